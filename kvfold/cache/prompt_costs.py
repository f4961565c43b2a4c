"""What folding a layer's keys and values costs, estimated on a prompt's first tokens.

The error over all tokens says little: the nearest tokens carry most of attention's output, and they stay dense. So for
each query only those tokens are folded that a cache would hold folded by then. The power of the error in attention's
output, relative to the output's, then follows the KL that folding the layer costs (docs/quality.md).
"""

import torch
from torch import Tensor

from kvfold.formats import Window, get_format
from kvfold.quant.packing import Lanes

EVERY = 4
"""One query in this many is used: the last."""

STAND_IN = "kvfold-2"
"""The format that keys and values are folded into, with channels in their given order. An order fitted to the same
queries would make errors look smaller than on later queries, by a different amount in each layer."""


def sampled(first: int, sinks: int, stop: int) -> slice:
    """The queries that `far_errors` takes, of those from position `first` on: no sinks, and none from `stop` on."""
    start = max(sinks - first, 0)
    start += (EVERY - 1 - (first + start - sinks)) % EVERY
    return slice(start, max(stop - first, 0), EVERY)


def count_sampled(length: int, sinks: int) -> int:
    """How many queries of the first `length` tokens `far_errors` takes."""
    return max(length - sinks, 0) // EVERY


def far_errors(query: Tensor, key: Tensor, value: Tensor, window: Window, scaling: float | None) -> tuple[float, float]:
    """Power of the error in attention's output if keys fold, and if values fold, relative to the output's.

    Attention is causal and plain here: softcaps, logits of sinks and other masks do not count. Keys and values are
    those of the first tokens, dense, (batch, kv_heads, tokens, dim); `query` are their `sampled` queries, (batch,
    heads, n, key_dim). When a query comes, the window's sinks and `recent` newest tokens are dense. `scaling` is the
    factor on scores; None: key_dim^−½.
    """
    tokens, kv_heads = key.shape[2], key.shape[1]
    at = torch.arange(tokens, device=key.device)
    of = torch.arange(window.sinks + EVERY - 1, tokens, EVERY, device=key.device).unsqueeze(1)
    far = (of - at >= window.recent) & (at >= window.sinks)
    scaling = scaling or key.shape[3] ** -0.5
    powers = torch.zeros(3, device=key.device)  # of both errors, and of the output
    for q, k, v in zip(query, key.float(), value.float(), strict=True):  # a row at a time: scores take room
        q = q.float().unflatten(0, (kv_heads, -1)) * scaling
        folded_k, folded_v = _folded(k, window, "tokens").unsqueeze(1), _folded(v, window, "channels").unsqueeze(1)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        scores = (q @ k.mT).masked_fill(at > of, -torch.inf)
        weights = scores.softmax(-1)
        output = weights @ v
        of_keys = torch.where(far, q @ folded_k.mT, scores).softmax(-1) @ v - output
        of_values = (weights * far) @ (folded_v - v)
        powers += torch.stack([x.square().sum() for x in (of_keys, of_values, output)])
    keys, values = (powers[:2] / powers[2]).nan_to_num(0.0).tolist()  # an output of zeros has nothing to lose
    return keys, values


def _folded(x: Tensor, window: Window, lanes: Lanes) -> Tensor:
    """`x`, (kv_heads, tokens, dim), with all whole pages after the sinks folded and unfolded."""
    fmt = get_format(STAND_IN, x.shape[2], lanes=lanes)
    pages = (x.shape[1] - window.sinks) // fmt.page_size
    if pages <= 0:
        return x
    stop = window.sinks + pages * fmt.page_size
    folded = fmt.unfold(fmt.fold(x[None, :, window.sinks : stop]))[0]
    return torch.cat((x[:, : window.sinks], folded, x[:, stop:]), 1)
