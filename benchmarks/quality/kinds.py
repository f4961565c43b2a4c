"""kvfold's formats on several kinds of text: by the prompt's own first tokens, and by a calibration on other text.

Each passage is read once with a dense cache and once with each folded one, through the real cache and attention.
"prompt" is what a cache does by itself. The calibration sees the language reference in Python's library, and none of
the passages; it gives both statistics and each layer's loss. The repeated text says one sentence over and over, and is
left out of the means. `bits` is what the layers that fold held at the end of a passage, everything counted.

    python benchmarks/quality/kinds.py [--model gemma3-270m] [--passage 4096] [--formats kvfold-3] [--json FILE]
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate import FidelityMeter, read_in_lockstep, standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.integrations.text import text_sha256

sys.path.append(str(Path(__file__).parents[1]))  # models.py
import models
from texts import texts

BY = ("prompt", "calibrated")
REPEATED = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--formats", default="kvfold-4,kvfold-3,kvfold-2")
    parser.add_argument("--passage", type=int, default=4096, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=1, help="passages of each kind, spread over the text")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()

    model, tokenizer = models.load(args.model)
    read = text_passages(tokenizer, standard_text(), 1024, 4)
    statistics = kvfold.calibrate(model, read)
    kinds = texts() | {"repeated": REPEATED * (args.passage // 8)}
    columns = [*product(args.formats.split(","), BY)]
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("losses", total=None)
        losses = kvfold.measure_losses(
            model, read, statistics, progress=lambda done, total: progress.update(bar, completed=done, total=total)
        )
        goes_by = dict(zip(BY, (None, losses), strict=True))
        task = progress.add_task("reading", total=len(kinds) * args.passages * args.passage * (1 + len(columns)))
        for kind, text in kinds.items():
            meters = {name: FidelityMeter() for name in ["dense", *map(" ".join, columns)]}
            caches: dict[str, kvfold.FoldedCache] = {}
            for passage in text_passages(tokenizer, text, args.passage, args.passages):
                caches = {
                    f"{format} {by}": kvfold.FoldedCache(model.config, format, calibration=goes_by[by])
                    for format, by in columns
                }
                dense = DynamicCache(config=model.config)
                read_in_lockstep(
                    model, passage, dense, caches, meters, progress=lambda n: progress.advance(task, n)
                )  # fmt: skip
            reference = meters["dense"].result()
            for format, by in columns:
                name = f"{format} {by}"
                result, held = meters[name].result(), caches[name].report()
                rows.append({
                    "model": args.model, "kind": kind, "text_sha": text_sha256(text), "passage": args.passage,
                    "passages": args.passages, "format": format, "statistics": by, "ppl_dense": reference.ppl,
                    "delta_ppl_pct": 100 * (result.ppl / reference.ppl - 1), "kl_mean": result.kl_mean,
                    "kl_p99": result.kl_p99, "top1": result.top1, "bits_per_value": held.bits_per_value,
                    "folded_bits_per_value": held.folded_bits_per_value, "ratio_to_bf16": held.ratio_to_bf16,
                    "versions": versions(),
                })  # fmt: skip
    table = Table(title=f"{args.model}, passages of {args.passage:,} tokens")
    figures = [f"{figure}, {by}" for by in BY for figure in ("bits", "ΔPPL", "KL")]
    for column in ("text", "dense PPL", "format", *figures):
        table.add_column(column, justify="left" if column in ("text", "format") else "right")
    for same in zip(*(rows[i :: len(BY)] for i in range(len(BY))), strict=True):
        first = same[0]
        cells = [
            cell for row in same for cell in
            (f"{row['folded_bits_per_value']:.2f}", f"{row['delta_ppl_pct']:+.2f} %", f"{row['kl_mean']:.4f}")
        ]  # fmt: skip
        table.add_row(str(first["kind"]), f"{first['ppl_dense']:.2f}", str(first["format"]), *cells)
    to_stdout().print(table)
    for format, by in columns:
        real = [row for row in rows if (row["format"], row["statistics"]) == (format, by) and row["kind"] != "repeated"]
        print(f"{format}, {by}: mean KL {sum(row['kl_mean'] for row in real) / len(real):.5f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
