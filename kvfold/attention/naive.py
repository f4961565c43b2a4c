"""Attention over folded rows, computed literally by its formula: unfold everything, mask, softmax, sum.

Slow and wasteful, and the truth that all backends are tested against.
"""

import torch
from torch import Tensor

from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan


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
    (_, heads, n, _), first = query.shape, rows.window.sinks
    folded_until, stop = (torch.tensor(x).unsqueeze(-1) for x in rows.reach(n, dense, causal=mask is None))
    parts = []  # keys, values, their slots, and which of these each query reads
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
    key, value = (torch.cat([x[side].double() for x in parts], 2) for side in (0, 1))
    key, value = (x.repeat_interleave(heads // rows.kv_heads, 1) for x in (key, value))
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
