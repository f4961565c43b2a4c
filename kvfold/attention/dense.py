"""Attention over dense keys and values, with options that torch's attention lacks."""

import torch
from torch import Tensor


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention with soft-capped scores and attention sinks, for layers that stay dense.

    Arguments are those of `kvfold.attention.attend`, with `key` (batch, kv_heads, tokens, key_dim) and
    `value` (batch, kv_heads, tokens, value_dim); without a mask, the queries are the newest tokens.
    """
    batch, heads, n, _ = query.shape
    kv_heads, tokens = key.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.to(dtype).unflatten(1, (kv_heads, heads // kv_heads)) * scaling
    scores = (q @ key.to(dtype).unsqueeze(2).mT).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        causal = torch.ones(n, tokens, dtype=torch.bool, device=query.device).tril(tokens - n)
        scores = scores.masked_fill(~causal, -torch.inf)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask.to(dtype)
    if sink_logits is not None:
        scores = torch.cat((scores, sink_logits.to(dtype).view(1, heads, 1, 1).expand(batch, -1, n, -1)), dim=-1)
    p = scores.softmax(-1)[..., :tokens].unflatten(1, (kv_heads, -1))
    return (p @ value.to(dtype).unsqueeze(2)).flatten(1, 2).to(query.dtype)
