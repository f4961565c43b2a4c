"""Kernels in Gluon as PTX, and run in the machine of ptx_machine.py, where there is no GPU.

Triton's interpreter does not take Gluon, and where it is on, nothing is compiled. So a process of its own compiles: it
runs this file.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ptx_machine
import torch

ARCH = 80
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.uint8: "*u8", torch.int32: "*i32"}


@contextmanager
def tensor_cores() -> Iterator[list[str]]:
    """Attention in Triton takes what it takes on NVIDIA's tensor cores; the names of the kernels in Gluon that run."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    from kvfold.attention.triton import sides

    command = [sys.executable, __file__]
    known: dict[bytes, tuple[str, int]] = {}
    ran: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"TRITON_INTERPRET": "0"}
    ) as compiler:
        assert compiler.stdin
        assert compiler.stdout

        def run(
            kernel: Any,
            *args: Any,
            grid: Any,
            warmup: bool,
            num_warps: int,
            num_stages: int,
            maxnreg: int,
            **named: Any,
        ) -> None:
            given = dict(zip(kernel.arg_names, args, strict=False)) | named
            request = pickle.dumps((*_described(kernel, given), num_warps))
            if request not in known:
                compiler.stdin.write(len(request).to_bytes(8) + request)
                compiler.stdin.flush()
                known[request] = pickle.loads(compiler.stdout.read(int.from_bytes(compiler.stdout.read(8))))
            ptx, shared = known[request]
            values = [given[p.name] for p in kernel.params if not p.is_constexpr and given[p.name] is not None]
            ptx_machine.run(ptx, [*values, 0, 0], grid, 32 * num_warps, shared)
            ran.append(kernel.__name__)

        with patch.object(GluonJITFunction, "run", run), patch.object(sides, "tensor_cores", lambda device: True):
            yield ran
        compiler.stdin.close()


def _described(
    kernel: Any, given: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], Any]]:
    """Types of a kernel's arguments, those that are constants, and what is a multiple of 16."""
    signature, constants, known = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = given[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                known[i,] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    return signature, constants, known


def _compile(request: bytes) -> bytes:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from kvfold.kernels.gluon import attend

    *described, warps = pickle.loads(request)
    target = GPUTarget("cuda", ARCH, 32)
    found = triton.compile(GluonASTSource(attend.attend_pages, *described), target, {"num_warps": warps})
    return pickle.dumps((found.asm["ptx"], found.metadata.shared))


def main() -> None:
    source, to = sys.stdin.buffer, sys.stdout.buffer
    while size := source.read(8):
        answer = _compile(source.read(int.from_bytes(size)))
        to.write(len(answer).to_bytes(8) + answer)
        to.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
