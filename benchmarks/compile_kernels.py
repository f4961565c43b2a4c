"""What Triton's compilers make of the GPU kernels, with no GPU: that they compile, with how many registers and spills.

Attention over a small cache, and folding, are called as usual; each launch is compiled for the target and not run.

    python benchmarks/compile_kernels.py [--targets cuda:90,cuda:80,hip:gfx942] [--formats kvfold-4] [--json FILE]
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvfold.attention import attend
from kvfold.cache.layer import LayerCache
from kvfold.kernels.triton import fold
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.transforms import orthogonal

TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

Launch = tuple[JITFunction, dict[str, Any], dict[str, Any]]


def launches(work: Callable[[], object]) -> list[Launch]:
    """Kernels that `work` launches, with arguments and options; none of them runs."""
    found: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | named, options))

    whole, JITFunction.run = JITFunction.run, run
    try:
        work()
    finally:
        JITFunction.run = whole
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
    return ASTSource(kernel, signature, constants, known)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack (spills), of a kernel for NVIDIA."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = next(line for line in told.splitlines() if "REG:" in line)
    pairs = dict(part.split(":", 1) for part in usage.split() if ":" in part)
    return {"registers": int(pairs["REG"]), "stack bytes": int(pairs["STACK"])}


def work(name: str, dim: int, repeat: int, tokens: int) -> Callable[[], object]:
    """Attention of `tokens` new ones over a cache of `name`."""
    x = torch.randn(1, 1, 1_024 + tokens, dim).bfloat16()
    cache = LayerCache(name)
    cache.observe(None, cache.append(x[:, :, :1_024], x[:, :, :1_024]))
    new = cache.append(x[:, :, 1_024:], x[:, :, 1_024:])
    query = torch.randn(1, repeat, tokens, dim).bfloat16()
    return lambda: attend(query, new, scaling=dim**-0.5, backend="triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="cuda:90,hip:gfx942", help="backend:architecture, separated by commas")
    parser.add_argument("--formats", default="kvfold-4,turboquant-4,kvfold-2")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    jobs: list[tuple[str, list[Launch]]] = []
    for name in args.formats.split(","):
        for dim, repeat, tokens in ((128, 4, 1), (128, 4, 64), (64, 3, 1)):
            what = f"{name}, D{dim}, {repeat} heads × {tokens}"
            jobs.append((what, launches(work(name, dim, repeat, tokens))))
    how = RotatedCode(orthogonal("hadamard", 128), torch.linspace(-0.3, 0.3, 16), "least_squares")
    x = torch.randn(1, 1, 64, 128)
    jobs.append(("4 bits, D128", launches(lambda: fold.fold_rotated(x, how, "tokens", 64, 0))))
    scales = torch.rand(1, 16, 128)
    affine = launches(lambda: fold.closest_affine(x[0], scales, scales, torch.zeros(8, 64), [6, 6, 4, 4, 3, 3, 3, 3]))
    jobs.append(("kvfold-4's keys, D128", affine))
    rows: list[dict[str, Any]] = []
    for target in args.targets.split(","):
        backend, _, arch = target.partition(":")
        gpu = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 32 if backend == "cuda" else 64)
        for what, found in jobs:
            for kernel, arguments, options in found:
                compiled = triton.compile(source(kernel, arguments), target=gpu, options=options)
                row = {"target": target, "kernel": kernel.__name__, "for": what, "warps": compiled.metadata.num_warps,
                       "shared bytes": compiled.metadata.shared}  # fmt: skip
                rows.append(row | (resources(compiled.asm["cubin"]) if backend == "cuda" else {}))
    table = Table(title="kernels as compiled")
    for column in ("target", "kernel", "for", "warps", "shared bytes", "registers", "stack bytes"):
        table.add_column(column, justify="left" if column in ("target", "kernel", "for") else "right")
    for row in rows:
        table.add_row(*(str(row.get(column.header, "–")) for column in table.columns))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
