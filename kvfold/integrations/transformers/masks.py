"""Masks of transformers as folded attention takes them."""

import torch
from torch import Tensor


def where_allowed(mask: Tensor | None) -> Tensor | None:
    """A mask that is added to scores as one of bool, if it only says which keys a query reads.

    Such are those of "eager" attention: 0 where a key is read, and the lowest number of the dtype, or less, elsewhere.
    All layers get the same mask, which is looked at once.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    known: list[Tensor | None] | None = getattr(mask, "kvfold_allowed", None)
    if known is None:
        allowed, barred = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
        known = [mask]
        if bool((allowed | barred).all()):
            known = [None if mask.shape[2] == 1 and not bool(barred.any()) else allowed]
        mask.kvfold_allowed = known  # type: ignore[attr-defined]
    return known[0]
