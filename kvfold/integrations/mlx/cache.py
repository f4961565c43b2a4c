"""A prompt cache of mlx-lm whose full-attention layers are folded."""

import json
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import cache as theirs

from kvfold.cache.budgets import PromptBudgets, budgeted, prompt_budgets
from kvfold.cache.calibration import Calibration
from kvfold.cache.mlx import ArrayLayer, held_array_bytes
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport, LayerReport
from kvfold.cache.saved import Contents
from kvfold.formats import DEFAULT
from kvfold.integrations.mlx.attach import FoldedHandle, attach

logger = logging.getLogger("kvfold")

KIND = "kvfold-mlx-3"

# By `Passes.name`: mlx-lm loads layers one by one, and those of a cache share what gives them bits.
_LOADED: WeakValueDictionary[str, PromptBudgets] = WeakValueDictionary()


@dataclass
class Passes:
    """What the layers of one prompt cache must know of each other.

    Attributes
    ----------
    broken
        Why one of them did not take the tokens that others took; None if all is well.
    trace
        Whether the log has said that a trim left one.
    name
        What layers of the same prompt cache find each other by once they are loaded, one by one.
    """

    broken: str | None = None
    trace: bool = False
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    def check(self) -> None:
        """Raise ValueError if a pass failed."""
        if self.broken is not None:
            raise ValueError(f"this prompt cache lost tokens in an earlier pass, make a new one: {self.broken}")

    @contextmanager
    def one(self) -> Iterator[None]:
        """A part of a pass; if it fails, so has the whole."""
        self.check()
        try:
            yield
        except Exception as error:
            self.broken = str(error)
            raise


class FoldedKVCache(theirs._BaseCache):  # type: ignore[misc]
    """One folded layer as mlx-lm sees it: `make_prompt_cache` makes a list of them.

    Not batched with others by mlx-lm's server (it has no `merge`), and not quantised again.
    """

    def __init__(self, layer: ArrayLayer, passes: Passes | None = None) -> None:
        self.layer = layer
        self.passes = passes or Passes()

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
        """Add tokens, (batch, kv_heads, n, dim); what comes back stands for all keys and values in attention.

        Raises
        ------
        ValueError
            On keys or values that do not fit what is held, or that hold NaN or infinity where they fold. The other
            layers may have taken this pass's tokens, so the whole prompt cache is of no use then, and says so.
        """
        with self.passes.one():
            appended = self.layer.append(keys, values)
        return FoldedHandle(appended, keys, 0, self.passes.one), FoldedHandle(appended, values, 1, self.passes.one)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of `N` new tokens, as mlx-lm's own caches give it."""
        return theirs.create_attention_mask(N, self.offset, return_array, window_size)

    def is_trimmable(self) -> bool:
        """True: see `trim`."""
        return True

    def trim(self, n: int) -> int:
        """Forget the newest `n` tokens; returns how many.

        Up to `layer.undo` of them leave no trace, as speculative decoding wants it. Further back, tokens whose page had
        folded go on from their folded values, and the log says so.
        """
        self.passes.check()
        if n < 0:
            raise ValueError(f"n = {n}: give a number of tokens to forget, 0 or more")
        n = min(self.offset, n)
        if n and self.layer.crop(self.offset - n) and not self.passes.trace:
            self.passes.trace = True
            logger.warning(
                "layer %d: trim by %d tokens goes back further than the %d that leave no trace: tokens whose page had "
                "folded go on from their folded values", self.layer.index, n, self.layer.undo,
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
        """Arrays by name, and under "about" the bytes of a line of JSON: all that it takes to go on.

        For mlx-lm's `save_prompt_cache`, and to be evaluated.
        """
        self.passes.check()
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
        self.passes = Passes(name=name)
        if self.layer.budgets is not None:
            own, self.layer.budgets = self.layer.budgets, _LOADED.setdefault(name, self.layer.budgets)
            self.layer.budgets.join(own.formats)
        attach()

    @property
    def meta_state(self) -> str:
        """Nothing: `state` has it all. mlx-lm before 0.32 saves it beside."""
        return ""

    @meta_state.setter
    def meta_state(self, meta_state: str) -> None:
        if meta_state:
            raise ValueError(f"meta_state = {meta_state!r}: a folded cache has none")

    @classmethod
    def from_state(cls, state: dict[str, Any], meta_state: str = "") -> "FoldedKVCache":
        """The layer that `state` told of.

        Raises
        ------
        ValueError
            If it is none, or damaged.
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


def make_prompt_cache(
    model: Any,
    format: str | None = None,
    *,
    policy: Policy | None = None,
    dense_dtype: torch.dtype | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> list[Any]:
    """A prompt cache for a model of mlx-lm, to be passed to its `generate` as `prompt_cache`.

    Full-attention layers fold; layers with a sliding window or a state are mlx-lm's own, dense. Attention of all of
    mlx-lm's models reads folded caches from then on (`kvfold.integrations.mlx.attach`).

    Parameters
    ----------
    model
        A model of mlx-lm.
    format, policy, dense_dtype, calibration
        As `kvfold.FoldedCache` takes them.

    Raises
    ------
    ValueError
        On an unknown format, one that cannot take the model's head dimension, or a model with latent attention.

    Examples
    --------
    >>> model, tokenizer = mlx_lm.load("some/folder")
    >>> cache = make_prompt_cache(model, "kvfold-4")
    >>> mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)
    """
    if format is not None and policy is not None:
        raise ValueError(f"format = {format!r} and a policy: give one of them, the policy names formats itself")
    policy = policy or Policy(format or DEFAULT)
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    arguments = _text_arguments(model)
    if getattr(arguments, "kv_lora_rank", None):
        raise ValueError(
            f"{getattr(model, 'model_type', 'this model')} keeps latents (kv_lora_rank = {arguments.kv_lora_rank}), "
            "which kvfold folds in torch only: take kvfold.FoldedCache"
        )
    layers = theirs.make_prompt_cache(model)
    if calibration is not None and max(calibration.layers, default=0) >= len(layers):
        raise ValueError(
            f"the calibration has a layer {max(calibration.layers)}, the model has {len(layers)} layers: calibrate "
            "this model"
        )
    policy = budgeted(policy, calibration, len(layers))
    passes, head_dim = Passes(), _head_dim(arguments)
    folding = [index for index, layer in enumerate(layers) if type(layer) is theirs.KVCache]
    budgets = prompt_budgets(policy, calibration, len(layers), folding)
    for index in folding:
        name = policy.format_of(index, len(layers))
        if name is None:
            continue
        folded = ArrayLayer(name, index, dense_dtype, policy.window)
        if budgets is not None and index in budgets.formats:
            folded.budgets = budgets
        if calibration is not None:
            folded.statistics = calibration.layers.get(index)
            if folded.statistics is None:
                raise ValueError(f"the calibration has no layer {index}: calibrate this model")
        if head_dim is not None and folded.formats_of(head_dim, head_dim).keys.turns_back:
            raise ValueError(f"format = {name!r} turns RoPE back, which kvfold does in torch only: take tbq3")
        layers[index] = FoldedKVCache(folded, passes)
    wanted = any(policy.format_of(i, len(layers)) is not None for i in range(len(layers)))
    if wanted and not any(isinstance(layer, FoldedKVCache) for layer in layers):
        logger.warning(
            "no layer of this model folds (its caches are %s), so this cache is dense: windows and states do not fold",
            ", ".join(sorted({type(layer).__name__ for layer in layers})),
        )
    attach()
    return layers


def _text_arguments(model: Any) -> Any:
    """The arguments of the language model in `model`."""
    inner = getattr(model, "language_model", None)
    return getattr(inner, "args", None) or getattr(model, "args", None)


def _head_dim(arguments: Any) -> int | None:
    """Channels of a head, if the arguments tell."""
    own = getattr(arguments, "head_dim", None)
    if own:
        return int(own)
    width, heads = (getattr(arguments, name, None) for name in ("hidden_size", "num_attention_heads"))
    return width // heads if width and heads else None


def cache_report(cache: Sequence[Any]) -> CacheReport:
    """What a prompt cache holds, layer by layer, walked array by array, tables included."""
    rows, tables, values = [], [], 0
    for index, each in enumerate(cache):
        if isinstance(each, FoldedKVCache):
            layer = each.layer
            tables.append(layer.tables())
            row = LayerReport(index, layer.folded_as, layer.columns, 0, layer.value_count, each.nbytes)
        else:
            held, dense = each.nbytes, getattr(each, "keys", None)
            tokens = getattr(each, "offset", 0)
            count = 0
            if isinstance(dense, mx.array):
                per_token = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in (each.keys, each.values))
                count = per_token * min(tokens, dense.shape[2])
            row = LayerReport(index, "dense", tokens, 0, count, held)
        rows.append(row)
        values += row.values
    shared = held_array_bytes(tables)
    return CacheReport(tuple(rows), shared, shared + sum(row.held_bytes for row in rows), values)
