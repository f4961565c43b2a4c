"""What a sequence's first tokens cost folded, in a cache as an engine's pool has it: only unfinished pages are dense.

The standard text is read once with a dense cache and once with each folded one. Formats are fitted to a calibration on
another part of it, as an engine fits them. A pool keeps one first token dense; FoldedCache itself keeps eight.

    python benchmarks/quality/first_tokens.py [--model gemma3-270m] [--formats kvfold-3] [--json FILE]
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
from kvfold.cache.policy import Policy
from kvfold.cli.output import to_stdout
from kvfold.evaluate import FidelityMeter, read_in_lockstep, standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats.base import Window

sys.path.append(str(Path(__file__).parents[1]))  # models.py
import models

DENSE = (0, 1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--formats", default="kvfold-4,kvfold-3,kvfold-2")
    parser.add_argument("--passage", type=int, default=1024, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=4, help="passages, spread over the text")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()

    model, tokenizer = models.load(args.model)
    fitted_to, *passages = text_passages(tokenizer, standard_text(), args.passage, args.passages + 1)
    statistics = kvfold.calibrate(model, [fitted_to])
    columns = [*product(args.formats.split(","), DENSE)]
    meters = {name: FidelityMeter() for name in ["dense", *columns]}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("reading", total=len(passages) * args.passage * (1 + len(columns)))
        for passage in passages:
            caches = {
                (format, first): kvfold.FoldedCache(
                    model.config, policy=Policy(format, window=Window(sinks=first, recent=1)), calibration=statistics
                )
                for format, first in columns
            }
            dense = DynamicCache(config=model.config)
            read_in_lockstep(model, passage, dense, caches, meters, progress=lambda n: progress.advance(task, n))
    table = Table(title=f"{args.model}, {args.passages} passages of {args.passage:,} tokens: KL from dense")
    for heading in ("format", *(f"{first} first tokens dense" for first in DENSE)):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    rows = [
        {"model": args.model, "format": format, "dense_first_tokens": first, "passage": args.passage,
         "passages": args.passages, "kl_mean": meters[format, first].result().kl_mean, "versions": versions()}
        for format, first in columns
    ]  # fmt: skip
    for same in zip(*(rows[i :: len(DENSE)] for i in range(len(DENSE))), strict=True):
        table.add_row(str(same[0]["format"]), *(f"{row['kl_mean']:.4f}" for row in same))
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
