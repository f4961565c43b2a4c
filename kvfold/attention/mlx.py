"""Attention that reads a folded cache in MLX arrays, with plain operations: `reference.py` in MLX.

Keys are never rotated back: q·x̂ is taken with q̃ = R⁻ᵀ·q, rotated once. Values are summed over codes, and R⁻¹ is applied
once, to the sum. Softmax runs online over blocks of pages, each of which waits for the one before (`mx.depends`): MLX
computes a graph by its depth, and would unpack all blocks at once. Everything is float32.
"""

from dataclasses import dataclass
from typing import Any

from kvfold.cache.layer import Appended
from kvfold.cache.mlx import ArrayLayer, ArrayRows
from kvfold.cache.rows import DenseSpan
from kvfold.formats.page import PageForm, Pages
from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.codes import unpack_levels
from kvfold.kernels.mlx.transforms import apply_to_query, invert

PAGE_BLOCK = 16
"""Pages that are unpacked at a time."""
SCORE_BLOCK = 2**20
"""About how many scores are held at a time; sets the number of queries that go through the keys together."""


def attend(
    query: mx.array,
    new: Appended,
    *,
    scaling: float,
    mask: mx.array | None = None,
    sink_logits: mx.array | None = None,
) -> mx.array:
    """Attention of the tokens just appended over everything that their layer holds.

    Parameters
    ----------
    query
        (batch, heads, n, key_dim) for the n columns of `new`; heads a multiple of kv_heads.
    new
        What `ArrayLayer.append` returned for these tokens.
    scaling
        Factor on the scores.
    mask
        None for causal attention. Otherwise what broadcasts to (batch, heads, n, columns): bool, True where a query may
        attend; or floating point, added to the scores. It then decides alone.
    sink_logits
        If given, one logit a head, (heads,), that takes part in the softmax and has no value.

    Returns
    -------
    mx.array
        (batch, heads, n, value_dim) in the query's dtype; 0 for queries that the mask bars from every key.

    Raises
    ------
    ValueError
        On a query of another shape.
    """
    layer = new.layer
    assert isinstance(layer, ArrayLayer)
    rows, (dense,) = layer.rows, new.dense
    batch, kv_heads, key_dim, value_dim = layer.shape or (0, 0, 0, 0)
    heads, n = query.shape[1:3]
    if query.shape != (batch, heads, new.columns, key_dim) or heads % kv_heads:
        raise ValueError(
            f"query has shape {query.shape}: give (batch, heads, n, key_dim) = ({batch}, a multiple of {kv_heads}, "
            f"{new.columns}, {key_dim})"
        )
    layer.observe(query, new)
    until, _ = rows.reach(n, dense, causal=mask is None)
    q = _to_groups(_floats(query) * scaling, kv_heads)
    q_rotated = apply_to_query(rows.keys.form.transform, q)
    if mask is not None:
        mask = mx.broadcast_to(mask, (batch, heads, n, rows.length)).reshape(batch, kv_heads, -1, n, rows.length)
    logits = None if sink_logits is None else _floats(sink_logits).reshape(1, kv_heads, -1, 1, 1)
    out = []
    width = max(SCORE_BLOCK // (batch * heads * PAGE_BLOCK * rows.page_size), 16)
    for first in range(0, n, width):
        own = slice(first, min(first + width, n))
        reader = _Reader(
            rows,
            position=list(range(rows.length - n + own.start, rows.length - n + own.stop)),
            folded_until=until[own],
            mask=None if mask is None else mask[..., own, :],
        )
        reader.read(q[..., own, :], q_rotated[..., own, :], dense)
        out.append(reader.result(logits))
    whole = out[0] if len(out) == 1 else mx.concatenate(out, -2)
    whole = whole.reshape(batch, heads, n, value_dim).astype(query.dtype)
    if rows.query_energy is not None:  # nobody else asks for it, and what it is made of would wait with it
        (whole,) = mx.depends([whole], [rows.query_energy])
    return whole


def _to_groups(x: mx.array, kv_heads: int) -> mx.array:
    """(batch, heads, …) → (batch, kv_heads, heads / kv_heads, …)."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


@dataclass(eq=False)
class _Reader:
    """One block of queries, reading its keys and values part by part; an online softmax runs along.

    Attributes
    ----------
    rows
        The cache.
    position, folded_until
        Of each query: where it is, and the position after the last token that it reads folded.
    mask
        (batch, kv_heads, repeat, n, positions), or None for causal attention.
    maximum, total, rotated, plain
        The softmax so far: values from pages are summed in rotated coordinates, dense ones as they are.
    """

    rows: ArrayRows
    position: list[int]
    folded_until: list[int]
    mask: mx.array | None
    maximum: mx.array | None = None
    total: mx.array | None = None
    rotated: mx.array | None = None
    plain: mx.array | None = None

    def read(self, q: mx.array, q_rotated: mx.array, dense: DenseSpan | None) -> None:
        """All that the queries see: sinks, pages, dense tokens."""
        sinks = self.rows.sink_span()
        if sinks is not None:
            self._read_dense(q, sinks)
        self._read_pages(q_rotated)
        if dense is not None:
            self._read_dense(q, dense, folded_later=True)

    def _read_dense(self, q: mx.array, span: DenseSpan, folded_later: bool = False) -> None:
        """Dense tokens; if they are `folded_later`, only until a query reads them folded."""
        start, stop = span.start, span.stop
        if folded_later:
            start = max(start, self.folded_until[0])
        if self.mask is None:
            stop = min(stop, self.position[-1] + 1)
        if start >= stop:
            return
        own = slice(start - span.start, stop - span.start)
        key, value = (_floats(x[:, :, own]) for x in (span.key, span.value))
        token = mx.arange(start, stop)
        barred = None
        if folded_later and start < self.folded_until[-1]:
            barred = token < mx.array(self.folded_until)[:, None]
        p = self._weights(self._visible(_grouped(q, key.swapaxes(-1, -2)), start, stop, barred))
        self.plain = _added(self.plain, _grouped(p, value))

    def _read_pages(self, q: mx.array) -> None:
        """Folded pages, a block of them at a time."""
        rows, size = self.rows, self.rows.page_size
        last = self.folded_until[-1]
        if self.mask is None:
            last = min(last, self.position[-1] + 1)
        pages = min(rows.keys.count, -(-(last - rows.window.sinks) // size))
        for first in range(0, pages, PAGE_BLOCK):
            stop = min(first + PAGE_BLOCK, pages)
            keys, values = (self._after_the_last(store.pages(first, stop)) for store in (rows.keys, rows.values))
            # Slots of a part-full page lie beyond every query's `folded_until`, and beyond the mask.
            begin, end = (rows.window.sinks + page * size for page in (first, stop))
            barred = None
            if end > self.folded_until[0]:
                barred = mx.arange(begin, end) >= mx.array(self.folded_until)[:, None]
            p = self._weights(self._visible(page_scores(q, keys, rows.keys.form), begin, end, barred))
            self.rotated = _added(self.rotated, page_outputs(p, values, rows.values.form))

    def _after_the_last(self, pages: Pages) -> Pages:
        """The same pages, to be looked at after what has been read so far."""
        before = [x for x in (self.total, self.rotated) if x is not None]
        return pages.map(lambda t: mx.depends([t], before)[0]) if before else pages

    def _visible(self, scores: mx.array, start: int, stop: int, barred: mx.array | None) -> mx.array:
        """Scores of the tokens from `start` to `stop`, with -inf where a query must not look."""
        if self.mask is None:
            if stop - 1 > self.position[0]:
                causal = mx.arange(start, stop) > mx.array(self.position)[:, None]
                barred = causal if barred is None else barred | causal
        else:
            mask = self.mask[..., start:stop]
            seen = mask if mask.dtype == mx.bool_ else None
            short = stop - start - mask.shape[-1]
            if seen is None:
                added = mx.pad(_floats(mask), [(0, 0)] * 4 + [(0, short)], constant_values=-mx.inf)
                scores = scores + added
            else:
                hidden = mx.logical_not(mx.pad(seen, [(0, 0)] * 4 + [(0, short)]))
                barred = hidden if barred is None else barred | hidden
        return scores if barred is None else mx.where(barred, -mx.inf, scores)

    def _weights(self, scores: mx.array) -> mx.array:
        """Unnormalised probabilities of a block's scores (…, n, tokens), all sums rescaled to match."""
        block = scores.max(-1, keepdims=True)
        maximum = block if self.maximum is None else mx.maximum(self.maximum, block)
        # A query that has seen no key yet keeps -inf; 0 in its place makes every exp a plain 0.
        finite = mx.maximum(maximum, mx.finfo(mx.float32).min)
        p = mx.exp(scores - finite)
        if self.maximum is not None:
            assert self.total is not None
            decay = mx.exp(self.maximum - finite)
            self.total = self.total * decay + p.sum(-1, keepdims=True)
            self.rotated = None if self.rotated is None else self.rotated * decay
            self.plain = None if self.plain is None else self.plain * decay
        else:
            self.total = p.sum(-1, keepdims=True)
        self.maximum = maximum
        return p

    def result(self, sink_logits: mx.array | None) -> mx.array:
        """Attention's output, (batch, kv_heads, repeat, n, value_dim)."""
        assert self.total is not None
        total, out = self.total, self.plain
        if sink_logits is not None:
            total = total + mx.exp(sink_logits - self.maximum)
        if self.rotated is not None:
            out = _added(out, invert(self.rows.values.form.transform, self.rotated))
        return mx.where(self.total > 0, out / total, 0)


def page_scores(q: mx.array, pages: Pages, form: PageForm) -> mx.array:
    """q·x̂ for every folded token, from codes.

    q̃·z + Σ_g a[t,g]·Σ_{c∈g} q̃_c + Σ_g s[t,g]·Σ_{c∈g} q̃_c·(S ⊙ lut[code])_c

    Parameters
    ----------
    q
        Rotated queries q̃, (batch, kv_heads, repeat, n, code_dim).
    pages
        Arrays (batch, kv_heads, N, …).

    Returns
    -------
    mx.array
        (batch, kv_heads, repeat, n, N·P).
    """
    levels = page_levels(pages, form)
    scale, offset = (None if x is None else _floats(x).flatten(2, 3) for x in (pages.scale, pages.offset))
    scores = None
    for g, channels in enumerate(form.scale_groups):
        q_g = q[..., channels]
        part = _grouped(q_g, levels[..., channels].swapaxes(-1, -2))
        if scale is not None:
            part = part * _beside_queries(scale[..., g])
        if offset is not None:
            part = part + q_g.sum(-1, keepdims=True) * _beside_queries(offset[..., g])
        scores = _added(scores, part)
    if pages.centre is not None:
        centre = _floats(pages.centre)
        by_page = _grouped(q[..., : centre.shape[-1]], centre.swapaxes(-1, -2))  # (batch, kv_heads, repeat, n, N)
        scores = _added(scores, mx.repeat(by_page, form.page_size, axis=-1))
    return scores


def page_outputs(p: mx.array, pages: Pages, form: PageForm) -> mx.array:
    """R·Σ_t p_t·x̂[t], from codes.

    Σ_n (Σ_{t∈n} p_t)·z_n + Σ_t p_t·a[t,g] + Σ_t p_t·s[t,g]·(S ⊙ lut[code[t]])

    Parameters
    ----------
    p
        Weights, (batch, kv_heads, repeat, n, N·P).

    Returns
    -------
    mx.array
        (batch, kv_heads, repeat, n, D), in rotated coordinates.
    """
    levels = page_levels(pages, form)
    scale, offset = (None if x is None else _floats(x).flatten(2, 3) for x in (pages.scale, pages.offset))
    parts = []
    for g, channels in enumerate(form.scale_groups):
        weights = p if scale is None else p * _beside_queries(scale[..., g])
        part = _grouped(weights, levels[..., channels])
        if offset is not None:
            part = part + (p * _beside_queries(offset[..., g])).sum(-1, keepdims=True)
        parts.append(part)
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, -1)
    if pages.centre is not None:
        of_page = p.reshape(*p.shape[:-1], -1, form.page_size).sum(-1)
        centre = _grouped(of_page, _floats(pages.centre))
        out = out + mx.pad(centre, [(0, 0)] * 4 + [(0, out.shape[-1] - centre.shape[-1])])  # a residual has no centre
    return out


def page_levels(pages: Pages, form: PageForm) -> mx.array:
    """S ⊙ lut[code] of every token: float32, (batch, kv_heads, N·P, code_dim)."""
    if not form.bits:  # float16 numbers in the place of codes
        return _floats(pages.code).flatten(2, 3)
    levels = unpack_levels(pages.code, form.lut, form.page_size, form.code_dim, form.bits, form.lanes)
    if form.unit_levels:
        levels = levels / mx.sqrt(mx.square(levels).sum(-1, keepdims=True))
    if pages.channel_scale is not None:
        levels = levels * _floats(pages.channel_scale)[..., None, :]
    return levels.flatten(2, 3)


def _floats(x: Any) -> mx.array:
    return x.astype(mx.float32)


def _added(x: mx.array | None, y: mx.array | None) -> mx.array:
    return y if x is None else x if y is None else x + y


def _grouped(x: mx.array, y: mx.array) -> mx.array:
    """x (batch, kv_heads, repeat, n, a) @ y (batch, kv_heads, a, b), y shared by all repeats and not copied."""
    return (x.flatten(2, 3) @ y).reshape(*x.shape[:-1], y.shape[-1])


def _beside_queries(per_token: mx.array) -> mx.array:
    """(batch, kv_heads, tokens) → (batch, kv_heads, 1, 1, tokens)."""
    return per_token[:, :, None, None]
