"""One operator that appends to a folded layer and reads it: graphs can hold that, but no cache that grows."""

from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvfold.integrations.transformers.layer import ForwardPass


class NumberedCache(Protocol):
    """A cache that graphs know by a number: the part of `FoldedCache` that the operator uses."""

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
    """A new number for a cache, int64 (1,), by which graphs name it: as a tensor it is no constant of a graph."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    with torch.inference_mode(mode=False):  # the cache may be read outside the mode that it is made in
        return torch.tensor([number], device="cpu")


class Awaited(NamedTuple):
    """Carried by stand-ins for a layer's keys (`part` 0) or values (1): the new ones, which attention appends."""

    cache: NumberedCache
    layer: int
    part: int
    new: Tensor


def await_attention(cache: NumberedCache, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Stand-ins in a graph for all keys and values of a layer, of which `key` and `value` are the new ones.

    Both have the shape of all and no elements (they are on "meta"), so computing with them fails. Attention must take
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
    """What keys and values in a call of attention stand for; None if they are no stand-ins."""
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
    """The error to raise unless a layer's stand-ins reached attention unchanged, exactly once."""
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

    No gradients flow through it. Its first tensor is on a CPU, which keeps it out of CUDA graphs. The new tokens'
    queries, keys and values are (batch, heads, n, key_dim), (batch, kv_heads, n, key_dim) and (batch, kv_heads, n,
    value_dim), the output is (batch, n, heads, value_dim).
    """
    return _CACHES[int(cache)].append_and_attend(
        layer, query, key, value, mask=mask, scaling=scaling, softcap=softcap, sink_logits=sink_logits, backend=backend
    )


@append_and_attend.register_fake
def _(cache: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
