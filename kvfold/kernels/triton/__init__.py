"""Triton kernels for GPUs: codes.py reads pages, attend.py attends, fold.py folds.

They run on whatever Triton compiles for, and with TRITON_INTERPRET=1 on a CPU, to be tested.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def on_its_device(launch: Callable[P, T]) -> Callable[P, T]:
    """`launch` where its first argument is: Triton launches on the current device, wherever tensors are."""

    @wraps(launch)
    def launched(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.cuda.device_of(args[0]):
            return launch(*args, **kwargs)

    return launched
