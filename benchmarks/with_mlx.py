"""The cache on MLX beside the same cache in torch: quality, the ablation, memory, speed.

    python benchmarks/with_mlx.py
    python benchmarks/with_mlx.py --parts quality --formats kvfold-4 --passage 1024

quality reads the same passages with both runtimes, through the protocol of `kvfold eval`. ablation runs the stages of
`kvfold sweep` on MLX. memory takes what MLX's allocator says beside what the cache says that it holds. speed decodes
one token after another with mlx-lm's dense cache and a folded one, in turns; on Linux MLX has no kernels to speak of,
so that a folded step is slower there, and only a Mac's figures would mean much.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvfold.cli.options import token_progress
from kvfold.cli.output import to_stdout
from kvfold.evaluate import evaluate_formats, standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.evaluate.runtime import Runtime
from kvfold.evaluate.sweep import Sweep
from kvfold.integrations.mlx import cache_report, make_prompt_cache
from kvfold.integrations.mlx.runtime import MlxRuntime
from kvfold.integrations.models import load_model
from kvfold.integrations.transformers.runtime import TransformersRuntime
from kvfold.kernels.mlx import mx  # MLX with torch's BLAS

PARTS = ("quality", "ablation", "memory", "speed")


def _read(runtime: Runtime, name: str, passages: list[Tensor], formats: list[str]) -> dict[str, dict[str, Any]]:
    runtime.attach()
    with token_progress() as progress:
        task = progress.add_task(name, total=sum(ids.shape[1] for ids in passages) * (1 + len(formats)))
        rows = evaluate_formats(runtime, passages, formats, progress=lambda n: progress.advance(task, n))
    runtime.detach()
    return {row.format: asdict(row) for row in rows}


def quality(runtime: MlxRuntime, model: str, passages: list[Tensor], formats: list[str]) -> list[dict[str, Any]]:
    """Each format's figures on both runtimes."""
    by_mlx = _read(runtime, "mlx", passages, formats)
    by_torch = _read(TransformersRuntime(load_model(model)[0]), "torch", passages, formats)
    table = Table(title=f"quality: {sum(ids.shape[1] - 1 for ids in passages):,} tokens")
    for column in ("format", "runtime", "PPL dense", "PPL", "KL", "top-1", "bits/value", "seconds", "dense seconds"):
        table.add_column(column, justify="left" if column in ("format", "runtime") else "right")
    rows = []
    for name in formats:
        for kind, own in (("torch", by_torch[name]), ("mlx", by_mlx[name])):
            rows.append({"part": "quality", "runtime": kind, **own})
            table.add_row(
                name, kind, f"{own['ppl_dense']:.4f}", f"{own['ppl']:.4f}", f"{own['kl_mean']:.6f}",
                f"{own['top1']:.4f}", f"{own['bits_per_value']:.3f}", f"{own['seconds']:.1f}",
                f"{own['seconds_dense']:.1f}",
            )  # fmt: skip
        away = [by_mlx[name][figure] / by_torch[name][figure] - 1 for figure in ("ppl", "kl_mean")]
        table.add_row("", "mlx / torch", "", f"{away[0]:+.2%}", f"{away[1]:+.2%}", end_section=True)
    to_stdout().print(table)
    return rows


def ablation(runtime: MlxRuntime, about: dict[str, Any], passages: list[Tensor]) -> list[dict[str, Any]]:
    """The stages, of kvfold's own formats and of the published ones, which take a residual."""
    rows = []
    table = Table(title=f"ablation through MLX: {sum(ids.shape[1] - 1 for ids in passages):,} tokens")
    for column in ("family", "stage", "format", "ΔPPL", "KL", "bits/value", "verdict"):
        table.add_column(column, justify="left" if column in ("family", "stage", "format", "verdict") else "right")
    with tempfile.TemporaryDirectory() as folder:
        for family in ("kvfold", "turboquant"):
            job = Sweep(runtime, passages, Path(folder) / "rows.jsonl", about, family=family)
            for row in job.ablate():
                rows.append({"part": "ablation", **row})
                table.add_row(
                    family, row["stage"].split("/")[1], row["config"]["format"], f"{100 * row['rel_delta']:+.4f} %",
                    f"{row['kl_mean']:.6f}", f"{row['bits_per_value']:.2f}", row["verdict"],
                )  # fmt: skip
    to_stdout().print(table)
    return rows


def memory(runtime: MlxRuntime, ids: Tensor, formats: list[str]) -> list[dict[str, Any]]:
    """What the allocator gave out while a text was read, beside what the cache says."""
    table = Table(title=f"memory after {ids.shape[1]:,} tokens, MB")
    for column in ("format", "held", "of MLX's allocator", "bits/value", "dense bf16"):
        table.add_column(column, justify="left" if column == "format" else "right")
    rows = []
    for name in formats:
        mx.clear_cache()
        before = mx.get_active_memory()
        cache = make_prompt_cache(runtime.model, name)
        for start in range(0, ids.shape[1], 256):
            runtime(ids[:, start : start + 256], past_key_values=cache)
        taken, report = mx.get_active_memory() - before, cache_report(cache)
        rows.append({"part": "memory", "format": name, "tokens": ids.shape[1], "allocated": taken, **report.to_json()})
        del rows[-1]["layers"]
        table.add_row(
            name, f"{report.held_bytes / 1e6:.2f}", f"{taken / 1e6:.2f}", f"{report.bits_per_value:.3f}",
            f"{report.values * 2 / 1e6:.2f}",
        )  # fmt: skip
        del cache
    to_stdout().print(table)
    return rows


def speed(runtime: MlxRuntime, ids: Tensor, formats: list[str], contexts: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of a decoding step: medians of steps in turns."""
    table = Table(title="a decoding step, ms")
    for column in ("tokens", "cache", "median", "fastest to slowest"):
        table.add_column(column, justify="right")
    rows = []
    for context in contexts:
        caches = {"dense": runtime.dense_cache(), **{name: make_prompt_cache(runtime.model, name) for name in formats}}
        for cache in caches.values():
            for start in range(0, context, 256):
                runtime(ids[:, start : start + 256], past_key_values=cache)
        times: dict[str, list[float]] = {name: [] for name in caches}
        for step in range(10):
            for name, cache in caches.items():
                begin = time.perf_counter()
                runtime(ids[:, context + step : context + step + 1], past_key_values=cache)
                times[name].append(1e3 * (time.perf_counter() - begin))
        for name, own in times.items():
            rows.append({"part": "speed", "tokens": context, "cache": name, "ms": own})
            table.add_row(f"{context:,}", name, f"{median(own):.0f}", f"{min(own):.0f} to {max(own):.0f}")
    to_stdout().print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    parser.add_argument("--formats", default="kvfold-4,kvfold-3,kvfold-2,turboquant-4")
    parser.add_argument("--passage", type=int, default=4096, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=1)
    parser.add_argument("--ablation-tokens", type=int, default=1024)
    parser.add_argument("--contexts", default="512,4096", help="for speed")
    parser.add_argument("--json", type=Path, help="write all rows there")
    args = parser.parse_args()
    parts, formats = args.parts.split(","), args.formats.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"parts = {part!r}: choose among {', '.join(PARTS)}")
    runtime, tokenizer = MlxRuntime.load(args.model)
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids
    rows: list[dict[str, Any]] = []
    if "quality" in parts:
        passages = text_passages(tokenizer, standard_text(), args.passage, args.passages)
        rows += quality(runtime, args.model, passages, formats)
    if "ablation" in parts:
        about = {"model": args.model, "passage": args.ablation_tokens}
        rows += ablation(runtime, about, text_passages(tokenizer, standard_text(), args.ablation_tokens, 1))
    if "memory" in parts:
        rows += memory(runtime, ids[:, : args.passage], formats)
    if "speed" in parts:
        rows += speed(runtime, ids, formats[:1], [int(n) for n in args.contexts.split(",")])
    own = versions(("torch", "transformers", "mlx", "mlx-lm"))
    Console(stderr=True).print(f"{mx.default_device()}, {own}", highlight=False)
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows, "versions": own, "argv": sys.argv[1:]}, indent=2))


if __name__ == "__main__":
    main()
