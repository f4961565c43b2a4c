"""What is written is whole or not there, takes the place of files alone, and is known to be possible before work."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold import Calibration, FoldedCache, QueryStatistics
from kvfold.cache.files.paths import check_input, check_output, replacing
from kvfold.evaluate import plots
from kvfold.evaluate.records import open_rows, read_rows
from kvfold.integrations.text import check_text, read_text

WRITERS: dict[str, Callable[[Path, Any], None]] = {
    "bytes": lambda path, model: _write(path),
    "a cache": lambda path, model: FoldedCache(model.config, "turboquant-4").save(path),
    "a calibration": lambda path, model: Calibration({}).save(path),
    "TRIA": lambda path, model: QueryStatistics(1, 4, 1e4, 1.0, torch.ones(1, 1, 4, 2)).save(path),
    "a plot": lambda path, model: plots.save(plots.new_figure(), path.with_name(path.name + ".svg")),
    "rows": lambda path, model: open_rows(path, {}) and None,
}
READERS: dict[str, Callable[[Path], Any]] = {
    "a cache": FoldedCache.load,
    "a calibration": Calibration.load,
    "TRIA": QueryStatistics.load,
    "rows": read_rows,
    "text": read_text,
    "bytes": check_input,
}


def _write(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")


def _make(kind: str, path: Path) -> None:
    """Something that is no file, made for this test: never a device of the machine's."""
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link to a FIFO":
        os.mkfifo(path.with_name("fifo"))
        path.symlink_to("fifo")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    else:
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")


KINDS = ("folder", "FIFO", "link to a FIFO", "link to itself", "device")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_but_a_file_is_replaced(writer: str, kind: str, tmp_path: Path, llama: Any) -> None:
    path = tmp_path / "x"
    _make(kind, tmp_path / "x.svg" if writer == "a plot" else path)
    before = sorted((each.name, each.lstat().st_mode) for each in tmp_path.iterdir())
    with pytest.raises(OSError, match=r"x(\.svg)?'( is a|: Too many levels)"):
        WRITERS[writer](path, llama)
    assert sorted((each.name, each.lstat().st_mode) for each in tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_nothing_but_a_file_is_read(reader: str, kind: str, tmp_path: Path) -> None:
    _make(kind, tmp_path / "x")
    with pytest.raises(OSError, match=r"x'(: there is no such file, it is a|: Too many levels)"):
        READERS[reader](tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="no such file"):
        READERS[reader](tmp_path / "y")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_that_is_not_there(writer: str, tmp_path: Path, llama: Any) -> None:
    for name in ("no/x", "y/x", "z" * 300, "\udcff"):
        (tmp_path / "y").touch()
        with pytest.raises(OSError, match=r"= '.*'(: there is no such folder|: File name too long|: a name that)"):
            WRITERS[writer](tmp_path / name, llama)
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def test_what_a_link_points_to_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    _write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    (tmp_path / "to nothing").symlink_to("made")
    _write(tmp_path / "to nothing")
    assert (tmp_path / "made").read_bytes() == b"new"


def test_what_is_read_is_not_replaced(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "model"
    folder.mkdir()
    for path in (source, folder / "weights"):
        path.touch()
    (tmp_path / "link").symlink_to("source")
    os.link(source, tmp_path / "hard")
    for out in (source, tmp_path / "link", tmp_path / "hard", folder / "weights"):
        with pytest.raises(ValueError, match=r"out = .* would replace"):
            check_output(out, "out", (None, source, folder))
    with pytest.raises(ValueError, match="would replace"):  # a plot over rows that are yet to be made
        check_output(tmp_path / "new", "out", (tmp_path / "new",))
    assert check_output(folder / "new", "out", (None, source, folder)) == folder / "new"


def test_what_may_not_be_written_or_read_is_known_before() -> None:
    """By someone who is not root."""
    script = (
        "import os, sys; os.getuid() or os.setuid(65534)\n"
        "from kvfold.cache.files.paths import check_input, check_output\n"
        "for check, path in zip((check_output, check_output, check_input), sys.argv[1:]):\n"
        "    try: check(path, 'it')\n"
        "    except PermissionError as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for the user alone
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "shut").mkdir(mode=0o555)
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        for file, mode in (("old", 0o444), ("secret", 0o000)):
            (folder / "open" / file).touch()
            (folder / "open" / file).chmod(mode)
        paths = [str(folder / path) for path in ("shut/new", "open/old", "open/secret")]
        run = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in run.stderr or "Permission denied" in run.stderr:
        pytest.skip("others than its owner do not read this checkout")
    says = [
        f"it = {path!r} may not be {done}" for path, done in zip(paths, ("written", "written", "read"), strict=True)
    ]
    assert run.stdout.splitlines() == says, run.stderr


@pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfea\0"])
def test_text_that_is_no_utf_8(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"file = '.*x.txt' is no UTF-8: byte \d is 0x"):
        read_text(path, "file")
    with pytest.raises(ValueError, match="prompt is no UTF-8: see its character 3"):
        check_text("caf\udce9", "prompt")


def test_a_home_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfold.integrations import models, unpacking

    (tmp_path / "file").touch()
    monkeypatch.setattr(unpacking, "_convert", lambda *_: pytest.fail("the work had begun"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"'.*/file/kvfold/.*', which cannot be written .* let XDG_CACHE_HOME name"):
        models.demo_folder()
