"""Forward passes over a cache: how one begins and ends, and how a broken one is rolled back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from kvfold.cache.shape import LayerShape
from kvfold.integrations.transformers.layer import ForwardPass
from kvfold.integrations.transformers.undo import Undo, undo_of_growth
from kvfold.integrations.transformers.watch import WatchedPass, calling_modules
from kvfold.kernels.graphs import outside_graphs


class Passes:
    """Keeps all layers of a cache at the same tokens.

    An attached model tells when a pass begins and ends. For other models, passes are inferred from touches of layers
    and the calls that they come from (`WatchedPass`). What layers know of the current pass is `under_way`.
    """

    def __init__(self, layers: list[Any], shapes: Sequence[LayerShape], under_way: ForwardPass) -> None:
        self._layers, self._shapes, self._under_way = layers, shapes, under_way
        self._before: list[Undo] | None = None
        self._watched = WatchedPass()

    def __getstate__(self) -> dict[str, Any]:
        # Functions that undo a pass are bound to the layers of this cache.
        return {**vars(self), "_before": None, "_watched": WatchedPass()}

    @property
    def is_under_way(self) -> bool:
        """Whether a forward pass has begun that has not ended."""
        if self._under_way.reads_folded:
            return True
        return self._before is not None and not self._watched.has_ended

    def begin(self) -> None:
        """Remember what all layers hold, for `roll_back`."""
        self._before = [undo_of_growth(layer) for layer in self._layers]

    def end(self) -> None:
        """Keep the pass's tokens."""
        self._before = None

    def forget_ended(self) -> None:
        """Let go of what layers held before the last pass, once it has ended."""
        if not self.is_under_way:
            self._before = None

    def roll_back(self) -> None:
        """Let all layers hold what they held when the pass began."""
        for undo in self._before or ():
            undo()
        self._before, self._watched = None, WatchedPass()

    @contextmanager
    def touching(self, layer: int, what: object) -> Iterator[None]:
        """Guard a layer that takes a pass's tokens: if it fails, all layers forget the pass."""
        watched = not self._under_way.reads_folded  # `_watch` leaves graphs, which takes long in a step
        if watched:
            self._watch(layer, what)
        try:
            yield
            if watched:
                self._watched.touch(layer, what)
        except BaseException:
            self.roll_back()
            raise

    def touch(self, layer: int, what: object) -> None:
        """Note that a model writes to a layer by itself."""
        if not self._under_way.reads_folded:
            self._watch(layer, what)
            self._watched.touch(layer, what)

    @outside_graphs
    def _watch(self, layer: int, what: object) -> None:
        """Begin a pass of a model that is not attached, if this touch of a layer begins one."""
        if self._before is None or not self._watched.goes_on(layer, what):
            self.forget_unended()
            self.begin()
            self._watched.begin(self._last_touched())

    def _last_touched(self) -> int | None:
        """The last layer that each forward pass touches; None if there is none.

        Some models never touch layers of linear attention, so these count once they hold something.
        """

        def is_touched(index: int, layer: Any) -> bool:
            if isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, DynamicLayer):
                return any(isinstance(x, dict | list) and _holds_a_tensor(x) for x in vars(layer).values())
            return self._shapes[index].kind != "none"

        return max((i for i, layer in enumerate(self._layers) if is_touched(i, layer)), default=None)

    def forget_unended(self) -> None:
        """Let go of the last pass of a model that is not attached.

        If that pass never ended, it is rolled back, and RuntimeError is raised: the model that begins a pass now has
        already read this cache's length, which included the tokens that are rolled back.
        """
        if self.is_under_way:
            self.roll_back()
            raise RuntimeError(
                "the last forward pass over this cache did not get to its last layer: its tokens are forgotten now, in "
                "all layers; call the model again"
            )
        self._before = None

    def check_between(self, done: str) -> None:
        """Raise ValueError if a pass is under way, or was interrupted; `done` says in the message what must wait."""
        if self.is_under_way:
            raise ValueError(
                "a forward pass over this cache is under way, or was interrupted: a cache is "
                f"{done} whole, between forward passes"
            )

    def end_unended(self, done: str) -> None:
        """Roll back a pass that was interrupted, so that layers change together; ValueError if it is under way."""
        if not self.is_under_way:
            return
        if self._under_way.reads_folded or next(calling_modules(), None) is not None:
            self.check_between(done)
        self.roll_back()


def _holds_a_tensor(states: dict[Any, Any] | list[Any]) -> bool:
    return any(isinstance(x, Tensor) for x in (states.values() if isinstance(states, dict) else states))
