"""Sliding windows of layers that do not fold."""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvfold.cache.rows import checks_tokens


def rounded(key: Tensor, value: Tensor, dtype: torch.dtype, index: int) -> tuple[Tensor, Tensor]:
    """The newest keys and values of layer `index`, as its window holds them.

    They are rounded before they are read, so that it does not matter which tokens come in one pass. Raises ValueError
    if a number is too large for `dtype`, though single tokens are not checked on all devices (`checks_tokens`).
    """
    stored = key.to(dtype), value.to(dtype)
    if dtype == key.dtype or not (checks_tokens(key) or key.shape[2] > 1):
        return stored
    for name, given, held in zip(("keys", "values"), (key, value), stored, strict=True):
        if not held.isfinite().all() and given.isfinite().all():
            raise ValueError(
                f"layer {index}: {name} of its sliding window are too large for {dtype}; pass dense_dtype=torch.float32"
            )
    return stored


def only_the_window(
    layer: DynamicSlidingWindowLayer, read: tuple[Tensor, Tensor], new: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `new` tokens read of a sliding window, in the model's dtype.

    A window that is a view of a prompt is copied, to free the prompt.
    """
    if layer.record_past:  # before 5.18 this is all that is kept for drafts
        masked = layer.sliding_window - 1 + new
        read = read[0][:, :, -masked:], read[1][:, :, -masked:]
    else:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            spare = held.untyped_storage().nbytes() - held.nbytes
            if spare > held.nbytes // held.shape[2]:  # one spare token is what a step leaves
                setattr(layer, name, held.clone())
    return read[0].to(dtype), read[1].to(dtype)
