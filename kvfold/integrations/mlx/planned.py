"""Which caches of a model of mlx-lm may be folded ones, by a pass that MLX plans but never computes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as theirs

from kvfold.cache.batch import Appended
from kvfold.cache.config import LayerConfig
from kvfold.cache.mlx import ArrayLayer
from kvfold.formats.base import Window
from kvfold.integrations.mlx.attach import FoldedHandle
from kvfold.integrations.mlx.layer import FoldedKVCache
from kvfold.integrations.mlx.passes import Passes

STEPS = (2, 1)
"""Tokens of a short prompt and of a step, as models may treat the two differently. All are sinks, so none folds."""


class _Tried(FoldedKVCache):
    """A folded layer that remembers what it gave."""

    appended: list[Appended]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[FoldedHandle, FoldedHandle]:
        handles = super().update_and_fetch(keys, values)
        self.appended = [*getattr(self, "appended", ()), handles[0].appended]
        return handles


def planned_shapes(model: Any, folding: Sequence[int]) -> dict[int, tuple[int, int, int, int]]:
    """Shapes of what an attached model would give to the layers `folding` of its prompt cache, by their index.

    A shape is batch, KV heads, and channels of a key and of a value. Layers that the model does not use are left out.
    MLX computes arrays only when they are evaluated; those of these passes never are.

    Raises ValueError if the model does anything with cached keys and values but hand them to `attach`'s attention, each
    layer after the one before.
    """
    if not folding:
        return {}
    layers, passes = theirs.make_prompt_cache(model), Passes()
    for index in folding:
        layers[index] = _Tried(ArrayLayer(LayerConfig("float16", index, window=Window(sinks=sum(STEPS)))), passes)
    try:
        for n in STEPS:
            model(mx.zeros((1, n), mx.int32), cache=layers)
        passes.check_whole()
    except Exception as error:
        raise ValueError(_refusal(model, f"{type(error).__name__}: {error}")) from error
    tried = {index: layers[index] for index in folding if layers[index].offset}
    unread = [index for index, layer in tried.items() if not all(new.observed for new in layer.appended)]
    if unread:
        raise ValueError(_refusal(model, f"no attention reads layer {unread[0]}"))
    return {index: layer.layer.shape for index, layer in tried.items()}


def _refusal(model: Any, why: str) -> str:
    return (
        f"{getattr(model, 'model_type', type(model).__name__)} computes with cached keys and values itself, and folded "
        f"ones have no elements: take kvfold.FoldedCache in torch, or a cache of mlx-lm's own ({why})"
    )
