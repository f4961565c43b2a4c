"""How many pages workers have folded, for the process that serves metrics.

Each worker on the same machine keeps its count in a file of its own. An environment variable, which vLLM's processes
inherit, names the folder. Workers on other machines have no such folder and do not count.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

FOLDER = "KVFOLD_COUNTERS"
BYTES = 8

_files: dict[Path, int] = {}


def make_folder() -> None:
    """Called in the first process, before it starts others."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="kvfold-")
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)


def count_folds(folds: int, engine: int, rank: int) -> None:
    """Write what a worker of an engine has folded so far."""
    folder = os.environ.get(FOLDER)
    if folder is None or not os.path.isdir(folder):
        return
    path = Path(folder) / f"{engine}-{os.getpid()}-{rank}"
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(_files[path], folds.to_bytes(BYTES, "little"), 0)


def folds(engine: int) -> int:
    """Pages that all workers of an engine on this machine have folded."""
    folder = os.environ.get(FOLDER)
    counts = () if folder is None else Path(folder).glob(f"{engine}-*")
    return sum(int.from_bytes(path.read_bytes(), "little") for path in counts)
