"""Results as JSON lines: one row a run, appended as it ends, so that nothing is lost when a long job is killed."""

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger("kvfold")

Row = dict[str, Any]

START = b'{"'
"""How every row begins."""


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file.

    A last line that was cut off while it was written (it has no newline, and begins as a row does) is not a row;
    that is logged.

    Raises
    ------
    ValueError
        If another line is not a JSON object: names the line; the file is left as it is.
    """
    rows: list[Row] = []
    content = path.read_bytes()
    lines = content.split(b"\n")  # and not at the line separators of Unicode, which answers may hold
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict):
                raise ValueError(f"it holds a {type(row).__name__}, not an object")
        except ValueError as error:
            if number == len(lines) and line.startswith(START):
                logger.warning("%s: line %d was cut off while it was written; that run is repeated", path, number)
                break
            raise ValueError(
                f"{path}, line {number}: not a row of results ({error}). The {len(rows)} rows before it are whole: "
                "mend or delete that line, or name another file"
            ) from None
        rows.append(row)
    return rows


def open_rows(path: Path) -> list[Row]:
    """Rows of a file that is to be appended to, made if it is missing; a cut-off last line is removed from it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch()
        return []
    rows = read_rows(path)
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        last = content.rfind(b"\n") + 1
        try:
            json.loads(content[last:])
        except ValueError:
            os.truncate(path, last)
        else:
            with path.open("ab") as file:
                file.write(b"\n")
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add one row and wait until it is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
