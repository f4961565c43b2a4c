"""Dense tokens that lie side by side."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(eq=False)
class DenseSpan:
    """Keys and values of consecutive tokens, dense."""

    storage: tuple[Tensor, Tensor]  # keys and values, (batch, kv_heads, any, dim), these tokens among them
    start: int  # slot of the first
    # Where these tokens begin in `storage`, and how many they are.
    offset: int
    tokens: int

    @classmethod
    def of(cls, key: Tensor, value: Tensor, start: int) -> "DenseSpan":
        """All of `key` and `value`."""
        return cls((key, value), start, 0, key.shape[2])

    def after(self, tokens: int) -> "DenseSpan":
        """Without the first `tokens`, which may be more than there are."""
        left = max(self.tokens - tokens, 0)
        return DenseSpan(self.storage, self.start + tokens, self.offset + self.tokens - left, left)

    @cached_property
    def key(self) -> Tensor:
        """Keys of these tokens alone, (batch, kv_heads, tokens, key_dim)."""
        return self.storage[0][:, :, self.offset : self.offset + self.tokens]

    @cached_property
    def value(self) -> Tensor:
        """Values of these tokens alone, (batch, kv_heads, tokens, value_dim)."""
        return self.storage[1][:, :, self.offset : self.offset + self.tokens]

    @property
    def stop(self) -> int:
        """Slot after the last."""
        return self.start + self.tokens
