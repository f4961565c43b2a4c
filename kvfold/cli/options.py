"""Options that several commands share."""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Model = Annotated[
    str, typer.Option(help="smollm2 (packaged), a folder with weights or one GGUF file, or a name on a hub.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A dtype by name; None stays None."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype = {name!r}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def token_progress() -> Progress:
    """A progress bar of tokens, on stderr."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
    )  # fmt: skip
