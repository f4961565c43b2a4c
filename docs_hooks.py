"""What mkdocs.yml adds to mkdocs: README.md as the first page, and files outside docs/ named without a link."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent


def on_files(files: Files, config: Any) -> Files:
    """Take README.md as the first page; its links are to docs/."""
    page = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())
    files.append(
        File.generated(config, "index.md", content=re.sub(r"\[([^]]+)\]\((?=[A-Z]|examples)[^)]*\)", r"\1", page))
    )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name what lies outside docs/ without a link: the site does not have it."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^]]+)\]\({re.escape(up)}[^)]*\)", r"\1", markdown)
