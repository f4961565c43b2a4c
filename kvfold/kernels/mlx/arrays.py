"""Arrays between torch and MLX, bit for bit."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvfold.kernels.mlx import mx

DTYPES = {
    mx.float32: torch.float32, mx.float16: torch.float16, mx.bfloat16: torch.bfloat16, mx.uint8: torch.uint8,
    mx.int16: torch.int16, mx.int32: torch.int32, mx.int64: torch.int64,
}  # fmt: skip
"""torch's dtype of each of MLX's that a cache holds."""

_COPIES = WeakIdKeyDictionary()


def to_torch(x: mx.array) -> Tensor:
    """The elements of an array, computed if they have not been yet; memory is shared, so nobody may write there.

    An MLX array may be a view with strides of its own, as `transpose` leaves one, and whoever reads its buffer gets
    elements in another order: seed 002's bug. It is laid out anew first.
    """
    x = mx.contiguous(x)
    bits = x.view(mx.uint16) if x.dtype == mx.bfloat16 else x  # NumPy has no bfloat16
    tensor = torch.from_numpy(np.array(bits, copy=False))
    return tensor.view(torch.bfloat16) if x.dtype == mx.bfloat16 else tensor


def to_mlx(t: Tensor) -> mx.array:
    """A copy of a tensor."""
    t = t.detach().cpu().contiguous()
    if t.dtype == torch.bfloat16:
        return mx.array(t.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(t.numpy())


def table(t: Tensor) -> mx.array:
    """A table that nobody changes, as an array: copied once, and gone with its original."""
    if t not in _COPIES:
        _COPIES[t] = to_mlx(t)
    copy: mx.array = _COPIES[t]
    return copy


def copies_of(tables: Iterator[Tensor]) -> list[mx.array]:
    """What `table` copied of some."""
    return [_COPIES[t] for t in tables if t in _COPIES]
