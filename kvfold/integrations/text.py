"""Text that every Python installation carries."""

import hashlib
from pydoc_data.topics import topics


def standard_text() -> str:
    """The language reference inside Python's standard library: about 465,000 characters of technical English.

    Topics in key order, separated by blank lines. It differs between Python versions: quote
    `text_sha256` beside figures.
    """
    return "\n\n".join(topics[key] for key in sorted(topics))


def text_sha256(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()
