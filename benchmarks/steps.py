"""What a layer's cache and attention take of a decoding step, dense and folded, inside a model.

Times every call of `Cache.update` and of the attention function while caches decode in turns, a token each: between
two layers weights have passed through the processor's caches, which no loop over one layer shows. Medians of steps.

    python benchmarks/steps.py [--formats kvfold-4,turboquant-4] [--contexts 512,7900] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate import standard_text
from kvfold.evaluate.quality import versions
from kvfold.integrations.transformers import FoldedCache

CHUNK = 1024
spent = {"update": 0.0, "attention": 0.0}


def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, whose time is added to what was spent under a name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent[name] += time.perf_counter() - start
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="kvfold-4,kvfold-2,turboquant-4")
    parser.add_argument("--contexts", default="512,7900")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=48, help="tokens decoded with each cache")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    model, tokenizer = kvfold.demo_model(getattr(torch, args.dtype))
    kvfold.attach(model)
    for cache_type in (DynamicCache, FoldedCache):
        cache_type.update = timed(cache_type.update, "update")  # type: ignore[method-assign]
    AttentionInterface.register("kvfold", timed(ALL_ATTENTION_FUNCTIONS["kvfold"], "attention"))
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids
    layers, rows = model.config.num_hidden_layers, []
    for context in map(int, args.contexts.split(",")):
        caches = {"dense": DynamicCache(config=model.config)}
        caches |= {name: FoldedCache(model.config, name) for name in args.formats.split(",")}
        for cache in caches.values():
            for first in range(0, context, CHUNK):
                model(ids[:, first : min(first + CHUNK, context)], past_key_values=cache, logits_to_keep=1)
        steps: dict[str, list[dict[str, float]]] = {name: [] for name in caches}
        for t in range(context, context + args.steps):
            for name, cache in caches.items():
                spent.update(update=0.0, attention=0.0)
                start = time.perf_counter()
                model(ids[:, t : t + 1], past_key_values=cache)
                steps[name].append({"step": time.perf_counter() - start, **spent})
        for name, own in steps.items():
            median = {part: statistics.median(step[part] for step in own) for part in own[0]}
            rows.append({
                "cache": name, "context": context, "dtype": args.dtype, "threads": args.threads,
                "step_ms": 1e3 * median["step"],
                "update_us_a_layer": 1e6 * median["update"] / layers,
                "attention_us_a_layer": 1e6 * median["attention"] / layers,
                "versions": versions(),
            })  # fmt: skip
    table = Table(title=f"{args.dtype}, {args.threads} threads")
    for column in ("cache", "context", "step ms", "update µs a layer", "attention µs a layer"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for row in rows:
        table.add_row(
            row["cache"], f"{row['context']:,}", f"{row['step_ms']:.1f}", f"{row['update_us_a_layer']:.0f}",
            f"{row['attention_us_a_layer']:.0f}",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
