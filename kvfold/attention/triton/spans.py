"""What the kernels are told of sequences and of what these read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.quant.packing import TILE

ALIGNED = 4
"""Numbers to whose multiples parts are aligned: kernels are compiled anew for addresses of other alignment."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences whose new tokens are in one list."""

    # int32, of each sequence: its first new token, how many new tokens it has, and how many pages.
    first: Tensor
    count: Tensor
    pages: Tensor
    stop: Tensor  # how many folded tokens each new token reads: int32, (tokens)
    # The most new tokens, and pages, of a sequence.
    most: int
    most_pages: int
    fewest: int  # the fewest new tokens of a sequence
    skipped: Tensor | None = None  # how many of the first folded tokens no new token reads: int32; None for none


@dataclass(frozen=True, eq=False)
class Span:
    """Which dense tokens each sequence reads, all int32."""

    # Of each sequence: where its tokens begin, in steps of the tensor; how many they are; position of the first.
    place: Tensor
    held: Tensor
    position: Tensor
    # Positions that bound what each new token reads: (tokens).
    start: Tensor
    stop: Tensor


@dataclass(frozen=True, eq=False)
class Dense:
    """Dense tokens; strides are in elements, from place to place, head to head and token to token."""

    span: Span
    key: Tensor
    value: Tensor
    key_strides: Sequence[int]
    value_strides: Sequence[int]


class Ints:
    """Whole numbers that go to a device together."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def add(self, numbers: Iterable[int]) -> slice:
        """Where `numbers` are among all."""
        self.numbers += [0] * (-len(self.numbers) % ALIGNED)
        start = len(self.numbers)
        self.numbers.extend(numbers)
        return slice(start, len(self.numbers))


@lru_cache(maxsize=8)
def sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """`numbers` on a device, int32, sent once for all layers of equal length: each copy would wait for the GPU."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def block_of(page_size: int, channels: int, numbers: int) -> int:
    """Tokens that are read at a time, about `numbers` numbers: a power of two that divides a page."""
    return min(page_size & -page_size, max(numbers // channels, TILE), 64)
