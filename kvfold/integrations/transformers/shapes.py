"""What each layer of a cache holds, by the model's config."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvfold.cache.shape import LayerShape

KIND_OF = {
    "DynamicLayer": "full",
    "DynamicIndexedLayer": "dense",
    "LinearAttentionAndFullAttentionLayer": "dense",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding",
    "LinearAttentionLayer": "none",
    "DummyLayer": "none",
}
"""What layers of transformers hold, by the names of their classes. Models may have others of their own."""


@dataclass(frozen=True)
class HeadDim:
    """A head dimension and the evidence for it."""

    value: int  # coordinates of a key of one head
    evidence: tuple[str, ...]  # the step that decided, then what the other steps say


def cache_layers(config: PreTrainedConfig) -> list[Any]:
    """The layers that transformers gives a model's cache.

    Raises ValueError if the config is of an encoder-decoder model, or transformers makes no cache by it.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("config is of an encoder-decoder model: only caches of decoder-only models fold")
    try:
        try:
            return list(DynamicCache(config=config).layers)
        except KeyError:  # some models bring layers of their own, known once the module that defines them is imported
            MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config.get_text_config(decoder=True)), None)
            return list(DynamicCache(config=config).layers)
    except Exception as error:  # configs fail in many ways
        raise ValueError(f"transformers makes no cache by this {config.model_type} config: {error}") from None


def layer_shapes(config: PreTrainedConfig, layers: Sequence[Any] | None = None) -> tuple[LayerShape, ...]:
    """Shapes of all layers of a model's cache; a nested config of the language model is found.

    `layers` is the result of `cache_layers`, if it exists already; else ValueError as there.
    """
    text = config.get_text_config(decoder=True)
    layers = cache_layers(config) if layers is None else layers
    cross = getattr(text, "cross_attention_layers", None) or ()  # these hold an image
    indexers = getattr(text, "indexer_types", None) or ["full"] * len(layers)  # "shared": by an earlier layer's
    known: dict[tuple[int, str, int], LayerShape] = {}
    shapes = []
    for i, (layer, own) in enumerate(zip(layers, config_of_each_layer(text, len(layers)), strict=True)):
        kind = KIND_OF.get(type(layer).__name__, type(layer).__name__) if i not in cross else "none"
        window = int(layer.sliding_window) if kind == "sliding" else 0
        if (id(own), kind, window) not in known:
            known[id(own), kind, window] = _shape(own, kind, window)
        shape = known[id(own), kind, window]
        if kind == "sliding":
            shape = replace(shape, plain=type(layer) is DynamicSlidingWindowLayer and not has_latents(own))
        shapes.append(replace(shape, beside=0) if indexers[i] == "shared" else shape)
    return tuple(shapes)


def config_of_each_layer(config: PreTrainedConfig, layers: int) -> list[PreTrainedConfig]:
    """The config of each layer: one for all, unless layers differ."""
    own = getattr(config, "per_layer_config", None)
    return [config] * layers if own is None else [own[i] for i in range(layers)]


def has_latents(config: PreTrainedConfig) -> bool:
    """Whether a text model's layers cache latents (multi-head latent attention)."""
    return getattr(config, "kv_lora_rank", None) is not None


def check_shape(key: Tensor, shape: LayerShape, index: int, config: PreTrainedConfig) -> None:
    """Raise ValueError if keys (batch, kv_heads, tokens, key_dim) are not those of a layer of this config."""
    if shape.kind not in ("full", "sliding") or not shape.is_known or key.ndim != 4:
        return
    if (key.shape[1], key.shape[3]) != (shape.kv_heads, shape.key_dim):
        raise ValueError(
            f"layer {index}: keys have {key.shape[1]} heads of {key.shape[3]}, but this cache was made for a "
            f"{config.model_type} config with {shape.kv_heads} heads of {shape.key_dim}: "
            "make one with FoldedCache(model.config)"
        )


def resolve_head_dim(config: PreTrainedConfig) -> HeadDim:
    """Head dimension by a cascade of five steps, cross-checked; raises ValueError if the config has none of them.

    MLA key length, explicit key length, sliding-window key length, value length, hidden size over heads: the first that
    the config has decides, and the others are kept as evidence. MLA comes first, as its configs have an explicit
    length, too, but of the rotary part alone.
    """
    config = config.get_text_config(decoder=True)
    nope, rope = _number(config, "qk_nope_head_dim"), _number(config, "qk_rope_head_dim")
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    steps = {
        "qk_nope_head_dim + qk_rope_head_dim": nope + rope if nope and rope else 0,
        "head_dim": _number(config, "head_dim"),
        "swa_head_dim": _number(config, "swa_head_dim"),
        "v_head_dim": _number(config, "v_head_dim"),
        "hidden_size / num_attention_heads": hidden // heads if heads else 0,
    }
    found = {name: value for name, value in steps.items() if value}
    if not found:
        raise ValueError(f"config tells no head dimension: it has none of {', '.join(steps)}")
    (decided, value), *others = found.items()
    agreement = (f"{name} = {own} {'agrees' if own == value else 'differs'}" for name, own in others)
    return HeadDim(value, (f"{decided} = {value}", *agreement))


def _shape(config: PreTrainedConfig, kind: str, window: int) -> LayerShape:
    """What a layer of a kind holds, by its own config."""
    if kind == "none":
        return LayerShape(kind)
    rank, rope, heads = (_number(config, name) for name in ("kv_lora_rank", "qk_rope_head_dim", "num_attention_heads"))
    beside = (_number(config, "index_head_dim") or _number(config, "indexer_head_dim")) if kind == "dense" else 0
    shape = LayerShape(kind, window=window, heads=heads, beside=beside)
    if rank and rope:
        return replace(shape, kind="latent" if kind == "full" else kind, kv_heads=1, key_dim=rank, value_dim=rope)
    try:
        dim = resolve_head_dim(config).value
    except ValueError:
        return shape
    if kind == "sliding":
        dim = _number(config, "swa_head_dim") or dim
    return replace(shape, kv_heads=_kv_heads(config, kind), key_dim=dim, value_dim=_number(config, "v_head_dim") or dim)


def _kv_heads(config: PreTrainedConfig, kind: str) -> int:
    """KV heads that a layer keeps; 0 if the config does not tell them."""
    found = _number(config, "num_key_value_heads")
    if kind == "sliding":
        found = _number(config, "swa_num_key_value_heads") or found
        if config.model_type == "mimo_v2_flash":  # its code, not its config, doubles them in layers with windows
            found *= 2
    if found:
        return found
    if not type(config).__module__.startswith("transformers."):  # custom code may use other names
        return 0
    heads = _number(config, "num_attention_heads")
    if not getattr(config, "multi_query", False) or getattr(config, "new_decoder_architecture", False):
        return heads  # Falcon's newer models repeat their KV heads before they keep them
    return 1


def _number(config: PreTrainedConfig, name: str) -> int:
    """A size that a config has; 0 if it has none, or one a layer."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0
