"""The dense tokens of rows: sinks at the start, and the tail at the end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from kvfold.cache.spans import DenseSpan
from kvfold.kernels.cpu.copy import copy_finite

TAIL_STEP = 8
"""The dense tail grows by this many tokens at a time."""

Sides = tuple[Any, Any]
"""Keys and values: tensors, or MLX arrays."""


def tail_capacity(tokens: int) -> int:
    """Tokens that a tail has room for when it must hold `tokens`."""
    return -(-tokens // TAIL_STEP) * TAIL_STEP


@dataclass(frozen=True, eq=False)
class DenseTokens:
    """Dense keys and values of rows, (batch, kv_heads, capacity, dim) each.

    The rows know how many of them are held. New tokens are written behind those, or into other storage, so an older
    `DenseTokens` of the same rows stays valid.
    """

    tail_start: int  # slot of the tail's first token
    sinks: Sides | None = None  # the first tokens; None before the first
    # The newest tokens. It overlaps the pages that folded last, so that they can be undone. None before the first token
    # after the sinks, and if tokens fold as they come.
    tail: Sides | None = None
    # Coordinates of a value, if values are a view of the keys' first channels; None otherwise.
    shared_dim: int | None = None

    def sink_span(self, tokens: int) -> DenseSpan | None:
        """The first `tokens` sinks."""
        return None if self.sinks is None else DenseSpan(self.sinks, start=0, offset=0, tokens=tokens)

    def tail_span(self, length: int) -> DenseSpan | None:
        """The tail of rows of `length` slots, including tokens that are also folded; None if it is empty."""
        if self.tail is None or length <= self.tail_start:
            return None
        return DenseSpan(self.tail, self.tail_start, offset=0, tokens=length - self.tail_start)

    @property
    def room_left(self) -> int:
        """The first slot that the tail has no room for."""
        return self.tail_start + (0 if self.tail is None else int(self.tail[0].shape[2]))

    def with_sinks(self, key: Tensor, value: Tensor, held: int, sinks: int) -> "DenseTokens":
        """With more sinks, written behind the `held` ones; there will be at most `sinks`."""
        n = key.shape[2]
        if not n:
            return self
        own = self.sinks
        if own is None or held + n > own[0].shape[2]:
            own = self._wider(own, (key, value), held, min(tail_capacity(held + n), sinks))
        for kept, new in zip(own, (key, value), strict=True):
            kept[:, :, held : held + n] = new
        return replace(self, sinks=own)

    def widened(self, length: int, n: int) -> "DenseTokens":
        """With room for `n` tokens after the first `length` slots, in other storage if there is none."""
        assert self.tail is not None
        if length + n <= self.room_left:
            return self
        held = length - self.tail_start
        return replace(self, tail=self._wider(self.tail, self.tail, held, tail_capacity(held + n)))

    def write(self, key: Tensor, value: Tensor, length: int, checks: bool) -> bool:
        """Write tokens, rounded to the tail's dtypes, behind the first `length` slots, where there is room.

        Returns whether all are finite; they count as finite unless it `checks` them.
        """
        assert self.tail is not None
        at, n = length - self.tail_start, key.shape[2]
        new, tail = ((key, value), self.tail) if self.shared_dim is None else ((key,), self.tail[:1])
        if checks:
            return copy_finite(new, tail, at)
        for kept, tokens in zip(tail, new, strict=True):
            kept[:, :, at : at + n] = tokens
        return True

    def with_tail(self, dense: DenseSpan, new: int, tail_start: int) -> "DenseTokens":
        """With a tail of `dense` from slot `tail_start` on, whose last `new` tokens are not in the tail yet."""
        held = dense.stop - tail_start
        if not new and tail_start == self.tail_start:
            return self
        # A tail whose start moves goes to other storage, so that older `DenseTokens` stay valid.
        stays = self.tail is not None and tail_start == self.tail_start and held <= self.tail[0].shape[2]
        tail = self.tail if stays else self.room(dense.key, dense.value, tail_capacity(held))
        assert tail is not None
        first = held - new if stays else 0
        for kept, source in zip(tail, (dense.key, dense.value), strict=True):
            kept[:, :, first:held] = source[:, :, tail_start + first - dense.start :]
        return replace(self, tail=tail, tail_start=tail_start)

    def moved_into(self, tail: Sides, length: int) -> "DenseTokens":
        """With the tail of rows of `length` slots in other storage, which has room for it."""
        assert self.tail is not None
        held = length - self.tail_start
        for new, own in zip(tail, self.tail, strict=True):
            new[:, :, :held] = own[:, :, :held]
        return replace(self, tail=tail)

    def moved(self, slots: int) -> "DenseTokens":
        """The same tokens, `slots` slots further on."""
        return replace(self, tail_start=self.tail_start + slots)

    def reopened(self, key: Tensor, value: Tensor, tail_start: int) -> "DenseTokens":
        """With these tokens as the tail, in its dtypes."""
        assert self.tail is not None  # a folded page was dense before
        tokens = key.shape[2]
        tail = self.room(*self.tail, tail_capacity(tokens))
        for kept, source in zip(tail, (key, value), strict=True):
            kept[:, :, :tokens] = source.to(kept.dtype)
        return replace(self, tail=tail, tail_start=tail_start)

    def map(self, change: Callable[[Any], Any]) -> "DenseTokens":
        """Each tensor changed."""
        sinks, tail = (
            None if own is None else self._beside(change(own[0]), partial(change, own[1]))
            for own in (self.sinks, self.tail)
        )
        return replace(self, sinks=sinks, tail=tail)

    def room(self, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Storage for `tokens` tokens shaped as these."""
        return self._beside(_room(key, tokens), partial(_room, value, tokens))

    def _beside(self, key: Tensor, value: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys, and values: those that `value` makes, or a view of the keys."""
        return key, value() if self.shared_dim is None else key[..., : self.shared_dim]

    def _wider(self, old: Sides | None, like: Sides, held: int, capacity: int) -> Sides:
        """Storage for `capacity` tokens with the first `held` of `old`."""
        wider = self.room(*like, capacity)
        for new, own in zip(wider[: 2 if self.shared_dim is None else 1], old or (), strict=False):
            new[:, :, :held] = own[:, :, :held]
        return wider


def _room(like: Tensor, tokens: int) -> Tensor:
    """Storage for `tokens` tokens shaped as `like`."""
    batch, heads, _, dim = like.shape
    return like.new_zeros(batch, heads, tokens, dim)
