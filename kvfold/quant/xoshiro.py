"""The rotation of tq3 and tq4 blocks of ggml_turboquant: its generator, Gaussian numbers, Gram–Schmidt."""

from collections.abc import Iterator
from math import cos, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1


def gaussian_rotation(d: int, seed: int) -> NDArray[np.float64]:
    """Rows of Gaussian numbers, orthogonalised column by column (modified Gram–Schmidt), (d, d)."""
    normal = _normal(_uniform(_xoshiro256(seed)))
    matrix = np.array([[next(normal) for _ in range(d)] for _ in range(d)])
    for j in range(d):
        for i in range(j):
            matrix[:, j] -= (matrix[:, i] @ matrix[:, j]) * matrix[:, i]
        matrix[:, j] /= np.linalg.norm(matrix[:, j])
    return matrix


def _splitmix64(seed: int) -> Iterator[int]:
    state = seed & _MASK
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
        yield z ^ z >> 31


def _rotate_left(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & _MASK


def _xoshiro256(seed: int) -> Iterator[int]:
    """xoshiro256**, its state filled by SplitMix64."""
    a, b, c, d = (word for word, _ in zip(_splitmix64(seed), range(4), strict=False))
    while True:
        yield (_rotate_left(b * 5 & _MASK, 7) * 9) & _MASK
        shifted = (b << 17) & _MASK
        c ^= a
        d ^= b
        b ^= c
        a ^= d
        c ^= shifted
        d = _rotate_left(d, 45)


def _uniform(words: Iterator[int]) -> Iterator[float]:
    """In [0, 1), from the upper 53 bits."""
    return ((word >> 11) * 2.0**-53 for word in words)


def _normal(uniform: Iterator[float]) -> Iterator[float]:
    """Box–Muller, the cosine branch alone."""
    while True:
        u = next(uniform)
        while u == 0.0:
            u = next(uniform)
        yield sqrt(-2 * log(u)) * cos(2 * pi * next(uniform))
