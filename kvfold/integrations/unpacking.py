"""GGUF files, unpacked into ordinary model folders: once, and kept in the user's cache folder."""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.integrations.gguf_configs import gguf_config

logger = logging.getLogger("kvfold")

UNPACKED = torch.float32
"""The dtype in which GGUF files are loaded by default, whatever a release of transformers makes of them."""


def kept_models() -> Path:
    """The folder of models that were unpacked; FileNotFoundError if the user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"
    except RuntimeError:
        raise FileNotFoundError("there is no home folder to keep the model in: let XDG_CACHE_HOME name one") from None


def unpacked_folder(gguf: Path, dtype: torch.dtype) -> Path:
    """The model folder that a GGUF file makes in a dtype, made if it is not there yet.

    It is found by the file's content, so that another file of the same name has its own.

    Raises
    ------
    OSError
        If it cannot be written.
    ValueError
        If transformers or gguf cannot read the file, or it says of the model what transformers cannot do.
    """
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = kept_models() / f"{gguf.stem}-{digest[:16]}-{str(dtype).removeprefix('torch.')}"
    if not (folder / "config.json").is_file():
        logger.warning("unpacking %s into %s (once; the folder may be deleted at any time)", gguf.name, folder)
        try:
            convert_gguf(gguf, folder, dtype)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # transformers and gguf check files in many ways
            raise ValueError(f"model = {str(gguf)!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return folder


def unpacked_folders(gguf: Path) -> list[Path]:
    """Folders that were made of files of this name."""
    return [*kept_models().glob(f"{gguf.stem}-*")]


def convert_gguf(
    gguf: Path, folder: Path, dtype: torch.dtype = UNPACKED, check: Callable[[Path], None] = lambda made: None
) -> None:
    """Write a GGUF file's weights and its tokenizer as an ordinary model folder, whole or not at all.

    `check` may raise on the folder that was made, before it is at its place. Raises OSError if the folder cannot be
    written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder.parent)
    except OSError as error:
        raise OSError(
            f"the model is unpacked once, into {str(folder)!r}, which cannot be written ({error.strerror}): "
            "let XDG_CACHE_HOME name another folder"
        ) from None
    with scratch:
        made = Path(scratch.name, "model")
        _convert(gguf, made, dtype)
        check(made)
        try:
            made.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)
                raise


def _convert(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    # transformers looks for a file's name in the current folder first, so it gets the whole path
    where, options = str(gguf.parent), {"gguf_file": str(gguf.absolute())}
    source, about = AutoModelForCausalLM.from_pretrained(
        where, config=gguf_config(gguf), dtype=dtype, output_loading_info=True, **options
    )
    if missing := sorted(about["missing_keys"]):
        raise ValueError(
            f"the file lacks {len(missing)} of the model's weights, such as {missing[0]}, which would be random"
        )
    config = type(source.config).from_dict(source.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(source)(config)
    plain.load_state_dict(source.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, **options).save_pretrained(folder)
