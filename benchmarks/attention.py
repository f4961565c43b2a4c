"""Decode attention over folded pages against dense attention in torch, in paired runs.

For each shape, format and number of threads: the time of one query token's attention, folded and by the best of several
dense ways, alternating in one process; medians, the ratio's median and quartiles, and the time that streaming the same
folded bytes once takes. Each folded call is for a token that was just appended, as in decoding. "again" is one right
after another, when caches hold what they can.

    python benchmarks/attention.py [--formats kvfold-4,turboquant-3,turboquant-2] [--json FILE]
    python benchmarks/attention.py --contexts 1024,4096,16384,65536,262144    # how the cost grows
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
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvfold.attention import attend, cpu
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.report import held_bytes
from kvfold.cli.output import to_stdout
from kvfold.evaluate.quality import versions

SHAPES = {
    "8x4 D128 32768": (8, 4, 128, 32_768),
    "3x3 D64 8000": (3, 3, 64, 8_000),
}
"""KV heads, query heads a KV head, head_dim, tokens."""

MOST_FP32 = 65_536
"""Tokens up to which float32 is a baseline too; beyond, its copies take too much memory."""


def dense_ways(q: Tensor, key: Tensor, value: Tensor, repeat: int) -> dict[str, Callable[[], Tensor]]:
    """Ways that torch has to attend densely, for one query token."""
    batch, heads, _, dim = q.shape
    grouped = q.view(batch, heads // repeat, repeat, dim)

    def products(k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return ((x @ k.mT) * dim**-0.5).softmax(-1) @ v

    ways = {
        "bf16 sdpa, grouped": lambda: scaled_dot_product_attention(q.bfloat16(), key, value, enable_gqa=True),
        "bf16 products": lambda: products(key, value, grouped.bfloat16()),
    }
    if key.shape[2] > MOST_FP32:
        return ways
    k32, v32 = key.float(), value.float()
    return ways | {
        "fp32 sdpa, grouped": lambda: scaled_dot_product_attention(q, k32, v32, enable_gqa=True),
        "fp32 products": lambda: products(k32, v32, grouped),
    }


def seconds(run: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="kvfold-4,turboquant-4,turboquant-3,turboquant-2,turboquant-8")
    parser.add_argument("--contexts", help="lengths at which to time the first shape, instead of all shapes")
    parser.add_argument("--rounds", type=int, default=15, help="paired runs")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    rows = []
    shapes = SHAPES
    if args.contexts:
        shapes = {f"8x4 D128 {tokens}": (8, 4, 128, int(tokens)) for tokens in args.contexts.split(",")}
    for shape, (kv_heads, repeat, dim, tokens) in shapes.items():
        torch.manual_seed(0)
        key, value = torch.randn(2, 1, kv_heads, tokens, dim)
        q = torch.randn(1, kv_heads * repeat, 1, dim)
        ways = dense_ways(q, key.bfloat16(), value.bfloat16(), repeat)
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            best = {name: min(seconds(run) for _ in range(5)) for name, run in ways.items()}
            kinds = dict.fromkeys(name.split()[0] for name in ways)
            dense = {kind: min((t, n) for n, t in best.items() if n.startswith(kind))[1] for kind in kinds}
            for name in args.formats.split(","):
                cache = LayerCache(LayerConfig(name))
                cache.observe(None, cache.append(key[:, :, :-1], value[:, :, :-1]))
                token = key[:, :, -1:], value[:, :, -1:]
                attend(q, cache.append(*token), scaling=dim**-0.5)
                store = cache.groups[0].rows
                stream = torch.empty(held_bytes([store.pages()]) // 4, dtype=torch.float32).normal_()
                times: dict[str, list[float]] = {name: [] for name in ("folded", "again", "stream", *kinds)}
                for _ in range(args.rounds):
                    for call in ("folded", "again"):
                        new = cache.append(*token)
                        times[call].append(seconds(partial(attend, q, new, scaling=dim**-0.5)))
                    for kind, way in dense.items():
                        times[kind].append(seconds(ways[way]))
                    times["stream"].append(seconds(stream.sum))
                ratio = {kind: [d / f for d, f in zip(times[kind], times["folded"], strict=True)] for kind in kinds}
                quartiles = statistics.quantiles(ratio["bf16"], n=4)
                rows.append({
                    "shape": shape, "threads": threads, "format": name, "instruction_set": cpu.INSTRUCTION_SETS[0],
                    "folded_ms": 1e3 * statistics.median(times["folded"]),
                    "again_ms": 1e3 * statistics.median(times["again"]),
                    "bf16_ms": 1e3 * statistics.median(times["bf16"]), "bf16_way": dense["bf16"],
                    "fp32_ms": 1e3 * statistics.median(times["fp32"]) if "fp32" in kinds else None,
                    "fp32_way": dense.get("fp32"),
                    "stream_ms": 1e3 * statistics.median(times["stream"]),
                    "ratio_bf16": statistics.median(ratio["bf16"]),
                    "ratio_bf16_quartiles": [quartiles[0], quartiles[2]],
                    "ratio_fp32": statistics.median(ratio["fp32"]) if "fp32" in kinds else None,
                    "folded_mb": held_bytes([store.pages()]) / 1e6,
                    "versions": versions(),
                })  # fmt: skip
    table = Table(title="one query token, ms; ratios are dense over folded")
    for column in (
        "shape",
        "threads",
        "format",
        "folded",
        "again",
        "stream",
        "bf16",
        "fp32",
        "bf16 ratio",
        "fp32 ratio",
    ):
        table.add_column(column, justify="left" if column in ("shape", "format") else "right")
    for row in rows:
        low, high = row["ratio_bf16_quartiles"]
        table.add_row(
            row["shape"], str(row["threads"]), row["format"], f"{row['folded_ms']:.2f}", f"{row['again_ms']:.2f}",
            f"{row['stream_ms']:.2f}", f"{row['bf16_ms']:.2f}",
            "–" if row["fp32_ms"] is None else f"{row['fp32_ms']:.2f}",
            f"{row['ratio_bf16']:.2f} ({low:.2f}–{high:.2f})",
            "–" if row["ratio_fp32"] is None else f"{row['ratio_fp32']:.2f}",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
