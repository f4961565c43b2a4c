"""Let mlx-lm's models read folded caches."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base

from kvfold.attention.mlx import attend
from kvfold.cache.batch import Appended

FUNCTION = "scaled_dot_product_attention"
_THEIRS = getattr(base, FUNCTION)


class FoldedHandle:
    """Returned by a folded layer instead of dense keys and values: it has their shape, but no elements.

    mlx-lm's models pass the result of `update_and_fetch` to `scaled_dot_product_attention`, which takes `appended` from
    it. Any other use is an error.
    """

    def __init__(
        self, appended: Appended, like: mx.array, part: int, reading: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.appended, self.part, self.dtype, self.reading = appended, part, like.dtype, reading
        self.shape = (*like.shape[:2], appended.layer.columns, like.shape[3])
        self.ndim = 4

    def read(
        self, queries: mx.array, values: "FoldedHandle", scale: float, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention over these keys and their values; without a mask it is causal."""
        with self.reading():
            return attend(queries, self.appended, scaling=scale, mask=mask, sink_logits=sinks)

    def belongs_to(self, values: "FoldedHandle") -> bool:
        """Whether these are keys, and those the values that came with them."""
        return self.appended is values.appended and (self.part, values.part) == (0, 1)

    def astype(self, dtype: mx.Dtype) -> "FoldedHandle":
        """Itself: folded keys and values are read in float32, whatever they came as."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            f"this model asks for {name!r} of cached keys or values itself, and folded ones have no elements: kvfold's "
            f"MLX cache is for models that hand them to mlx_lm.models.base.{FUNCTION}"
        )

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("[...]")


@wraps(_THEIRS)
def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    if not isinstance(keys, FoldedHandle):
        return _THEIRS(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
    if type(values) is not type(keys) or not keys.belongs_to(values):
        raise TypeError("folded keys come with values that are not theirs: this model mixes caches in a way of its own")
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f"mask = {mask!r}: folded attention takes 'causal', an array or None")
        mask = None
    elif mask is None and queries.shape[2] > 1:  # in mlx-lm, None lets all queries read all keys
        mask = mx.ones((queries.shape[2], keys.shape[2]), mx.bool_)
    return keys.read(queries, values, scale, mask, sinks)


def attach(model: nn.Module | None = None) -> None:
    """Let all models of mlx-lm read folded caches folded; other caches are read as before.

    Each model's module imports the attention function by name. So it is replaced in those modules, and in the one from
    which later modules will import it. Another call covers modules imported since; `detach` undoes it.

    Parameters
    ----------
    model
        A model whose code may be in no imported module, as when mlx-lm runs a checkpoint's own `model_file`.
    """
    _replace(_THEIRS, _attention, model)


def detach(model: nn.Module | None = None) -> None:
    """Undo `attach`."""
    _replace(_attention, _THEIRS, model)


def require_attached() -> None:
    """Raise RuntimeError after `detach`."""
    if getattr(base, FUNCTION) is not _attention:
        raise RuntimeError(
            "mlx-lm's models were detached and read no folded cache: call kvfold.integrations.mlx.attach() first"
        )


def _replace(old: Callable[..., Any], new: Callable[..., Any], model: nn.Module | None) -> None:
    names = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    if model is not None:
        names += [getattr(type(module).__call__, "__globals__", {}) for module in model.modules()]
    for own in names:
        if own.get(FUNCTION) is old:
            own[FUNCTION] = new
