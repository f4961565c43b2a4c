"""Files that are written whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import repr as short
from typing import BinaryIO

A_FILE, A_FOLDER = "a file", "a folder"
KINDS = (
    (stat.S_ISDIR, A_FOLDER), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip
"""Things that have a path but are no files."""

AnyPath = str | os.PathLike[str]


def check_input(path: AnyPath, name: str = "path", made_by: str = "") -> Path:
    """`path`, if a file is there that can be read from beginning to end; `made_by` names what makes one, for messages.

    Raises OSError if there is none, or it may not be read; the message begins with `name`.
    """
    _check_name(path, name)
    there = _kind(path, name)
    if there != A_FILE:
        found = there and f", it is {there}"
        made_by = made_by and f"; {made_by} makes one"
        raise FileNotFoundError(f"{name} = {str(path)!r}: there is no such file{found}{made_by}")
    if not os.access(path, os.R_OK):
        raise PermissionError(f"{name} = {str(path)!r} may not be read")
    return Path(path)


def check_output(path: AnyPath, name: str = "path", inputs: Sequence[AnyPath | None] = ()) -> Path:
    """Where a file for `path` would be written: a link stays, and its target is written.

    Call it before the work that fills the file. `path` names a file, or nothing yet, in an existing folder, and `name`
    is the user's name for it, for messages. `inputs` are files, and folders of files, that must not be replaced: they
    are read, or written as well.

    Raises OSError if no file can be there, or something is there that a file must not replace (a folder, a device, a
    FIFO), and ValueError if it is one of the inputs.
    """
    _check_name(path, name)
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{name} = {str(path)!r}: there is no such folder")
    there = _kind(path, name)
    if there and there != A_FILE:
        error = IsADirectoryError if there == A_FOLDER else OSError
        raise error(f"{name} = {str(path)!r} is {there} and was not written: give a file")
    asked = Path(os.path.abspath(path))
    for source in inputs:
        if source is not None and _reads(Path(source), target, asked):
            raise ValueError(f"{name} = {str(path)!r} would replace {str(source)!r}: name another file")
    if not os.access(target.parent, os.W_OK | os.X_OK) or (there and not os.access(target, os.W_OK)):
        raise PermissionError(f"{name} = {str(path)!r} may not be written")
    return target


def _check_name(path: AnyPath, name: str) -> None:
    """Raise TypeError or OSError if nothing can have such a path."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"{name} = {short(path)}: give a path, a str or a pathlib.Path")
    try:
        os.fspath(path).encode()  # safetensors opens no other names
    except UnicodeEncodeError:
        raise OSError(f"{name} = {str(path)!r}: a name that is no UTF-8; name another file") from None
    if "\0" in os.fspath(path):
        raise OSError(f"{name} = {str(path)!r}: a name that holds a NUL; name another file")


def _kind(path: AnyPath, name: str) -> str:
    """What is at `path`: a file, something of `KINDS`, or nothing ("")."""
    try:
        mode = os.stat(os.fspath(path) or os.curdir).st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:  # a name that is too long, a link to itself
        raise OSError(f"{name} = {str(path)!r}: {error.strerror}") from None
    return next((kind for is_one, kind in KINDS if is_one(mode)), A_FILE)


def _reads(source: Path, target: Path, asked: Path) -> bool:
    """Whether `target` is the file `source`, or an existing file of the folder `source`, which may be a link there.

    `asked` is the path that leads to `target`.
    """
    with suppress(OSError):
        if source.is_dir():
            if not target.exists():
                return False
            inside = any(source.samefile(path.parent) for path in (asked, target))
            return inside or any(_same(each, target) for each in source.iterdir())
        return Path(os.path.realpath(source)) == target or source.samefile(target)
    return False


def _same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


@contextmanager
def replacing_path(path: AnyPath, name: str = "path") -> Iterator[Path]:
    """Path of a new, empty file that replaces `path` when the block ends, once all of it is on the disk.

    If anything fails, the new file is deleted and `path` is as it was. Raises OSError if it cannot be written
    (`check_output`).
    """
    target = check_output(path, name)
    scratch = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        scratch.touch(exist_ok=False)
        # Nobody who must not read the old file may read the new one, complete or not.
        mode = (target if target.is_file() else scratch).stat().st_mode
        scratch.chmod(0o600)
        yield scratch
        with open(scratch, "r+b") as file:
            scratch.chmod(mode)
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink()
        if isinstance(error, OSError):
            why = error.strerror or str(error)
            raise OSError(
                error.errno, f"{name} = {str(path)!r} was not written, and what was there is as it was: {why}"
            ) from error
        raise


@contextmanager
def replacing(path: AnyPath, name: str = "path") -> Iterator[BinaryIO]:
    """As `replacing_path`, but open for writing."""
    with replacing_path(path, name) as scratch, open(scratch, "wb") as file:
        yield file
