"""How fast GPUs could decode, by the compiler's listing: estimates, not measurements.

    python benchmarks/compile_kernels.py --targets cuda:90,cuda:80 --json listing.json
    python benchmarks/gpu_estimates.py listing.json

Numbers of pages a second are at most

    by instructions   multiprocessors · 128 · clock · ISSUED / instructions a number
    by memory         bandwidth · STREAMED / bytes a number

as each of a multiprocessor's four schedulers starts an instruction of 32 threads a cycle. A dense bfloat16 kernel is
taken to be bound by memory. ISSUED and STREAMED are guesses at what a well-tuned kernel reaches.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvfold.formats import get_formats

ISSUED, STREAMED = 0.6, 0.85
GPUS = {
    "H100 SXM": ("cuda:90", 132, 1.98e9, 3.35e12),
    "H200": ("cuda:90", 132, 1.98e9, 4.8e12),
    "A100 80 GB": ("cuda:80", 108, 1.41e9, 2.04e12),
    "RTX 4090": ("cuda:80", 128, 2.52e9, 1.01e12),
}
"""Target whose listing is taken, multiprocessors, boost clock in Hz, and bytes a second: from NVIDIA's data sheets."""


def bytes_a_number(name: str, dim: int) -> float:
    pair = get_formats(name, dim, dim)
    return float(pair.keys.bytes_per_vector + pair.values.bytes_per_vector) / (2 * dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listing", type=Path, help="JSON of compile_kernels.py")
    args = parser.parse_args()
    table = Table(title="estimates of decoding, 4 heads × 1")
    for column in ("GPU", "for", "a number", "by instructions, 10¹²/s", "by memory, 10¹²/s", "over dense bf16"):
        table.add_column(column, justify="left" if column in ("GPU", "for") else "right")
    rows = [row for row in json.loads(args.listing.read_text()) if row["kernel"] == "attend_pages"]
    for gpu, (target, multiprocessors, clock, bandwidth) in GPUS.items():
        for row in rows:
            name, dim, shape = ([*row["for"].split(", "), "", ""])[:3]
            if row["target"] != target or row["in"] != "Gluon" or shape != "4 heads × 1":
                continue
            by_instructions = multiprocessors * 128 * clock * ISSUED / row["a number"]
            by_memory = bandwidth * STREAMED / bytes_a_number(name, int(dim[1:]))
            dense = bandwidth * STREAMED / 2
            cells = by_instructions / 1e12, by_memory / 1e12, min(by_instructions, by_memory) / dense
            table.add_row(gpu, f"{name}, {dim}", str(row["a number"]), *(f"{x:.1f}" for x in cells))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
