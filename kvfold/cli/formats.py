"""`kvfold formats`: every format, what it costs, what it is."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvfold.formats import FORMATS, get_format


def formats(
    head_dim: Annotated[int, typer.Option(help="Coordinates of a key or value of one head.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows instead of a table.")] = False,
) -> None:
    """List the formats: bits, bytes of a vector, what stays dense, what it is and from where.

    Any of these names goes wherever a format is asked for; keys:values, such as kvfold-4:turboquant-3, gives
    keys and values one each. Other bits (1 to 8), residuals and page sizes are named the same way:
    kvfold-3, turboquant-4+qjl (one of the 4 bits for signs of the remainder; or +srht, +sign), kvfold-4@128.
    """
    rows = []
    for name in FORMATS:
        fmt = get_format(name, head_dim)
        rows.append(
            {
                "format": name,
                "head_dim": head_dim,
                "code_bits": fmt.bits,
                "bytes_per_vector": fmt.bytes_per_vector,
                "page_metadata_bytes": fmt.metadata_bytes_per_page,
                "page_size": fmt.page_size,
                "bits_per_value": 8 * fmt.bytes_per_vector / head_dim,
                "dense_sinks": fmt.window.sinks,
                "dense_recent": fmt.window.recent,
                "what": fmt.summary,
                "source": fmt.source,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = Table(
        title=f"Formats at head_dim {head_dim}",
        caption="bytes and bits count codes, scales and page metadata; dense: first tokens + at least so many newest",
        show_lines=True,
    )
    for column in ("format", "bytes/vector", "bits/value", "dense"):
        table.add_column(column, justify="right" if "/" in column else "left", no_wrap=True)
    table.add_column("what it is, and from where")
    for row in rows:
        dense = f"{row['dense_sinks']} + {row['dense_recent']}" if row["dense_sinks"] or row["dense_recent"] else "-"
        table.add_row(
            str(row["format"]), f"{row['bytes_per_vector']:g}", f"{row['bits_per_value']:.3g}", dense,
            f"{row['what']} [dim]({row['source']})[/]",
        )  # fmt: skip
    Console().print(table)
