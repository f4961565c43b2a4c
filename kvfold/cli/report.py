"""`kvfold report`: one HTML page from results."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvfold.cache.files.paths import check_output, replacing
from kvfold.evaluate.report import Results, render
from kvfold.integrations.text import check_text


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Files of eval --json, sweep, tasks, compare --json, plan --json.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Its heading.")] = "kvfold: what folding costs",
) -> None:
    """Make one self-contained HTML page from results: plots, tables, machine and versions.

    kvfold eval --json > eval.json; kvfold sweep --out sweep.jsonl; kvfold tasks --out tasks.jsonl

    kvfold report eval.json sweep.jsonl tasks.jsonl --out report.html
    """
    check_output(out, "out", results)
    page = render(Results.read(results), check_text(title, "title")).encode()
    with replacing(out, "out") as file:
        file.write(page)
    Console(stderr=True).print(f"wrote {out} ({len(page) / 1e3:.0f} kB)", highlight=False, markup=False, soft_wrap=True)
