"""KVarN: tiles of even deviations, and evenly spaced codes."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.base import ByPage
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant.balance import balance
from kvfold.quant.transforms import orthogonal

ROUNDS = 16
"""How often columns and rows are brought to equal deviations in turn."""


@dataclass(frozen=True)
class KVarN(ByPage):
    """A page is rotated, and brought to equal deviations of tokens and of channels. Codes are evenly spaced.

    With s and S of `kvfold.quant.balance`, and y = R·x / (s·S), the codes of keys span each channel's range over the
    page's tokens: x̂ = R⁻¹·s[t]·(z + S ⊙ lut[code]), with the range's middle in z and its step in S. Those of values
    span each token's range over its channels: x̂ = R⁻¹·S ⊙ (a[t] + s[t]·lut[code]), with middle and step in a and s.

    A page is the method's tile; `kvarn-4@128` has the tiles of 128 tokens that its authors measured.
    """

    summary = "Evenly spaced codes of pages with equal deviations of tokens and channels, Hadamard rotation"
    source = "KVarN, arXiv 2606.03458"

    @property
    def _middle(self) -> float:
        return (2**self.bits - 1) / 2

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(self.head_dim, self.bits)
        lut = level_table({self.bits: tuple(code - self._middle for code in range(2**self.bits))}, bits)
        rotation = orthogonal("hadamard", self.head_dim, self.seed)
        return PageForm(self.head_dim, self.page_size, bits, lut, rotation, self.lanes, scaled_shifts=True)

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)
        scale, channel_scale = balance(y, ROUNDS)
        even = y / (scale * channel_scale)
        along = -2 if self.lanes == "tokens" else -1
        low, high = even.amin(along, keepdim=True), even.amax(along, keepdim=True)
        middle, step = 0.5 * (low + high), (high - low) / (2**self.bits - 1)
        # Codes are computed from shifts and scales as stored.
        if self.lanes == "tokens":
            s, centre, spread = scale.half(), (channel_scale * middle).half(), (channel_scale * step).half()
            code = self._codes(y / s.float() - centre.float(), spread)
            return TokenCodes(code, s, centre=centre.squeeze(-2), channel_scale=spread.squeeze(-2))
        spread, offset, s = channel_scale.half(), (scale * middle).half(), (scale * step).half()
        code = self._codes(y / spread.float() - offset.float(), s)
        return TokenCodes(code, s, offset, channel_scale=spread.squeeze(-2))

    def _codes(self, y: Tensor, step: Tensor) -> Tensor:
        """The nearest level to y, in steps; 0 for steps of 0."""
        codes = (y / step.float()).where(step != 0, 0) + self._middle
        return codes.round().clamp(0, 2**self.bits - 1).to(torch.uint8)
