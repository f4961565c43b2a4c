"""The folder of pages that outlive a process: whole or not there, whatever happens to it."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvfold.cache.files import paths
from kvfold.cache.files.pages import PageFolder

KEYS = [f"{i:02x}{i:062x}" for i in range(40)]
PAGE = 10_000


def _page(i: int) -> bytes:
    return random.Random(i).randbytes(PAGE)


def test_a_page_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path / "not" / "there", "kind")
    assert not folder.has(KEYS[0])
    assert folder.load(KEYS[0]) is None
    folder.store(KEYS[0], _page(0))
    assert folder.has(KEYS[0])
    assert folder.load(KEYS[0]) == _page(0)
    again = PageFolder(tmp_path / "not" / "there", "kind")
    assert again.load(KEYS[0]) == _page(0)
    assert not PageFolder(tmp_path / "not" / "there", "another").has(KEYS[0])


@pytest.mark.parametrize("at", [0, 31, 32, 5_000, PAGE + 31])
def test_a_flipped_bit_is_found(at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PageFolder(tmp_path, "kind")
    folder.store(KEYS[0], _page(0))
    path = folder.path(KEYS[0])
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)
    assert folder.load(KEYS[0]) is None
    assert f"{path} is damaged" in caplog.text
    assert not folder.has(KEYS[0])  # the next time it is computed and stored
    folder.store(KEYS[0], _page(0))
    assert folder.load(KEYS[0]) == _page(0)


@pytest.mark.parametrize("left", [0, 10, 32, 5_000, PAGE + 31])
def test_a_truncated_file_is_found(left: int, tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, "kind")
    folder.store(KEYS[0], _page(0))
    os.truncate(folder.path(KEYS[0]), left)
    assert folder.load(KEYS[0]) is None
    assert not folder.has(KEYS[0])


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    folder, other = PageFolder(tmp_path, "kind", 10 * PAGE), PageFolder(tmp_path, "other")
    other.store(KEYS[39], _page(39))
    for i in range(9):
        folder.store(KEYS[i], _page(i))
        os.utime(folder.path(KEYS[i]), (i, i))
    os.utime(other.path(KEYS[39]), (0, 0))
    assert folder.load(KEYS[0]) == _page(0)  # used now
    folder.store(KEYS[9], _page(9))
    assert not other.has(KEYS[39])  # other kinds count, too
    assert not folder.has(KEYS[1])
    assert all(folder.has(KEYS[i]) for i in (0, 5, 6, 7, 8, 9))
    for i in range(10, 40):
        folder.store(KEYS[i], _page(i))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 10 * PAGE + 2 * 32
    assert folder.has(KEYS[39])


def test_a_full_disk_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = PageFolder(tmp_path, "kind")
    folder.store(KEYS[0], _page(0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(paths.os, "fsync", full)
        for i in range(3):
            folder.store(KEYS[i], _page(i + 1))
    assert folder.load(KEYS[0]) == _page(0)
    assert not folder.has(KEYS[1])
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
    assert not [*tmp_path.glob("*/*/.*")]
    folder.store(KEYS[1], _page(1))
    assert folder.load(KEYS[1]) == _page(1)


WRITING = """
import random, sys
from pathlib import Path
from kvfold.cache.files.pages import PageFolder
folder, seed = PageFolder(Path(sys.argv[1]), "kind", int(sys.argv[2])), int(sys.argv[3])
print(flush=True)
for n in range(10**6):
    i = random.Random(seed + n).randrange(40)
    key = f"{i:02x}{i:062x}"
    page = random.Random(i).randbytes(10_000)
    if n % 2:
        folder.store(key, page)
    elif (found := folder.load(key)) is not None and found != page:
        sys.exit("another page")
"""


def test_processes_that_share_it_and_are_killed_leave_only_whole_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for round_ in range(3):
        command = [sys.executable, "-c", WRITING, tmp_path, 15 * PAGE]
        writers = [
            subprocess.Popen([*map(str, command), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for seed in (round_, round_ + 1000)
        ]
        for writer in writers:
            assert writer.stdout.readline()
        time.sleep(1)
        for writer in writers:
            assert writer.poll() is None, writer.stderr.read()
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert b"damaged" not in writer.stderr.read()
    folder = PageFolder(tmp_path, "kind", 15 * PAGE)
    there = [i for i in range(40) if folder.has(KEYS[i])]
    assert len(there) >= 5
    assert all(folder.load(KEYS[i]) == _page(i) for i in there)
    assert "damaged" not in caplog.text
