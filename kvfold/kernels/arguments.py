"""Arguments of the folding operators: checks, and the forms that kernels take."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.quant import packing


def check_dim(x: Tensor, dim: int) -> None:
    """Raise unless a rotation of `dim` coordinates takes vectors like those of x."""
    if x.shape[-1] != dim:
        raise ValueError(f"x has vectors of {x.shape[-1]} coordinates, the rotation takes {dim}")


def check_channelwise(
    x: Tensor, order: Tensor | None, lut: Tensor, bits: Sequence[int], steps: int, page_size: int
) -> None:
    """Raise unless these are arguments of `fold_channelwise`."""
    *lead, tokens, dim = x.shape
    if page_size < 1 or page_size % packing.TILE or tokens % page_size:
        raise ValueError(f"x has {tokens} tokens and page_size = {page_size}: give whole pages of 16·n")
    groups = packing.padded(dim) // packing.TILE
    if len(bits) != groups or not all(1 <= b <= 8 for b in bits) or lut.shape[:-1] != (groups,):
        raise ValueError(f"bits and lut must have one entry, of 1 to 8 bits, for each of {groups} channel groups")
    if lut.shape[1] < 2 ** max(bits) or lut.dtype != torch.float32 or steps < 1:
        raise ValueError(
            f"lut is {lut.dtype} of {tuple(lut.shape)}, steps = {steps}: give float32 of 2^bits, and a step"
        )
    wanted = (*(1,) * (2 - len(lead)), *lead, dim)[-3:]
    shape = () if order is None else tuple(order.shape)
    if order is not None and (
        order.dtype != torch.int16 or not 1 <= len(shape) <= 3 or shape[-1] != dim
        or any(a not in (1, b) for a, b in zip(reversed(shape), reversed(wanted), strict=False))
    ):  # fmt: skip
        raise ValueError(f"order is {order.dtype} of {shape}: give int16 of {wanted}, or one for all")


def heads_of(x: Tensor) -> Tensor:
    """(…, tokens, dim) as (rows, heads, tokens, dim), coordinates side by side; a view if it can be one."""
    flat = x if x.ndim == 4 else x.reshape(1, x.shape[:-2].numel(), *x.shape[-2:])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def order_of_heads(order: Tensor | None, x: Tensor) -> tuple[Tensor | None, int, int]:
    """An order of channels for vectors (rows, heads, tokens, dim), and its strides from row to row and head to head."""
    if order is None:
        return None, 0, 0
    order = order.contiguous()
    by_row, by_head, _ = order.expand(*x.shape[:2], x.shape[3]).stride()
    return order, by_row, by_head
