"""Decoding steps of a compiled model (torch.compile) beside those of an eager one, with a dense and a folded cache.

All four read the same prompt and take the same tokens, in turns, so that all see the same machine. First steps, which
compile, are told apart: they take half a minute or more, once for a process.

    python benchmarks/compiled.py [--contexts 512,7900] [--format kvfold-4] [--dtype bfloat16] [--json FILE]
"""

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate import standard_text
from kvfold.evaluate.quality import versions

WARM = 4
"""Steps that may compile: the first at a length, and the first at any."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="512,7900", help="lengths of prompts in tokens, separated by commas")
    parser.add_argument("--format", default="kvfold-4")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--new", type=int, default=40, help="steps that are timed")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    model, tokenizer = kvfold.demo_model()
    model = model.to(getattr(torch, args.dtype))
    kvfold.attach(model)
    runs = {"eager": model, "compiled": torch.compile(model)}
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids
    kinds = [*product(("dense", args.format), runs)]
    rows = []
    for context in map(int, args.contexts.split(",")):
        caches = {}
        for cache, run in kinds:
            dense = cache == "dense"
            caches[cache, run] = DynamicCache(config=model.config) if dense else kvfold.FoldedCache(model.config, cache)
            with torch.no_grad():
                for part in ids[:, :context].split(1024, 1):
                    model(part, past_key_values=caches[cache, run], logits_to_keep=1)
        times: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
        for t in track(range(context, context + WARM + args.new), f"{context} tokens", console=Console(stderr=True)):
            for kind in kinds:
                start = time.perf_counter()
                with torch.no_grad():
                    runs[kind[1]](ids[:, t : t + 1], past_key_values=caches[kind])
                times[kind].append(1e3 * (time.perf_counter() - start))
        steps = {kind: took[WARM:] for kind, took in times.items()}
        for kind in kinds:
            ratios = {base: [a / b for a, b in zip(steps[base], steps[kind], strict=True)] for base in kinds}
            quartiles = statistics.quantiles(steps[kind], n=4)
            rows.append({
                "context": context, "dtype": args.dtype, "threads": torch.get_num_threads(),
                "cache": kind[0], "run": kind[1], "ms": quartiles[1], "ms_quartiles": [quartiles[0], quartiles[2]],
                "first_steps_s": sum(times[kind][:WARM]) / 1e3,
                "over_dense_eager": statistics.median(ratios["dense", "eager"]),
                "over_dense_alike": statistics.median(ratios["dense", kind[1]]),
                "versions": versions(),
            })  # fmt: skip
    table = Table(title=f"SmolLM2-135M, {args.dtype}, {torch.get_num_threads()} threads: a decoding step")
    for column in (
        "context",
        "cache",
        "run",
        "ms",
        "quartiles",
        "× dense eager",
        "× dense, run alike",
        "first steps s",
    ):
        table.add_column(column, justify="left" if column in ("cache", "run") else "right")
    for row in rows:
        low, high = row["ms_quartiles"]
        table.add_row(
            f"{row['context']:,}", row["cache"], row["run"], f"{row['ms']:.1f}", f"{low:.1f}–{high:.1f}",
            f"{row['over_dense_eager']:.2f}", f"{row['over_dense_alike']:.2f}", f"{row['first_steps_s']:.1f}",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
