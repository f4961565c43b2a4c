"""Masks of transformers as folded attention takes them."""

import torch
from torch import Tensor


def where_allowed(mask: Tensor | None) -> Tensor | None:
    """A mask that is added to scores, as a boolean one if it only says which keys a query reads.

    Masks of "eager" attention do: they are 0 where a key is read, and the lowest number of the dtype, or less,
    elsewhere. All layers get the same mask, so it is checked once, and again only after it was written to.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    version = None if mask.is_inference() else mask._version  # inference tensors do not count writes
    known: tuple[int, Tensor | None] | None = getattr(mask, "kvfold_allowed", None)
    if known is not None and known[0] == version:
        return known[1]
    allowed, barred = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    found: Tensor | None = mask
    if bool((allowed | barred).all()):
        found = None if mask.shape[2] == 1 and not bool(barred.any()) else allowed
    if version is not None:
        mask.kvfold_allowed = version, found  # type: ignore[attr-defined]
    return found
