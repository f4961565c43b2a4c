"""What a folded layer hands to attention in the place of dense keys and values."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from kvfold.cache.batch import Appended
from kvfold.cache.layer import LayerCache


class FoldedHandle(Tensor):
    """A stand-in for folded keys or values: it has their shape, but no elements.

    transformers passes the result of `Cache.update` straight to the attention function, which takes `appended` from it,
    and the `backend` that is to read it. If a model's own code computes with it first, it is unfolded at that point:
    the answer is right, and `warn` is called.
    """

    appended: Appended
    part: int
    warn: Callable[[str], None]
    backend: str | None

    @staticmethod
    def __new__(
        cls, appended: Appended, like: Tensor, part: int, warn: Callable[[str], None], backend: str | None = None
    ) -> "FoldedHandle":
        batch, heads, _, dim = like.shape
        handle = Tensor._make_wrapper_subclass(
            cls, (batch, heads, appended.layer.columns, dim), dtype=like.dtype, device=like.device
        )
        handle.appended, handle.part, handle.warn, handle.backend = appended, part, warn, backend
        return handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FoldedHandle(shape={tuple(self.shape)}, layer={self.appended.layer.index})"

    def to_unfolded(self) -> Tensor:
        """The dense tensor that it stands for."""
        self.warn(
            "this model computes with cached keys or values before its attention function, so they are unfolded at "
            "every step: answers are right, but it takes time and a dense copy of one layer"
        )
        layer = self.appended.layer
        assert isinstance(layer, LayerCache)
        if layer.config.sharpen:
            raise ValueError("sharpen = True, but this model computes with keys before its attention function")
        key, value = layer.unfold(self.dtype)
        if layer.config.values_of_keys:  # then it stands for the latent or the rotary part of keys
            key, value = value, key[..., value.shape[-1] :]
        return (key, value)[self.part]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(FoldedHandle, cls.to_unfolded, (args, kwargs or {}))
        return func(*args, **kwargs)


def appended_of(key: Tensor, value: Tensor) -> Appended | None:
    """What a folded layer appended, if both are its handles as `update` returned them; else None."""
    if isinstance(key, FoldedHandle) and isinstance(value, FoldedHandle) and (key.part, value.part) == (0, 1):
        return key.appended
    return None
