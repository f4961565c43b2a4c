"""`kvfold formats`: every format, what it costs, what it is."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
import typer
from rich.table import Table

from kvfold.attention.backend import FASTEST
from kvfold.attention.dispatch import path_of
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.formats import BLOCKS, FORMATS, PAIRS, PRESETS, FormatPair, get_formats
from kvfold.formats.block import BlockFormat

OF_OTHERS = (
    *(name for name in BLOCKS if name != "float16"), "affine-4", "uniform-4", "turboquant-2.5", "turboquant-3.5",
    *PAIRS,
)  # fmt: skip
"""Formats that other systems define, and pairs by their names for them."""


def formats(
    head_dim: Annotated[int, typer.Option(help="Coordinates of a key or value of one head.")] = 128,
    devices: Annotated[
        bool, typer.Option("--devices", help="Say for each device of this machine what reads each format.")
    ] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="List the formats of other systems, with the bytes of their blocks.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the formats: bits, bytes of a vector, what stays dense, what it is and from where.

    Any of these names goes wherever a format is asked for; keys:values, such as kvfold-4:turboquant-3, gives
    keys and values one each. Other bits (1 to 8), residuals and page sizes are named the same way:
    kvfold-5, turboquant-4+qjl (one of the 4 bits for signs of the remainder; or +srht, +sign), kvfold-4@128.
    kvfold's keys are fitted to the first 256 tokens of a prompt, or to a text by `kvfold calibrate`. The same tokens
    decide how many bits each layer gets. Without a calibration nothing folds before they are there.
    oscar's keys and values are fitted by `kvfold calibrate` alone.
    --blocks lists formats whose bytes other systems define, and pairs by the names that they give them.
    """
    names = OF_OTHERS if blocks else FORMATS
    pairs = _pairs(names, head_dim, skip=blocks)
    if devices:
        return _print_paths(pairs, head_dim, as_json)
    presets = {name: preset for preset, name in PRESETS.items()}
    rows = []
    for name, pair in pairs.items():
        keys, values = pair.keys, pair.values
        same = keys.summary == values.summary
        rows.append(
            {
                "format": name,
                "preset": presets.get(name),
                "head_dim": head_dim,
                "code_bits": keys.bits,
                "block_bytes": keys.block_bytes if isinstance(keys, BlockFormat) else None,
                "key_bytes": keys.bytes_per_vector,
                "value_bytes": values.bytes_per_vector,
                "page_metadata_bytes": keys.metadata_bytes_per_page + values.metadata_bytes_per_page,
                "page_size": keys.page_size,
                "bits_per_value": 8 * (keys.bytes_per_vector + values.bytes_per_vector) / (2 * head_dim),
                "dense_sinks": pair.window.sinks,
                "dense_recent": pair.window.recent,
                "fitted": pair.awaits_fit or pair.needs_calibration,
                "what": keys.summary if same else f"Keys: {_lower(keys.summary)}. Values: {_lower(values.summary)}",
                "source": keys.source if same else f"{keys.source}; {values.source}",
            }
        )
    if as_json:
        return print_json(rows)
    table = Table(
        title=f"Formats at head_dim {head_dim}",
        caption="bytes of a key and of a value count codes, scales and page metadata; dense: first tokens + at least "
        "so many newest",
        show_lines=True,
    )
    for column in ("format", "bytes", "bits/value", "dense"):
        table.add_column(column, justify="right" if column in ("bytes", "bits/value") else "left", no_wrap=True)
    table.add_column("what it is, and from where")
    for row in rows:
        dense = f"{row['dense_sinks']} + {row['dense_recent']}" if row["dense_sinks"] or row["dense_recent"] else "-"
        name = str(row["format"]) + (f"\n[dim]{row['preset']}[/]" if row["preset"] else "")
        sizes = [f"{row['key_bytes']:g}", f"{row['value_bytes']:g}"]
        table.add_row(
            name, sizes[0] if sizes[0] == sizes[1] else " + ".join(sizes), f"{row['bits_per_value']:.3g}", dense,
            f"{row['what']} [dim]({row['source']})[/]",
        )  # fmt: skip
    to_stdout().print(table)


def _pairs(names: Sequence[str], head_dim: int, skip: bool) -> dict[str, FormatPair]:
    """Formats by name; those of another head_dim are left out if `skip`."""
    pairs = {}
    for name in names:
        try:
            pairs[name] = get_formats(name, head_dim, head_dim)
        except ValueError:
            if not skip:
                raise
    return pairs


def _print_paths(pairs: Mapping[str, FormatPair], head_dim: int, as_json: bool) -> None:
    """What reads each format on each device of this machine."""
    present = [device for device in (*FASTEST, "mps") if getattr(torch, device).is_available()]
    rows = [
        {"format": name, "head_dim": head_dim, **{device: path_of(pair, device) for device in present}}
        for name, pair in pairs.items()
    ]
    if as_json:
        return print_json(rows)
    table = Table(title=f"What reads a cache at head_dim {head_dim}")
    for column in ("format", *present):
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column]) for column in ("format", *present)))
    to_stdout().print(table)


def _lower(summary: str) -> str:
    """A summary inside a sentence; names like Lloyd–Max keep their capital."""
    return summary if summary.startswith("Lloyd") else summary[0].lower() + summary[1:]
