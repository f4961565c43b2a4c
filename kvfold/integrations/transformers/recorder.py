"""What records the launches of a step and replays them."""

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records what a function launches, and replays it."""

    def rehearse(self, function: Callable[[], Any]) -> Any:
        """Call `function` as usual; raise RuntimeError if it does what cannot be recorded, such as to wait."""

    def record(self, function: Callable[[], Any]) -> Any:
        """Call `function`, which only then is recorded, and return what it returns: tensors without numbers yet."""

    def replay(self) -> None:
        """Launch it all again, over the same memory."""


class CudaGraph:
    """A `Recorder` by CUDA, or HIP."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._graph = torch.cuda.CUDAGraph()

    def rehearse(self, function: Callable[[], Any]) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def record(self, function: Callable[[], Any]) -> Any:
        # Unlike `torch.cuda.graph`, this leaves the stream even if the recording broke.
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                self._graph.capture_begin()
                try:
                    return function()
                finally:
                    self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaGraph}
"""By the type of a model's device."""
