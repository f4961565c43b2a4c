"""How many pages workers have folded, and tokens forgotten, for the process that serves metrics.

Each worker on the same machine keeps its count in a file of its own. An environment variable, which vLLM's processes
inherit, names the folder. Workers on other machines have no such folder and do not count.
"""

import atexit
import os
import shutil
import struct
import tempfile
from pathlib import Path

FOLDER = "KVFOLD_COUNTERS"
NUMBERS = struct.Struct("<2Q")

_files: dict[Path, int] = {}


def make_folder() -> None:
    """Called in the first process, before it starts others."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="kvfold-")
        owner = os.getpid()
        atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)


def count(folds: int, forgotten: int, engine: int, rank: int) -> None:
    """Write how many pages a worker of an engine has folded so far, and how many tokens its requests have forgotten."""
    folder = os.environ.get(FOLDER)
    if folder is None or not os.path.isdir(folder):
        return
    path = Path(folder) / f"{engine}-{os.getpid()}-{rank}"
    if path not in _files:
        _files[path] = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(_files[path], NUMBERS.pack(folds, forgotten), 0)


def counted(engine: int) -> tuple[int, int]:
    """Pages folded and tokens forgotten by all workers of an engine on this machine."""
    folder, folds, forgotten = os.environ.get(FOLDER), 0, 0
    for path in () if folder is None else Path(folder).glob(f"{engine}-*"):
        if len(written := path.read_bytes()) == NUMBERS.size:
            own = NUMBERS.unpack(written)
            folds, forgotten = folds + own[0], forgotten + own[1]
    return folds, forgotten
