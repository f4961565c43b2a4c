"""How a model's RoPE turns keys."""

from dataclasses import dataclass
from math import isfinite

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.cache.shape import LayerShape
from kvfold.formats.numbers import real


@dataclass(frozen=True)
class Rope:
    """A RoPE that does not depend on the length of the sequence."""

    frequencies: tuple[float, ...]  # ω_f of each pair of channels
    turned_by: float  # the factor that keys are multiplied by besides being turned: YaRN's attention factor, else 1
    theta: float  # RoPE's base


def rope_of(config: PreTrainedConfig, head_dim: int) -> Rope | None:
    """The RoPE of all full-attention layers of a model; None if the config does not fix its frequencies.

    Scaled ones (linear, llama3, YaRN, …) are those that transformers computes. Scaling that depends on the length of a
    sequence gives None. Raises ValueError if the config has impossible numbers.
    """
    rope = getattr(config, "rope_parameters", None)
    layer_type = {}
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        rope, layer_type = rope["full_attention"], {"layer_type": "full_attention"}
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return None
    kind, theta = rope.get("rope_type", "default"), real("the config's rope_theta", rope["rope_theta"], 1e-3, 1e30)
    if kind == "default":
        factor = real("the config's partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 0, 1)
        dim = int(head_dim * factor)
        if dim < 2:
            raise ValueError(f"the config's partial_rotary_factor = {factor}: RoPE would turn no channel of {head_dim}")
        return Rope(tuple(theta ** (-2 * f / dim) for f in range(dim // 2)), 1.0, theta)
    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
        return None
    try:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **layer_type)
    except Exception as error:  # configs fail in many ways
        raise ValueError(f"the config's rope_parameters = {rope} give no frequencies: {error}") from None
    if not (frequencies.isfinite().all() and isfinite(factor)):
        raise ValueError(f"the config's rope_parameters = {rope} give a frequency or a factor that is not finite")
    return Rope(tuple(frequencies.tolist()), float(factor), theta)


def layer_frequencies(config: PreTrainedConfig, shape: LayerShape, format: str) -> tuple[float, ...]:
    """RoPE's ω_f of a layer whose format turns keys back; raises ValueError if they are not known."""
    rope = rope_of(config, shape.key_dim) if shape.kind == "full" else None
    if rope is None:
        raise ValueError(
            f"format = {format!r} turns RoPE back, but by which frequencies this {config.model_type} turns keys is not "
            "told simply: take tbq3"
        )
    return rope.frequencies
