"""Attention that reads a folded cache in MLX arrays, with plain operations: `reference.py` in MLX.

Where there is Metal, one kernel decodes (`kvfold.kernels.mlx.decode`), and these operations are its reference.

Keys are never rotated back: q·x̂ is taken with q̃ = R⁻ᵀ·q, rotated once. Values are summed over codes, and R⁻¹ is applied
once, to the sum. Softmax runs online over blocks of pages, each of which waits for the one before (`mx.depends`):
MLX computes a graph by its depth, and would otherwise unpack all blocks at once. Everything is float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvfold.attention.dispatch import warn_once
from kvfold.attention.reference import PAGE_BLOCK, SCORE_BLOCK
from kvfold.cache.batch import Appended
from kvfold.cache.mlx import ArrayLayer, ArrayRows
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore
from kvfold.formats.page import PageForm, Pages
from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.codes import unpack_levels
from kvfold.kernels.mlx.decode import Side, decode, fits, why_not
from kvfold.kernels.mlx.transforms import apply_to_query, invert


def attend(
    query: mx.array,
    new: Appended,
    *,
    scaling: float,
    mask: mx.array | None = None,
    sink_logits: mx.array | None = None,
) -> mx.array:
    """`kvfold.attention.attend` for MLX: attention of the tokens just appended over all that their layer holds.

    Queries are (batch, heads, n, key_dim) for the n columns of `new`, which `ArrayLayer.append` returned; heads are a
    multiple of kv_heads. `mask` is None for causal attention. Otherwise it is what broadcasts to (batch, heads, n,
    columns): bool, True where a query may attend; or floating point, added to the scores. It then decides alone.
    `sink_logits`, if given, are one logit a head, (heads,), that takes part in the softmax and has no value.

    Returns (batch, heads, n, value_dim) in the query's dtype; 0 for queries that the mask bars from every key. Raises
    ValueError on a query of another shape.
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
    layer.observe(query, new, scaling)
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
        reader = Reader(
            rows,
            position=list(range(rows.length - n + own.start, rows.length - n + own.stop)),
            folded_until=until[own],
            mask=None if mask is None else mask[..., own, :],
        )
        reader.read(q[..., own, :], q_rotated[..., own, :], dense)
        out.append(reader.result(logits))
    whole = out[0] if len(out) == 1 else mx.concatenate(out, -2)
    whole = whole.reshape(batch, heads, n, value_dim).astype(query.dtype)
    seen = [x for x in (rows.fit.energy, rows.fit.queries) if x is not None]
    if seen:  # nothing else evaluates them, so their inputs would stay in memory
        (whole,) = mx.depends([whole], seen)
    return whole


def _to_groups(x: mx.array, kv_heads: int) -> mx.array:
    """(batch, heads, …) → (batch, kv_heads, heads / kv_heads, …)."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


@dataclass(eq=False)
class Reader:
    """One block of queries, reading its keys and values part by part; an online softmax runs along."""

    rows: ArrayRows
    # Of each query: where it is, and the position after the last token that it reads folded.
    position: list[int]
    folded_until: list[int]
    mask: mx.array | None  # (batch, kv_heads, repeat, n, positions), or None for causal attention
    # The softmax so far: values from pages are summed in rotated coordinates, dense ones as they are.
    maximum: mx.array | None = None
    total: mx.array | None = None
    rotated: mx.array | None = None
    unrotated: mx.array | None = None

    @cached_property
    def _at(self) -> mx.array:
        return mx.array(self.position)[:, None]

    @cached_property
    def _until(self) -> mx.array:
        return mx.array(self.folded_until)[:, None]

    def read(self, q: mx.array, q_rotated: mx.array, dense: DenseSpan | None) -> None:
        """Read all that the queries see: sinks, pages, dense tokens."""
        sinks = self.rows.sink_span()
        if sinks is not None:
            self._read_dense(q, sinks)
        if self.mask is None and q.shape[3] == 1 and _on_metal():
            why = why_plain(self.rows, q.shape[2])
            if why is None:
                self.decode_pages(q_rotated)
            else:
                warn_once("decoding on Metal takes plain operations, which are slower than the kernel: %s", why)
                self.read_pages(q_rotated)
        else:
            self.read_pages(q_rotated)
        if dense is not None:
            self._read_dense(q, dense, folded_later=True)

    def _read_dense(self, q: mx.array, span: DenseSpan, folded_later: bool = False) -> None:
        """Read dense tokens; with `folded_later`, each query skips those that it reads folded."""
        start, stop = span.start, span.stop
        if folded_later:
            start = max(start, self.folded_until[0])
        if self.mask is None:
            stop = min(stop, self.position[-1] + 1)
        if start >= stop:
            return
        own = slice(start - span.start, stop - span.start)
        key, value = (_floats(x[:, :, own]) for x in (span.key, span.value))
        barred = None
        if folded_later and start < self.folded_until[-1]:
            barred = mx.arange(start, stop) < self._until
        scores = _grouped(q, key.swapaxes(-1, -2))
        # These tokens are not checked yet: an infinite score would vanish, or hide all others.
        scores = mx.where(mx.isinf(scores), mx.nan, scores)
        p = self._weights(self._visible(scores, start, stop, barred))
        self.unrotated = _added(self.unrotated, _grouped(p, value))

    def decode_pages(self, q: mx.array, kernel: Callable[..., Any] | None = None) -> None:
        """Read folded pages by one Metal kernel, for a single query a head."""
        rows, tokens = self.rows, self.folded_until[-1] - self.rows.window.sinks
        if tokens <= 0:
            return
        keys, values = (_side(store) for store in (rows.keys, rows.values))
        pages = -(-tokens // rows.page_size)
        q = q[:, :, :, 0]
        highest, total, summed = (x[:, :, :, None] for x in decode(q, keys, values, pages, tokens, kernel))
        finite = self._rise_to(highest.max(-1, keepdims=True))
        weight = mx.exp(highest - finite)  # of each part of the context
        self.total = _added(self.total, (total * weight).sum(-1, keepdims=True))
        self.rotated = _added(self.rotated, (summed * weight[..., None]).sum(-2))

    def read_pages(self, q: mx.array) -> None:
        """Read folded pages, a block of them at a time."""
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
                barred = mx.arange(begin, end) >= self._until
            p = self._weights(self._visible(page_scores(q, keys, rows.keys.form), begin, end, barred))
            self.rotated = _added(self.rotated, page_outputs(p, values, rows.values.form))

    def _after_the_last(self, pages: Pages) -> Pages:
        """The same pages, to be computed after everything that has been read so far."""
        before = [x for x in (self.total, self.rotated) if x is not None]
        return pages.map(lambda t: mx.depends([t], before)[0]) if before else pages

    def _visible(self, scores: mx.array, start: int, stop: int, barred: mx.array | None) -> mx.array:
        """Scores of the tokens from `start` to `stop`, with -inf where a query must not read."""
        if self.mask is None:
            if stop - 1 > self.position[0]:
                causal = mx.arange(start, stop) > self._at
                barred = causal if barred is None else barred | causal
        else:
            mask = self.mask[..., start:stop]
            beyond = [(0, 0)] * 4 + [(0, stop - start - mask.shape[-1])]
            if mask.dtype == mx.bool_:
                hidden = mx.logical_not(mx.pad(mask, beyond))
                barred = hidden if barred is None else barred | hidden
            else:
                scores = scores + mx.pad(_floats(mask), beyond, constant_values=-mx.inf)
        return scores if barred is None else mx.where(barred, -mx.inf, scores)

    def _weights(self, scores: mx.array) -> mx.array:
        """Unnormalised probabilities of a block's scores (…, n, tokens), all sums rescaled to match."""
        finite = self._rise_to(scores.max(-1, keepdims=True))
        p = mx.exp(scores - finite)
        self.total = _added(self.total, p.sum(-1, keepdims=True))
        return p

    def _rise_to(self, highest: mx.array) -> mx.array:
        """Raise the maximum to at least `highest`, rescale all sums to match, and return it, finite."""
        before, self.maximum = self.maximum, highest if self.maximum is None else mx.maximum(self.maximum, highest)
        # A query that has seen no key yet keeps -inf; the least number in its place makes every exp a plain 0.
        finite = mx.maximum(self.maximum, mx.finfo(mx.float32).min)
        if before is not None:
            decay = mx.exp(before - finite)
            for name in ("total", "rotated", "unrotated"):
                held = getattr(self, name)
                setattr(self, name, None if held is None else held * decay)
        return finite

    def result(self, sink_logits: mx.array | None) -> mx.array:
        """Attention's output, (batch, kv_heads, repeat, n, value_dim)."""
        assert self.total is not None
        total, out = self.total, self.unrotated
        if sink_logits is not None:
            total = total + mx.exp(sink_logits - self.maximum)
        if self.rotated is not None:
            out = _added(out, invert(self.rows.values.form.transform, self.rotated))
        return mx.where(self.total == 0, 0, out / total)  # what is NaN stays so


def why_plain(rows: ArrayRows, repeat: int) -> str | None:
    """Why the Metal kernel does not decode over these pages, `repeat` query heads a KV head; None if it does."""
    forms = (rows.keys.form, rows.values.form)
    reasons = (why_not(f.bits, f.groups, f.unit_levels, f.plain_dim) for f in forms)
    why = next((reason for reason in reasons if reason is not None), None)
    if why is None and not fits(repeat, forms[0].code_dim, rows.page_size):
        why = f"{repeat} query heads share a KV head, or pages have {rows.page_size} tokens"
    return why


def _on_metal() -> bool:
    return bool(mx.metal.is_available() and mx.default_device().type == mx.DeviceType.gpu)


def _side(store: PageStore) -> Side:
    form = store.form
    assert store.storage is not None
    parts: dict[str, mx.array] = dict(store.storage.tensors())
    return Side(parts, form.code_dim, form.page_size, form.bits, form.groups, form.lut, form.scaled_shifts)


def page_scores(q: mx.array, pages: Pages, form: PageForm) -> mx.array:
    """`kvfold.attention.reference.page_scores` in arrays, without plain channels."""
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
        by_token = mx.repeat(by_page, form.page_size, axis=-1)
        if scale is not None and form.scaled_shifts:
            by_token = by_token * _beside_queries(scale[..., 0])
        scores = _added(scores, by_token)
    return scores


def page_outputs(p: mx.array, pages: Pages, form: PageForm) -> mx.array:
    """`kvfold.attention.reference.page_outputs` in arrays."""
    levels = page_levels(pages, form)
    scale, offset = (None if x is None else _floats(x).flatten(2, 3) for x in (pages.scale, pages.offset))
    parts = []
    for g, channels in enumerate(form.scale_groups):
        weights = p if scale is None else p * _beside_queries(scale[..., g])
        part = _grouped(weights, levels[..., channels])
        if offset is not None and not form.scaled_shifts:
            part = part + (p * _beside_queries(offset[..., g])).sum(-1, keepdims=True)
        parts.append(part)
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, -1)
    if pages.centre is not None:
        weights = p
        if scale is not None and form.scaled_shifts:
            weights = p * _beside_queries(scale[..., 0])
        centre = _by_page(weights, pages.centre)
        out = out + mx.pad(centre, [(0, 0)] * 4 + [(0, out.shape[-1] - centre.shape[-1])])  # a residual has no centre
    if offset is not None and form.scaled_shifts:
        out = out + _by_page(p * _beside_queries(offset[..., 0]), pages.channel_scale)
    return out


def _by_page(weights: mx.array, of_page: Any) -> mx.array:
    """Each page's vector, (batch, kv_heads, N, ·), times the sum of its tokens' weights, summed over pages."""
    return _grouped(weights.reshape(*weights.shape[:-1], of_page.shape[-2], -1).sum(-1), _floats(of_page))


def page_levels(pages: Pages, form: PageForm) -> mx.array:
    """S ⊙ lut[code] of every token: float32, (batch, kv_heads, N·P, code_dim)."""
    if not form.bits:  # float16 numbers in the place of codes
        return _floats(pages.code).flatten(2, 3)
    levels = unpack_levels(pages.code, form.lut, form.kinds, form.page_size, form.code_dim, form.bits, form.lanes)
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
