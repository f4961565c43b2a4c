"""Factors on attention scores that offset the effect of key codes on softmax (the TBQ fork of llama.cpp).

Errors of keys add variance to scores, and the largest error among N tokens grows as about √(2·ln N). At D = 256 that
system sharpens scores to compensate; at D = 64, where its codes are coarse, it softens them.
"""

from math import log

from torch import Tensor

SHARPEN = {(3, False): 0.00579, (3, True): 0.01304, (4, False): 0.00326, (4, True): 0.00724}
"""c by bits and whether one of them is a sign. Taken from that system's code, with which its own table disagrees."""

SOFTEN = {(3, False): 7.80, (3, True): 3.45, (4, False): 14.05, (4, True): 6.13}
"""Signal-to-noise ratio s by the same, likewise from its code."""

REFERENCE = log(2048)


def sharpening(count: Tensor, bits: int, signs: bool) -> Tensor:
    """α(N) = 1 + c·√(ln max(N, 2)) for N tokens."""
    return 1 + SHARPEN[bits, signs] * count.double().clamp_min(2).log().sqrt()


def softening(count: Tensor, bits: int, signs: bool) -> Tensor:
    """α(N) = s/(s + √(ln N / ln 2048))."""
    ratio = SOFTEN[bits, signs]
    return ratio / (ratio + (count.double().log() / REFERENCE).sqrt())
