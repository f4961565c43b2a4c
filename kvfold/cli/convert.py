"""`kvfold convert`: vectors from one block format into another."""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from kvfold.cache.files.paths import check_input, check_output, replacing
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.formats import get_format
from kvfold.formats.base import MAX_HEAD_DIM
from kvfold.formats.before_rope import BASE, frequencies_of
from kvfold.formats.block import BlockFormat
from kvfold.formats.numbers import LARGEST, whole

RAW = "f32"
TOKENS = 4_096
"""Vectors converted at a time."""


def convert(
    source: Annotated[Path, typer.Argument(help="A file of blocks, one vector after the other, without a header.")],
    out: Annotated[Path, typer.Argument(help="Where to write.")],
    source_format: Annotated[str, typer.Option("--from", help=f"Its format: {RAW} or a block format.")],
    out_format: Annotated[str, typer.Option("--to", help=f"The new format: {RAW} or a block format.")],
    head_dim: Annotated[int, typer.Option(help="Coordinates of a vector.")] = 128,
    position: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Position of the first vector: amx3 and tbqx3 turn RoPE back by it.")
    ] = 0,
    rope_base: Annotated[float, typer.Option(help="RoPE's base, for amx3 and tbqx3: the model's rope_theta.")] = BASE,
    layer: Annotated[
        int, typer.Option(min=0, max=LARGEST, help="Layer of the vectors: polar4 has a rotation for each.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Read vectors in one block format, write them in another: tq3, tq4, polar4, tbq3 … tbqp4, amx3, q8_0, q4_0, f16.

    f32 stands for plain float32 numbers. Vectors are read as they would be in attention, so whatever the first
    format lost stays lost, and the second adds its own: the error between the two is printed.

    kvfold convert keys.tq3 keys.tbq4 --from tq3 --to tbq4

    kvfold convert keys.q8_0 keys.f32 --from q8_0 --to f32 --head-dim 64
    """
    whole("head_dim", head_dim, 1, MAX_HEAD_DIM)
    first, second = (_format(name, head_dim, layer, rope_base) for name in (source_format, out_format))
    size = 4 * head_dim if first is None else first.block_bytes
    length = check_input(source, "source").stat().st_size
    check_output(out, "out", (source,))
    if not length or length % size:
        raise ValueError(
            f"source = {str(source)!r} has {length} bytes: a vector of {head_dim} in {source_format} takes {size}, and "
            "a file is a whole number of them"
        )
    count, error, energy = length // size, 0.0, 0.0
    with open(source, "rb") as file, replacing(out, "out") as target:
        starts = range(0, count, TOKENS)
        for start in track(starts, "converting", console=Console(stderr=True), transient=True, disable=len(starts) < 4):
            here = min(TOKENS, count - start)
            raw = torch.frombuffer(bytearray(file.read(here * size)), dtype=torch.uint8).view(here, size)
            pages = None if first is None else first.from_bytes(raw, position + start)
            x = raw.view(torch.float32) if first is None or pages is None else first.unfold(pages)
            _check_finite(x, f"source = {str(source)!r}", start)
            if second is None:
                y, data = x, x.contiguous().view(torch.uint8)
            else:
                folded = second.fold(x, position + start)
                y, data = second.unfold(folded), second.to_bytes(folded)
            _check_finite(y, f"in {out_format}", start)
            target.write(data.contiguous().numpy().data)
            error += (x.double() - y).square().sum().item()
            energy += x.double().square().sum().item()
    row = {
        "vectors": count, "from": source_format, "to": out_format, "bytes_from": length,
        "bytes_to": os.path.getsize(out), "error": error / energy if energy else 0.0,
    }  # fmt: skip
    if as_json:
        return print_json(row)
    to_stdout().print(
        f"{count:,} vectors: {length:,} bytes of {source_format} to {row['bytes_to']:,} of {out_format}; "
        f"relative squared error between the two {row['error']:.3g}",
        highlight=False,
    )


def _check_finite(x: Tensor, where: str, start: int) -> None:
    """Raise if a vector, the first of which is number `start`, holds a NaN or an infinity."""
    finite = x.isfinite().all(-1)
    if not finite.all():
        raise ValueError(f"{where}: vector {start + int(finite.logical_not().nonzero()[0])} holds a NaN or an infinity")


def _format(name: str, head_dim: int, layer: int, rope_base: float) -> BlockFormat | None:
    """The block format `name`; None for float32 numbers."""
    if name == RAW:
        return None
    fmt = get_format(name, head_dim).at(layer, frequencies_of(rope_base))
    if not isinstance(fmt, BlockFormat):
        raise ValueError(f"format = {name!r} has no blocks: convert reads and writes {RAW} and block formats")
    return fmt
