"""OSCAR: rotations by what queries and scores weigh, and evenly spaced codes with clipped ranges."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.base import ByPage
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.formats.statistics import KeyStatistics
from kvfold.quant.spectral import bit_reversed, hadamard
from kvfold.quant.transforms import HeadMatrices, Matrix, Transform

GROUP = 128
"""Channels that share an offset and a scale. A head that is no multiple of it is one group."""

CLIPPED = {"tokens": 0.96, "channels": 0.92}
"""Quantiles of a token's |y| to which keys, and values, are clipped."""

CLIPPED_BITS = 3
"""Most bits of codes that are clipped. The authors measured two; with four, clipping costs more than finer steps gain:
on SmolLM2 it raises KL from .0041 to .0107."""


@dataclass(frozen=True)
class Oscar(ByPage):
    """x̂ = R⁻¹·(a[t,g] + s[t,g]·lut[code]) with one R a head, from a calibration, and codes that span a token's range.

    R spreads over all coordinates the directions that queries weigh, for keys, and that scores weigh, for values
    (`kvfold.quant.spectral`, `kvfold.cache.calibration.Observed`). With up to `CLIPPED_BITS`, the largest |y| of a
    token are clipped to the quantile `CLIPPED` of |y|. a and s are the middle and the step of what is left of each
    group of channels.

    The authors keep the first 64 and the newest 256 tokens dense; `Policy(window=Window(64, 256, 24))` does so.
    """

    rotation: Tensor | None = field(default=None, compare=False, repr=False)
    """R: float32, (heads, D, D). None: not fitted, U = I."""

    summary = "Evenly spaced codes of clipped ranges, rotations by what queries and scores weigh; needs a calibration"
    source = "OSCAR, arXiv 2605.17757"

    @property
    def needs_calibration(self) -> bool:
        return self.rotation is None

    def fitted(self, statistics: KeyStatistics) -> "Oscar":
        keys = self.lanes == "tokens"
        rotation = statistics.key_rotation if keys else statistics.value_rotation
        if rotation is None:
            raise ValueError(
                f"the calibration has no rotations of {'keys' if keys else 'values'}, which oscar formats need: make "
                "it anew with kvfold calibrate"
            )
        return self.with_fit_tables({"rotation": rotation.float()})

    def fit_tables(self) -> dict[str, Tensor]:
        return {} if self.rotation is None else {"rotation": self.rotation}

    def with_fit_tables(self, tables: Mapping[str, Tensor]) -> "Oscar":
        rotation = tables.get("rotation")
        if rotation is None or len(tables) != 1:
            raise ValueError(f"Oscar has a table called rotation, and not {', '.join(tables) or 'none'}")
        if rotation.ndim != 3 or rotation.shape[1:] != (self.head_dim, self.head_dim):
            raise ValueError(
                f"rotation has shape {tuple(rotation.shape)}: give (heads, {self.head_dim}, {self.head_dim})"
            )
        return replace(self, rotation=rotation)

    @property
    def _width(self) -> int:
        """Channels of a group."""
        return self.head_dim if self.head_dim % GROUP else GROUP

    @property
    def _middle(self) -> float:
        return (2**self.bits - 1) / 2

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(self.head_dim, self.bits)
        lut = level_table({self.bits: tuple(code - self._middle for code in range(2**self.bits))}, bits)
        transform = HeadMatrices(self.rotation) if self.rotation is not None else _unfitted(self.head_dim)
        groups = (self._width,) * (self.head_dim // self._width)
        return PageForm(self.head_dim, self.page_size, bits, lut, transform, self.lanes, groups if groups[1:] else ())

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)
        if self.bits <= CLIPPED_BITS:
            clipped_to = self.head_dim - int(CLIPPED[self.lanes] * self.head_dim)  # the how-manieth largest |y|
            most = y.abs().topk(clipped_to, -1).values[..., -1:]
            y = y.clamp(-most, most)
        y = y.unflatten(-1, (-1, self._width))
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        offset, scale = (0.5 * (low + high)).half(), ((high - low) / (2**self.bits - 1)).half()
        # Codes are computed from a and s as stored.
        steps = ((y - offset.float()) / scale.float()).where(scale != 0, 0) + self._middle
        code = steps.round().clamp(0, 2**self.bits - 1).to(torch.uint8).flatten(-2)
        return TokenCodes(code, scale.squeeze(-1), offset.squeeze(-1))


def _unfitted(head_dim: int) -> Transform:
    """(H·P)ᵀ, what is left of R without U."""
    return Matrix(hadamard(head_dim)[:, bit_reversed(head_dim)].mT)
