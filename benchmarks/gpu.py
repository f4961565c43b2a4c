"""Folded attention on a GPU: right, how fast, and how much memory; in one call of under five minutes.

check   Every format's kernels against the reference in float64, over prompts, chunks and single tokens. Nothing else
        runs if this fails.
decode  One new token of each of a batch of sequences: folded attention beside the fastest of torch's dense kernels in
        bfloat16, both replayed as CUDA graphs, so that the GPU's time is what counts. "of copy" is the rate at which
        the folded bytes are read, over the rate at which a copy on the same GPU reads and writes.
fold    Vectors a second, as prompts fold them.
model   Decoding by a random model of Qwen3-8B's shape, with as many layers as memory has room for, folded beside a
        dense cache in bfloat16; the most memory that was allocated beside the weights.
report  Registers and spilled bytes of the main kernels.

    python benchmarks/gpu.py [--json FILE] [--parts check,decode] [--formats kvfold-4,turboquant-4]

Without a GPU only `check` runs, in Triton's interpreter (TRITON_INTERPRET=1), on small shapes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.attention import attend
from kvfold.cache.layer import LayerCache
from kvfold.cache.report import held_bytes
from kvfold.evaluate.quality import versions
from kvfold.formats import FORMATS, get_formats

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PARTS = ("check", "decode", "fold", "model", "report")

DECODE = [
    (batch, context, kv_heads, repeat)
    for kv_heads, repeat in ((8, 4), (4, 8))
    for batch, context in ((1, 1_024), (1, 32_768), (1, 131_072), (8, 4_096), (8, 32_768), (32, 4_096), (64, 1_024))
]
"""Batch, tokens, KV heads, query heads a KV head; head_dim is 128."""
DIM = 128
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
"""Of the reference's norm; bfloat16's own rounding of a result is 2e-3."""

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--formats", default="kvfold-4,turboquant-4,kvfold-2", help="to time; check has its own")
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if not GPU and parts != ["check"]:
        parser.error(f"--parts {args.parts}: there is no GPU here, only --parts check runs without one")
    machine = torch.cuda.get_device_name() if GPU else "no GPU: Triton's interpreter"
    console.print(f"{machine}; {', '.join(f'{k} {v}' for k, v in versions().items())}")
    found: dict[str, Any] = {"machine": machine, "versions": versions()}
    runs: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "check": check,
        "decode": lambda: decode(args.formats.split(",")),
        "fold": lambda: fold(args.formats.split(",")),
        "model": lambda: model(args.formats.split(",")[0]),
        "report": report,
    }
    for part in PARTS:
        if part not in parts:
            continue
        start = time.perf_counter()
        rows = found[part] = runs[part]()
        show(part, rows, time.perf_counter() - start)
        if args.json:
            args.json.write_text(json.dumps(found, indent=2))
        if part == "check" and not all(row["right"] for row in rows):
            sys.exit("kernels are wrong: nothing is timed")


def show(part: str, rows: list[dict[str, Any]], seconds: float) -> None:
    table = Table(title=f"{part} ({seconds:.0f} s)")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)


# --- check ------------------------------------------------------------------------------------------------------------


def check() -> list[dict[str, Any]]:
    rows = []
    dims = (64, 80, 128, 256) if GPU else (64,)
    names = dict.fromkeys((*FORMATS, "turboquant-4+qjl", "affine-4g32", "uniform-4", "q8_0", "turboquant-2.5"))
    for name in names:
        for dim in dims:
            for dtype, tolerance in TOLERANCE.items():
                try:
                    get_formats(name, dim, dim)
                except ValueError:
                    continue  # not for this head_dim
                error = worst_error(name, dim, dtype, (1000, 1, 100) if GPU else (290, 1))
                rows.append({"format": name, "head_dim": dim, "dtype": str(dtype).removeprefix("torch."),
                             "error": error, "right": error < tolerance})  # fmt: skip
    return rows


def worst_error(name: str, dim: int, dtype: torch.dtype, chunks: tuple[int, ...]) -> float:
    """Of a prompt, a token and a chunk: the largest relative error beside the reference in float64."""
    batch, kv_heads, repeat, tokens = 2, 2, 3, sum(chunks)
    torch.manual_seed(0)
    key = torch.randn(batch, kv_heads, tokens, dim, device=DEVICE) + 2 * torch.randn(dim, device=DEVICE)
    value = torch.randn_like(key)
    query = torch.randn(batch, kv_heads * repeat, tokens, dim, device=DEVICE)
    key, value, query = (x.to(dtype) for x in (key, value, query))
    cache, done, worst = LayerCache(name), 0, 0.0
    for n in chunks:
        part = slice(done, done + n)
        new = cache.append(key[:, :, part], value[:, :, part])
        out = attend(query[:, :, part], new, scaling=dim**-0.5, backend="triton").double()
        true = attend(query[:, :, part].double(), new, scaling=dim**-0.5, backend="reference")
        worst = max(worst, ((out - true).norm() / true.norm()).item())
        done += n
    return worst


# --- decode -----------------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], object]) -> float:
    """Median of a CUDA graph's replays."""
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return float(do_bench_cudagraph(run, rep=50, return_mode="median"))


def decode(formats: list[str]) -> list[dict[str, Any]]:
    copy = copy_rate()
    rows = []
    for batch, context, kv_heads, repeat in DECODE:
        torch.manual_seed(0)
        key, value = (torch.randn(batch, kv_heads, context, DIM, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        query = torch.randn(batch, kv_heads * repeat, 1, DIM, device=DEVICE, dtype=torch.bfloat16)
        dense, way = best_dense(query, key, value)
        for name in formats:
            cache = LayerCache(name)
            cache.observe(None, cache.append(key[:, :, :-1], value[:, :, :-1]))
            new = cache.append(key[:, :, -1:], value[:, :, -1:])

            def folded(query: Tensor = query, new: Any = new) -> Tensor:
                return attend(query, new, scaling=DIM**-0.5, backend="triton")

            first = folded()
            time_of_one = milliseconds(folded)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            same = torch.equal(first, folded())
            extra = torch.cuda.max_memory_allocated() - before
            pages = held_bytes([cache.groups[0].rows.pages()])
            rows.append({
                "batch": batch, "tokens": context, "heads": f"{kv_heads}×{repeat}", "format": name,
                "ms": time_of_one, "bf16 ms": dense, "bf16 by": way, "×": dense / time_of_one,
                "of copy": pages / time_of_one / 1e6 / copy, "extra MiB": extra / 2**20,
                "dense MiB": 2 * key.nbytes / 2**20, "same again": same,
            })  # fmt: skip
            del cache, new, folded
    return rows


def best_dense(query: Tensor, key: Tensor, value: Tensor) -> tuple[float, str]:
    """Milliseconds of torch's fastest dense attention, and its name."""
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[backend.name.split("_")[0].lower()] = milliseconds(
                    lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True)
                )
        except RuntimeError:
            continue  # this GPU or shape is not for it
    if not found:
        sys.exit("none of torch's dense attention kernels runs on this GPU")
    way = min(found, key=lambda name: found[name])
    return found[way], way


def copy_rate() -> float:
    """GB a second that a copy of 1 GiB reads and writes."""
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6


# --- fold -------------------------------------------------------------------------------------------------------------


def fold(formats: list[str], tokens: int = 32_768, kv_heads: int = 8) -> list[dict[str, Any]]:
    x = torch.randn(1, kv_heads, tokens, DIM, device=DEVICE, dtype=torch.bfloat16)
    rows = []
    for name in formats:
        pair = get_formats(name, DIM, DIM)
        for side, fmt in (("keys", pair.keys), ("values", pair.values)):
            times = []
            for _ in range(8):
                torch.cuda.synchronize()
                start = time.perf_counter()
                fmt.fold_from(x)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            seconds = statistics.median(times[2:])
            rows.append({"format": name, "side": side, "million vectors/s": kv_heads * tokens / seconds / 1e6})
    return rows


# --- model ------------------------------------------------------------------------------------------------------------


def model(name: str, context: int = 16_384, batch: int = 4, new: int = 64) -> list[dict[str, Any]]:
    import transformers

    import kvfold

    free, _ = torch.cuda.mem_get_info()
    layers = max(2, min(36, int(free * 0.5 / 500e6)))  # of about 400 MB, and room for a dense cache
    config = transformers.Qwen3Config(
        hidden_size=4_096, intermediate_size=12_288, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32_000, max_position_embeddings=context + new,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        qwen = transformers.Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    kvfold.attach(qwen)
    ids = torch.randint(0, 32_000, (batch, context), device=DEVICE)
    weights = torch.cuda.memory_allocated()
    rows = []
    for kind in ("bf16", name):
        cache = transformers.DynamicCache(config=config) if kind == "bf16" else kvfold.FoldedCache(config, kind)
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            start = time.perf_counter()
            for first in range(0, context, 4_096):
                out = qwen(ids[:, first : first + 4_096], past_key_values=cache, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            prefill = time.perf_counter() - start
            token, times = out.logits[:, -1:].argmax(-1), []
            for _ in range(new):
                start = time.perf_counter()
                token = qwen(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        most = torch.cuda.max_memory_allocated() - weights
        rows.append({
            "cache": kind, "layers": layers, "batch": batch, "tokens": context, "prefill s": prefill,
            "ms a step": 1e3 * statistics.median(times), "most MiB": most / 2**20,
        })  # fmt: skip
        del cache, out
    return rows


# --- report -----------------------------------------------------------------------------------------------------------


def report() -> list[dict[str, Any]]:
    """Of the kernels that ran so far in this process."""
    from kvfold.kernels.triton import attend as attending
    from kvfold.kernels.triton import fold as folding

    rows = []
    kernels = (attending.attend_pages, attending.attend_dense, attending.combine, folding._encode, folding._pack,
               folding._closest_affine)  # fmt: skip
    for kernel in kernels:
        for cached in kernel.device_caches.values():
            for compiled in cached[0].values():
                rows.append({
                    "kernel": compiled.metadata.name, "registers": compiled.n_regs, "spills": compiled.n_spills,
                    "shared bytes": compiled.metadata.shared, "warps": compiled.metadata.num_warps,
                })  # fmt: skip
    return rows or [{"kernel": "none ran: add --parts check", "registers": 0, "spills": 0}]


if __name__ == "__main__":
    main()
