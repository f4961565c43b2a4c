"""`kvfold bench`: speed and memory of a model with dense and folded caches."""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from kvfold.cli.options import (
    Dtype,
    Formats,
    Model,
    TextFile,
    Weights,
    counted,
    formats_beside_dense,
    listed_integers,
    parse_dtype,
    text_of,
)
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate import plots
from kvfold.evaluate.speed import SpeedRow, measure_speed
from kvfold.formats.numbers import LARGEST, whole
from kvfold.integrations.models import load_model
from kvfold.integrations.transformers import attach
from kvfold.integrations.weights import weights_held


def bench(
    model: Model = "smollm2",
    formats: Formats = "kvfold-4,kvfold-2",
    contexts: Annotated[str, typer.Option(help="Lengths of prompts in tokens, separated by commas.")] = "512,2048,7900",
    new: Annotated[int, typer.Option(min=2, max=LARGEST, help="Tokens to decode after each prompt.")] = 32,
    dtype: Dtype = None,
    weights: Weights = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default what torch takes.")] = None,
    text: TextFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speed and memory over contexts into this .png, .svg or .pdf.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time a model with a dense cache and with folded ones, over a list of contexts.

    prefill is the time to read the prompt; tok/s and ms those of the median step of decoding, dense and folded in
    turns, so that both see the same machine; ratio the dense step over the folded one; overall the new tokens over all
    time, in tok/s. held is every byte that the cache owns, peak how much the process grew while it read the prompt.
    """
    names, lengths = formats_beside_dense(formats), listed_integers("contexts", contexts)
    if not lengths:
        raise ValueError(f"contexts = {contexts!r}: give at least one length")
    plots.check(plot, (text, model))
    held_in = parse_dtype(dtype)
    words = text_of(text)
    if threads is not None:
        whole("threads", threads, 1, os.cpu_count() or 1)
        torch.set_num_threads(threads)
    network, tokenizer = load_model(model, held_in, weights)
    attach(network)
    ids = tokenizer(words, return_tensors="pt").input_ids
    with counted("timing", sum((1 + len(names)) * (length + new) for length in lengths)) as done:
        rows = measure_speed(network, ids, names, lengths, new, progress=done)
    if plot is not None:
        plots.save(plots.speed(rows), plot)
    held = weights_held(network)
    if as_json:
        about = {"model": model, "dtype": str(network.dtype), "weights": weights, "weights_bytes": held}
        return print_json([row.to_json(**about) for row in rows])
    _print(rows, model, network.dtype, held)


def _print(rows: list[SpeedRow], model: str, dtype: torch.dtype, weights: int) -> None:
    console = to_stdout()
    name = str(dtype).removeprefix("torch.")
    about = f"{model}, {name}, {torch.get_num_threads()} threads; weights {weights / 1e6:,.0f} MB; held and peak in MB"
    console.print(about, highlight=False)
    for context in dict.fromkeys(row.context for row in rows):
        table = Table(title=f"after {context:,} tokens")
        for column in ("cache", "prefill s", "tok/s", "ms", "ratio", "overall", "held", "peak"):
            table.add_column(column, justify="left" if column == "cache" else "right", no_wrap=True)
        for row in (row for row in rows if row.context == context):
            table.add_row(
                row.format, f"{row.prefill_ms / 1e3:.2f}", f"{row.decode_tok_s:.1f}", f"{row.ms_per_token:.1f}",
                f"{row.decode_ratio:.2f}×", f"{row.throughput_tok_s:.2f}", f"{row.held_bytes / 1e6:.1f}",
                "–" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
            )  # fmt: skip
        console.print(table)
