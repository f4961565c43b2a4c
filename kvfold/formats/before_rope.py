"""The base of formats that hold keys as they were before RoPE."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.numbers import real
from kvfold.formats.page import TokenCodes
from kvfold.quant.polar import default_frequencies

DIM = 128
PAIRS = DIM // 2
BASE = 1e6
"""RoPE's base by default: the TBQ fork assumes it for all models."""


def frequencies_of(base: float) -> tuple[float, ...]:
    """ω_f of a RoPE with that base and no scaling."""
    return default_frequencies(DIM, real("rope_base", base, 1, 1e12))


@dataclass(frozen=True)
class BeforeRope(BlockFormat):
    """Keys of 128 channels, where RoPE turns channels f and f + 64 together, as in Llama and most other models."""

    bits: int = 3
    frequencies: tuple[float, ...] = ()
    """RoPE's ω_f, 64 of them; (): those of base 10⁶."""

    bit_range = (3, 3)
    turns_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__.lower()
        if self.head_dim != DIM or self.lanes != "tokens":
            raise ValueError(f"head_dim = {self.head_dim}, lanes = {self.lanes!r}: {name} is for keys of {DIM}")
        if len(self.frequencies) not in (0, PAIRS):
            raise ValueError(
                f"frequencies = {len(self.frequencies)} of them: {name} takes {PAIRS}, of a RoPE that turns all "
                "channels; take tbq3 for others"
            )

    def at(self, layer: int, frequencies: tuple[float, ...] | None) -> Self:
        return self if frequencies is None else replace(self, frequencies=frequencies)

    @property
    def omega(self) -> tuple[float, ...]:
        """ω_f, given or assumed."""
        return self.frequencies or frequencies_of(BASE)

    @abstractmethod
    def encode_at(self, x: Tensor, position: int) -> TokenCodes: ...

    def encode(self, x: Tensor) -> TokenCodes:
        return self.encode_at(x, 0)
