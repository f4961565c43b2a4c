"""Eviction policies and a model's config."""

from collections.abc import Sequence
from dataclasses import replace
from math import isclose

from transformers import PreTrainedConfig

from kvfold.cache.layer import LayerCache
from kvfold.eviction import Eviction, TriAttention
from kvfold.integrations.transformers.rope import Rope, rope_of
from kvfold.integrations.transformers.shapes import layer_configs


def for_model(policy: Eviction, config: PreTrainedConfig, layers: Sequence[LayerCache]) -> Eviction:
    """The policy, completed for this model.

    Raises ValueError if the policy or its statistics do not fit the model or its formats.
    """
    for layer in layers:
        if "tbqx3" in layer.config.format.split(":"):
            raise ValueError(
                f"format = {layer.config.format!r} turns keys to their places by their order, which eviction mixes: "
                "take amx3"
            )
    if policy.asks_queries and getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"a {config.model_type} has latent attention, whose queries {type(policy).__name__} does not read: take "
            "StreamingLLM"
        )
    formats = sorted({layer.config.format for layer in layers})
    if policy.mode != "per_layer_per_head" and len(formats) > 1:
        raise ValueError(
            f"mode = {policy.mode!r} lets all layers keep the same tokens, but they fold into {', '.join(formats)}: "
            "give mode='per_layer_per_head'"
        )
    return _tri_attention(policy, config, layers) if isinstance(policy, TriAttention) else policy


def _tri_attention(policy: TriAttention, config: PreTrainedConfig, layers: Sequence[LayerCache]) -> TriAttention:
    own = policy.statistics
    rope, heads = model_rope(config), config.num_attention_heads
    pairs = len(rope.frequencies)
    shape = config.num_hidden_layers, heads, getattr(config, "num_key_value_heads", heads), 2 * pairs, pairs
    told = own.layers, own.heads, own.kv_heads, own.head_dim, own.pairs
    if told != shape:
        raise ValueError(
            "the statistics are of {} layers, {} heads, {} KV heads of {} and {} pairs; ".format(*told)
            + "the config has {}, {}, {} of {} and {}: run kvfold calibrate --eviction with this model".format(*shape)
        )
    if not isclose(own.rope_theta, rope.theta, rel_tol=1e-6):
        raise ValueError(
            f"the statistics say rope_theta = {own.rope_theta:,.10g}, the config {rope.theta:,.10g}: run kvfold "
            "calibrate --eviction with this model; or, if only the file's header is wrong, use "
            f"statistics.with_rope_theta({rope.theta:.10g})"
        )
    missing = [layer.index for layer in layers if not own.measured(layer.index)]
    if missing:
        raise ValueError(f"the statistics have nothing of layer {missing[0]}: run kvfold calibrate --eviction again")
    return replace(policy, frequencies=rope.frequencies, turned_by=rope.turned_by)


def model_rope(config: PreTrainedConfig) -> Rope:
    """A model's RoPE.

    Raises ValueError if no one set of frequencies turns all its keys: then there are no statistics of queries before
    RoPE.
    """
    dims = {getattr(own, "head_dim", None) for own in layer_configs(config, config.num_hidden_layers)}
    if len(dims) > 1:
        raise ValueError(
            f"the layers of a {config.model_type} have keys of {sorted(map(str, dims))} channels: TriAttention takes "
            "one number; StreamingLLM any"
        )
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)
    latent = getattr(config, "kv_lora_rank", None) is not None
    rope = None if head_dim is None or latent else rope_of(config, head_dim)
    if head_dim is None or rope is None or getattr(config, "rope_interleave", False):
        raise ValueError(
            f"how a {config.model_type} turns its keys is not told simply (latent attention, pairs of neighbouring "
            "channels, RoPE that depends on the length): TriAttention does not take it; StreamingLLM does"
        )
    return rope
