"""Tables of TBQ blocks: signs, levels and boundaries, to the digits that the bytes of the TBQ fork depend on."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from kvfold.quant.transforms import Hadamard, Matrix, Transform

_SIGNS = bytes.fromhex("a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb")
_SECOND = bytes.fromhex("d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85")
_QJL_512 = bytes.fromhex(
    "214e758d12a104886c5d2cb38ce200d430c215382bb0a532f8be8a1d4386f36f"
    "bc9bddcb058a09f32f39173c6fb8757874446f2a6a23250d614f35bb047bbc3d"
)

LEVELS = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3440, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6180, 2.0690, 2.7326),
}
"""Positive halves of the levels of N(0, 1)."""

_BOUNDARIES = {
    2: (0.9816,),
    3: (0.5006, 1.0500, 1.7480),
    4: (0.2583, 0.5225, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
}
"""Positive halves of the boundaries: not quite half-way between the levels."""


def levels(bits: int) -> tuple[float, ...]:
    """All levels, ascending."""
    half = LEVELS[bits]
    return (*(-level for level in reversed(half)), *half)


def codes(w: Tensor, bits: int) -> Tensor:
    """Index of the first boundary above each number, or the last index: uint8, for numbers of about N(0, 1)."""
    half = _BOUNDARIES[bits]
    boundaries = torch.tensor([*(-b for b in reversed(half)), 0.0, *half], device=w.device)
    return torch.bucketize(w, boundaries, right=True, out_int32=True).to(torch.uint8)


def _signs(table: bytes, d: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """±1 from bits, the lowest first; a 1 is −1."""
    bits = np.unpackbits(np.frombuffer(table, np.uint8), bitorder="little")[:d]
    return 1.0 - 2.0 * bits.astype(np.float64)


def _hadamard(table: bytes, d: int) -> Hadamard:
    """H·diag(s)/√d."""
    return Hadamard(torch.from_numpy(_signs(table, d)).float())


@cache
def rotation(d: int, double: bool = False) -> Transform:
    """H·diag(s)/√d; `double` applies two of them, with the two halves of the 16 bytes that d = 128 uses."""
    if not double:
        return _hadamard(_SIGNS + _SECOND, d)
    first, second = _hadamard(_SIGNS[:8], d), _hadamard(_SIGNS[8:16], d)
    return Matrix(second.matrix @ first.matrix)


@cache
def qjl_rotation(d: int) -> Transform:
    """The second rotation, for d of 256 and 512: blocks store the signs of its output."""
    return _hadamard(_SECOND if d == 256 else _QJL_512, d)
