"""Options that several commands share."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.runtime import Runtime
from kvfold.formats import check_names
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model
from kvfold.integrations.text import read_text, standard_text
from kvfold.integrations.transformers.runtime import TransformersRuntime

Model = Annotated[
    str,
    typer.Option(help="smollm2 (packaged), a folder with weights or one GGUF file, a GGUF file, or a name on a hub."),
]
Format = Annotated[str, typer.Option(help="A format, or keys:values; see `kvfold formats`.")]
Formats = Annotated[str, typer.Option(help="Formats, or keys:values, separated by commas.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default the model's.")]

Weights = Annotated[
    str | None,
    typer.Option(help=escape("int8: quantise the weights (pip install 'kvfold[weights]'); by default as they are.")),
]

CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", help="A file of `kvfold calibrate`; by default a prompt's own first 256 tokens."),
]

RuntimeName = Annotated[
    str, typer.Option("--runtime", help=escape("torch, or mlx (pip install 'kvfold[mlx]'): what runs the model."))
]

CacheLimit = Annotated[
    int | None, typer.Option("--cache-limit-mb", help="mlx: MiB of freed memory that MLX keeps for itself.")
]
MemoryLimit = Annotated[
    int | None, typer.Option("--memory-limit-mb", help="mlx: MiB that MLX takes in all before it waits, or swaps.")
]
WiredLimit = Annotated[int | None, typer.Option("--wired-limit-mb", help="mlx, on Macs: MiB that are never swapped.")]

Sliding = Annotated[bool, typer.Option("--sliding", help="Fold layers with a sliding window, too.")]

TextFile = Annotated[
    Path | None,
    typer.Option("--text", help="A UTF-8 text file; by default the language reference in Python's library."),
]

RUNTIMES = ("torch", "mlx")

DENSE = "dense"
"""The name of a cache that folds nothing, wherever a format is asked for."""

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


def load_runtime(
    runtime: str, model: str, dtype: torch.dtype | None, weights: str | None = None
) -> tuple[Runtime, PreTrainedTokenizerBase]:
    """A model on an engine, not attached, and a tokenizer of transformers."""
    if runtime == "torch":
        network, tokenizer = load_model(model, dtype, weights)
        return TransformersRuntime(network), tokenizer
    if weights is not None:
        raise ValueError(f"weights = {weights!r}, and runtime = 'mlx': give mlx-lm a folder that is quantised already")
    from kvfold.integrations.mlx.runtime import MlxRuntime

    return MlxRuntime.load(model, dtype)


def token_progress() -> Progress:
    """A progress bar of tokens, on stderr."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip


@contextmanager
def counted(description: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A progress bar; gives what to call with numbers of tokens as they are done."""
    with token_progress() as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda tokens: progress.advance(task, tokens)


def text_of(path: Path | None) -> str:
    """The text of a file; Python's own reference text if none is named."""
    return standard_text() if path is None else read_text(path)


def check_format(format: str) -> None:
    """Raise unless it is a format, keys:values, or `DENSE`."""
    if format != DENSE:
        check_names(format)


def listed_formats(listed: str, others: Collection[str] = ()) -> list[str]:
    """Formats separated by commas, each once; names among `others` are no formats, and taken, too."""
    names = list(dict.fromkeys(listed_names(listed)))
    for name in names:
        if name not in others:
            check_names(name)
    if not names:
        raise ValueError(f"formats = {listed!r}: name at least one")
    return names


def formats_beside_dense(listed: str) -> list[str]:
    """Formats separated by commas, to be measured beside a dense cache: that is measured whether it is named or not."""
    names = [name for name in listed_formats(listed, (DENSE,)) if name != DENSE]
    if not names:
        raise ValueError(f"formats = {listed!r}: a dense cache is measured anyway; name a format beside it")
    return names


def listed_names(listed: str) -> list[str]:
    """Names separated by commas; none from the empty string."""
    return [part.strip() for part in listed.split(",") if part.strip()]


def listed_integers(option: str, listed: str) -> list[int]:
    """Whole numbers separated by commas."""
    parts = listed_names(listed)
    if not all(re.fullmatch("-?[0-9]{1,10}", part) and abs(int(part)) <= LARGEST for part in parts):
        raise ValueError(f"{option} = {listed!r}: give whole numbers separated by commas, up to {LARGEST}")
    return [int(part) for part in parts]


UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_bytes(amount: str, name: str = "memory") -> int:
    """Bytes of an amount such as 24GB or 512MiB; ValueError that begins with `name` if it is none."""
    match = re.fullmatch(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([A-Za-z]*)\s*", amount)
    if match is None or match[2].upper() not in UNITS:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        raise ValueError(f"{name} = {short(amount)}: write a number and a unit ({units}), such as 24GB or 512MiB")
    room = int(float(match[1]) * UNITS[match[2].upper()])
    if not 1 <= room < 2**63:
        raise ValueError(f"{name} = {amount!r} is {room} bytes: give at least 1, and less than 2**63")
    return room
