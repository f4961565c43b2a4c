"""Arrays between torch and MLX, bit for bit."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kvfold.kernels.mlx import mx

DTYPES = {
    mx.float32: torch.float32, mx.float16: torch.float16, mx.bfloat16: torch.bfloat16, mx.uint8: torch.uint8,
    mx.int16: torch.int16, mx.int32: torch.int32, mx.int64: torch.int64,
}  # fmt: skip
"""torch's dtype for each MLX dtype that a cache holds."""

_COPIES = WeakIdKeyDictionary()


def to_torch(x: mx.array) -> Tensor:
    """An array as a tensor, evaluated if it has not been yet. Memory is shared, so the tensor must not be written to.

    An MLX array may be a strided view, as `transpose` returns. Its raw buffer then has the elements in another order (a
    bug of sanctum-mlx), so the array is made contiguous first.
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


def table(t: Tensor, expanded: Callable[[], Tensor] | None = None) -> mx.array:
    """A constant table as an array, or what it expands to; the copy is made once, and freed with the original."""
    if t not in _COPIES:
        _COPIES[t] = to_mlx(t if expanded is None else expanded())
    copy: mx.array = _COPIES[t]
    return copy


def copies_of(tables: Iterator[Tensor]) -> list[mx.array]:
    """The copies that `table` made of these tables."""
    return [_COPIES[t] for t in tables if t in _COPIES]
