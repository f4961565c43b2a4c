"""A recorder of launches that replays them on a CPU, as CUDA does on a GPU: for tests without one.

What Python computes while it records is kept as it was: sizes, addresses, numbers among a launch's arguments. Only what
lies in memory is read again. So a replay shows whatever depends on a number that is not in memory. What a GPU could not
record raises: reading a number back from the device, or making a tensor of Python's numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor

WAITS = ("_local_scalar_dense", "nonzero", "lift_fresh", "lift_fresh_copy", "is_nonzero", "masked_select", "equal")
"""Operators that a stream which is recorded refuses, as they wait for the GPU or copy from Python's memory."""


class RecordedLaunches:
    """A `Recorder` (kvfold.integrations.transformers.recorder) for a CPU's memory and Triton's interpreter."""

    def __init__(self, device: torch.device) -> None:
        self.launches: list[Callable[[], None]] = []

    def rehearse(self, function: Callable[[], Any]) -> Any:
        with _Operators([], []):
            return function()

    def record(self, function: Callable[[], Any]) -> Any:
        own = GridExecutor.__call__

        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            def run() -> None:
                with _disable_current_modes():
                    own(executor, *args, **kwargs)

            self.launches.append(run)
            run()

        made: list[Tensor] = []
        GridExecutor.__call__ = launch
        try:
            with _Operators(self.launches, made):
                out = function()
        finally:
            GridExecutor.__call__ = own
        for x in made:  # a stream that is recorded computes nothing
            x.fill_(torch.nan if x.is_floating_point() else 1)
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for launch in self.launches:
            launch()


class _Operators(TorchDispatchMode):
    """Appends a replay of each of torch's operators to `launches`, and the memory that it makes to `made`."""

    def __init__(self, launches: list[Callable[[], None]], made: list[Tensor]) -> None:
        super().__init__()
        self.launches, self.made = launches, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{func} while a stream is recorded")
        out = func(*args, **kwargs)
        given = {_memory(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
        own = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        new = [_memory(x) not in given for x in own]
        self.made += [x for x, is_new in zip(own, new, strict=True) if is_new]

        def replay() -> None:
            again = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
            for old, found, is_new in zip(own, again, new, strict=True):
                if is_new:
                    old.copy_(found)

        self.launches.append(replay)
        return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
