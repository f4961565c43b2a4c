"""Forward passes of models that are not attached: a cache is not told when one begins or ends."""

import inspect
from collections.abc import Iterator
from types import FrameType

from torch import nn
from transformers import PreTrainedModel


class WatchedPass:
    """The forward pass that uses a cache's layers, inferred from how they are touched.

    A pass is one call of the model that runs the layers. It has ended once its last layer was touched. Later layers may
    still follow if no pass had touched them before.
    """

    def __init__(self) -> None:
        self.touched: set[tuple[int, object]] = set()  # layers, and what was done to them
        self._last: int | None = None
        self._caller: FrameType | None = None
        self._by_model = False

    @property
    def has_ended(self) -> bool:
        """Whether it has reached the last layer, or no model runs it: updates of layers by hand may stop anywhere."""
        return not self.touched or not self._by_model or any(layer == self._last for layer, _ in self.touched)

    def goes_on(self, layer: int, what: object) -> bool:
        """Whether a touch belongs to this pass; otherwise it begins another."""
        if not self.touched:
            return False
        if self._caller is not None:
            return any(frame is self._caller for frame in _frames())
        if self._by_model and (self._last is None or layer < self._last):
            return False
        return (layer, what) not in self.touched

    def begin(self, last: int | None) -> None:
        """Watch another pass, which ends with the layer `last`."""
        self.touched, self._last = set(), last
        self._caller = next(
            (each for each in _frames() if isinstance(each.f_locals.get("self"), PreTrainedModel)), None
        )
        self._by_model = self._caller is not None

    def touch(self, layer: int, what: object) -> None:
        """Note what the pass does to a layer."""
        self.touched.add((layer, what))
        if layer == self._last:
            self._caller = None  # it would keep the model's intermediate results alive


def calling_modules() -> Iterator[nn.Module]:
    """Modules whose methods are running, from the innermost on."""
    callers = (frame.f_locals.get("self") for frame in _frames())
    return (caller for caller in callers if isinstance(caller, nn.Module))


def _frames() -> Iterator[FrameType]:
    """The running frames, from the innermost call on."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
