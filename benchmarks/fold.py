"""How many vectors a second the formats fold, on one core and on two.

Times `Format.fold_from` over whole pages of Gaussian vectors: rotation, scales, codes and packing, and for kvfold's
keys the search for each channel's centre and scale. Medians with quartiles; beside it what a copy of the same vectors
takes, which is the least that memory allows.

    python benchmarks/fold.py [--formats hadamard-4,kvfold-4] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from kvfold.cli.output import to_stdout
from kvfold.evaluate.quality import versions
from kvfold.formats import KeyStatistics, get_formats
from kvfold.kernels.ops import INSTRUCTION_SET

VECTORS = 65_536


def rate(run: Callable[[], object], rounds: int) -> tuple[float, list[float]]:
    """Million vectors a second: the median, and the quartiles."""
    run()
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        rates.append(VECTORS / (time.perf_counter() - start) / 1e6)
    quartiles = statistics.quantiles(rates, n=4)
    return quartiles[1], [quartiles[0], quartiles[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", default="hadamard-4,hadamard-3,hadamard-2,hadamard-8,turboquant-4,centred-4,kvfold-4"
    )
    parser.add_argument("--dims", default="128,64", help="head dimensions, separated by commas")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    rows = []
    for dim in map(int, args.dims.split(",")):
        x = torch.randn(1, 8, VECTORS // 8, dim, generator=torch.Generator().manual_seed(0))
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            copy = rate(x.clone, args.rounds)[0]
            for name in args.formats.split(","):
                pair = get_formats(name, dim, dim)
                sides = {"keys": pair.keys.fitted(KeyStatistics(torch.ones(8, dim), torch.rand(8, dim)))}
                sides["values"] = pair.values
                for side, format in sides.items():
                    median, quartiles = rate(partial(format.fold_from, x), args.rounds)
                    rows.append({
                        "head_dim": dim, "threads": threads, "format": name, "side": side, "million_per_s": median,
                        "quartiles": quartiles, "copy_million_per_s": copy, "instruction_set": INSTRUCTION_SET,
                        "versions": versions(),
                    })  # fmt: skip
    table = Table(title="million vectors folded a second")
    for column in ("head_dim", "threads", "format", "side", "folded", "copied"):
        table.add_column(column, justify="left" if column in ("format", "side") else "right")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            str(row["head_dim"]), str(row["threads"]), row["format"], row["side"],
            f"{row['million_per_s']:.2f} ({low:.2f}–{high:.2f})", f"{row['copy_million_per_s']:.1f}",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
