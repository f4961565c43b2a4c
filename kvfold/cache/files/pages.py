"""A folder of pages that outlive the process: each a file, whole or not there, found by its key."""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path

from kvfold.cache.files.paths import replacing

logger = logging.getLogger("kvfold")

DIGEST = hashlib.sha256().digest_size
ROOM = 0.9
"""What is left of the limit after pages were removed, so that not every new page removes one."""


class PageFolder:
    """Pages of one kind in a folder that others may use at the same time.

    A file is a SHA-256 of what follows, then the page. Files are replaced as a whole, so a process that is killed
    leaves what was whole. When all kinds together take more than `limit` bytes, those that were read longest ago go.

    Parameters
    ----------
    folder
        Made if it is not there.
    kind
        What decides how the bytes are read, as a name of letters and digits. Pages of another kind are never found.
    limit
        Bytes; 0 for no limit.
    """

    def __init__(self, folder: Path, kind: str, limit: int = 0) -> None:
        self.folder, self.own, self.limit = folder, folder / kind, limit
        self.own.mkdir(parents=True, exist_ok=True)
        self._taken = self._measure() if limit else 0
        self._full = False  # whether the last page could not be written

    def path(self, key: str) -> Path:
        """Where a page is, or would be."""
        return self.own / key[:2] / key

    def has(self, key: str) -> bool:
        """Whether a page is there; `load` says whether it is sound."""
        return self.path(key).is_file()

    def load(self, key: str) -> bytes | None:
        """A page, which counts as used now; None if it is not there or damaged. A damaged file is removed."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, page = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(page).digest() != digest:
            logger.warning("kvfold: %s is damaged: it is removed, and computed again", path)
            path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # another process may have removed it since
            os.utime(path)
        return page

    def store(self, key: str, page: bytes) -> None:
        """Write a page. One that cannot be written, as the disk is full, is not kept, with a word in the log."""
        path = self.path(key)
        if self.limit and self._taken + len(page) > self.limit:
            self._make_room()
        try:
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as file:
                file.write(hashlib.sha256(page).digest())
                file.write(page)
        except OSError as error:
            if not self._full:
                logger.warning("kvfold: %s: pages are not kept while they cannot be written: %s", self.folder, error)
            self._full = True
            return
        self._full = False
        self._taken += DIGEST + len(page)

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each file of all kinds was last used, how many bytes it has, and where it is."""
        found = []
        for path in self.folder.glob("*/??/*"):
            try:
                about = path.stat()
            except OSError:
                continue
            found.append((about.st_mtime, about.st_size, path))
        return found

    def _measure(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _make_room(self) -> None:
        """Remove the files that were used longest ago; other processes' files count, too."""
        files = sorted(self._files())
        self._taken = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._taken <= ROOM * self.limit:
                break
            path.unlink(missing_ok=True)
            self._taken -= size
