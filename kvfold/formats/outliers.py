"""TurboQuant with more bits for outlier channels: 2.5 and 3.5 bits a value."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from kvfold.formats.ordered import Ordered
from kvfold.formats.page import PageForm, TokenCodes, level_table
from kvfold.formats.statistics import KeyStatistics
from kvfold.quant.codebooks import sphere_levels
from kvfold.quant.nearest import nearest_level
from kvfold.quant.packing import TILE
from kvfold.quant.transforms import ChannelOrder, OrderedMatrix, orthogonal


@dataclass(frozen=True)
class Outliers(Ordered):
    """Two independent instances of Algorithm 1: one of them, with more bits, for outliers.

    Outliers are the channels with the largest E[x_c²] over a prompt's first tokens, found for each head: the paper does
    not say how. Tokens stay dense until then.
    """

    outliers: int = TILE
    """How many channels have `outlier_bits`, the others `bits`: a multiple of 16."""
    outlier_bits: int = 3

    summary = "TurboQuant of outlier channels and of the others, each with its norm, bits and rotation"
    source = "arXiv 2504.19874, §4.3"

    def __post_init__(self) -> None:
        super().__post_init__()
        rest = self.head_dim - self.outliers
        if self.outliers % TILE or rest % TILE or self.outliers <= 0 or rest <= 0:
            raise ValueError(
                f"head_dim = {self.head_dim} with {self.outliers} outliers: both they and the {rest} others are to be "
                f"multiples of {TILE}"
            )

    @classmethod
    def of(cls, name: str, head_dim: int, **shape: object) -> "Outliers":
        """The format named by the mean of its bits: "2.5", "3.5" or "3.5q"."""
        divisor, bits, more = SPLITS[name]
        if head_dim % (divisor * TILE):
            raise ValueError(f"head_dim = {head_dim}: turboquant-{name} takes multiples of {divisor * TILE}")
        return cls(
            head_dim=head_dim, bits=bits, outliers=head_dim // divisor, outlier_bits=bits + more,
            **shape,  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def awaits_fit(self) -> bool:
        return self.order is None

    def fitted(self, statistics: KeyStatistics) -> "Outliers":
        if statistics.energy is None:
            raise ValueError(
                "the calibration does not tell of channels' energy, by which outliers are found: make it anew with "
                "kvfold calibrate, or leave it out, and each prompt decides"
            )
        return replace(self, order=statistics.energy.argsort(dim=-1, descending=True, stable=True).to(torch.int16))

    @property
    def _parts(self) -> tuple[tuple[slice, int], tuple[slice, int]]:
        """Coded channels and bits of each instance."""
        return (slice(0, self.outliers), self.outlier_bits), (slice(self.outliers, self.head_dim), self.bits)

    @cached_property
    def form(self) -> PageForm:
        bits = (self.outlier_bits,) * (self.outliers // TILE) + (self.bits,) * ((self.head_dim - self.outliers) // TILE)
        sizes = (self.outliers, self.head_dim - self.outliers)
        lut, rotation = _tables(bits, sizes, self.seed)
        order = torch.arange(self.head_dim, dtype=torch.int16) if self.order is None else self.order
        transform = OrderedMatrix(ChannelOrder(order), rotation)
        return PageForm(self.head_dim, self.page_size, bits, lut, transform, self.lanes, sizes)

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)
        codes, norms = [], []
        for channels, bits in self._parts:
            part = y[..., channels]
            norm = part.square().sum(-1, keepdim=True).sqrt()
            levels = self.form.lut[channels.start // TILE, : 2**bits]
            codes.append(nearest_level(part / norm.where(norm != 0, 1), levels)[0])
            norms.append(norm)
        return TokenCodes(torch.cat(codes, -1), torch.cat(norms, -1).half())


@cache
def _tables(bits: tuple[int, ...], sizes: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """Levels and the rotation of both parts, shared by all formats with the same split."""
    levels = {b: sphere_levels(b, d) for b, d in zip((bits[0], bits[-1]), sizes, strict=True)}
    rotations = (orthogonal("haar", d, seed + i).matrix for i, d in enumerate(sizes))
    return level_table(levels, bits), torch.block_diag(*rotations)


SPLITS = {"2.5": (4, 2, 1), "3.5": (2, 3, 1), "3.5q": (4, 3, 2)}
"""One channel in how many is an outlier, bits, and extra bits of outliers.

At D = 128: 32 × 3 + 96 × 2 (the paper's), 64 × 4 + 64 × 3, and 32 × 5 + 96 × 3 (the paper gives no split for 3.5).
"""
