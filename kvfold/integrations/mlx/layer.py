"""One folded layer as mlx-lm sees it."""

import json
import logging
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as theirs

from kvfold.cache.files.contents import Contents
from kvfold.cache.mlx import ArrayLayer, held_array_bytes
from kvfold.integrations.mlx.attach import FoldedHandle, attach, require_attached
from kvfold.integrations.mlx.passes import Passes

logger = logging.getLogger("kvfold")

KIND = "kvfold-mlx-3"


class FoldedKVCache(theirs._BaseCache):  # type: ignore[misc]
    """One folded layer as mlx-lm sees it: `make_prompt_cache` makes a list of them.

    Where mlx-lm makes batches of the caches that it is given (from 0.32 on), it is batched by `merge`.
    """

    def __init__(self, layer: ArrayLayer, passes: Passes | None = None) -> None:
        self.layer = layer
        self.passes = passes or Passes()
        self.passes.join(layer)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)  # of a copy
        self.passes.join(self.layer)

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self.layer.columns

    def size(self) -> int:
        """Tokens held."""
        return self.layer.columns

    def empty(self) -> bool:
        """Whether nothing is held."""
        return not self.layer.columns

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[FoldedHandle, FoldedHandle]:
        """Add tokens, (batch, kv_heads, n, dim); returns stand-ins for all keys and values in attention.

        Raises
        ------
        ValueError
            On keys or values that do not fit what is held, or that hold NaN or infinity where they fold. The other
            layers may have taken this pass's tokens, so the whole prompt cache is unusable then, and later calls raise,
            too. The next pass also raises if an interrupt has kept this one's tokens from some layers.
        RuntimeError
            After `detach`.
        """
        require_attached()
        with self.passes.one(self.layer):
            appended = self.layer.append(keys, values)
        reading = self.passes.reading
        return FoldedHandle(appended, keys, 0, reading), FoldedHandle(appended, values, 1, reading)

    def keys_and_values(self) -> None:
        """Not possible: layers that share a cache need keys and values that other layers added, which are not kept.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError("layers share this cache and ask for keys and values that other layers added")

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of `N` new tokens, as mlx-lm's own caches give it."""
        return theirs.create_attention_mask(N, self.offset, return_array, window_size)

    def is_trimmable(self) -> bool:
        """True: see `trim`."""
        return True

    def trim(self, n: int) -> int:
        """Forget the newest `n` tokens; returns how many.

        Up to `layer.undo` tokens of the newest pass leave no trace, as speculative decoding wants it. Further back,
        tokens whose page had folded go on from their folded values, and the log says so.
        """
        if n < 0:
            raise ValueError(f"n = {n}: give a number of tokens to forget, 0 or more")
        n = min(self.offset, n)
        with self.passes.one(self.layer):
            lost = self.layer.crop(self.offset - n)
        if lost and not self.passes.trace:
            self.passes.trace = True
            logger.warning(
                "layer %d: trim by %d tokens goes back further than what leaves no trace, up to %d of the newest pass: "
                "tokens whose page had folded go on from their folded values", self.layer.index, n, self.layer.undo,
            )  # fmt: skip
        return n

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> None:
        """Not possible.

        Raises
        ------
        ValueError
            Always: `kv_bits` is for dense caches.
        """
        raise ValueError(f"kv_bits = {bits}: this cache is folded already; leave kv_bits out")

    @property
    def state(self) -> dict[str, Any]:
        """Arrays by name, and under "about" the bytes of a line of JSON: all that is needed to go on.

        For mlx-lm's `save_prompt_cache`, and for `mx.eval`.
        """
        self.passes.check_whole()
        data, arrays = self.layer.to_arrays()
        about = json.dumps({"kind": KIND, "layer": self.layer.index, "cache": self.passes.name, "data": data})
        return {"about": mx.array(list(about.encode()), dtype=mx.uint8), **arrays}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        held = dict(tree_flatten(state))
        try:
            about = Contents(json.loads(bytes(held.pop("about").tolist())))
            kind = about.data.pop("kind", None)
            if kind != KIND:
                raise ValueError(f"its kind is {kind!r}, this kvfold reads {KIND!r}")
            index = about.number("layer")
            self.layer = ArrayLayer.from_arrays(about.take("data", dict), held, index)
            name = about.take("cache", str)
            about.done()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is no state of a folded cache, or a damaged one: {error}") from None
        self.passes = Passes.loaded(name, self.layer)
        attach()

    @property
    def meta_state(self) -> str:
        """Empty: `state` has everything. mlx-lm before 0.32 saves this, too."""
        return ""

    @meta_state.setter
    def meta_state(self, meta_state: str) -> None:
        if meta_state:
            raise ValueError(f"meta_state = {meta_state!r}: a folded cache has none")

    @classmethod
    def from_state(cls, state: dict[str, Any], meta_state: str = "") -> "FoldedKVCache":
        """The layer that `state` describes.

        Raises
        ------
        ValueError
            If it is no such state, or damaged.
        """
        own = cls.__new__(cls)
        own.state, own.meta_state = state, meta_state
        return own

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's own arrays; tables that layers share are left out."""
        return held_array_bytes(self.layer.own())


# mlx-lm's load_prompt_cache looks classes up by name, there.
theirs.FoldedKVCache = FoldedKVCache
