"""Folded rows as the contents of a file, and back."""

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.cache.prompt_costs import count_looked_at
from kvfold.cache.rows import FoldedRows, tail_capacity
from kvfold.cache.saved import Contents
from kvfold.formats import FormatPair, KeyStatistics


def rows_to_saved(rows: FoldedRows) -> Contents:
    """What rows hold, without unused capacity."""
    fitted = rows.unfitted.awaits_fit and not rows.formats.awaits_fit
    seen, looked_at = (None if x is None else x.shape[2] for x in (rows.query_energy, rows.queries))
    saved = Contents(
        {
            "pages": rows.keys.count,
            "tail_start": rows.tail_start,
            "fitted": fitted,
            "queries": seen,
            "looked_at": looked_at,
            "evicted": rows.evicted,
            "positions": None if rows.positions is None else rows.positions.shape[-1],
        }
    )
    if rows.positions is not None:
        saved.tensors["positions"] = rows.positions
    sides = ("keys", "values")[: rows.sides]
    for span_name, span in (("sinks", rows.sink_span()), ("tail", rows.tail_span())):
        if span is not None:
            for name, tensor in zip(sides, (span.key, span.value), strict=False):
                saved.tensors[f"{span_name}.{name}"] = tensor
    if rows.keys.count:
        for name, store in zip(sides, rows.stores, strict=True):
            saved.tensors |= {f"{name}.{part}": tensor for part, tensor in store.pages().tensors()}
    if rows.query_energy is not None:
        saved.tensors["query_energy"] = rows.query_energy
    if rows.queries is not None:
        saved.tensors["queries"] = rows.queries
    if fitted:
        for name in ("keys", "values"):
            fmt, before = getattr(rows.formats, name), getattr(rows.unfitted, name)
            own = before.awaits_fit or rows.unfitted.awaits_bits  # and not a calibration's
            saved.put(f"{name}_fit", Contents({}, fmt.fit_tables() if own else {}))
    return saved


def rows_from_saved(
    saved: Contents,
    formats: FormatPair,
    folds: FormatPair,
    like: tuple[Tensor, Tensor],
    length: int,
) -> FoldedRows:
    """The rows that `rows_to_saved` told of.

    Parameters
    ----------
    saved
        What it gave; all of it is taken out.
    formats
        The formats that the rows started with.
    folds
        Those that pages are folded with, not fitted: others, if the rows were given bits.
    like
        Empty keys and values, (batch, kv_heads, 0, dim), of the dtype of what stays dense.
    length
        Tokens that came to each row.

    Raises
    ------
    ValueError
        If the parts do not fit together.
    """
    batch, kv_heads = like[0].shape[:2]
    rows = FoldedRows(formats, kv_heads)
    rows.evicted = saved.number("evicted", most=max(length - rows.window.sinks, 0))
    rows.length = length = length - rows.evicted
    after = max(length - rows.window.sinks, 0)
    if not saved.lacks("positions"):
        slots = saved.number("positions", most=after if rows.evicted else 0)
        rows.positions = saved.tensor("positions", [torch.int32], (batch, kv_heads, slots))
        _check_positions(rows, saved.where)
    elif rows.evicted:
        raise ValueError(f"{saved.where}evicted is {rows.evicted}, but there are no positions")
    if saved.take("fitted", bool):
        fitted = []
        if folds.awaits_bits:
            raise ValueError(f"{saved.where}fitted is True, but bits are missing")
        for name, fmt in (("keys_fit", folds.keys), ("values_fit", folds.values)):
            part, tables = saved.part(name), {}
            if fmt.awaits_fit:
                x = torch.zeros(1, kv_heads, 1, fmt.head_dim)
                example = fmt.fitted(KeyStatistics.of(x, x[:, :, :0], rows.page_size)).fit_tables()
                tables = {key: part.tensor(key, [t.dtype], (batch, *t.shape[1:])) for key, t in example.items()}
            part.done()
            fitted.append(fmt.with_fit_tables(tables) if tables else fmt)
        if not formats.awaits_fit:
            raise ValueError(f"{saved.where}fitted is True, which this format never is")
        rows.set_formats(folds.with_formats(*fitted))
    if not saved.lacks("queries"):
        most = max(min(length, rows.fit_tokens) - rows.window.sinks, 0) if formats.awaits_fit else -1
        shape = (batch, kv_heads, saved.number("queries", 0, most), rows.key_dim)
        rows.query_energy = saved.tensor("query_energy", [torch.bfloat16], shape)
    if not saved.lacks("looked_at"):
        most = count_looked_at(min(length, rows.fit_tokens), rows.window.sinks) if formats.awaits_bits else -1
        count = saved.number("looked_at", 0, most)
        rows.queries = saved.tensor("queries", [torch.bfloat16], (batch, None, count, rows.key_dim))
        if not rows.queries.shape[1] or rows.queries.shape[1] % kv_heads:
            raise ValueError(f"{saved.where}queries are of {rows.queries.shape[1]} heads, keys of {kv_heads}")

    sides = ("keys", "values")[: rows.sides]
    count = saved.number("pages")
    page = [
        fmt.fold_from(torch.zeros(1, kv_heads, fmt.page_size, fmt.head_dim))
        for fmt in (folds.keys, folds.values)[: rows.sides]
    ]
    rows.tail_start = saved.number("tail_start")
    _check_layout(rows, count, after, saved.where)

    def dense(name: str, tokens: int, capacity: int) -> tuple[Tensor, Tensor]:
        parts = rows.room(*like, capacity)
        for part, empty, room in zip(sides, like, parts, strict=False):
            shape = (batch, kv_heads, tokens, empty.shape[3])
            room[:, :, :tokens] = saved.tensor(f"{name}.{part}", [empty.dtype], shape) if tokens else empty
        return parts

    if rows.window.sinks:
        rows.sinks = dense("sinks", min(length, rows.window.sinks), rows.window.sinks)
    if not formats.folds_by_token:
        held = max(length - rows.tail_start, 0)
        rows.tail = dense("tail", held, tail_capacity(held))
    for name, store, one in zip(sides, rows.stores, page, strict=True):
        if count:
            tensors = {
                part: saved.tensor(f"{name}.{part}", [t.dtype], (batch, kv_heads, count, *t.shape[3:]))
                for part, t in one.tensors()
            }
            store.storage, store.count = replace(one, **tensors, tokens=count * rows.page_size), count  # type: ignore[arg-type]
    if formats.folds_by_token and after % rows.page_size:
        _check_free_slots(rows, after % rows.page_size, saved.where)
    saved.done()
    return rows


def _check_positions(rows: FoldedRows, where: str) -> None:
    """Raise unless `positions` are different ones before all that follow them."""
    assert rows.positions is not None
    held = rows.positions.sort(-1).values
    part = not rows.formats.folds_by_token and held.shape[-1] % rows.page_size
    apart = bool((held.diff() > 0).all())
    inside = not held.numel() or (held.min() >= rows.window.sinks and held.max() < rows.whole_from)
    if part or not apart or not inside:
        raise ValueError(f"{where}positions are none that an eviction leaves")


def _check_layout(rows: FoldedRows, pages: int, after: int, where: str) -> None:
    """Raise unless `pages` pages and this tail can be those of a row with `after` tokens after the sinks."""
    dropped, rest = divmod(rows.tail_start - rows.window.sinks, rows.page_size)
    if rows.formats.folds_by_token:
        fits = pages == -(-after // rows.page_size) and dropped == 0
    elif rows.formats.awaits_fit:
        fits = pages == dropped == 0
    else:
        ripe = rows.full_pages(rows.length, rows.window.recent)
        fits = 0 <= dropped <= pages and ripe <= pages <= after // rows.page_size
    if rest or not fits:
        raise ValueError(
            f"{where}pages is {pages} and tail_start {rows.tail_start}, which a row of {rows.length} tokens does "
            "not come to"
        )


def _check_free_slots(rows: FoldedRows, part: int, where: str) -> None:
    """Raise unless the last page is free after `part` tokens: more are to join it."""
    for store in rows.stores:
        last = store.pages(store.count - 1)
        free = last.map(lambda t: t.clone())
        store.form.clear(free, part)
        if any(not torch.equal(tensor, getattr(free, name)) for name, tensor in last.tensors()):
            raise ValueError(f"{where}pages hold something after the last token")
