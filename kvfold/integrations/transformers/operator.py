"""Appending to a folded layer and reading it, as one operator: graphs can hold that, and no cache that grows."""

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvfold.integrations.transformers.cache import FoldedCache

_NUMBERS = count()
_CACHES: WeakValueDictionary[int, "FoldedCache"] = WeakValueDictionary()


def number_of(cache: "FoldedCache") -> Tensor:
    """A new number for a cache, int64 (1,), by which graphs name it: in a tensor it is no constant of theirs."""
    number = next(_NUMBERS)
    _CACHES[number] = cache
    with torch.inference_mode(mode=False):  # where the cache is made says nothing of where it is read
        return torch.tensor([number], device="cpu")


class Awaited(NamedTuple):
    """On new keys (`part` 0) or values (1) in a graph: the layer of the cache to which their attention appends them."""

    cache: "FoldedCache"
    layer: int
    part: int


def await_attention(cache: "FoldedCache", layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """New keys and values in a graph, to be appended where attention reads them.

    They stand for all keys and values only to attention, so it must take these very tensors, once; until then
    `cache.forward_pass.awaited` is their layer.
    """
    if cache.forward_pass.awaited is not None:
        raise not_taken(cache.forward_pass.awaited)
    cache.forward_pass.awaited = layer
    key.kvfold, value.kvfold = Awaited(cache, layer, 0), Awaited(cache, layer, 1)  # type: ignore[attr-defined]
    return key, value


def take_awaited(key: Tensor, value: Tensor) -> tuple["FoldedCache", int] | None:
    """Cache and layer that await attention to these keys and values; None if they are no such ones."""
    one, other = getattr(key, "kvfold", None), getattr(value, "kvfold", None)
    if one is None or other is None:
        return None
    cache, layer, _ = one
    if (one.part, other.part) != (0, 1) or cache.forward_pass.awaited != layer or other.layer != layer:
        raise not_taken(layer)
    cache.forward_pass.awaited = None
    return cache, layer


def not_taken(layer: int) -> RuntimeError:
    """What to raise if the new keys and values of a layer did not come to attention as they were, once."""
    return RuntimeError(
        f"layer {layer}: this model does something else with cached keys or values than to attend to them once, which "
        "a compiled graph over a folded cache cannot do: run it without torch.compile"
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

    Parameters
    ----------
    query, key, value
        (batch, heads, n, key_dim), (batch, kv_heads, n, key_dim) and (batch, kv_heads, n, value_dim) of the new tokens.

    Returns
    -------
    Tensor
        (batch, n, heads, value_dim).
    """
    read: Callable[..., Tensor] = _CACHES[int(cache)].append_and_attend
    return read(
        layer, query, key, value, mask=mask, scaling=scaling, softcap=softcap, sink_logits=sink_logits, backend=backend
    )


@append_and_attend.register_fake
def _(cache: Tensor, layer: int, query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
