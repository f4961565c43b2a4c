"""How a layer of a cache goes back to what it held."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvfold.integrations.transformers.layer import FoldedLayer

Undo = Callable[[], None]


def undo_of_growth(layer: Any) -> Undo:
    """A function that takes a layer back to what it holds now, after tokens were appended.

    Keys and values that only grow are not kept alive: undoing cuts them to their length.
    """
    if isinstance(layer, FoldedLayer):
        state = layer.folded.state()
        return lambda: layer.folded.restore(state)
    grows = isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)
    length = layer.get_seq_length() if grows else 0
    if not length:
        return undo_of_change(layer)
    others = {name: _copied(x) for name, x in vars(layer).items() if name not in ("keys", "values")}

    def undo() -> None:
        vars(layer).update(others)
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    return undo


def undo_of_change(layer: Any) -> Undo:
    """A function that takes a layer back to what it holds now, after `crop`, or rows were selected."""
    if isinstance(layer, FoldedLayer):
        return undo_of_growth(layer)
    attributes = {name: _copied(x) for name, x in vars(layer).items()}
    return lambda: vars(layer).update(attributes)


def _copied(value: Any) -> Any:
    """A snapshot of an attribute.

    Layers replace most of their tensors, so these need no copy. Those of linear attention, which lie in lists or
    dictionaries, are written to, so they are copied.
    """
    if isinstance(value, list) and all(isinstance(x, Tensor) for x in value):
        return [x.clone() for x in value]
    if isinstance(value, dict):
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in value.items()}
    return value
