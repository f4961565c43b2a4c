"""Any format with one of its bits spent on signs of the remainder."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.base import Format
from kvfold.formats.page import PageForm, TokenCodes, uniform_bits
from kvfold.formats.wrapped import Wrapped
from kvfold.quant.packing import TILE
from kvfold.quant.residuals import get_residual
from kvfold.quant.transforms import Matrix, Transform

RESIDUAL_SEED = 1
"""Added to the format's own seed, so that M and the rotation are independent."""


@dataclass(frozen=True, kw_only=True)
class Corrected(Wrapped):
    """b bits as (b − 1)-bit codes of another format and a sign of the remainder for each coordinate.

    M is the residual's matrix (`kvfold.quant.residuals`). Signs are channels D to 2D − 1 of the page form: a second
    scale group, with two levels. In the place of the other format's R⁻¹, the form has [R⁻¹, R⁻¹·Mᵀ]. So the page grows
    wider, and code that reads pages needs no change.
    """

    residual: str
    """Which M (`kvfold.quant.residuals`)."""

    summary = "One bit of each code spent on signs of the remainder"
    source = "arXiv 2504.19874, Algorithm 2"

    @classmethod
    def of(cls, base: Format, residual: str) -> "Corrected":
        """`base` with a sign bit more."""
        if base.head_dim % TILE:
            raise ValueError(
                f"head_dim = {base.head_dim}: a residual takes head dimensions that are multiples of {TILE}"
            )
        return cls(
            head_dim=base.head_dim, bits=base.bits + 1, page_size=base.page_size, seed=base.seed, lanes=base.lanes,
            base=base, residual=residual,
        )  # fmt: skip

    @cached_property
    def form(self) -> PageForm:
        main = self.base.form
        assert isinstance(main.transform, Transform)
        rule = get_residual(self.residual, self.head_dim, self.seed + RESIDUAL_SEED)
        signs = torch.zeros_like(main.lut)
        signs[:, 0], signs[:, 1] = -rule.gain, rule.gain
        inverse = main.transform.inverse
        transform = Matrix(
            torch.cat((main.transform.matrix, rule.matrix @ main.transform.matrix)),
            torch.cat((inverse, inverse @ rule.matrix.mT), dim=-1),
        )
        bits = (*main.bits, *uniform_bits(self.head_dim, 1))
        groups = (self.head_dim, self.head_dim)
        lut = torch.cat((main.lut, signs))
        return PageForm(2 * self.head_dim, self.page_size, bits, lut, transform, self.lanes, groups)

    def encode(self, x: Tensor) -> TokenCodes:
        main = self.base.encode(x)
        assert main.scale is not None
        remainder = self.base.form.transform.apply(x) - self.base.form.coordinates(main)
        rule = get_residual(self.residual, self.head_dim, self.seed + RESIDUAL_SEED)
        signs, scale = rule.encode(remainder)
        return TokenCodes(
            code=torch.cat((main.code, signs), dim=-1),
            scale=torch.cat((main.scale, scale.half().unsqueeze(-1)), dim=-1),
            centre=main.centre,
        )
