"""Configs and layers of a cache as `Contents` of a file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvfold.cache.budgets import PromptBudgets
from kvfold.cache.files.contents import FLOATS, Contents
from kvfold.cache.files.layer import layer_from_saved as folded_from_saved
from kvfold.cache.files.layer import layer_to_saved as folded_to_saved
from kvfold.cache.layer import LayerCache
from kvfold.cache.policy import Policy
from kvfold.formats import DEFAULT, check_names
from kvfold.integrations.transformers.layer import FoldedLayer, FoldedSlidingLayer
from kvfold.integrations.transformers.origin import Origin
from kvfold.integrations.transformers.shapes import check_shape

KIND = "kvfold-cache"
VERSION = 4
"""Raised with every change of what files hold, of what a format's codes mean, and of when a format is fitted."""

SHAPING = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim",
    "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "layer_types", "sliding_window", "attention_chunk_size",
    "num_kv_shared_layers", "cross_attention_layers", "rope_parameters", "partial_rotary_factor",
)  # fmt: skip
"""The fields of a config that shape keys and values, where it has them."""
LARGEST = 2**20
"""A saved config with a larger number of layers, heads or channels is refused before anything is made of it."""


def config_to_saved(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as plain data."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    plain.pop("_name_or_path", None)  # a path on somebody's machine
    return plain


def config_from_saved(plain: dict[str, Any], given: PreTrainedConfig | None) -> PreTrainedConfig:
    """The config that `config_to_saved` saved, or `given` if it makes the same cache.

    Raises ValueError if `given` makes another cache, or there is none and transformers does not know the saved one.
    """
    if given is not None:
        own = config_to_saved(given.get_text_config(decoder=True))
        for name in SHAPING:
            if own.get(name) != plain.get(name):
                raise ValueError(
                    f"config.{name} = {own.get(name)!r}, but the cache was saved with {plain.get(name)!r}: give the "
                    "config of the model that filled it"
                )
        return given
    _check_sizes(plain)
    try:
        return AutoConfig.for_model(**plain)
    except Exception as error:  # transformers checks configs in many ways
        raise ValueError(
            f"transformers makes no config of the saved model_type = {plain.get('model_type')!r} ({error}): give "
            "config=model.config"
        ) from None


def _check_sizes(plain: dict[str, Any]) -> None:
    """Raise if a saved config has impossible sizes, before anything of such a size is made."""
    rope = plain.get("rope_parameters")
    parts = [plain, rope, *(rope.values() if isinstance(rope, dict) else ())]
    factors = [part.get("partial_rotary_factor") for part in parts if isinstance(part, dict)]
    sizes = [(name, plain.get(name), LARGEST) for name in SHAPING]
    for name, value, most in (*sizes, *(("partial_rotary_factor", factor, 1) for factor in factors)):
        if isinstance(value, int | float) and not 0 <= value <= most:
            raise ValueError(f"the saved config has {name} = {value}")


def check_savable(layers: Sequence[Any]) -> None:
    """Raise ValueError, before layers are filled, if one is of a class whose state is not known."""
    for index, layer in enumerate(layers):
        layer_to_saved(layer, index)


def layer_to_saved(layer: Any, index: int) -> Contents:
    """One layer of a cache; raises ValueError if its class is not one whose state is known."""
    kind = type(layer)
    if isinstance(layer, FoldedLayer):
        saved = folded_to_saved(layer.folded)
        if isinstance(layer, FoldedSlidingLayer):
            saved.data["record_past"] = layer.record_past
    elif kind in (DynamicLayer, DynamicSlidingWindowLayer):
        held = layer.is_initialized and layer.get_seq_length() > 0
        saved = Contents({"held": held}, {"keys": layer.keys, "values": layer.values} if held else {})
        if kind is DynamicSlidingWindowLayer:
            seen, recording = layer.get_seq_length(), getattr(layer, "record_past", False)
            saved.data |= {"cumulative_length": seen, "record_past": recording}
    elif kind.__name__ == "DummyLayer":
        saved = Contents()
    else:
        raise ValueError(
            f"layer {index} is a {kind.__name__}: save knows folded layers, DynamicLayer, DynamicSlidingWindowLayer "
            "and DummyLayer, and would lose what this one holds"
        )
    saved.data["class"] = kind.__name__
    return saved


def layer_from_saved(layer: Any, saved: Contents, index: int) -> None:
    """Let a new layer hold what `layer_to_saved` saved; everything is taken out of `saved`.

    Raises ValueError if it is a layer of another class, or does not hold such keys and values.
    """
    name = saved.take("class", str)
    if name != type(layer).__name__:
        raise ValueError(f"layer {index} was a {name[:80]}, by this config it is a {type(layer).__name__}")
    if isinstance(layer, FoldedLayer):
        if isinstance(layer, FoldedSlidingLayer):
            layer.record_past = saved.take("record_past", bool)
        width, layer.folded = layer.folded.config.sliding, folded_from_saved(saved, index)
        if layer.folded.config.sliding != width:
            raise ValueError(f"layer {index} has a window of {layer.folded.config.sliding}, by this config of {width}")
    elif isinstance(layer, DynamicLayer):
        _fill_dense(layer, saved)
    saved.done()


def _fill_dense(layer: Any, saved: Contents) -> None:
    held = saved.take("held", bool)
    if held:
        keys = saved.tensor("keys", FLOATS.values(), (None, None, None, None))
        values = saved.tensor("values", FLOATS.values(), (keys.shape[0], None, keys.shape[2], None))
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = saved.number("cumulative_length")
        fewest = min(layer.cumulative_length, layer.sliding_window - 1)
        most = fewest
        if saved.take("record_past", bool):
            layer.record_past, most = True, layer.cumulative_length
        tokens = layer.keys.shape[2] if held else 0
        if not fewest <= tokens <= most or held != (tokens > 0):
            raise ValueError(
                f"{saved.where}keys are of {tokens} tokens, but {layer.cumulative_length} came and the window is "
                f"{layer.sliding_window}"
            )
    elif held and not layer.keys.shape[2]:
        raise ValueError(f"{saved.where}keys are of no token")


def held_by_layer(layers: list[Any], config: PreTrainedConfig) -> dict[int, tuple[int, int]]:
    """Batch rows and tokens of each layer that holds some of the text."""
    apart = getattr(config, "cross_attention_layers", None) or ()  # these hold an image
    held = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, FoldedLayer) and layer.folded.shape is not None:
            held[index] = (layer.folded.batch, layer.folded.columns)
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.get_seq_length() and index not in apart:
            held[index] = (layer.keys.shape[0], layer.get_seq_length())
    return held


def batch_and_tokens(layers: list[Any], config: PreTrainedConfig) -> tuple[int, int] | None:
    """Batch rows and tokens that a cache's layers hold; None if they hold nothing, ValueError if some hold more."""
    held = held_by_layer(layers, config)
    if not held:
        return None
    first, whole = next(iter(held.items()))
    for index, own in held.items():
        if own != whole:
            raise ValueError(
                f"layer {index} holds {own[0]} rows of {own[1]} tokens and layer {first} {whole[0]} of {whole[1]}: a "
                "cache is saved whole, between forward passes"
            )
    return whole


def cache_to_saved(cache: Any, ids: Tensor | None) -> Contents:
    """What a `FoldedCache` holds, and the ids of its tokens, if they are given; raises as `FoldedCache.save`."""
    held, padding = batch_and_tokens(cache.layers, cache.text_config), cache.forward_pass.padding
    saved = Contents({"config": config_to_saved(cache.text_config), "layers": len(cache.layers)})
    saved.data["padding"] = None if padding is None else list(padding)
    saved.data["model"] = cache.origin.fingerprint() if held else None
    saved.data["ids"] = ids is not None
    if ids is not None:
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids = {short(ids)}: give a tensor, (batch, tokens) or (tokens,)")
        ids = ids[None] if ids.ndim == 1 else ids
        rows, tokens = held or (ids.shape[0], 0)
        whole_numbers = not ids.is_floating_point() and ids.dtype != torch.bool and bool((ids >= 0).all())
        if not whole_numbers or tuple(ids.shape) != (rows, tokens):
            raise ValueError(
                f"ids are {ids.dtype} of the shape {tuple(ids.shape)}: give those of the {tokens} tokens that the "
                f"cache holds, ({rows}, {tokens}) integers from 0 on; generate's last token is not among them"
            )
        saved.tensors["ids"] = ids.long()
    for i, layer in enumerate(cache.layers):
        saved.put(f"layer{i}", layer_to_saved(layer, i))
    return saved


def cache_from_saved(saved: Contents, make: Callable[..., Any], config: PreTrainedConfig | None) -> Any:
    """The cache that `cache_to_saved` saved; `make` makes an empty one, `config` is that of `FoldedCache.load`.

    Raises ValueError if the parts do not fit together, or the config.
    """
    own = config_from_saved(saved.take("config", dict), config)
    parts = [saved.part(f"layer{i}") for i in range(saved.number("layers"))]
    formats = [(i, part.data.get("format", "dense")) for i, part in enumerate(parts)]
    if any(not isinstance(format, str) for _, format in formats):
        raise ValueError("a layer's format is no name")
    # Layers get formats and statistics from the file below. Until then, some could not do without a calibration.
    for i, part in enumerate(parts):
        if part.data.get("calibrated"):
            check_names(formats[i][1])
            formats[i] = i, DEFAULT
    try:
        sliding = any(part.data.get("class") == FoldedSlidingLayer.__name__ for part in parts)
        cache = make(own, policy=Policy(DEFAULT, exceptions=formats, sliding=sliding))
    except Exception as error:
        if config is not None or isinstance(error, ValueError):
            raise
        raise ValueError(f"the saved config makes no cache ({error}): give config=model.config") from None
    if len(cache.layers) != len(parts):
        raise ValueError(f"the file has {len(parts)} layers, a cache of its config {len(cache.layers)}")
    for i, (layer, part) in enumerate(zip(cache.layers, parts, strict=True)):
        layer_from_saved(layer, part, i)
        if isinstance(layer, FoldedLayer) and layer.folded.shape is not None:
            batch, kv_heads, key_dim, _ = layer.folded.shape
            check_shape(torch.empty(batch, kv_heads, 0, key_dim), cache.shapes[i], i, cache.text_config)
        elif cache.shapes[i].folds and layer.is_initialized:
            check_shape(layer.keys, cache.shapes[i], i, cache.text_config)
    _share_budgets([layer.folded for layer in cache.layers if isinstance(layer, FoldedLayer)])
    held = batch_and_tokens(cache.layers, cache.text_config)
    if not saved.lacks("padding"):
        cache.forward_pass.padding = saved.numbers("padding")
    if not saved.lacks("model"):
        model = saved.part("model")
        cache.origin = Origin({name: model.take(name, str) for name in ("weights", "dtype")})
        model.done()
    if saved.take("ids", bool):
        cache.ids = saved.tensor("ids", [torch.int64], held or (None, 0))
    saved.done()
    return cache


def _share_budgets(layers: Sequence[LayerCache]) -> None:
    """Let loaded layers whose bits depend on the prompt share one object that chooses them."""
    own = [layer for layer in layers if layer.config.budgets is not None]
    budgets = PromptBudgets({layer.index: layer.config.format for layer in own})
    for layer in own:
        layer.config = replace(layer.config, budgets=budgets)
