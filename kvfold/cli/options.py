"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.runtime import Runtime
from kvfold.integrations.models import load_model
from kvfold.integrations.text import standard_text
from kvfold.integrations.transformers.runtime import TransformersRuntime

Model = Annotated[
    str, typer.Option(help="smollm2 (packaged), a folder with weights or one GGUF file, or a name on a hub.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", help="A file of `kvfold calibrate`; by default a prompt's own first 256 tokens."),
]

RuntimeName = Annotated[
    str, typer.Option("--runtime", help="torch, or mlx (pip install 'kvfold[mlx]'): what runs the model.")
]

RUNTIMES = ("torch", "mlx")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by name; None stays None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype = {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_runtime(runtime: str) -> None:
    """Raise unless it is one of `RUNTIMES`, and installed."""
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime = {runtime!r}: choose one of {', '.join(RUNTIMES)}")
    if runtime == "mlx":
        try:
            import kvfold.integrations.mlx  # noqa: F401
        except ImportError as error:
            raise ValueError(f"runtime = 'mlx': {error}") from None


def load_runtime(runtime: str, model: str, dtype: torch.dtype | None) -> tuple[Runtime, PreTrainedTokenizerBase]:
    """A model on an engine, not attached, and a tokenizer of transformers."""
    if runtime == "torch":
        network, tokenizer = load_model(model, dtype)
        return TransformersRuntime(network), tokenizer
    from kvfold.integrations.mlx.runtime import MlxRuntime

    return MlxRuntime.load(model, dtype)


def token_progress() -> Progress:
    """A progress bar of tokens, on stderr."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip


def read_text(path: Path | None) -> str:
    """The text of a file; Python's own reference text if none is named."""
    if path is None:
        return standard_text()
    if not path.is_file():
        raise FileNotFoundError(f"text = {str(path)!r}: there is no such file")
    words = path.read_text(encoding="utf-8")
    if not words.strip():
        raise ValueError(f"text = {str(path)!r}: the file is empty")
    return words


def listed_names(listed: str) -> list[str]:
    """Names separated by commas; none from the empty string."""
    return [part.strip() for part in listed.split(",") if part.strip()]


def listed_integers(option: str, listed: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(part) for part in listed_names(listed)]
    except ValueError:
        raise ValueError(f"{option} = {listed!r}: give whole numbers separated by commas") from None
