"""Results as JSON lines: one row a run, appended as it ends, so that nothing is lost when a long job is killed."""

import json
import logging
import os
from math import isnan
from pathlib import Path
from reprlib import repr as short
from typing import Any

from kvfold.cache.files.paths import check_input, check_output

logger = logging.getLogger("kvfold")

Row = dict[str, Any]

START = b'{"'
"""How every row begins."""

_ABOUT: Row = {
    "model": (str, None), "text_sha": (str, None), "dtype": (str, None), "seed": (int, None), "versions": (dict, None),
}  # fmt: skip

OUTCOME: Row = _ABOUT | {
    "task": str, "case": str, "about": dict, "format": str, "expected": str, "answer": str, "score": float,
    "detail": str, "tokens": int, "folded": float, "replies": ([[int]], None),
}  # fmt: skip
"""Fields of a row of `kvfold tasks`: types by name, [type] for lists, (type, None) for optional fields."""

RUN: Row = _ABOUT | {
    "stage": str, "config": {"format": str, "family": (str, None)},
    "eval": {"model": (str, None), "n_tokens": int, "passage": (int, None)},
    "ppl_fp16": float, "ppl_tq": float, "abs_delta": float, "rel_delta": float, "kl_mean": float,
    "bits_per_value": float, "verdict": str,
}  # fmt: skip
"""Fields of a row of `kvfold sweep`."""

QUALITY: Row = _ABOUT | {
    "format": str, "passage": (int, None), "n_tokens": int, "ppl_dense": float, "ppl": float, "delta_ppl_pct": float,
    "kl_mean": float,
    "kl_p99": float, "top1": float, "folded_bits_per_value": (float, None), "bits_per_value": float,
    "dense_share": (float, None), "ratio_to_bf16": (float, None), "held_bytes": int, "seconds": float,
    "key_error": ([(float, None)], None), "value_error": ([(float, None)], None),
}  # fmt: skip
"""Fields of a row of `kvfold eval`."""

BF16 = 16
"""Bits of a value in bfloat16."""

MOST = 1e30
"""No number in a row is larger."""


OF_BF16 = "of bf16"
ABOUT_OF_BF16 = f"{OF_BF16}: the whole cache beside a dense one in bfloat16; above 100 %, it is larger"
"""The title of a column of `of_bf16`, and what it means."""


def of_bf16(row: Row) -> str:
    """What a whole cache holds, in percent of a dense bfloat16 cache of the same model, as text."""
    return f"{100 * row['bits_per_value'] / BF16:.1f} %"


HELD = ("bits", OF_BF16)
ABOUT_HELD = f"bits: held for a value in layers that fold, – while nothing is folded; {ABOUT_OF_BF16}"
"""Titles of columns of `held_cells`, and what they mean."""


def held_cells(row: Row) -> tuple[str, str]:
    """Bits a value where layers fold, those of all layers if none folds; and `of_bf16`."""
    bits = row.get("folded_bits_per_value")
    if bits is None or isnan(bits):
        bits = row["bits_per_value"]
    return "–" if row.get("dense_share") == 1 else f"{bits:.2f}", of_bf16(row)


def check_row(row: Any, shape: Any, where: str) -> None:
    """Raise ValueError, which begins with `where`, unless a row has the fields of `shape`, written as in `OUTCOME`.

    A float may be a whole number, and NaN where there was nothing to measure.
    """
    if isinstance(shape, tuple):
        if row is not None:
            check_row(row, shape[0], where)
    elif isinstance(shape, dict):
        check_row(row, dict, where)
        for name, own in shape.items():
            if name not in row and not isinstance(own, tuple):
                raise ValueError(f"{where} lacks {name!r}: it is of another version, or no such row; name another file")
            check_row(row.get(name), own, f"{where}, {name}")
    elif isinstance(shape, list):
        check_row(row, list, where)
        for i, part in enumerate(row):
            check_row(part, shape[0], f"{where}, {i}")
    else:
        fits = isinstance(row, int | float if shape is float else shape) and not isinstance(row, bool)
        if not fits or (isinstance(row, int | float) and abs(row) > MOST):
            raise ValueError(f"{where} is {short(row)}, where a {shape.__name__} belongs")


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON-lines file.

    A last line that was cut off while it was written (it has no newline, and begins as a row does) is not a row;
    that is logged. A ValueError names any other line that is not a JSON object; the file is left as it is.
    """
    rows: list[Row] = []
    content = check_input(path, "results").read_bytes()
    lines = content.split(b"\n")  # and not at the line separators of Unicode, which answers may hold
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
            if not isinstance(row, dict):
                raise ValueError(f"it holds a {type(row).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            if number == len(lines) and line.startswith(START):
                logger.warning("%s: line %d was cut off while it was written; that run is repeated", path, number)
                break
            raise ValueError(
                f"{path}, line {number}: not a row of results ({error}). The {len(rows)} rows before it are whole: "
                "mend or delete that line, or name another file"
            ) from None
        rows.append(row)
    return rows


def open_rows(path: Path, shape: Row) -> list[Row]:
    """Rows of a file that is to be appended to, none if it is missing; a cut-off last line is removed from it.

    A ValueError names the first row that is not of that shape; the file is left as it is.
    """
    check_output(path, "out")
    if not path.exists():
        return []
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        check_row(row, shape, f"out = {str(path)!r}, row {number}")
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
