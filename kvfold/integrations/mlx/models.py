"""Models of mlx-lm by the names that `kvfold.load_model` takes."""

import os
from pathlib import Path
from typing import Any

import torch
from mlx_lm import load
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import hf_repo_to_path

from kvfold.cache.mlx import ARRAY_DTYPES
from kvfold.integrations.models import DEMO_NAME, demo_folder, gguf_of, local_path, read_config
from kvfold.integrations.unpacking import UNPACKED, unpacked_folder


def load_mlx_model(name: str | os.PathLike[str], dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A model of mlx-lm and its tokenizer.

    Parameters
    ----------
    name
        "smollm2" for the packaged demo model; a folder with a config.json and safetensors, of transformers or of
        mlx-lm; a GGUF file, or a folder with one, which transformers unpacks; or a name on a model hub.
    dtype
        dtype of the weights that are not quantised. None: that of the checkpoint.

    Raises
    ------
    FileNotFoundError
        If a folder holds no such model, or the demo model's package is missing.
    ValueError
        If mlx-lm takes other layers for sliding windows than the config says.
    """
    model, tokenizer = load_mlx_folder(str(model_folder(name, dtype)))[:2]
    if dtype is not None:
        model.set_dtype(ARRAY_DTYPES[dtype])
    return model, tokenizer


def load_mlx_folder(folder: str, **options: Any) -> tuple[Any, ...]:
    """What `mlx_lm.load` makes of a folder, with the config's names as mlx-lm knows them; ValueError on windows."""
    config = read_config(Path(folder))
    loaded = load(folder, model_config=config_as_before(config), **options)
    _check_windows(loaded[0], config.get("text_config") or config)
    return loaded


def _check_windows(model: Any, config: dict[str, Any]) -> None:
    """Raise ValueError if mlx-lm gives a sliding window to a layer that has none."""
    kinds, layers = config.get("layer_types"), make_prompt_cache(model)
    if not isinstance(kinds, list) or len(kinds) != len(layers):
        return
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        if kind == "full_attention" and isinstance(layer, RotatingKVCache):
            raise ValueError(
                f"layer {index} attends to everything by the config's layer_types, and mlx-lm gives it a sliding "
                "window: its answers would be wrong; take the torch runtime"
            )


def model_folder(name: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Path:
    """The folder of a model, downloaded if it is a name on a hub, or unpacked in a dtype if it is a GGUF file.

    Raises FileNotFoundError as `load_mlx_model`.
    """
    source = str(demo_folder() if name == DEMO_NAME else name)
    path = local_path(source)
    if path is None:
        return Path(hf_repo_to_path(source))
    gguf = gguf_of(path)
    return path if gguf is None else unpacked_folder(gguf, dtype or UNPACKED)


def config_as_before(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE and windows of a transformers 5 config, under the names that older configs have for them.

    Some of mlx-lm's models (0.32) know only these names. Otherwise they would silently turn keys by a base of 10,000,
    or give sliding windows to the wrong layers.
    """
    found: dict[str, Any] = {}
    parameters, kinds = config.get("rope_parameters"), config.get("layer_types")
    if isinstance(parameters, dict):
        full, sliding = parameters.get("full_attention", parameters), parameters.get("sliding_attention")
        if "rope_theta" in full:
            found["rope_theta"] = full["rope_theta"]
        if full.get("rope_type", "default") != "default":
            found["rope_scaling"] = {key: value for key, value in full.items() if key != "rope_theta"}
            found["rope_scaling"]["type"] = full["rope_type"]
        if "partial_rotary_factor" in full:
            found["partial_rotary_factor"] = full["partial_rotary_factor"]
        if isinstance(sliding, dict) and "rope_theta" in sliding:
            found["rope_local_base_freq"] = sliding["rope_theta"]
    if isinstance(kinds, list) and "sliding_attention" in kinds and "full_attention" in kinds:
        pattern = kinds.index("full_attention") + 1
        if kinds == ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(len(kinds))]:
            found["sliding_window_pattern"] = pattern
    found = {key: value for key, value in found.items() if config.get(key) is None}
    if isinstance(config.get("text_config"), dict):
        added = config_as_before(config["text_config"])
        if added:
            found["text_config"] = config["text_config"] | added
    return found
