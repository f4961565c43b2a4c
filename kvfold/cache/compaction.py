"""Folded tokens that go, physically: what stays moves together, and storage is given back.

Attention asks for no order, as RoPE has turned every key by its own position. So what stays moves as little as it can:
only into the places that became free.
"""

import torch
from torch import Tensor

from kvfold.cache.store import PAGE_DIM, PageStore
from kvfold.formats.base import Format


def fill_holes(keep: Tensor, after: int = 0) -> Tensor:
    """What comes to lie where: int64, (batch, heads, kept + after).

    Units that are kept and lie among the first `kept` stay; the others go, in their order, to the places that became
    free there. `after` units follow, all kept, and stay in order.

    Parameters
    ----------
    keep
        Bool, (batch, heads, units), True equally often for each head.
    """
    batch, heads, units = keep.shape
    kept = int(keep[0, 0].sum())
    index = torch.arange(kept, device=keep.device).repeat(batch, heads, 1)
    unit = torch.arange(units, device=keep.device).expand_as(keep)
    index[~keep[..., :kept]] = unit[..., kept:][keep[..., kept:]]  # both head by head, and equally many of each
    return torch.cat((index, torch.arange(units, units + after, device=keep.device).expand(batch, heads, after)), -1)


def in_order(keep: Tensor) -> Tensor:
    """Units that are kept, one after the other: int64, (batch, heads, kept)."""
    unit = torch.arange(keep.shape[-1], device=keep.device).expand_as(keep)
    return unit[keep].view(*keep.shape[:2], -1)


def move_pages(store: PageStore, index: Tensor) -> None:
    """Let page n of each head be what page index[…, n] was, and give the rest back."""
    pages = (index != torch.arange(index.shape[-1], device=index.device)).any(0).any(0).nonzero()[:, 0]
    if len(pages):
        _write(store, pages, {name: _at(t, index[..., pages]) for name, t in store.pages().tensors()})
    store.give_back(index.shape[-1])


def move_tokens(store: PageStore, index: Tensor) -> None:
    """Let slot n of each head hold the token that slot index[…, n] held, code for code, and give the rest back.

    For pages without a centre and channel scales, whose tokens mean the same in any page.
    """
    form, kept = store.form, index.shape[-1]
    size = form.page_size
    count = -(-kept // size)
    if count:
        # What lies after the last token is a copy of it, until it is cleared.
        by_page = torch.cat((index, index[..., -1:].expand(-1, -1, count * size - kept)), -1).unflatten(-1, (-1, size))
        own = torch.arange(count * size, device=index.device).view(count, size)
        pages = (by_page != own).any(-1).any(0).any(0).nonzero()[:, 0]
        if len(pages):
            first = int(pages[0])  # nothing comes from before
            source = by_page[:, :, pages].flatten(2) - first * size

            def moved(part: Tensor) -> Tensor:
                return _at(part.flatten(2, 3), source).unflatten(2, (-1, size))

            tokens = form.unpack(store.pages(first)).map_tokens(moved)
            _write(store, pages, dict(form.pack(tokens).tensors()))
    store.give_back(count)
    if kept % size:
        form.clear(store.pages(count - 1), kept % size)


def fold_again(store: PageStore, format: Format, index: Tensor) -> None:
    """Let the first pages hold, in order, the tokens of slots `index` (…, whole pages of them), folded once more.

    For pages with a centre or channel scales, which are made for the tokens of a page: each time adds an error. Pages
    before the first token that moves stay as they are; the number of pages does not change.
    """
    size = store.form.page_size
    own = torch.arange(index.shape[-1], device=index.device)
    moved = (index != own).any(0).any(0).nonzero()
    if not len(moved):
        return
    first, stop = int(moved[0]) // size, -(-(int(index.max()) + 1) // size)
    x = store.form.unfold(store.pages(first, stop))
    folded = format.fold_from(_at(x, index[..., first * size :] - first * size), 0, 0)
    pages = torch.arange(first, index.shape[-1] // size, device=index.device)
    _write(store, pages, dict(folded.tensors()))


def _write(store: PageStore, pages: Tensor, tensors: dict[str, Tensor]) -> None:
    assert store.storage is not None
    for name, tensor in tensors.items():
        getattr(store.storage, name).index_copy_(PAGE_DIM, pages, tensor)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x[b, h, index[b, h, n]] for x (batch, heads, units, …): (batch, heads, n, …)."""
    batch, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return x[batch[:, None, None], heads[:, None], index]
