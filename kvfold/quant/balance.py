"""Scales of tokens and channels that make a tile of numbers even."""

import torch
from torch import Tensor


def balance(y: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Scales s (…, P, 1) and S (…, 1, D) that bring the rows and columns of y / (s·S) to equal deviations.

    Columns and rows are divided by their deviations in turn, in the logarithm (Sinkhorn and Knopp, Pacific J. Math. 21,
    1967; for KV caches: KVarN, arXiv 2606.03458). Of all states, the most even is kept: that with the least variance of
    the logarithms of all deviations. `y` is float32, (…, P, D). The logarithms of s, and of S, have the mean 0.
    """
    scales = [torch.zeros_like(y[..., :1]), torch.zeros_like(y[..., :1, :])]
    best, least = [scale.clone() for scale in scales], torch.full_like(y[..., :1, :1], torch.inf)
    for _ in range(rounds + 1):
        even = y / (scales[0] + scales[1]).exp()
        uneven = sum(_log_deviation(even, dim).square().mean((-2, -1), keepdim=True) for dim in (-1, -2))
        better = uneven < least
        least = torch.where(better, uneven, least)
        best = [torch.where(better, scale, old) for scale, old in zip(scales, best, strict=True)]
        scales[1] = scales[1] + _log_deviation(even, -2)
        even = y / (scales[0] + scales[1]).exp()
        scales[0] = scales[0] + _log_deviation(even, -1)
    return best[0].exp(), best[1].exp()


def _log_deviation(y: Tensor, dim: int) -> Tensor:
    """Logarithms of the deviations along `dim`, around their mean; a deviation of 0 counts as a small one."""
    deviation = y.std(dim, correction=0, keepdim=True)
    across = -1 if dim == -2 else -2
    floor = 1e-4 * deviation.amax(across, keepdim=True)
    log = deviation.clamp_min(floor).clamp_min(torch.finfo(torch.float32).tiny).log()
    return log - log.mean(across, keepdim=True)
