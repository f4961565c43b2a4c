"""What folding a layer's keys and values costs, by what a prompt's first tokens make of them.

Errors of all tokens say little of it: the nearest carry most of what attention puts out, and they stay dense. Folding
those tokens only that a cache would hold folded when the query comes, the power of the error in attention's output,
relative to the output's, goes with the KL that folding the layer costs (docs/quality.md).
"""

import torch
from torch import Tensor

from kvfold.formats import Window, get_format
from kvfold.quant.packing import Lanes

EVERY = 4
"""One query of so many is looked at: the last."""

FOLDED = "kvfold-2"
"""What keys and values are folded into, channels as they come. In an order fitted to the same queries errors look
smaller than on those to come, and not by as much in each layer."""


def looked_at(first: int, sinks: int, stop: int) -> slice:
    """Of queries from position `first` on those that `far_errors` takes: none of sinks, none from `stop` on."""
    start = max(sinks - first, 0)
    start += (EVERY - 1 - (first + start - sinks)) % EVERY
    return slice(start, max(stop - first, 0), EVERY)


def count_looked_at(length: int, sinks: int) -> int:
    """How many queries of the first `length` tokens that is."""
    return max(length - sinks, 0) // EVERY


def far_errors(query: Tensor, key: Tensor, value: Tensor, window: Window, scaling: float | None) -> tuple[float, float]:
    """Powers of what folding keys, and folding values, does to attention's output, relative to the output's.

    Parameters
    ----------
    query
        Those of these tokens that are `looked_at`, (batch, heads, n, key_dim).
    key, value
        The first tokens, (batch, kv_heads, tokens, dim), dense.
    window
        What is dense when a query comes: sinks, and the `recent` newest tokens.
    scaling
        Factor on scores; None: key_dim^−½.
    """
    tokens, kv_heads = key.shape[2], key.shape[1]
    at = torch.arange(tokens, device=key.device)
    of = torch.arange(window.sinks + EVERY - 1, tokens, EVERY, device=key.device).unsqueeze(1)
    far = (of - at >= window.recent) & (at >= window.sinks)
    q = query.float().unflatten(1, (kv_heads, -1)) * (scaling or key.shape[3] ** -0.5)
    k, v = (x.float().unsqueeze(2) for x in (key, value))
    folded_k, folded_v = (_folded(key, window, "tokens").unsqueeze(2), _folded(value, window, "channels").unsqueeze(2))
    scores = (q @ k.mT).masked_fill(at > of, -torch.inf)
    weights = scores.softmax(-1)
    moved = torch.where(far, q @ folded_k.mT, scores).softmax(-1)
    output = weights @ v
    errors = torch.stack((moved @ v - output, (weights * far) @ (folded_v - v)))
    power = errors.square().sum(tuple(range(1, errors.ndim))) / output.square().sum()
    of_keys, of_values = power.nan_to_num(0.0).tolist()  # attention over what is not finite gives NaN whatever the bits
    return of_keys, of_values


def _folded(x: Tensor, window: Window, lanes: Lanes) -> Tensor:
    """`x` with all whole pages after the sinks folded and unfolded, float32."""
    fmt, x = get_format(FOLDED, x.shape[3], lanes=lanes), x.float()
    pages = (x.shape[2] - window.sinks) // fmt.page_size
    if pages <= 0:
        return x
    stop = window.sinks + pages * fmt.page_size
    return torch.cat((x[:, :, : window.sinks], fmt.unfold(fmt.fold(x[:, :, window.sinks : stop])), x[:, :, stop:]), 2)
