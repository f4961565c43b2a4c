"""Appending to a folded layer and reading it, as one operator: graphs can hold that, and no cache that grows."""

from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvfold.integrations.transformers.layer import ForwardPass


class NumberedCache(Protocol):
    """A cache that graphs know by a number: what the operator asks of `FoldedCache`."""

    forward_pass: ForwardPass
    layers: list[Any]
    number: Tensor | None

    def append_and_attend(
        self, layer_idx: int, query: Tensor, key_states: Tensor, value_states: Tensor, *, mask: Tensor | None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Append a layer's new tokens and attend with their queries."""


_NUMBERS = count()
_CACHES: WeakValueDictionary[int, NumberedCache] = WeakValueDictionary()


def number_of(cache: NumberedCache) -> Tensor:
    """A new number for a cache, int64 (1,), by which graphs name it: in a tensor it is no constant of theirs."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    with torch.inference_mode(mode=False):  # where the cache is made says nothing of where it is read
        return torch.tensor([number], device="cpu")


class Awaited(NamedTuple):
    """On what stands in a graph for keys (`part` 0) or values (1) of a layer: the new ones, which attention appends."""

    cache: NumberedCache
    layer: int
    part: int
    new: Tensor


def await_attention(cache: NumberedCache, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What stands in a graph for all keys and values of a layer, of which `key` and `value` are the new ones.

    Both have their shape and no elements (they are on "meta"), so whoever computes with them fails. Attention must take
    these very tensors, once; until then `cache.forward_pass.awaited` is their layer.
    """
    if cache.forward_pass.awaited is not None:
        raise not_taken(cache.forward_pass.awaited)
    cache.forward_pass.awaited = layer
    columns = cache.layers[layer].get_seq_length() + key.shape[2]
    parts = []
    for part, new in enumerate((key, value)):
        stand_in = new.new_empty((*new.shape[:2], columns, new.shape[3]), device="meta")
        stand_in.kvfold = Awaited(cache, layer, part, new)  # type: ignore[attr-defined]
        parts.append(stand_in)
    return parts[0], parts[1]


def take_awaited(query: Tensor, key: Tensor, value: Tensor) -> tuple[Awaited, Awaited] | None:
    """What keys and values stand for that come to attention with a query; None if they stand for nothing."""
    one, other = getattr(key, "kvfold", None), getattr(value, "kvfold", None)
    if one is None and other is None and query.device == key.device == value.device:
        return None
    if one is None or other is None:
        raise not_taken(None)
    if (one.part, other.part) != (0, 1) or not one.layer == other.layer == one.cache.forward_pass.awaited:
        raise not_taken(one.layer)
    one.cache.forward_pass.awaited = None
    return one, other


def not_taken(layer: int | None) -> RuntimeError:
    """What to raise if a layer's keys and values did not come to attention as they were, once."""
    return RuntimeError(
        f"layer {'unknown' if layer is None else layer}: this model does something else with cached keys or values "
        "than to attend to them once, which a compiled graph over a folded cache cannot do: leave graphs for this "
        "cache by cache.update = torch.compiler.disable(cache.update), or run the model without torch.compile"
    )


@torch.library.custom_op("kvfold::append_and_attend", mutates_args=("cache",))
def append_and_attend(
    cache: Tensor,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    backend: str | None,
) -> Tensor:
    """Append new tokens to a layer of the cache with that number, then `kvfold.attention.attend`.

    No gradients flow through it. The first tensor tells that it runs on a CPU, which keeps it out of CUDA graphs.

    Parameters
    ----------
    query, key, value
        (batch, heads, n, key_dim), (batch, kv_heads, n, key_dim) and (batch, kv_heads, n, value_dim) of the new tokens.

    Returns
    -------
    Tensor
        (batch, n, heads, value_dim).
    """
    return _CACHES[int(cache)].append_and_attend(
        layer, query, key, value, mask=mask, scaling=scaling, softcap=softcap, sink_logits=sink_logits, backend=backend
    )


@append_and_attend.register_fake
def _(cache: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
