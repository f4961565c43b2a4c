"""Evicting folded tokens physically: those that stay are moved together, in new storage.

Attention needs no order, as RoPE has turned every key by its own position. So tokens move as little as possible: only
into the places that became free.
"""

import torch
from torch import Tensor

from kvfold.cache.store import PAGE_DIM, PageStore
from kvfold.formats import Format


def keep_pages(stores: tuple[PageStore, ...], keep: Tensor) -> tuple[tuple[PageStore, ...], Tensor]:
    """Stores without the evicted pages, and former slots of the kept pages' tokens, in the new order.

    `keep` is of the first pages, bool, (batch, heads, pages), True equally often for each head. All after them stay.
    Slots are int64, (batch, heads, tokens).
    """
    pages, size = keep.shape[-1], stores[0].form.page_size
    index = fill_holes(keep, after=stores[0].count - pages)
    within = torch.arange(size, device=index.device)
    slots = (index[..., : int(keep[0, 0].sum())].unsqueeze(-1) * size + within).flatten(2)
    return tuple(_moved_pages(store, index) for store in stores), slots


def keep_tokens(
    stores: tuple[PageStore, ...], formats: tuple[Format, ...], keep: Tensor, held: int
) -> tuple[tuple[PageStore, ...], Tensor]:
    """Stores without the evicted tokens, and former slots of the kept ones.

    `keep` says which tokens of the first pages stay: bool, (batch, heads, tokens), True equally often for each head.
    Where pages are folded once more, the kept tokens must fill whole pages. Tokens after these pages stay. The stores
    hold `held` tokens in all.

    Tokens keep their codes if pages have neither centres nor channel scales. If one side has them, all its pages from
    the first that loses a token are folded once more, and both sides keep their order.
    """
    tokens, shape = keep.shape[-1], keep.shape[:2]
    if not any(store.describes_pages for store in stores):
        index = fill_holes(keep, after=held - tokens)
        return tuple(_moved_tokens(store, index) for store in stores), index[..., : int(keep[0, 0].sum())]
    slots = in_order(keep)
    after = torch.arange(tokens, held, device=keep.device).expand(*shape, -1)
    by_slot, pages = torch.cat((slots, after), -1), tokens // stores[0].form.page_size
    moved = tuple(
        _folded_again(store, fmt, slots, pages) if store.describes_pages else _moved_tokens(store, by_slot)
        for store, fmt in zip(stores, formats, strict=True)
    )
    return moved, slots


def fill_holes(keep: Tensor, after: int = 0) -> Tensor:
    """The unit that moves to each place: int64, (batch, heads, kept + after).

    `keep` is bool, (batch, heads, units), True equally often for each head. Kept units among the first `kept` stay. The
    other kept ones move, in order, to the places that became free there. `after` more units follow, all kept, in order.
    """
    batch, heads, units = keep.shape
    kept = int(keep[0, 0].sum())
    index = torch.arange(kept, device=keep.device).repeat(batch, heads, 1)
    unit = torch.arange(units, device=keep.device).expand_as(keep)
    index[~keep[..., :kept]] = unit[..., kept:][keep[..., kept:]]  # both run head by head, equally many each
    return torch.cat((index, torch.arange(units, units + after, device=keep.device).expand(batch, heads, after)), -1)


def in_order(keep: Tensor) -> Tensor:
    """Units that are kept, one after the other: int64, (batch, heads, kept)."""
    unit = torch.arange(keep.shape[-1], device=keep.device).expand_as(keep)
    return unit[keep].view(*keep.shape[:2], -1)


def _moved_pages(store: PageStore, index: Tensor) -> PageStore:
    """A store whose page n of each head is what page index[…, n] was."""
    return store.holding(store.pages().map(lambda t: _at(t, index)), index.shape[-1])


def _moved_tokens(store: PageStore, index: Tensor) -> PageStore:
    """A store whose slot n of each head holds the token that slot index[…, n] held, code for code.

    For pages without a centre and channel scales, whose tokens mean the same in any page.
    """
    form, kept = store.form, index.shape[-1]
    size = form.page_size
    count = -(-kept // size)
    held = store.pages(0, count).map(lambda t: t.clone())
    moved = store.holding(held, count)
    if not count:
        return moved
    # Slots after the last token get copies of it, which are cleared below.
    by_page = torch.cat((index, index[..., -1:].expand(-1, -1, count * size - kept)), -1).unflatten(-1, (-1, size))
    own = torch.arange(count * size, device=index.device).view(count, size)
    pages = (by_page != own).any(-1).any(0).any(0).nonzero()[:, 0]
    if len(pages):
        first = int(pages[0])  # no token comes from before
        source = by_page[:, :, pages].flatten(2) - first * size

        def moved_part(part: Tensor) -> Tensor:
            return _at(part.flatten(2, 3), source).unflatten(2, (-1, size))

        for name, tensor in form.pack(form.unpack(store.pages(first)).map_tokens(moved_part)).tensors():
            getattr(held, name).index_copy_(PAGE_DIM, pages, tensor)
    if kept % size:
        form.clear(moved.pages(count - 1), kept % size)
    return moved


def _folded_again(store: PageStore, format: Format, index: Tensor, pages: int) -> PageStore:
    """A store whose first `pages` pages are replaced by the tokens of slots `index`, which fill whole pages.

    For pages with a centre or channel scales, which fit the tokens of one page only. Each folding adds an error, so
    pages before the first token that moves stay as they are.
    """
    size = store.form.page_size
    kept = index.shape[-1] // size
    own = torch.arange(index.shape[-1], device=index.device)
    moved = (index != own).any(0).any(0).nonzero()
    first = int(moved[0]) // size if len(moved) else kept
    parts = [store.pages(0, first), store.pages(pages)]
    if first < kept:
        x = store.form.unfold(store.pages(first, -(-(int(index.max()) + 1) // size)))
        parts.insert(1, format.fold_from(_at(x, index[..., first * size :] - first * size)))
    whole = parts[0].map_named(lambda name, _: torch.cat([getattr(part, name) for part in parts], PAGE_DIM))
    return store.holding(whole, kept + store.count - pages)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x[b, h, index[b, h, n]] for x (batch, heads, units, …): (batch, heads, n, …)."""
    batch, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return x[batch[:, None, None], heads[:, None], index]
