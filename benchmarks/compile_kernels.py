"""What Triton's compilers make of the GPU kernels, with no GPU: registers, what spills, how many instructions.

Attention over a small cache, and folding, are called as usual; each launch is compiled for the target and not run.
"a number" are the instructions that a thread spends on each number of a page for all rows of a KV head, or for 64 of
them; where a program has fewer, several read the page. Where many rows read pages unfolded, the row "together" adds up
what 64 of them take. An H200 has some 28·10¹² a second; a dense kernel that is bound by memory reads 2.2·10¹² bfloat16
numbers in that time.

    python benchmarks/compile_kernels.py [--targets cuda:90,cuda:80,hip:gfx942] [--formats kvfold-4] [--json FILE]

NVIDIA's targets get the kernels in Gluon where forms fit, as at run time. --twin compiles Triton's for them as well.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from kvfold.attention.triton import attend_pool, attend_rows, launch, sides
from kvfold.attention.triton.step import GraphStep, told_of_next
from kvfold.attention.triton.unfolded import ROWS
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import PageLayout, PagePool, why_not_paged
from kvfold.cache.pool.plan import Slots, plan
from kvfold.cli.output import to_stdout
from kvfold.formats import KeyStatistics, get_formats
from kvfold.formats.channelwise import SCALES, spread_bits
from kvfold.formats.page import level_table
from kvfold.kernels.triton import fold
from kvfold.quant.codebooks import flat_levels
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.transforms import orthogonal

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64", torch.int16: "*i16",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

Launch = tuple[JITFunction, dict[str, Any], dict[str, Any]]


def launches(work: Callable[[], object], target: GPUTarget, tensor_cores: bool = False) -> list[Launch]:
    """Kernels that `work` launches on a target, with arguments and options; none of them runs."""
    wide = target.backend == "cuda" and target.arch < 90
    found: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in named}
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | named, options))

    with (
        patch.object(JITFunction, "run", run),
        patch.object(sides, "tensor_cores", lambda device: tensor_cores),
        patch.object(launch, "has_wide_programs", lambda device: wide),
    ):
        work()
    return found


def source(kernel: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """A kernel with its arguments' types, and what the compiler may know of their values."""
    signature, constants, known = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = arguments[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                known[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                known[(i,)] = [["tt.divisibility", 16]]
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, known)


def resources(compiled: triton.compiler.CompiledKernel) -> dict[str, int]:
    """Registers of a thread, and what of them is kept in memory instead: bytes for NVIDIA, registers for AMD."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        counts = {name: int(re.search(rf"\.{name}: +(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
        return {"registers": counts["vgpr_count"], "spilled": counts["vgpr_spill_count"]}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = next(line for line in told.splitlines() if "REG:" in line)
    pairs = dict(part.split(":", 1) for part in usage.split() if ":" in part)
    return {"registers": int(pairs["REG"]), "spilled": int(pairs["STACK"])}


def instructions(compiled: triton.compiler.CompiledKernel, passes: bool) -> int:
    """Of all threads of a program of NVIDIA's: in one turn of the longest loop, or in all if there is none.

    `passes`: leave out what the longest branch in the loop passes over, as in a block that needs no mask.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", text)]
    jumps = [(at, int(jump[1], 16)) for at, what in lines if (jump := re.search(r"BRA.* 0x([0-9a-f]+)", what))]
    products = [at for at, what in lines if re.search(r"[FI]G?MMA|HG?MMA", what)]  # stray jumps back have none
    loops = [(to, at) for at, to in jumps if to < at and any(to <= product <= at for product in products)]
    loops = loops or [(to, at) for at, to in jumps if to < at] or [(0, max(at for at, what in lines if "EXIT" in what))]
    first, last = max(loops, key=lambda loop: loop[1] - loop[0])
    turn = sum(first <= at <= last for at, _ in lines)
    if passes:
        turn -= max(
            (sum(at < other < to for other, _ in lines) for at, to in jumps if first <= at < to <= last), default=0
        )
    return turn * 32 * compiled.metadata.num_warps


def a_number(
    kernel: JITFunction, arguments: dict[str, Any], queries: int, unfolded: list[torch.Tensor],
    compiled: triton.compiler.CompiledKernel,
) -> float | None:  # fmt: skip
    """Instructions for each number of pages, of keys and values, and for 64 rows.

    None for kernels that read neither pages nor what was `unfolded` from them.
    """
    if kernel.__name__ == "unfold":
        return (
            instructions(compiled, False)
            * min(ROWS / queries, 1)
            / (2 * arguments["BLOCK"] * arguments["SHAPE"].code_dim)
        )
    programs = min(queries, ROWS) / max(min(queries, arguments.get("ROWS", ROWS)), 1)
    if kernel.__name__ == "attend_pages":
        block = 64 if kernel.is_gluon() else arguments["BLOCK"]
        read = block * sum(arguments[side].code_dim for side in ("KEYS", "VALUES"))
        return instructions(compiled, False) * programs / read
    if kernel.__name__ == "attend_dense" and any(arguments["key"] is x for x in unfolded):
        read = arguments["BLOCK"] * (arguments["KEY_DIM"] + arguments["VALUE_DIM"])
        return instructions(compiled, True) * programs / read
    return None


def counted(work: Callable[[], object], target: GPUTarget, queries: int, tensor_cores: bool) -> float:
    """Instructions of `work` for a number of pages, of all kernels that read pages or what is unfolded from them."""
    found, total = launches(work, target, tensor_cores), 0.0
    unfolded = [arguments["to"] for kernel, arguments, _ in found if kernel.__name__ == "unfold"]
    for kernel, arguments, options in found:
        compiled = triton.compile(source(kernel, arguments), target=target, options=options)
        total += a_number(kernel, arguments, queries, unfolded, compiled) or 0
    return total


def over_rows(
    name: str, dim: int, repeat: int, tokens: int, dtype: torch.dtype = torch.bfloat16, value_dim: int | None = None,
    masked: bool = False,
) -> Callable[[], object]:  # fmt: skip
    """Attention of `tokens` new ones over a cache of `name`."""
    x = torch.randn(1, 1, 1_024 + tokens, dim).to(dtype)
    value = x[..., :value_dim]
    cache = LayerCache(LayerConfig(name, values_of_keys=value_dim is not None))
    cache.observe(None, cache.append(x[:, :, :1_024], value[:, :, :1_024]))
    new = cache.append(x[:, :, 1_024:], value[:, :, 1_024:])
    query = torch.randn(1, repeat, tokens, dim).to(dtype)
    mask = torch.ones(1, 1, tokens, 1_024 + tokens, dtype=torch.bool) if masked else None
    cache.observe(query, new)
    rows, dense = cache.groups[0].rows, new.dense[0]
    return lambda: attend_rows(query, rows, dense, scaling=dim**-0.5, mask=mask)


def step_of_a_graph(name: str, dim: int, repeat: int) -> Callable[[], object]:
    """Appending a token to a cache of `name`, and attending with it."""
    x, query = torch.randn(1, 1, 1_025, dim).bfloat16(), torch.randn(1, repeat, 1, dim).bfloat16()
    cache = LayerCache(LayerConfig(name))
    cache.observe(None, cache.append(x[:, :, :1_022], x[:, :, :1_022]))
    rows, token = cache.groups[0].rows, x[:, :, 1_022:1_023]
    numbers = torch.tensor(told_of_next(rows).numbers, dtype=torch.int32)

    def step() -> None:
        own = GraphStep(rows, numbers)
        own.append(token, token, rows.length)
        own.attend(query, torch.empty_like(query), rows.length + 1, dim**-0.5, 0.0, 1)

    return step


def over_pool(name: str, dim: int, repeat: int) -> Callable[[], object]:
    """Attention of one token over an engine's pool."""
    layer, table = pool_of(name, dim)
    size, slots = layer.pool.layout.page_size, Slots(1)
    plan([0, 8 * size + 1], [8 * size + 1], table, slots, 1, size)
    step = plan([0, 1], [8 * size + 2], table, slots, 1, size)
    query, key = torch.randn(1, repeat, dim).bfloat16(), torch.randn(1, 1, dim).bfloat16()
    return lambda: attend_pool(query, key, key, layer, step, scaling=dim**-0.5)


def into_pool(name: str, dim: int) -> Callable[[], object]:
    """Folding a prompt of a page into an engine's pool."""
    layer, table = pool_of(name, dim)
    size = layer.pool.layout.page_size
    step, x = plan([0, size], [size], table, Slots(1), 1, size), torch.randn(size, 1, dim).bfloat16()
    return lambda: layer.fold_in_place(step, torch.from_numpy(layer.pool.units_of(step.folded.numpy())), x, x)


def pool_of(name: str, dim: int) -> tuple[PagedLayer, NDArray[np.integer]]:
    """A pool of nine pages of one head, and the block table of a sequence that has all."""
    pair = get_formats(name, dim, dim)
    layout = PageLayout(pair)
    if pair.awaits_fit:
        pair = pair.with_formats(pair.keys.fitted(KeyStatistics(*torch.rand(2, 1, dim))), pair.values)
    blocks = torch.zeros(9, 1, layout.page_size, layout.slot_bytes(2) // 2, dtype=torch.bfloat16)
    return PagedLayer(pair, PagePool(blocks, layout), 1, torch.bfloat16), np.arange(9)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="cuda:90,hip:gfx942", help="backend:architecture, separated by commas")
    parser.add_argument("--formats", default="kvfold-4,turboquant-4,kvfold-2")
    parser.add_argument("--dims", default="64,128,256", help="head dimensions, separated by commas")
    parser.add_argument("--twin", action="store_true", help="Triton's kernels for NVIDIA, too, where Gluon's run")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    jobs: list[tuple[str, int, Callable[[], object]]] = []  # what, rows of a KV head, and the work
    for name in args.formats.split(","):
        for dim, repeat, tokens in ((128, 4, 1), (128, 4, 64), (64, 4, 1), (256, 4, 1)):
            if str(dim) not in args.dims.split(","):
                continue
            try:
                get_formats(name, dim, dim)
            except ValueError:
                continue  # not for this head_dim
            what = f"{name}, D{dim}, {repeat} heads × {tokens}"
            jobs.append((what, repeat * tokens, over_rows(name, dim, repeat, tokens)))
        if why_not_paged(get_formats(name, 128, 128)) is None:
            jobs.append((f"{name}, D128, a pool", 4, over_pool(name, 128, 4)))
            jobs.append((f"{name}, D128, into a pool", 0, into_pool(name, 128)))
    for name in ("kvfold-4", "turboquant-4"):
        jobs.append((f"{name}, D128, a graph's step", 4, step_of_a_graph(name, 128, 4)))
    name = args.formats.partition(",")[0]
    jobs.append((f"{name}, D128, float32", 4, over_rows(name, 128, 4, 1, torch.float32)))
    jobs.append((f"{name}, D128, a mask", 256, over_rows(name, 128, 4, 64, masked=True)))
    jobs.append(("turboquant-4, 576/512", 16, over_rows("turboquant-4", 576, 16, 1, value_dim=512)))
    how = RotatedCode(orthogonal("hadamard", 128), torch.linspace(-0.3, 0.3, 16), "least_squares")
    x = torch.randn(1, 1, 64, 128)
    jobs.append(("4 bits, D128", 0, lambda: fold.fold_rotated(x, how, "tokens", 64, 0)))
    centred = replace(how, centred=True)
    jobs.append(("4 bits, D128, a centre", 0, lambda: fold.fold_rotated(x, centred, "channels", 64, 0)))
    codes = torch.zeros(1, 64, 128, dtype=torch.uint8)
    jobs.append(("4 bits, D128", 0, lambda: fold.pack(codes, [4] * 8, "tokens")))
    bits = spread_bits(4, 8)
    lut = level_table({b: flat_levels(b) for b in set(bits)}, bits)
    order = torch.arange(128, dtype=torch.int16)[None]
    channelwise = partial(fold.fold_channelwise, x, order, lut, bits, SCALES, "tokens", 64)
    jobs.append(("kvfold-4's keys, D128", 0, channelwise))
    rows: list[dict[str, Any]] = []
    for target in args.targets.split(","):
        backend, _, arch = target.partition(":")
        gpu = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)
        nvidia = backend == "cuda"
        for what, queries, work in jobs:
            found = launches(work, gpu, nvidia)
            if nvidia and args.twin:
                found += launches(work, gpu)
            unfolded = [arguments["to"] for kernel, arguments, _ in found if kernel.__name__ == "unfold"]
            together = 0.0
            for kernel, arguments, options in found:
                compiled = triton.compile(source(kernel, arguments), target=gpu, options=options)
                row = {"target": target, "kernel": kernel.__name__, "in": "Gluon" if kernel.is_gluon() else "Triton",
                       "for": what, "warps": compiled.metadata.num_warps, "shared bytes": compiled.metadata.shared,
                       } | resources(compiled)  # fmt: skip
                count = a_number(kernel, arguments, queries, unfolded, compiled) if nvidia else None
                if count is not None:
                    row["a number"], together = round(count, 1), together + count
                if row not in rows:
                    rows.append(row)
            if unfolded and together and not args.twin:
                rows.append({"target": target, "kernel": "together", "for": what, "a number": round(together, 1)})
    table = Table(title="kernels as compiled")
    columns = dict.fromkeys(column for row in rows for column in row)
    for column in columns:
        table.add_column(column, justify="left" if column in ("target", "kernel", "in", "for") else "right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
