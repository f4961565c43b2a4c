"""Scalar quantisation: the index of the nearest level."""

import torch
from torch import Tensor

from kvfold.quant.tables import on


def nearest_level(y: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Index, uint8, of the level nearest to each element, and that level; a tie goes to the lower one.

    Levels are float32 and ascend, 256 at most.
    """
    levels = on(y.device, levels)
    code = torch.bucketize(y, 0.5 * (levels[1:] + levels[:-1]), out_int32=True)
    return code.to(torch.uint8), levels[code]
