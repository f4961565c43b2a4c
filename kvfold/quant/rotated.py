"""Codes of rotated vectors from one codebook, with a scale a token: the kernels' reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.quant.nearest import nearest_level
from kvfold.quant.scales import SCALE_RULES
from kvfold.quant.transforms import Transform


@dataclass(frozen=True, eq=False)
class RotatedCode:
    """How vectors become codes: y = R·x − z, code = argmin |y/‖y‖ − level|, and a scale by one of `SCALE_RULES`."""

    transform: Transform
    levels: Tensor
    """Ascending, for coordinates of unit vectors: float32, (2^bits,)."""
    rule: str
    centred: bool = False
    """Whether z is the mean of a page's R·x, as float16 holds it, or 0."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.levels) - 1).bit_length()


def encode(x: Tensor, how: RotatedCode) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of pages (…, P, D), uint8, their scales, float16, (…, P), and their centres, float16, (…, D), or None."""
    y, centre = how.transform.apply(x), None
    if how.centred:
        centre = y.mean(-2).half()
        y = y - centre.float().unsqueeze(-2)  # the centre as stored, so that codes absorb its rounding
    norm = y.square().sum(-1, keepdim=True).sqrt().clamp_min(torch.finfo(y.dtype).tiny)
    code, level = nearest_level(y / norm, how.levels)
    return code, SCALE_RULES[how.rule](y, level).half(), centre
