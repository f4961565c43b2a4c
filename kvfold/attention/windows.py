"""Masks of layers with a sliding window."""

import torch
from torch import Tensor

from kvfold.cache.batch import Appended


def sliding_mask(new: Appended, device: torch.device) -> Tensor | None:
    """Which columns each new token of a layer with a sliding window reads: (1, 1, n, columns), True where it does.

    The columns are the last of those that the layer has seen, from the first that any of the tokens reads. None if
    causal attention over all columns is the same.
    """
    width, stop = new.layer.config.sliding, new.first_column + new.columns
    if stop <= width:
        return None
    key = torch.arange(new.layer.window_start(new.first_column), stop, device=device)
    query = torch.arange(new.first_column, stop, device=device).unsqueeze(1)
    return ((key <= query) & (key > query - width))[None, None]


def ending_mask(mask: Tensor, tokens: int) -> Tensor:
    """A mask of the last columns, (…, columns), as one of the last `tokens`: none reads those before the columns."""
    missing = tokens - mask.shape[-1]
    if missing <= 0:
        return mask[..., -missing:]
    barred = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return torch.cat((mask.new_full((*mask.shape[:-1], missing), barred), mask), -1)
