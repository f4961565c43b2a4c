"""Configs and layers of a cache as `Contents` of a file."""

import json
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvfold.cache.files.contents import FLOATS, Contents
from kvfold.cache.files.layer import layer_from_saved as folded_from_saved
from kvfold.cache.files.layer import layer_to_saved as folded_to_saved
from kvfold.integrations.transformers.layer import FoldedLayer

KIND = "kvfold-cache"
VERSION = 4
"""Raised with every change of what files hold, of what a format's codes mean, and of when a format is fitted."""

SHAPING = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim",
    "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "layer_types", "sliding_window", "attention_chunk_size",
    "num_kv_shared_layers", "cross_attention_layers", "rope_parameters", "partial_rotary_factor",
)  # fmt: skip
"""What of a config shapes keys and values, where it has it."""
LARGEST = 2**20
"""A saved config with a larger number of layers, heads or channels is refused before anything is made of it."""


def config_to_saved(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as plain data."""
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    plain.pop("_name_or_path", None)  # a path on somebody's machine
    return plain


def config_from_saved(plain: dict[str, Any], given: PreTrainedConfig | None) -> PreTrainedConfig:
    """The config that `config_to_saved` told of, or `given` if it makes the same cache.

    Raises
    ------
    ValueError
        If `given` makes another cache, or there is none and transformers does not know the saved one.
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
    """Raise if a saved config has numbers that are no sizes, before anything of such a size is made."""
    rope = plain.get("rope_parameters")
    parts = [plain, rope, *(rope.values() if isinstance(rope, dict) else ())]
    factors = [part.get("partial_rotary_factor") for part in parts if isinstance(part, dict)]
    sizes = [(name, plain.get(name), LARGEST) for name in SHAPING]
    for name, value, most in (*sizes, *(("partial_rotary_factor", factor, 1) for factor in factors)):
        if isinstance(value, int | float) and not 0 <= value <= most:
            raise ValueError(f"the saved config has {name} = {value}")


def check_savable(layers: Sequence[Any]) -> None:
    """Raise ValueError, before they are filled, if a layer is of a class whose state is not known."""
    for index, layer in enumerate(layers):
        layer_to_saved(layer, index)


def layer_to_saved(layer: Any, index: int) -> Contents:
    """One layer of a cache.

    Raises
    ------
    ValueError
        If its class is not one whose state is known.
    """
    kind = type(layer)
    if isinstance(layer, FoldedLayer):
        saved = folded_to_saved(layer.folded)
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
    """Let a new layer hold what `layer_to_saved` told of; all of `saved` is taken out.

    Raises
    ------
    ValueError
        If it is a layer of another class, or does not hold such keys and values.
    """
    name = saved.take("class", str)
    if name != type(layer).__name__:
        raise ValueError(f"layer {index} was a {name[:80]}, by this config it is a {type(layer).__name__}")
    if isinstance(layer, FoldedLayer):
        layer.folded = folded_from_saved(saved, index)
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
    """Batch rows and tokens that a cache's layers hold; None if they hold nothing.

    Raises
    ------
    ValueError
        If some hold more than others.
    """
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
