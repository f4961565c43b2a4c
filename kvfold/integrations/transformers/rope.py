"""The frequencies by which a model's RoPE turns keys."""

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rope_frequencies(config: PreTrainedConfig, head_dim: int) -> tuple[float, ...] | None:
    """ω_f of a model whose layers all turn by the same ones; None if that is not told simply.

    Scaled ones (linear, llama3, YaRN, …) are those that transformers computes; scaling that depends on the length of a
    sequence is not told simply.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return None
    kind = rope.get("rope_type", "default")
    if kind == "default":
        dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        return tuple(rope["rope_theta"] ** (-2 * f / dim) for f in range(dim // 2))
    if kind not in ROPE_INIT_FUNCTIONS or kind in ("dynamic", "longrope"):
        return None
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist())
