"""Folded attention on a GPU: right, how fast, and how much memory; in one call of under five minutes.

check   Kernels against the reference in float64, over prompts, chunks and single tokens: every format, head_dim 64 to
        256, latent keys of 576 channels, masks and soft caps, an engine's pool; the same inputs twice; and pages
        folded here against those that the CPU folds. Replayed steps of a small model against the same steps without
        CUDA graphs, bit for bit. Nothing else runs if this fails.
decode  One new token of each of a batch of sequences: folded attention beside the fastest of torch's dense kernels in
        bfloat16, both replayed as CUDA graphs, so that the GPU's time is what counts, and over as many caches in turn
        as no second-level cache holds. "of copy" is the rate at which the folded bytes are read, over the rate at which
        a copy on the same GPU reads and writes. "a number" are the instructions that the compiler's listing has for
        each number of the cache (`compile_kernels.py`), and "ms by count" how long they take if the GPU starts them as
        fast as `gpu_estimates.py` guesses: if that is near "ms", instructions are the bound.
prompt  The same for 512 new tokens of one sequence. Dense attention is not causal there, and reads a little more.
fold    Vectors a second, as prompts fold them.
model   Decoding by a random model of Qwen3-8B's shape, with as many layers as memory has room for, folded, with and
        without CUDA graphs, beside a dense cache in bfloat16; the first steps, one of which is recorded; the share of
        folding in the others, which comes with every 64th token; the most memory that was allocated beside the weights.
report  Registers and spilled bytes of the kernels that ran.

    python benchmarks/gpu.py [--json FILE] [--parts check,decode] [--formats kvfold-4,turboquant-4]

Without a GPU only `check` runs, in Triton's interpreter (TRITON_INTERPRET=1), on small shapes of two formats.
"""

import argparse
import copy
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from gpu_estimates import ISSUED
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvfold.attention import attend
from kvfold.attention.pool import PagedAttention
from kvfold.attention.triton import unfolded
from kvfold.attention.triton.target import tensor_cores
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import PageLayout, PagePool
from kvfold.cache.pool.plan import Slots, plan
from kvfold.cache.report import held_bytes
from kvfold.cli.output import to_stdout
from kvfold.evaluate.quality import versions
from kvfold.formats import FORMATS, KeyStatistics, get_formats

Row = dict[str, Any]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
PARTS = ("check", "decode", "prompt", "fold", "model", "report")

DECODE = [
    (batch, context, kv_heads, repeat)
    for kv_heads, repeat in ((8, 4), (4, 8))
    for batch, context in ((1, 1_024), (1, 32_768), (1, 131_072), (8, 4_096), (8, 32_768), (32, 4_096), (64, 1_024))
]
"""Batch, tokens, KV heads, query heads a KV head; head_dim is 128."""
PROMPTS = [(1, context, 8, 4) for context in (4_096, 32_768)]
PROMPT = 512
DIM = 128
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
"""Of the reference's norm; bfloat16's own rounding of a result is 2e-3."""
IN_WHOLE_NUMBERS = 3e-2
"""The same where a device multiplies whole numbers, which rounds by 5e-3 to 2e-2 (KVFOLD_GLUON=0: it does not)."""

console = to_stdout()


def tolerance(dtype: torch.dtype) -> float:
    """How far this device may be from the reference."""
    return IN_WHOLE_NUMBERS if dtype != torch.float32 and tensor_cores(DEVICE) else TOLERANCE[dtype]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas")
    parser.add_argument("--formats", default="kvfold-4,turboquant-4,kvfold-2", help="to time; check has its own")
    parser.add_argument("--json", type=Path, help="also write all rows to this file, each as soon as it is there")
    args = parser.parse_args()
    parts, formats = args.parts.split(","), args.formats.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if not GPU and parts != ["check"]:
        parser.error(f"--parts {args.parts}: there is no GPU here, only --parts check runs without one")
    machine = torch.cuda.get_device_name() if GPU else "no GPU: Triton's interpreter"
    told = versions() | {"triton": triton.__version__, "cuda": torch.version.cuda or torch.version.hip or "none"}
    found: dict[str, Any] = {"machine": machine, "date": str(datetime.date.today()), "versions": told}
    console.print(f"{machine}; {found['date']}; {', '.join(f'{k} {v}' for k, v in told.items())}")
    runs: dict[str, Callable[[], Iterator[Row]]] = {
        "check": check,
        "decode": lambda: attention(formats, DECODE, 1),
        "prompt": lambda: attention(formats, PROMPTS, PROMPT),
        "fold": lambda: fold(formats),
        "model": lambda: model(formats[0]),
        "report": report,
    }
    for part in PARTS:
        if part not in parts:
            continue
        start, rows = time.perf_counter(), found.setdefault(part, [])
        for row in runs[part]():
            rows.append(row)
            if args.json:
                args.json.write_text(json.dumps(found, indent=2))
        show(part, rows, time.perf_counter() - start)
        if part == "check" and not all(row["right"] for row in rows):
            sys.exit("kernels are wrong: nothing is timed")


def show(part: str, rows: list[Row], seconds: float) -> None:
    table = Table(title=f"{part} ({seconds:.0f} s)")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)


# --- check ------------------------------------------------------------------------------------------------------------

CHUNKS = (1_000, 1, 100) if GPU else (290, 1, 10)


def check() -> Iterator[Row]:
    every = dict.fromkeys((*FORMATS, "turboquant-4+qjl", "affine-4g32", "uniform-4", "q8_0", "turboquant-2.5"))
    jobs: list[tuple[str, torch.dtype, dict[str, Any]]] = []
    if GPU:
        jobs += [(name, torch.bfloat16, {}) for name in every]
    for name in ("kvfold-4", "turboquant-4"):
        for dtype in TOLERANCE:
            jobs += [(name, dtype, {"dim": dim}) for dim in ((64, 80, 256) if GPU else (64,))]
            jobs.append((name, dtype, {"attention": {"softcap": 5.0}, "masked": True}))
    jobs.append(("turboquant-4", torch.bfloat16, {"dim": 576, "value_dim": 512, "kv_heads": 1, "repeat": 16}))
    for name, dtype, shape in track(jobs, "checking", console=console, transient=True):
        try:
            get_formats(name, shape.get("dim", DIM), shape.get("value_dim", shape.get("dim", DIM)))
        except ValueError:
            continue  # not for this head_dim
        what = f"{name}, " + (", ".join(f"{k} {v}" for k, v in shape.items()) or f"dim {DIM}")
        with patch.multiple(unfolded, BYTES=2**18, PAGES=2):  # prompts read pages in several turns
            errors, same = worst_errors(name, dtype, **shape)
        for many, error in errors.items():
            most = TOLERANCE[dtype] if many else tolerance(dtype)
            yield row_of(f"{what}, prompts" if many else what, str(dtype).removeprefix("torch."), error, most, same)
    for name in ("kvfold-4", "turboquant-4"):
        yield row_of(f"{name}, an engine's pool", "bfloat16", pool_error(name, [1, 3, 69]), tolerance(torch.bfloat16))
        yield row_of(
            f"{name}, prompts of a pool", "bfloat16", pool_error(name, [40, 30, 69]), TOLERANCE[torch.bfloat16]
        )
        yield row_of(f"{name}, pages beside the CPU's", "float32", *fold_error(name))
        if GPU:
            error, same = graph_error(name)
            yield row_of(f"{name}, steps as graphs", "bfloat16", error, TOLERANCE[torch.bfloat16], same)


def row_of(what: str, dtype: str, error: float, tolerance: float, same: bool | None = None) -> Row:
    """`same`: whether a second call gave the same bits; None if there was none."""
    told = "" if same is None else str(same)
    return {
        "what": what,
        "dtype": dtype,
        "error": error,
        "same again": told,
        "right": error < tolerance and same is not False,
    }


def distance(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


def worst_errors(
    name: str, dtype: torch.dtype, dim: int = DIM, value_dim: int | None = None, kv_heads: int = 2, repeat: int = 3,
    attention: dict[str, float] | None = None, masked: bool = False,
) -> tuple[dict[bool, float], bool]:  # fmt: skip
    """The largest relative errors beside the reference in float64, of a token or small chunk (False) and of many rows,
    which read pages unfolded (True); and whether a second call gives the same bits."""
    batch, tokens, options = 2, sum(CHUNKS), attention or {}
    torch.manual_seed(0)
    key = torch.randn(batch, kv_heads, tokens, dim, device=DEVICE) + 2 * torch.randn(dim, device=DEVICE)
    value = torch.randn_like(key)[..., :value_dim]
    query = torch.randn(batch, kv_heads * repeat, tokens, dim, device=DEVICE)
    key, value, query = (x.to(dtype) for x in (key, value, query))
    view, measured = value_dim is not None, None
    if get_formats(name, dim, value_dim or dim, values_of_keys=view).needs_calibration:
        ones, rotations = torch.ones(kv_heads, dim), torch.linalg.qr(torch.randn(2, kv_heads, dim, dim))[0]
        measured = KeyStatistics(ones, ones, None, *rotations)
    cache, done = LayerCache(LayerConfig(name, statistics=measured, values_of_keys=view)), 0
    worst, same = dict[bool, float](), True
    if value_dim is not None:
        value = key[..., :value_dim]
    for n in CHUNKS:
        part = slice(done, done + n)
        done += n
        if not GPU and n > 100:  # the interpreter would take minutes
            cache.observe(query[:, :, part], cache.append(key[:, :, part], value[:, :, part]))
            continue
        mask = torch.rand(batch, 1, n, done, device=DEVICE) < 0.7 if masked else None
        new = cache.append(key[:, :, part], value[:, :, part])
        own = query[:, :, part]
        out, again = (attend(own, new, scaling=dim**-0.5, mask=mask, backend="triton", **options) for _ in range(2))
        true = attend(own.double(), new, scaling=dim**-0.5, mask=mask, backend="reference", **options)
        many = n * repeat >= unfolded.ROWS and mask is None
        worst[many], same = max(worst.get(many, 0.0), distance(out, true)), same and torch.equal(out, again)
    return worst, same


def pool_error(name: str, new: list[int]) -> float:
    """Of a step of an engine that gives `new` tokens to a long, a short and a new sequence."""
    formats = get_formats(name, DIM, DIM)
    layout = PageLayout(formats)
    if formats.awaits_fit:
        statistics = KeyStatistics(*torch.rand(2, 2, DIM, generator=torch.Generator().manual_seed(0)))
        formats = formats.with_formats(formats.keys.fitted(statistics), formats.values)
    size = layout.page_size
    blocks = torch.zeros(64, 2, size, layout.slot_bytes(2) // 2, dtype=torch.bfloat16, device=DEVICE)
    outs = []
    lengths = [15 * size + 7, size - 1, 0]
    table = torch.arange(63).view(3, 21).numpy()
    for backend in ("triton", "reference"):
        torch.manual_seed(1)
        layer = PagedLayer(formats, PagePool(blocks.zero_(), layout), 8, torch.bfloat16)
        attention = PagedAttention(layer, 6, scaling=DIM**-0.5, backend=backend)
        slots = Slots(8)
        for counts, before in ((lengths, [0, 0, 0]), (new, lengths)):
            starts = [sum(counts[:i]) for i in range(4)]
            step = plan(starts, [a + b for a, b in zip(counts, before, strict=True)], table, slots, 1, size)
            query, key, value = (torch.randn(step.tokens, heads, DIM, device=DEVICE).bfloat16() for heads in (6, 2, 2))
            out = attention(query, key, value, step)
        outs.append(out)
    return distance(*outs)


def fold_error(name: str) -> tuple[float, float]:
    """How far vectors lie apart that were folded here and by the CPU, of the error of folding, and what is too much."""
    torch.manual_seed(0)
    x, worst = torch.randn(1, 2, 512, DIM), 0.0
    pair = get_formats(name, DIM, DIM)
    for fmt in (pair.keys, pair.values):
        here, there = (fmt.unfold(fmt.fold(each)).cpu() for each in (x.to(DEVICE), x))
        worst = max(worst, ((here - there).norm() / (there - x).norm()).item())
    return worst, 0.05  # codes that lie on an edge may go either way


def graph_error(name: str) -> tuple[float, bool]:
    """How far logits of replayed steps, some of which fold, are from those without graphs; and whether bits agree."""
    import transformers

    import kvfold
    from kvfold.integrations.transformers import recorder

    class Counting(recorder.CudaGraph):
        replays = 0

        def replay(self) -> None:
            Counting.replays += 1
            super().replay()

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1_000, num_hidden_layers=2, hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, intermediate_size=512,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval().to(DEVICE, torch.bfloat16)
    ids, outs = torch.randint(0, 1_000, (2, 600), device=DEVICE), []
    cache = kvfold.FoldedCache(config, name)
    with torch.no_grad(), patch.dict(recorder.RECORDERS, {DEVICE.type: Counting}):
        for replayed in (True, False):
            kvfold.attach(llama, cuda_graphs=replayed)
            if replayed:
                llama(ids[:, :400], past_key_values=cache)
                llama(ids[:, 400:401], past_key_values=cache)  # from here on storage is as it will be
            own = copy.deepcopy(cache) if replayed else cache
            outs.append(torch.cat([llama(token, past_key_values=own).logits for token in ids[:, 401:].split(1, 1)]))
            kvfold.detach(llama)
    if Counting.replays < 190:
        return float("nan"), False
    return distance(*outs), torch.equal(*outs)


# --- decode -----------------------------------------------------------------------------------------------------------

IN_TURN = 2**27
"""Bytes that caches read in turn have together, far more than second-level caches hold."""


def milliseconds(runs: Sequence[Callable[[], object]]) -> float:
    """Of one of `runs`: the median of replays of a CUDA graph of them all, one after the other."""

    def all_in_turn() -> None:
        for run in runs:
            run()

    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(all_in_turn, rep=50, return_mode="median")) / len(runs)


def attention(formats: list[str], shapes: Sequence[tuple[int, ...]], new: int) -> Iterator[Row]:
    """Of `new` tokens a sequence, which the context counts in."""
    rate = copy_rate()
    for batch, context, kv_heads, repeat in track(shapes, "attending", console=console, transient=True):
        torch.manual_seed(0)
        shape = batch, kv_heads, context, DIM
        key, value = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        query = torch.randn(batch, kv_heads * repeat, new, DIM, device=DEVICE, dtype=torch.bfloat16)
        dense, way = best_dense(query, key, value)
        for name in formats:
            first = LayerCache(LayerConfig(name))
            first.observe(None, first.append(key[:, :, :-new], value[:, :, :-new]))
            pages = held_bytes([first.groups[0].rows.pages()])
            caches = [first, *(copy.deepcopy(first) for _ in range(turns(pages) - 1))]
            news = [cache.append(key[:, :, -new:], value[:, :, -new:]) for cache in caches]
            calls = [partial(attend, query, own, scaling=DIM**-0.5, backend="triton") for own in news]
            out = calls[0]()
            time_of_one = milliseconds(calls)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            same = torch.equal(out, calls[0]())
            extra = torch.cuda.max_memory_allocated() - before
            per_number = a_number(name, repeat, new)
            count = per_number * batch * kv_heads * context * 2 * DIM * max(repeat * new / unfolded.ROWS, 1)
            yield {
                "batch": batch, "tokens": context, "heads": f"{kv_heads}×{repeat}", "format": name,
                "ms": time_of_one, "bf16 ms": dense, "bf16 by": way, "×": dense / time_of_one,
                "of copy": pages / time_of_one / 1e6 / rate, "a number": per_number,
                "ms by count": 1e3 * count / issue_rate(),
                "extra MiB": extra / 2**20, "dense MiB": 2 * key.nbytes / 2**20, "same again": same,
            }  # fmt: skip
            del first, caches, news, calls


@cache
def a_number(name: str, repeat: int, new: int) -> float:
    """Instructions of this GPU's listing for each number of a cache, for 64 rows at most; NaN where there is none."""
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda":
        return float("nan")
    from compile_kernels import counted, over_rows

    return counted(over_rows(name, DIM, repeat, new), target, repeat * new, tensor_cores(DEVICE))


def issue_rate() -> float:
    """Thread instructions that the GPU starts in a second, by the guess of `gpu_estimates.py`."""
    properties = torch.cuda.get_device_properties(DEVICE)
    return properties.multi_processor_count * 128 * getattr(properties, "clock_rate", float("nan")) * 1e3 * ISSUED


def turns(nbytes: int) -> int:
    """How many caches of so many bytes are read in turn."""
    return max(-(-IN_TURN // nbytes), 1)


def best_dense(query: Tensor, key: Tensor, value: Tensor) -> tuple[float, str]:
    """Milliseconds of torch's fastest dense attention, and its name."""
    found = {}
    others = range(turns(2 * key.nbytes) - 1)
    pairs = [(key, value), *((key.clone(), value.clone()) for _ in others)]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[backend.name.split("_")[0].lower()] = milliseconds(
                    [partial(scaled_dot_product_attention, query, k, v, enable_gqa=True) for k, v in pairs]
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
    return 2 * source.nbytes / milliseconds([lambda: target.copy_(source)]) / 1e6


# --- fold -------------------------------------------------------------------------------------------------------------


def fold(formats: list[str], tokens: int = 32_768, kv_heads: int = 8) -> Iterator[Row]:
    x = torch.randn(1, kv_heads, tokens, DIM, device=DEVICE, dtype=torch.bfloat16)
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
            yield {"format": name, "side": side, "million vectors/s": kv_heads * tokens / seconds / 1e6}


# --- model ------------------------------------------------------------------------------------------------------------


FIRST = 4
"""Steps of which one warms up for a CUDA graph, the next is recorded, and two are compared."""


def model(name: str, context: int = 16_384, batch: int = 4, new: int = 128) -> Iterator[Row]:
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
    ids = torch.randint(0, 32_000, (batch, context), device=DEVICE)
    weights = torch.cuda.memory_allocated()

    @torch.no_grad()
    def run(cache: Any, tokens: int, steps: int) -> tuple[float, list[float]]:
        """Seconds of reading a prompt, and of each step after it."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for first in range(0, tokens, 4_096):
            part = ids[:, first : min(first + 4_096, tokens)]
            out = qwen(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        prefill, times = time.perf_counter() - start, []
        token = out.logits[:, -1:].argmax(-1)
        for _ in range(steps):
            start = time.perf_counter()
            token = qwen(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return prefill, times

    for kind, graphs in (("bf16", False), (name, False), (name, True)):
        kvfold.attach(qwen, cuda_graphs=graphs)
        make = transformers.DynamicCache if kind == "bf16" else partial(kvfold.FoldedCache, format=kind)
        run(make(config=config), 5_000, 70)  # compiles what it needs, a step that folds included
        torch.cuda.reset_peak_memory_stats()
        prefill, times = run(make(config=config), context, new + FIRST)
        kvfold.detach(qwen)
        later = times[FIRST:]
        usual = statistics.median(later)
        yield {
            "cache": kind, "graphs": "yes" if graphs else "no", "layers": layers, "batch": batch, "tokens": context,
            "prefill s": prefill, "first steps s": sum(times[:FIRST]), "ms a step": 1e3 * usual,
            "of it folding": 1 - usual / statistics.mean(later),
            "most MiB": (torch.cuda.max_memory_allocated() - weights) / 2**20,
        }  # fmt: skip


# --- report -----------------------------------------------------------------------------------------------------------


def report() -> Iterator[Row]:
    """Of the kernels that ran so far in this process, the most of each."""
    from kvfold.kernels.gluon import attend as whole_numbers
    from kvfold.kernels.triton import append as appending
    from kvfold.kernels.triton import attend as attending
    from kvfold.kernels.triton import fold as folding
    from kvfold.kernels.triton import unfold as unfolding

    kernels = (whole_numbers.attend_pages, attending.attend_pages, unfolding.unfold, attending.attend_dense,
               attending.combine, appending._append, folding._fold_token, folding._fold_rotated,
               folding._fold_channelwise, folding._pack)  # fmt: skip
    for kernel in kernels:
        variants = [variant for cached in kernel.device_caches.values() for variant in cached[0].values()]
        if variants:
            yield {
                "kernel": kernel.__name__, "in": kernel.__module__.split(".")[2], "variants": len(variants),
                "registers": max(v.n_regs for v in variants),
                "spills": max(v.n_spills for v in variants), "shared bytes": max(v.metadata.shared for v in variants),
            }  # fmt: skip


if __name__ == "__main__":
    main()
