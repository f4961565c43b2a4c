"""Answers of commands on standard output: tables, and JSON."""

import json
import os
import sys
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any

import typer
from rich.console import Console

WIDE = 160
"""Columns of a table that goes to a file or a program."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def to_stdout() -> Console:
    """Standard output. Where it is no terminal and COLUMNS is not set, it is wide, so that no figure is cut off."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)


def print_json(document: Any) -> None:
    """One JSON document on stdout, in letters that it has; numbers that are none (NaN, infinities) are null."""
    text = json.dumps(_without_nan(document), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=2)
    print(text)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return value
