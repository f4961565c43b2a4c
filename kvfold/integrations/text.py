"""Text of files, and text that every Python installation carries."""

import hashlib
import os
from pydoc_data.topics import topics

from kvfold.cache.files.paths import check_input


def standard_text() -> str:
    """The language reference inside Python's standard library: about 465,000 characters of technical English.

    Topics in key order, separated by blank lines. It differs between Python versions: quote
    `text_sha256` beside figures.
    """
    return "\n\n".join(topics[key] for key in sorted(topics))


def read_text(path: str | os.PathLike[str], name: str = "text") -> str:
    """The text of a UTF-8 file.

    Raises OSError, with a message that begins with `name`, if there is no such file, or it may not be read; ValueError
    if it holds no text, or is no UTF-8.
    """
    try:
        words = check_input(path, name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} = {str(path)!r} is no UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    if not words.strip():
        raise ValueError(f"{name} = {str(path)!r}: the file is empty")
    return words


def check_text(text: str, name: str) -> str:
    """`text`; raises ValueError if it is no Unicode.

    Arguments that are no UTF-8 come with surrogates in the place of their bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no UTF-8: see its character {error.start}") from None
    return text


def text_sha256(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()
