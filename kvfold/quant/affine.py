"""The best of several centres and scales for each channel, by the error that its codes leave."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.quant.packing import TILE


def closest_affine(y: Tensor, centre: Tensor, scale: Tensor, lut: Tensor, bits: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For each channel, the candidate k and codes with the least Σ_t (y − z_k − S_k·lut[code])⁴: the kernels' truth.

    Parameters
    ----------
    y
        float32, (pages, P, D).
    centre, scale
        Candidates z and S: float32, (pages, K, D), K ≤ 255. A scale of 0 reads as the centre alone.
    lut
        Ascending levels of each group of 16 channels: float32, (⌈D/16⌉, at least 2^bits).
    bits
        Bits of each group.

    Returns
    -------
    code
        uint8, (pages, P, D).
    chosen
        k, the first of equals: uint8, (pages, D).
    """
    tiny = 2.0**-24  # the smallest float16
    best: list[tuple[Tensor, Tensor]] = []
    for group, b in enumerate(bits):
        channels = slice(group * TILE, (group + 1) * TILE)
        levels = lut[group, : 2**b]
        edges = 0.5 * (levels[1:] + levels[:-1])
        losses, codes = [], []
        for k in range(centre.shape[1]):
            z, s = centre[:, None, k, channels], scale[:, None, k, channels]
            rest = y[..., channels] - z
            code = torch.bucketize(rest * s.clamp_min(tiny).reciprocal(), edges, out_int32=True)
            losses.append((rest - s * levels[code]).square().square().sum(1))
            codes.append(code.to(torch.uint8))
        chosen = torch.stack(losses).argmin(0)  # (pages, channels)
        code = torch.stack(codes).take_along_dim(chosen[None, :, None, :], 0)[0]
        best.append((code, chosen.to(torch.uint8)))
    codes_of_groups, choices = zip(*best, strict=True)
    return torch.cat(codes_of_groups, -1), torch.cat(choices, -1)
