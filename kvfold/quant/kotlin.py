"""Kotlin's seeded random bits, from which SKaiNET draws the sign flips of its blocks."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_MASK = 2**32 - 1


def random_signs(count: int, seed: int) -> NDArray[np.float64]:
    """−1 where `kotlin.random.Random(seed).nextBoolean()` says true, in its order, else 1."""
    bits = _booleans(seed)
    return np.array([-1.0 if next(bits) else 1.0 for _ in range(count)])


def _booleans(seed: int) -> Iterator[bool]:
    """Upper bits of Marsaglia's xorwow, its state made from the seed and run in for 64 steps."""
    low, high = seed & _MASK, (-1 if seed < 0 else 0) & _MASK
    x, y, z, w, v = low, high, 0, 0, ~low & _MASK
    addend = (low << 10 & _MASK) ^ high >> 4
    step = 0
    while True:
        t = x ^ x >> 2
        x, y, z, w = y, z, w, v
        v = (t ^ t << 1 ^ v ^ v << 4) & _MASK
        addend = (addend + 362437) & _MASK
        step += 1
        if step > 64:
            yield (v + addend & _MASK) >> 31 == 1
