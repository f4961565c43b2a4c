"""TurboQuant as published: rotate, quantise every coordinate of the unit vector, keep the norm."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.base import Format
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant import scales
from kvfold.quant.codebooks import sphere_levels
from kvfold.quant.nearest import nearest_level
from kvfold.quant.transforms import orthogonal


@dataclass(frozen=True)
class TurboQuant(Format):
    """Algorithm 1 ("mse"): y = Π·x/‖x‖, idx = argmin |y − c|, x̂ = ‖x‖·Πᵀ·c[idx].

    Π is a Haar rotation, c the Lloyd–Max levels of a sphere's coordinate in `head_dim` dimensions.
    No centre, and no dense window: each token folds on arrival.
    """

    summary = "TurboQuant as published: Lloyd–Max codes, Haar rotation, stored norm"
    source = "arXiv 2504.19874, Algorithm 1"

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(self.head_dim, self.bits)
        lut = level_table({self.bits: sphere_levels(self.bits, self.head_dim)}, bits)
        rotation = orthogonal("haar", self.head_dim, self.seed)
        return PageForm(self.head_dim, self.page_size, bits, lut, rotation, self.lanes)

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)
        norm = scales.raw(y, y)
        code, _ = nearest_level(y / norm.clamp_min(torch.finfo(y.dtype).tiny).unsqueeze(-1), self.form.lut[0])
        return TokenCodes(code=code, scale=norm.half().unsqueeze(-1))
