"""Configs of GGUF files: what their metadata say and transformers passes over is put right, or refused.

transformers reads sizes from a GGUF file, and takes the rest from the architecture's defaults. How positions are
stretched for long contexts is left out so, and a model made without it predicts well at first and worse as the text
grows. Names of keys and tensors are those of llama.cpp's converter.
"""

import logging
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

logger = logging.getLogger("kvfold")

FULL, SLIDING = "full_attention", "sliding_attention"
AS_THEY_ARE = {
    "attention.key_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a file, and the attributes of a config that say the same."""
HAS_TWO_SIZES = "gemma4"
"""Its layers have heads of two sizes, and rotate parts of them by default; transformers reads both sizes."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Llama's models from 3.1 on have. Their files hold only the factors that follow from it."""


def gguf_config(path: Path) -> PreTrainedConfig:
    """A model's config from its GGUF file.

    Raises
    ------
    ValueError
        If the file says of the model what its class in transformers cannot do, or in a way that is not known here.
    Exception
        Whatever transformers and gguf raise of a file that is damaged or of an architecture that they do not know.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(path.parent), gguf_file=str(path.absolute()))
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
        raise ValueError(
            f"the file is of the architecture {architecture!r}, and transformers {transformers.__version__} reads "
            f"{', '.join(known)}: take a folder with a config.json and safetensors"
        ) from None
    prefix = f"{architecture}."
    said = {
        key.removeprefix(prefix): field.contents() for key, field in reader.fields.items() if key.startswith(prefix)
    }
    factors = {
        tensor.name.removesuffix(".weight"): torch.tensor(tensor.data.copy()).float()
        for tensor in reader.tensors
        if tensor.name.startswith(("rope_freqs", "rope_factors"))
    }
    before = config.to_dict()
    _set_windows(config, said)
    if not config.model_type.startswith(HAS_TWO_SIZES):
        _set_plain(config, said)
        _set_positions(config, said, factors)
    after = config.to_dict()
    if changed := {key: value for key, value in after.items() if before.get(key) != value}:
        logger.info("%s says of the model what transformers does not read: %s", path.name, changed)
    return config


def _set_plain(config: PreTrainedConfig, said: dict[str, Any]) -> None:
    for key, attribute in AS_THEY_ARE.items():
        if attribute == "head_dim" and hasattr(
            config, "global_head_dim"
        ):  # Gemma 4 has two, and transformers reads both
            continue
        if key not in said or math.isclose(said[key], getattr(config, attribute, None) or 0, rel_tol=1e-6):
            continue
        if hasattr(config, attribute):
            setattr(config, attribute, said[key])
        elif attribute != "head_dim":  # classes without it divide the hidden size, and weights that differ do not load
            raise ValueError(f"the file has {key} = {said[key]}, which a {config.model_type} model cannot do")


def _set_windows(config: PreTrainedConfig, said: dict[str, Any]) -> None:
    """Which layers attend to a window, and how long it is.

    A pattern is a list with True for each such layer, or a number: of so many layers, the last attends to everything.
    """
    kinds = getattr(config, "layer_types", None) or []
    if not {SLIDING} <= {*kinds} <= {SLIDING, FULL}:
        return
    if (window := said.get("attention.sliding_window")) is not None:
        config.sliding_window = window
    pattern = said.get("attention.sliding_window_pattern")
    if isinstance(pattern, int):
        pattern = [bool((layer + 1) % pattern) for layer in range(len(kinds))] if pattern else [False] * len(kinds)
    if pattern is not None:
        if len(pattern) != len(kinds):
            raise ValueError(f"the file says of {len(pattern)} layers whether they have windows, and has {len(kinds)}")
        config.layer_types = [SLIDING if slides else FULL for slides in pattern]


def _set_positions(config: PreTrainedConfig, said: dict[str, Any], factors: dict[str, Tensor]) -> None:
    """How fast the rotations of RoPE turn (`rope_parameters`). Those of layers with windows stay as they are."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return
    own = rope.get(FULL, rope)
    if own.get("rope_type", "default") != "default":  # the architecture's default, as Gemma 4's
        return
    if "rope.freq_base" in said:
        own["rope_theta"] = said["rope.freq_base"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "partial_rotary_factor" in own and "rope.dimension_count" in said:
        own["partial_rotary_factor"] = said["rope.dimension_count"] / head_dim
    if "rope_factors_long" in factors:
        own |= _longrope(said, factors)
        config.original_max_position_embeddings = own["original_max_position_embeddings"]  # which counts more
    elif "rope_freqs" in factors:
        own |= _llama3(factors["rope_freqs"], own["rope_theta"])
    else:
        own |= _scaling(said)


def _scaling(said: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a file's `rope.scaling`."""
    scaling = {key.removeprefix("rope.scaling."): value for key, value in said.items() if "rope.scaling." in key}
    kind, factor = scaling.pop("type", "none"), scaling.pop("factor", 1.0)
    scaling.pop("finetuned", None)  # whether the model was trained so
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and "original_context_length" in scaling:
        found = {"rope_type": "yarn", "factor": factor}
        found["original_max_position_embeddings"] = scaling.pop("original_context_length")
        for key, parameter in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if key in scaling:
                found[parameter] = scaling.pop(key)
        if scaling.pop("attn_factor", 1.0) == 1 == scaling.pop("yarn_attn_factor", 1.0) and not scaling:
            return found
    raise ValueError(
        f"the file stretches positions in a way that is not read here: rope.scaling.type = {kind!r}, {scaling}; take "
        "the model's folder with a config.json"
    )


def _llama3(factors: Tensor, base: float) -> dict[str, Any]:
    """Parameters of Llama 3.1's scaling, which give the factors that a file divides frequencies by, (head_dim / 2,).

    Frequencies whose waves are longer than the first context are divided by the largest factor, those of a quarter of
    it or less by 1, and the others by what lies between.
    """
    largest, first = factors.max().item(), LLAMA3["original_max_position_embeddings"]
    waves = 2 * math.pi * base ** (torch.arange(len(factors), dtype=torch.float64) / len(factors))
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    share = ((first / waves - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(1 / ((1 - share) / largest + share), factors.double(), rtol=1e-3):
        raise ValueError(
            "the file has factors of RoPE's frequencies that are not Llama 3.1's; take the model's folder with a "
            "config.json"
        )
    return {} if largest == 1 else {"rope_type": "llama3", "factor": largest, **LLAMA3}


def _longrope(said: dict[str, Any], factors: dict[str, Tensor]) -> dict[str, Any]:
    """Parameters of Phi 3's scaling: factors for texts up to the first context, and for longer ones."""
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": factors["rope_factors_long"].tolist(),
        "short_factor": factors["rope_factors_short"].tolist(),
        "original_max_position_embeddings": said["rope.scaling.original_context_length"],
    }
    if "rope.scaling.attn_factor" in said:
        found["attention_factor"] = said["rope.scaling.attn_factor"]
    return found
