"""The best of several centres and scales for each channel, by the error that its codes leave."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.quant.packing import TILE
from kvfold.quant.tables import on


def closest_affine(y: Tensor, centre: Tensor, scale: Tensor, lut: Tensor, bits: Sequence[int]) -> tuple[Tensor, Tensor]:
    """For each channel, the candidate k and codes with the least Σ_t (y − z_k − S_k·lut[code])⁴.

    `y` is float32, (pages, P, D); z and S are float32, (pages, K, D), K ≤ 255, and a scale of 0 reads as the centre
    alone; levels ascend, (⌈D/16⌉, at least 2^bits). Returns codes, uint8, (pages, P, D), and k, the first of equals,
    uint8, (pages, D).
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


def candidates(y: Tensor, lut: Tensor, bits: Sequence[int], steps: int) -> tuple[Tensor, Tensor]:
    """Centres and scales to try, as they will be stored: float16, (pages, 2·steps, D).

    Centres are the mean of the page and the middle of its range; scales go from the standard deviation about the centre
    to the one whose last level reaches the farthest value.
    """
    top = torch.tensor([lut[group, 2**b - 1].item() for group, b in enumerate(bits)]).repeat_interleave(TILE)
    mean = y.mean(1, keepdim=True)
    low, high = y.amin(1, keepdim=True), y.amax(1, keepdim=True)
    centres = torch.cat((mean, 0.5 * (low + high)), 1).half()
    z = centres.float()
    # About z. hypot replaces sqrt, which wakes all threads even for a few numbers.
    deviation = y.std(1, correction=0, keepdim=True).hypot(z - mean)
    reach = torch.maximum(high - z, z - low) / top[: y.shape[-1]].to(y.device)
    weights = torch.linspace(0, 1, steps, device=y.device).view(-1, 1, 1, 1)
    scales = deviation.lerp(torch.maximum(reach, deviation), weights)  # (steps, pages, 2, D)
    scales = scales.permute(1, 2, 0, 3).flatten(1, 2).half()
    return centres.repeat_interleave(steps, 1), scales


def encode(y: Tensor, lut: Tensor, bits: Sequence[int], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of pages (…, P, D), uint8, and their centres and scales, float16, (…, D), by the best of `candidates`.

    This is the reference of kernels that fold.
    """
    pages = y.reshape(-1, *y.shape[-2:])
    centres, scales = candidates(pages, lut, bits, steps)
    code, chosen = closest_affine(pages, centres.float(), scales.float(), on(y.device, lut), bits)
    index, shape = chosen.long().unsqueeze(1), (*y.shape[:-2], y.shape[-1])
    centre, scale = (x.take_along_dim(index, 1).view(shape) for x in (centres, scales))
    return code.view(y.shape), centre, scale
