"""TurboQuant with a Hadamard rotation and EDEN's scale: how kvfold folds values."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.base import Format
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant import scales
from kvfold.quant.codebooks import on_grid, sphere_levels
from kvfold.quant.nearest import nearest_level
from kvfold.quant.transforms import orthogonal


@dataclass(frozen=True)
class Hadamard(Format):
    """x̂ = s·Rᵀ·c with s = ‖x‖²/⟨Rx, c⟩, so that inner products with x̂ are unbiased over random rotations.

    Attention adds many values up. Their errors average out, a common shrinkage does not: at 2 bits this scale leaves
    a quarter less divergence than the least-squares one, whose x̂ are closer and shorter.
    """

    summary = "Lloyd–Max codes after a Hadamard rotation, unbiased scales"
    source = "arXiv 2504.19874 with the scale of EDEN (arXiv 2604.18555)"

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(self.head_dim, self.bits)
        lut = level_table({self.bits: on_grid(sphere_levels(self.bits, self.head_dim))}, bits)
        rotation = orthogonal("hadamard", self.head_dim, self.seed)
        return PageForm(self.head_dim, self.page_size, bits, lut, rotation, self.lanes)

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)
        norm = scales.raw(y, y).clamp_min(torch.finfo(y.dtype).tiny)
        code, level = nearest_level(y / norm.unsqueeze(-1), self.form.lut[0])
        return TokenCodes(code=code, scale=scales.eden(y, level).half().unsqueeze(-1))
