"""Functions that run outside the torch modes (inference mode, autocast) in which a model runs."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

DEVICES = ("cpu", "cuda", "xpu")


def in_no_mode(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run as if `torch.inference_mode` and `torch.autocast` were off.

    Tensors made in inference mode can't be written to outside of it, but a cache is used in both. Autocast would round
    vectors to 16 bits before they become codes.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        inference, casting = torch.is_inference_mode_enabled(), [d for d in DEVICES if torch.is_autocast_enabled(d)]
        if not inference and not casting:
            return function(*args, **kwargs)
        with ExitStack() as modes:
            for device in casting:
                modes.enter_context(torch.autocast(device, enabled=False))
            if inference:
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            return function(*args, **kwargs)

    return call
