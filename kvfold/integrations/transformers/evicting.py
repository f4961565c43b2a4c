"""Eviction policies and a model's config."""

from collections.abc import Sequence
from dataclasses import replace
from math import isclose

from transformers import PreTrainedConfig

from kvfold.cache.layer import LayerCache
from kvfold.cache.shape import LayerShape
from kvfold.eviction import Eviction, TriAttention
from kvfold.eviction.policy import MODES
from kvfold.integrations.transformers.rope import Rope, rope_of
from kvfold.integrations.transformers.shapes import has_latents


def for_model(
    policy: Eviction, config: PreTrainedConfig, shapes: Sequence[LayerShape], layers: Sequence[LayerCache]
) -> Eviction:
    """The policy, completed for this model with its layers' `shapes`, of which `layers` fold.

    Raises ValueError if the policy or its statistics do not fit the model or its formats.
    """
    for layer in layers:
        if "tbqx3" in layer.config.format.split(":"):
            raise ValueError(
                f"format = {layer.config.format!r} turns keys to their places by their order, which eviction mixes: "
                "take amx3"
            )
    if policy.asks_queries and has_latents(config):
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
    if not isinstance(policy, TriAttention):
        return policy
    return tri_attention_for(policy, config, shapes, [layer.index for layer in layers])


def check_once(policy: Eviction, own: Eviction | None) -> None:
    """Raise ValueError if a policy cannot act on a cache whose own eviction is `own`."""
    kept = 0 if own is None else own.asks_queries
    if policy.asks_queries > kept:
        raise ValueError(
            f"the policy goes by the newest {policy.asks_queries} queries, and this cache keeps {kept}: make it by "
            f"FoldedCache(config, eviction={type(policy).__name__}(...))"
        )
    if own is not None and MODES.index(policy.mode) > MODES.index(own.mode):
        raise ValueError(
            f"mode = {policy.mode!r}, but this cache's own eviction has the mode {own.mode!r} and needs the same "
            "tokens in its layers or heads: give that mode"
        )


def tri_attention_for(
    policy: TriAttention, config: PreTrainedConfig, shapes: Sequence[LayerShape], layers: Sequence[int]
) -> TriAttention:
    """The policy, completed for this model, of which the layers of these numbers fold; ValueError as `for_model`."""
    own, rope, of = policy.statistics, model_rope(config, shapes), head_shape(shapes)
    pairs = len(rope.frequencies)
    shape = config.num_hidden_layers, of.heads, of.kv_heads, 2 * pairs, pairs
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
    missing = [layer for layer in layers if not own.measured(layer)]
    if missing:
        raise ValueError(f"the statistics have nothing of layer {missing[0]}: run kvfold calibrate --eviction again")
    return replace(policy, frequencies=rope.frequencies, turned_by=rope.turned_by)


def head_shape(shapes: Sequence[LayerShape]) -> LayerShape:
    """The shape of a model's first layer that folds; of any with keys if none folds, of a layer without if none has."""
    with_keys = [shape for shape in shapes if shape.key_dim]
    return next((shape for shape in with_keys if shape.folds), next(iter(with_keys), LayerShape("none")))


def model_rope(config: PreTrainedConfig, shapes: Sequence[LayerShape]) -> Rope:
    """A model's RoPE.

    Raises ValueError if no one set of frequencies turns all its keys: then there are no statistics of queries before
    RoPE.
    """
    dims = sorted({shape.key_dim for shape in shapes if shape.key_dim})
    if len(dims) > 1:
        raise ValueError(
            f"the layers of a {config.model_type} have keys of {dims} channels: TriAttention takes one number; "
            "StreamingLLM any"
        )
    rope = None if not dims or has_latents(config) else rope_of(config, dims[0])
    if rope is None or getattr(config, "rope_interleave", False):
        raise ValueError(
            f"how a {config.model_type} turns its keys is not told simply (latent attention, pairs of neighbouring "
            "channels, RoPE that depends on the length): TriAttention does not take it; StreamingLLM does"
        )
    return rope
