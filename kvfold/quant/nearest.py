"""Scalar quantisation: the index of the nearest level."""

import torch
from torch import Tensor

from kvfold.quant.tables import on


def nearest_level(y: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the level nearest to each element, and that level.

    Parameters
    ----------
    y
        Floating point, any shape.
    levels
        float32, (L,), ascending, L ≤ 256.

    Returns
    -------
    code
        uint8, the shape of `y`; a tie goes to the lower level.
    value
        `levels[code]`.
    """
    levels = on(y.device, levels)
    code = torch.bucketize(y, 0.5 * (levels[1:] + levels[:-1]), out_int32=True)
    return code.to(torch.uint8), levels[code]
