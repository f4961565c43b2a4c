"""What a worker's model and formats are, so that what was kept is only found where it means the same."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from kvfold.formats import KeyStatistics
from kvfold.integrations.text import standard_text
from kvfold.integrations.unpacking import kept_models
from kvfold.integrations.vllm.options import Options

LAYOUT = 2
"""Of the bytes of a kept block. To be raised when they change."""


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How the names of files of weights end."""


class Identity:
    """One worker's part of a model: the model's files, as weights in memory may be packed, and its place."""

    def __init__(self, config: Any, rank: int) -> None:
        self.model, parallel = config.model_config, config.parallel_config
        self.place = rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        self.load_format = config.load_config.load_format

    @cached_property
    def parts(self) -> list[str]:
        """What all that is kept depends on; OSError if the model's files are not found."""
        model = self.model
        options = [str(x) for x in (model.dtype, model.quantization, self.load_format, model.seed, self.place)]
        return [*_contents(_folder(model.model, model.revision)), model.hf_config.to_json_string(), *options]

    def fitted(self, values: bool, tokens: int) -> Path:
        """Where the statistics lie that an engine with this model measured, of values too or not, by so many tokens.

        Raises OSError if the user has no home, or the model's files are not found.
        """
        text = hashlib.sha256(standard_text().encode()).hexdigest()
        name = _digest([*self.parts, version("kvfold"), text, str(values), str(tokens)])
        return kept_models() / "fitted" / f"{name}.safetensors"

    def kind(self, options: Options, statistics: Mapping[int, KeyStatistics | None], block: int, slot: int) -> str:
        """A name for pages of this model in a format that is fitted to statistics, by layer; OSError as `parts`."""
        parts = [*self.parts, options.format, str((LAYOUT, block, slot, sorted(statistics)))]
        for _, own in sorted(statistics.items()):
            for field in fields(KeyStatistics):
                tensor = None if own is None else getattr(own, field.name)
                parts.append("" if tensor is None else hashlib.sha256(tensor.contiguous().numpy()).hexdigest())
        return _digest(parts)


def _folder(model: str, revision: str | None) -> Path:
    return (
        Path(model)
        if Path(model).is_dir()
        else Path(snapshot_download(model, revision=revision, local_files_only=True))
    )


def _contents(folder: Path) -> list[str]:
    """SHA-256 of each file of weights. Files of a hub are links, which have it as their target's name."""
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    if not files:
        raise FileNotFoundError(f"{folder} has no file of weights ({', '.join(WEIGHTS)})")
    found = []
    for path in files:
        target = path.resolve().name
        if not re.fullmatch("[0-9a-f]{64}", target):
            with path.open("rb") as file:
                target = hashlib.file_digest(file, "sha256").hexdigest()
        found.append(f"{path.name} {target}")
    return found


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
