"""Folded rows as the contents of a file, and back."""

from dataclasses import replace
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.files.contents import Contents
from kvfold.cache.fit import PromptFit
from kvfold.cache.held import HeldRows
from kvfold.cache.prompt_costs import count_sampled
from kvfold.cache.rows import FoldedRows
from kvfold.cache.store import PageStore
from kvfold.cache.tail import DenseTokens, tail_capacity
from kvfold.formats import FormatPair, KeyStatistics
from kvfold.formats.base import Format
from kvfold.formats.channelwise import Channelwise

SIDES = ("keys", "values")
"""Names of the sides of rows in files; rows whose values are a view of keys have only the first."""


def rows_to_saved(rows: HeldRows) -> Contents:
    """What rows hold, without unused capacity."""
    fit, fitted = rows.fit, rows.fit.formats.awaits_fit and not rows.formats.awaits_fit
    seen, sampled = (None if x is None else x.shape[2] for x in (fit.energy, fit.queries))
    saved = Contents(
        {
            "pages": rows.keys.count,
            "tail_start": rows.dense.tail_start,
            "fitted": fitted,
            "queries": seen,
            "looked_at": sampled,
            "evicted": rows.evicted,
            "positions": None if rows.positions is None else rows.positions.shape[-1],
        }
    )
    if rows.positions is not None:
        saved.tensors["positions"] = rows.positions
    sides = SIDES[: len(rows.stores)]
    for span_name, span in (("sinks", rows.sink_span()), ("tail", rows.tail_span())):
        if span is not None:
            for name, tensor in zip(sides, (span.key, span.value), strict=False):
                saved.tensors[f"{span_name}.{name}"] = tensor
    if rows.keys.count:
        for name, store in zip(sides, rows.stores, strict=True):
            saved.tensors |= {f"{name}.{part}": tensor for part, tensor in store.pages().tensors()}
            saved.data[f"{name}_bits"] = list(store.form.bits)
    if fit.energy is not None:
        saved.tensors["query_energy"] = fit.energy
    if fit.queries is not None:
        saved.tensors["queries"] = fit.queries
    if fitted:
        for name in ("keys", "values"):
            fmt, before = getattr(rows.formats, name), getattr(fit.formats, name)
            own = before.awaits_fit or fit.awaits_bits  # else tables are a calibration's
            saved.put(f"{name}_fit", Contents({}, fmt.fit_tables() if own else {}))
    return saved


def rows_from_saved(
    saved: Contents, formats: FormatPair, folds: FormatPair, like: tuple[Tensor, Tensor], length: int
) -> FoldedRows:
    """The rows that `rows_to_saved` described; everything is taken out of `saved`.

    The rows started with `formats`. Their pages are folded with `folds`, not fitted, which differ from `formats` if
    first tokens decided bits. `like` are empty keys and values, (batch, kv_heads, 0, dim), of the dtype of what stays
    dense; `length` counts the tokens that came to each row. Raises ValueError if the parts do not fit together.
    """
    batch, kv_heads = like[0].shape[:2]
    rows = FoldedRows(formats, kv_heads)
    rows.evicted = saved.number("evicted", most=max(length - rows.window.sinks, 0))
    rows.length = length = length - rows.evicted
    if not saved.lacks("positions"):
        slots = saved.number("positions", most=_after_sinks(rows) if rows.evicted else 0)
        rows.positions = saved.tensor("positions", [torch.int32], (batch, kv_heads, slots))
        _check_positions(rows, saved.where)
    elif rows.evicted:
        raise ValueError(f"{saved.where}evicted is {rows.evicted}, but there are no positions")
    if saved.take("fitted", bool):
        if not formats.awaits_fit:
            raise ValueError(f"{saved.where}fitted is True, which this format never is")
        rows.formats = _fitted(saved, folds, batch, kv_heads)
        rows.stores = rows.read_as(rows.formats)
    rows.fit = _queries_from_saved(saved, rows, batch)
    count, tail_start = saved.number("pages"), saved.number("tail_start")
    _check_layout(rows, count, tail_start, saved.where)
    rows.dense = _dense_from_saved(saved, rows, like, tail_start)
    if count:
        rows.stores = _stores_from_saved(saved, rows, folds, (batch, kv_heads, count))
    part = _after_sinks(rows) % rows.page_size
    if formats.folds_by_token and part:
        _check_free_slots(rows, part, saved.where)
    saved.done()
    return rows


def _after_sinks(rows: FoldedRows) -> int:
    """Slots after the sinks."""
    return max(rows.length - rows.window.sinks, 0)


def _fitted(saved: Contents, folds: FormatPair, batch: int, kv_heads: int) -> FormatPair:
    """Formats with the tables that a prompt gave them."""
    if folds.awaits_bits:
        raise ValueError(f"{saved.where}fitted is True, but bits are missing")
    fitted = []
    for name, fmt in (("keys_fit", folds.keys), ("values_fit", folds.values)):
        part, tables = saved.part(name), {}
        if fmt.awaits_fit:
            x = torch.zeros(1, kv_heads, 1, fmt.head_dim)
            example = fmt.fitted(KeyStatistics.of(x, x[:, :, :0], fmt.page_size)).fit_tables()
            tables = {key: part.tensor(key, [t.dtype], (batch, *t.shape[1:])) for key, t in example.items()}
        part.done()
        fitted.append(fmt.with_fit_tables(tables) if tables else fmt)
    return folds.with_formats(*fitted)


def _queries_from_saved(saved: Contents, rows: FoldedRows, batch: int) -> PromptFit:
    """What is held of the first queries."""
    fit, sinks, kv_heads = rows.fit, rows.window.sinks, rows.kv_heads
    first = min(rows.length, rows.schedule.fit_tokens)
    energy = queries = None
    if not saved.lacks("queries"):
        most = max(first - sinks, 0) if fit.formats.awaits_fit else -1
        shape = (batch, kv_heads, saved.number("queries", 0, most), rows.key_dim)
        energy = saved.tensor("query_energy", [torch.bfloat16], shape)
    if not saved.lacks("looked_at"):
        count = saved.number("looked_at", 0, count_sampled(first, sinks) if fit.awaits_bits else -1)
        queries = saved.tensor("queries", [torch.bfloat16], (batch, None, count, rows.key_dim))
        if not queries.shape[1] or queries.shape[1] % kv_heads:
            raise ValueError(f"{saved.where}queries are of {queries.shape[1]} heads, keys of {kv_heads}")
    return replace(fit, energy=energy, queries=queries)


def _dense_from_saved(saved: Contents, rows: FoldedRows, like: tuple[Tensor, Tensor], tail_start: int) -> DenseTokens:
    """Sinks and the tail."""

    def dense(name: str, tokens: int, capacity: int) -> tuple[Tensor, Tensor]:
        held = []
        for part, empty in zip(SIDES[: len(rows.stores)], like, strict=False):
            shape = (*empty.shape[:2], tokens, empty.shape[3])
            held.append(saved.tensor(f"{name}.{part}", [empty.dtype], shape) if tokens else empty)
        parts = rows.dense.room(*like, capacity)  # once tensors of that size are there
        for own, room in zip(held, parts, strict=False):
            room[:, :, :tokens] = own
        return parts

    sinks = tail = None
    if rows.window.sinks:
        sinks = dense("sinks", min(rows.length, rows.window.sinks), rows.window.sinks)
    if not rows.schedule.by_token:
        held = max(rows.length - tail_start, 0)
        tail = dense("tail", held, tail_capacity(held))
    return replace(rows.dense, tail_start=tail_start, sinks=sinks, tail=tail)


def _stores_from_saved(
    saved: Contents, rows: FoldedRows, folds: FormatPair, shape: tuple[int, int, int]
) -> tuple[PageStore, ...]:
    """Pages, (batch, kv_heads, count) of them."""
    stores = []
    for name, store, fmt in zip(SIDES, rows.stores, (folds.keys, folds.values), strict=False):
        _check_bits(saved, name, fmt)
        one = fmt.fold_from(torch.zeros(1, shape[1], fmt.page_size, fmt.head_dim))
        tensors: dict[str, Any] = {
            part: saved.tensor(f"{name}.{part}", [t.dtype], (*shape, *t.shape[3:])) for part, t in one.tensors()
        }
        stores.append(store.holding(replace(one, **tensors, tokens=shape[2] * fmt.page_size), shape[2]))
    return tuple(stores)


def _check_bits(saved: Contents, name: str, fmt: Format) -> None:
    """Raise unless pages were folded with the bits that `fmt` has for each group of channels."""
    bits = list(fmt.form.bits)
    if f"{name}_bits" in saved.data:
        if (held := saved.numbers(f"{name}_bits")) != bits:
            raise ValueError(f"{saved.where}{name}_bits are {short(held)}, and this kvfold reads {short(bits)}")
    elif isinstance(fmt, Channelwise) and not fmt.by_quarters:  # files without bits are older than finer parts
        raise ValueError(
            f"{saved.where}{name} were folded by an older kvfold, with other bits a channel: read the tokens again"
        )


def _check_positions(rows: FoldedRows, where: str) -> None:
    """Raise unless `positions` are distinct, after the sinks, and before the tokens that follow."""
    assert rows.positions is not None
    held = rows.positions.sort(-1).values
    part = not rows.formats.folds_by_token and held.shape[-1] % rows.page_size
    apart = bool((held.diff() > 0).all())
    inside = not held.numel() or (held.min() >= rows.window.sinks and held.max() < rows.whole_from)
    if part or not apart or not inside:
        raise ValueError(f"{where}positions are none that an eviction leaves")


def _check_layout(rows: FoldedRows, pages: int, tail_start: int, where: str) -> None:
    """Raise unless rows of this length can have `pages` pages and this tail."""
    dropped, rest = divmod(tail_start - rows.window.sinks, rows.page_size)
    if rows.schedule.by_token:
        fits = pages == rows.schedule.pages(rows.length) and dropped == 0
    elif rows.formats.awaits_fit:
        fits = pages == dropped == 0
    else:
        ripe = rows.schedule.ripe(rows.length, rows.evicted)
        fits = 0 <= dropped <= pages and ripe <= pages <= _after_sinks(rows) // rows.page_size
    if rest or not fits:
        raise ValueError(
            f"{where}pages is {pages} and tail_start {tail_start}, which a row of {rows.length} tokens does not come to"
        )


def _check_free_slots(rows: FoldedRows, part: int, where: str) -> None:
    """Raise unless the last page is empty after `part` tokens: later tokens are added to it."""
    for store in rows.stores:
        last = store.pages(store.count - 1)
        free = last.map(lambda t: t.clone())
        store.form.clear(free, part)
        if any(not torch.equal(tensor, getattr(free, name)) for name, tensor in last.tensors()):
            raise ValueError(f"{where}pages hold something after the last token")
