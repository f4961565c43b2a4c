"""Attention over folded rows and pages, computed literally by its formula: unfold everything, mask, softmax, sum.

Slow and wasteful, and the truth that all backends are tested against.
"""

import torch
from torch import Tensor

from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.formats import FormatPair


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
    """`kvfold.attention.reference.attend_rows`, in float64."""
    n, first = query.shape[2], rows.window.sinks
    folded_until, stop = (torch.tensor(x).unsqueeze(-1) for x in rows.reach(n, dense, causal=mask is None))
    parts = []
    if (sinks := rows.sink_span()) is not None:
        slots = torch.arange(sinks.tokens)
        parts.append((sinks.key, sinks.value, slots, slots < stop))
    if rows.keys.count:
        slots = torch.arange(first, rows.folded_stop)
        key, value = (store.form.unfold(store.pages())[:, :, : len(slots)] for store in (rows.keys, rows.values))
        parts.append((key, value, slots, (slots < folded_until) & (slots < stop)))
    if dense is not None:
        slots = torch.arange(dense.start, dense.stop)
        parts.append((dense.key, dense.value, slots, (slots >= folded_until) & (slots < stop)))
    return _attend(query, parts, scaling, mask, softcap, sink_logits)


@torch.no_grad()
def attend_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    formats: FormatPair,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of the newest tokens of one sequence in a pool (`reference.attend_pool`), in float64.

    Queries are (1, heads, n, dim), keys and values (1, kv_heads, tokens, dim): those of all its tokens.
    """
    slots, size, pair = torch.arange(key.shape[2]), formats.keys.page_size, (formats.keys, formats.values)
    position = slots[-query.shape[2] :].unsqueeze(-1)
    own_page, full = position // size * size, len(slots) // size * size
    parts = [(key[:, :, :1], value[:, :, :1], slots[:1], own_page > 0)]
    if full:
        k, v = (fmt.unfold(fmt.fold_from(x[:, :, :full])) for fmt, x in zip(pair, (key, value), strict=True))
        parts.append((k, v, slots[:full], (slots[:full] > 0) & (slots[:full] < own_page)))
    parts.append((key, value, slots, (slots >= own_page) & (slots <= position)))
    return _attend(query, parts, scaling, None, softcap, sink_logits)


def _attend(
    query: Tensor, parts: list[tuple[Tensor, Tensor, Tensor, Tensor]], scaling: float, mask: Tensor | None,
    softcap: float | None, sink_logits: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention over parts of a context: keys, values, their slots, and which of these each query reads."""
    key, value = (torch.cat([x[side].double() for x in parts], 2) for side in (0, 1))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    slots, reads = torch.cat([x[2] for x in parts]), torch.cat([x[3] for x in parts], -1)

    scores = query.double() @ key.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        own = mask[..., slots]
        scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own
    scores = scores.masked_fill(~reads, -torch.inf)
    if sink_logits is not None:  # they take part in the softmax and have no value
        scores = torch.cat((scores, sink_logits.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1).nan_to_num(0.0)[..., : len(slots)] @ value  # 0 where all is barred
