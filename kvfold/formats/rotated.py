"""The base of formats that rotate vectors and code every coordinate with one codebook."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.formats.base import Format
from kvfold.formats.page import PageForm, Pages, TokenCodes, level_table, uniform_bits
from kvfold.kernels import ops
from kvfold.kernels.places import Places
from kvfold.quant import rotated
from kvfold.quant.codebooks import on_grid, sphere_levels
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.tables import on
from kvfold.quant.transforms import Transform, orthogonal


@dataclass(frozen=True)
class Rotated(Format):
    """x̂ = R⁻¹·(z + s·lut[code]): `kvfold.quant.rotated` says how codes and scales are chosen."""

    rotation: ClassVar[str]
    """Kind of R (`kvfold.quant.transforms.orthogonal`)."""
    rule: ClassVar[str]
    """Scale rule (`kvfold.quant.scales`)."""
    centred: ClassVar[bool] = False
    """Whether a page has a centre."""
    on_grid: ClassVar[bool] = True
    """Whether Lloyd–Max levels are rounded so that kernels multiply them exactly; otherwise they keep every digit."""

    @property
    def folds_by_token(self) -> bool:
        return not self.centred

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(self.head_dim, self.bits)
        levels = sphere_levels(self.bits, self.head_dim)
        lut = level_table({self.bits: on_grid(levels) if self.on_grid else levels}, bits)
        transform = orthogonal(self.rotation, self.head_dim, self.seed)
        return PageForm(self.head_dim, self.page_size, bits, lut, transform, self.lanes)

    def _code(self, device: torch.device) -> RotatedCode:
        transform = self.form.transform
        assert isinstance(transform, Transform)
        return RotatedCode(transform, on(device, self.form.lut)[0], self.rule, self.centred)

    def token_code(self, device: torch.device) -> RotatedCode | None:
        return None if self.centred else self._code(device)

    def encode(self, x: Tensor) -> TokenCodes:
        code, scale, centre = rotated.encode(x, self._code(x.device))
        return TokenCodes(code=code, scale=scale.unsqueeze(-1), centre=centre)

    def fold_from(self, x: Tensor, slot: int = 0, position: int = 0) -> Pages:
        how = self._code(x.device)
        rotation, mix = ops.parts_of(how.transform)
        code, scale, centre = ops.fold_rotated(
            x, rotation, mix, how.levels, how.rule, how.centred, self.lanes, self.page_size, slot
        )
        tokens = code.shape[-2] * self.page_size
        return Pages(code, scale.unsqueeze(-1), centre=centre if self.centred else None, tokens=tokens)

    def fold_into(self, x: Tensor, places: Places) -> None:
        from kvfold.kernels.triton import fold

        fold.fold_rotated_into(x, self._code(x.device), self.lanes, self.page_size, 0, places)
