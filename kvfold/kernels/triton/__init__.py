"""Triton kernels for GPUs: codes.py reads and writes codes, pages.py reads pages, attend.py attends,
unfold.py unfolds pages for prompts, fold.py folds, append.py appends single tokens.

They run on whatever Triton compiles for and, for tests, on a CPU with TRITON_INTERPRET=1.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def on_its_device(launch: Callable[P, T]) -> Callable[P, T]:
    """`launch` on the device of its first argument: Triton launches on the current device, wherever tensors are."""

    @wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        assert isinstance(first, torch.Tensor)
        if first.device.type == "cpu":
            return launch(*args, **kwargs)
        with torch.get_device_module(first.device).device(first.device):
            return launch(*args, **kwargs)

    return launched


def is_nvidia(device: torch.device) -> bool:
    """Whether a device is a GPU of NVIDIA's: torch says "cuda" of AMD's, too."""
    return device.type == "cuda" and torch.version.hip is None


def all_registers(device: torch.device) -> dict[str, int]:
    """The option by which a thread may have as many registers as there are.

    NVIDIA's assembler otherwise keeps to fewer, and some numbers in memory, so that more programs would fit. Other
    compilers do not know the option; the interpreter passes over it.
    """
    return {"maxnreg": 255} if device.type == "cpu" or is_nvidia(device) else {}
