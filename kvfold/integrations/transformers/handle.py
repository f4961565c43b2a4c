"""What a folded layer hands to attention in the place of dense keys and values."""

from typing import Any

from torch import Tensor

from kvfold.cache.layer import Appended


class FoldedHandle(Tensor):
    """Stands for keys or values that are folded: it has their shape, and no elements.

    transformers passes what `Cache.update` returns straight to the attention function, which takes
    `appended` from it. A model whose own code computes with it instead cannot use folded attention;
    it gets an error, never a wrong answer.
    """

    appended: Appended

    @staticmethod
    def __new__(cls, appended: Appended, like: Tensor) -> "FoldedHandle":
        shape = (*like.shape[:2], appended.layer.columns, like.shape[3])
        handle = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        handle.appended = appended
        return handle

    def __init__(self, appended: Appended, like: Tensor) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FoldedHandle(shape={tuple(self.shape)}, layer={self.appended.layer.index})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"this model computes {func} with cached keys or values outside of its attention function, so it cannot "
            "read a folded cache: call kvfold.detach(model) and the cache will be unfolded when it is read"
        )


def appended_of(key: Tensor) -> Appended | None:
    """What a folded layer appended, or None if `key` is an ordinary tensor."""
    return key.appended if isinstance(key, FoldedHandle) else None
