"""Attention that reads a folded cache folded, in plain torch: the reference for every kernel.

Keys are never rotated back: q·x̂ is taken with q̃ = R⁻ᵀ·q, rotated once. Values are summed over codes,
and R⁻¹ is applied once, to the sum. Softmax runs online over blocks of keys, so no more than a block of
pages is ever unpacked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.plan import EngineStep
from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.formats.page import PageForm, Pages, add_first
from kvfold.quant.finite import finite

PAGE_BLOCK = 16
"""Pages that are unpacked at a time."""
SCORE_BLOCK = 2**20
"""About how many scores are held at a time; sets the number of queries that go through the keys together."""


def why_not(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> None:
    """None: it takes every call."""


def step_of(rows: FoldedRows) -> None:
    """None: single tokens have no fast path."""


@torch.no_grad()
def attend_rows(
    query: Tensor,
    rows: FoldedRows,
    dense: DenseSpan | None,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`attend` for rows of one length; the queries are those of the newest tokens.

    `dense` is what `FoldedRows.append` returned. Computes in float32, or float64 if the query is, and
    returns that.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch, heads, n, _ = query.shape
    kv_heads = rows.kv_heads
    until, _ = rows.reach(n, dense, causal=mask is None)
    logits = _to_groups(sink_logits.to(dtype).view(1, heads, 1, 1), kv_heads) if sink_logits is not None else None

    # (batch, kv_heads, repeat, n, dim): one unpacked key serves the `repeat` query heads of its group.
    q = _to_groups(query.to(dtype) * scaling, kv_heads)
    q_rotated = rows.keys.form.rotated_query(q)
    out = []
    queries = max(SCORE_BLOCK // (batch * heads * PAGE_BLOCK * rows.page_size), 16)
    for first in range(0, n, queries):
        block = slice(first, min(first + queries, n))
        positions = range(rows.length - n + block.start, rows.length - n + block.stop)
        reader = _Reader(
            position=torch.tensor(positions, device=query.device),
            folded_until=torch.tensor(until[block], device=query.device),
            mask=None if mask is None else _to_groups(mask[:, :, block], kv_heads),
            softcap=softcap,
            state=_OnlineSoftmax.empty(q[..., block, :], rows.values.form.code_dim, rows.value_dim),
        )
        sinks = rows.sink_span()
        if sinks is not None:
            reader.read_dense(q[..., block, :], sinks)
        reader.read_pages(q_rotated[..., block, :], rows)
        if dense is not None:
            reader.read_dense(q[..., block, :], dense, folded_later=True)
        out.append(reader.state.result(rows.values.form, logits))
    return torch.cat(out, dim=-2).flatten(1, 2)


@torch.no_grad()
def attend_pool(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: PagedLayer,
    step: EngineStep,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of an engine's new tokens, one sequence after the other, in float32 or float64.

    Pages that the step completes are folded first. What it leaves of unfinished pages is kept last. What comes and what
    returns has the shapes that `kvfold.attention.pool.PagedAttention` says.
    """
    sound = layer.fold(step, key, value)
    dtype = torch.promote_types(query.dtype, torch.float32)
    size, kv_heads = layer.formats.keys.page_size, layer.pool.kv_heads
    keys_form, values_form = layer.formats.keys.form, layer.formats.values.form
    logits = None if sink_logits is None else _to_groups(sink_logits.to(dtype).view(1, -1, 1, 1), kv_heads)
    out = query.new_full((*query.shape[:2], layer.formats.values.head_dim), torch.nan, dtype=dtype)
    rows = zip(sound.rows.tolist(), sound.block_table.tolist(), strict=True)
    for row, ((first, count, length, tail, *_, place), table) in enumerate(rows):
        new, held = slice(first, first + count), (length - count) % size
        if not (finite(key[new]) and finite(value[new])):
            layer.give_up(sound, [row])
            continue
        dense = []
        for tails, x in ((layer.tail_keys, key), (layer.tail_values, value)):
            parts = [x[new].transpose(0, 1)] if tail < 0 else [tails[tail, :, :held], x[new].transpose(0, 1)]
            dense.append(torch.cat(parts, 1)[None])
        position = torch.arange(length - count, length, device=query.device)
        q = _to_groups(query[new].transpose(0, 1)[None].to(dtype) * scaling, kv_heads)
        reader = _Reader(
            position=position,
            folded_until=position // size * size,
            mask=None,
            softcap=softcap,
            state=_OnlineSoftmax.empty(q, values_form.code_dim, layer.formats.values.head_dim),
        )
        per = layer.pool.pages_a_block
        numbers = [table[page // per] * per + page % per for page in range((length - 1) // size)]
        if numbers:
            keys, values = layer.pool.read(torch.tensor(numbers, device=query.device))
            token = torch.arange(len(numbers) * size, device=query.device)
            barred = token >= reader.folded_until.unsqueeze(-1)
            if place >= 0:
                barred[:, 0] = True
                reader.read_first(q, *(x[place][None, :, None] for x in (layer.first_keys, layer.first_values)))
            scores = reader._visible(page_scores(keys_form.rotated_query(q), keys, keys_form), token, barred)
            reader.state.rotated += page_outputs(reader.state.weights(scores), values, values_form)
        reader.read_dense(q, DenseSpan.of(dense[0], dense[1], length - count - held), folded_later=True)
        out[new] = reader.state.result(values_form, logits)[0].flatten(0, 1).transpose(0, 1)
    layer.keep_tails(torch.from_numpy(sound.left(size)), key, value)
    return out


def _to_groups(x: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, …) → (batch, kv_heads, heads / kv_heads, …); a single head stays single."""
    return x.unflatten(1, (kv_heads, -1)) if x.shape[1] > 1 or kv_heads == 1 else x.unsqueeze(1)


@dataclass(eq=False)
class _OnlineSoftmax:
    """Running softmax over blocks of keys, for (batch, kv_heads, repeat, n) queries.

    Values read from pages are summed in rotated coordinates, dense ones as they are.
    """

    maximum: Tensor
    total: Tensor
    rotated: Tensor
    unrotated: Tensor

    @classmethod
    def empty(cls, q: Tensor, code_dim: int, dim: int) -> "_OnlineSoftmax":
        maximum = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total, rotated, unrotated = (q.new_zeros(*q.shape[:-1], width) for width in (1, code_dim, dim))
        return cls(maximum, total, rotated, unrotated)

    def weights(self, scores: Tensor) -> Tensor:
        """Unnormalised probabilities of a block's scores (…, n, tokens), all sums rescaled to match."""
        maximum = torch.maximum(self.maximum, scores.amax(-1, keepdim=True))
        # A query that has seen no key yet keeps -inf; the least number in its place makes every exp a plain 0.
        finite = maximum.clamp_min(torch.finfo(maximum.dtype).min)
        decay = torch.exp(self.maximum - finite)
        p = torch.exp(scores - finite)
        self.maximum = maximum
        self.total = self.total * decay + p.sum(-1, keepdim=True)
        self.rotated *= decay
        self.unrotated *= decay
        return p

    def result(self, values: PageForm, sink_logits: Tensor | None) -> Tensor:
        total = self.total
        if sink_logits is not None:
            total = total + torch.exp(sink_logits - self.maximum)
        out = values.transform.invert(self.rotated) + self.unrotated
        return (out / total).where(self.total != 0, 0)  # what is NaN stays so


@dataclass(eq=False)
class _Reader:
    """One block of queries, reading its keys and values part by part."""

    position: Tensor  # positions of the queries, (n,)
    folded_until: Tensor  # for each query, the position after the last token that it reads folded
    mask: Tensor | None  # (batch or 1, kv_heads or 1, repeat or 1, n, positions), or None for causal attention
    softcap: float | None
    state: _OnlineSoftmax

    def read_dense(self, q: Tensor, span: DenseSpan, folded_later: bool = False) -> None:
        """Read dense tokens; with `folded_later`, each query skips those that it reads folded."""
        start, stop = span.start, span.stop
        if folded_later:
            start = max(start, int(self.folded_until[0]))
        if self.mask is None:
            stop = min(stop, int(self.position[-1]) + 1)
        if start >= stop:
            return
        own = slice(start - span.start, stop - span.start)
        key, value = span.key[:, :, own].to(q.dtype), span.value[:, :, own].to(q.dtype)
        token = torch.arange(start, stop, device=q.device)
        barred = token < self.folded_until.unsqueeze(-1) if folded_later else None
        scores = self._visible(_grouped(q, key.mT), token, barred)
        self.state.unrotated += _grouped(self.state.weights(scores), value)

    def read_first(self, q: Tensor, key: Tensor, value: Tensor) -> None:
        """Read the first token dense, (batch, kv_heads, 1, dim), by those queries that read its page folded."""
        token, barred = torch.zeros(1, dtype=torch.int64, device=q.device), (self.folded_until == 0).unsqueeze(-1)
        scores = self._visible(_grouped(q, key.to(q.dtype).mT), token, barred)
        self.state.unrotated += _grouped(self.state.weights(scores), value.to(q.dtype))

    def read_pages(self, q: Tensor, rows: FoldedRows) -> None:
        """Read folded pages, a block of them at a time."""
        size, sinks = rows.page_size, rows.window.sinks
        last = int(self.folded_until[-1])
        if self.mask is None:
            last = min(last, int(self.position[-1]) + 1)
        pages = min(rows.keys.count, -(-(last - sinks) // size))
        for first in range(0, pages, PAGE_BLOCK):
            stop = min(first + PAGE_BLOCK, pages)
            keys, values = rows.keys.pages(first, stop), rows.values.pages(first, stop)
            # Slots of a part-full page lie beyond every query's `folded_until`, and beyond the mask.
            token = torch.arange(sinks + first * size, sinks + stop * size, device=q.device)
            barred = None
            if int(token[-1]) >= int(self.folded_until[0]):
                barred = token >= self.folded_until.unsqueeze(-1)
            scores = self._visible(page_scores(q, keys, rows.keys.form), token, barred)
            self.state.rotated += page_outputs(self.state.weights(scores), values, rows.values.form)

    def _visible(self, scores: Tensor, token: Tensor, barred: Tensor | None) -> Tensor:
        """Soft-capped scores of `token`s, with -inf where a query must not read."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.mask is None:
            if int(token[-1]) > int(self.position[0]):
                causal = token > self.position.unsqueeze(-1)
                barred = causal if barred is None else barred | causal
        else:
            first, held = int(token[0]), self.mask.shape[-1]
            mask = self.mask[..., first : first + len(token)]
            short = first + len(token) - held
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~torch.nn.functional.pad(mask, (0, max(short, 0))), -torch.inf)
            else:
                scores = scores + torch.nn.functional.pad(mask.to(scores.dtype), (0, max(short, 0)), value=-torch.inf)
        return scores if barred is None else scores.masked_fill(barred, -torch.inf)


def page_scores(q: Tensor, pages: Pages, form: PageForm) -> Tensor:
    """q·x̂ for every folded token, from codes: (batch, kv_heads, repeat, n, N·P).

    q̃·z + Σ_g a[t,g]·Σ_{c∈g} q̃_c + Σ_g s[t,g]·Σ_{c∈g} q̃_c·(S ⊙ lut[code])_c, and the products of plain channels. With
    scaled shifts, s[t]·q̃·z.

    `q` has rotated queries q̃, and plain channels after them, (batch, kv_heads, repeat, n, code_dim + plain_dim); pages
    are (batch, kv_heads, N, …).
    """
    levels = form.levels(pages).to(q.dtype).flatten(2, 3)  # (batch, kv_heads, N·P, code_dim)
    scale = _token_scale(pages, levels)
    offset = None if pages.offset is None else pages.offset.to(q.dtype).flatten(2, 3)
    scores: Tensor | float = 0.0
    for g, channels in enumerate(form.scale_groups):
        q_g = q[..., channels]
        scores = scores + _grouped(q_g, levels[..., channels].mT) * _beside_queries(scale[..., g])
        if offset is not None:
            scores = scores + q_g.sum(-1, keepdim=True) * _beside_queries(offset[..., g])
    assert isinstance(scores, Tensor)
    if pages.centre is not None:
        centre = _grouped(
            q[..., : pages.centre.shape[-1]], pages.centre.to(q.dtype).mT
        )  # (batch, kv_heads, repeat, n, N)
        centre = centre.repeat_interleave(form.page_size, dim=-1)
        scores = scores + (centre * _beside_queries(scale[..., 0]) if form.scaled_shifts else centre)
    if pages.plain is not None:
        scores = scores + _grouped(q[..., form.code_dim :], pages.plain.to(q.dtype).flatten(2, 3).mT)
    return scores


def page_outputs(p: Tensor, pages: Pages, form: PageForm) -> Tensor:
    """R·Σ_t p_t·x̂[t], from codes: (batch, kv_heads, repeat, n, code_dim), in rotated coordinates.

    Σ_n (Σ_{t∈n} p_t)·z_n + Σ_t p_t·a[t,g] + Σ_t p_t·s[t,g]·(S ⊙ lut[code[t]]). With scaled shifts, p_t·s[t]·z_n and
    p_t·a[t]·S_n in the place of the first two.

    Weights are (batch, kv_heads, repeat, n, N·P).
    """
    levels = form.levels(pages).to(p.dtype).flatten(2, 3)
    scale = _token_scale(pages, levels)
    offset = None if pages.offset is None else pages.offset.to(p.dtype).flatten(2, 3)
    parts = []
    for g, channels in enumerate(form.scale_groups):
        part = _grouped(p * _beside_queries(scale[..., g]), levels[..., channels])
        if offset is not None and not form.scaled_shifts:
            part = part + (p * _beside_queries(offset[..., g])).sum(-1, keepdim=True)
        parts.append(part)
    out = torch.cat(parts, dim=-1)
    if pages.centre is not None:
        out = add_first(out, _by_page(p * _beside_queries(scale[..., 0]) if form.scaled_shifts else p, pages.centre))
    if offset is not None and form.scaled_shifts:
        assert pages.channel_scale is not None
        out = out + _by_page(p * _beside_queries(offset[..., 0]), pages.channel_scale)
    return out


def _by_page(weights: Tensor, of_page: Tensor) -> Tensor:
    """Each page's vector, (batch, kv_heads, N, ·), times the sum of its tokens' weights, summed over pages."""
    return _grouped(weights.unflatten(-1, (of_page.shape[-2], -1)).sum(-1), of_page.to(weights.dtype))


def _token_scale(pages: Pages, levels: Tensor) -> Tensor:
    """s of every token: (batch, kv_heads, N·P, G)."""
    if pages.scale is None:
        return levels.new_ones(*levels.shape[:3], 1)
    return pages.scale.to(levels.dtype).flatten(2, 3)


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x (batch, kv_heads, repeat, n, a) @ y (batch, kv_heads, a, b), y shared by all repeats and not copied."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _beside_queries(per_token: Tensor) -> Tensor:
    """(batch, kv_heads, tokens) → (batch, kv_heads, 1, 1, tokens)."""
    return per_token[:, :, None, None]
