"""How many pages workers have folded, for the process that serves metrics.

Each worker on the same machine writes its count into a file of its own. An environment variable, which vLLM's processes
inherit, names the folder. Workers on other machines have no such folder and do not count.
"""

import atexit
import os
import shutil
import tempfile
import time
from pathlib import Path

FOLDER = "KVFOLD_COUNTERS"
SECONDS = 0.5
"""The shortest time between two writes of a worker."""

_last = 0.0


def make_folder() -> None:
    """Called in the first process, before it starts others."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="kvfold-")
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)


def count_folds(folds: int, rank: int, at_once: bool) -> None:
    """Write what a worker has folded, if the last time is long ago or it must be `at_once`."""
    global _last
    folder, now = os.environ.get(FOLDER), time.monotonic()
    if folder is None or (now - _last < SECONDS and not at_once) or not os.path.isdir(folder):
        return
    _last = now
    target = Path(folder) / f"{os.getpid()}-{rank}"
    scratch = target.with_suffix(".new")
    scratch.write_text(str(folds))
    os.replace(scratch, target)


def folds() -> int:
    """Pages that all workers of this machine have folded."""
    folder = os.environ.get(FOLDER)
    counts = [] if folder is None else [path for path in Path(folder).glob("*") if path.suffix != ".new"]
    return sum(int(path.read_text() or 0) for path in counts)
