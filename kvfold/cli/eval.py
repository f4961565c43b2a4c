"""`kvfold eval`: what formats cost a model, on a text."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cli.options import (
    CalibrationFile,
    Dtype,
    Formats,
    Model,
    RuntimeName,
    Sliding,
    TextFile,
    Weights,
    check_runtime,
    counted,
    formats_beside_dense,
    listed_integers,
    load_runtime,
    parse_dtype,
    text_of,
)
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate import QualityRow, evaluate_formats, text_passages
from kvfold.evaluate.records import ABOUT_HELD, HELD, held_cells
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.text import text_sha256


def evaluate(
    model: Model = "smollm2",
    runtime: RuntimeName = "torch",
    formats: Formats = "kvfold-4,kvfold-3,kvfold-2,turboquant-4,turboquant-3,turboquant-2",
    text: TextFile = None,
    passage: Annotated[int, typer.Option(max=LARGEST, help="Tokens of each passage, read with a fresh cache.")] = 1_024,
    passages: Annotated[int, typer.Option(max=LARGEST, help="How many passages, spread evenly over the text.")] = 4,
    offsets: Annotated[
        str | None, typer.Option(help="Where passages start, in tokens, separated by commas; instead of --passages.")
    ] = None,
    dtype: Dtype = None,
    weights: Weights = None,
    calibration: CalibrationFile = None,
    sliding: Sliding = False,
    layers: Annotated[bool, typer.Option("--layers", help="Also print each layer's key and value error.")] = False,
    as_json: Json = False,
) -> None:
    """Measure formats on a text: perplexity, divergence from a dense cache, held bits, time.

    Every prediction goes through the real cache and attention, so what is measured is what decoding token by token
    reads. PPL is perplexity; KL the mean, and p99 the 99th percentile, of the divergence KL(dense || folded) a token,
    in nats; top-1 the share of tokens where both predict the same; bits a value counts every byte held at the end of
    a passage.
    """
    names = formats_beside_dense(formats)
    held_in = parse_dtype(dtype)
    starts = None if offsets is None else listed_integers("offsets", offsets)
    check_runtime(runtime)
    if sliding and runtime != "torch":
        raise ValueError(f"sliding, and runtime = {runtime!r}: windows fold for runtime 'torch' only; leave one out")
    words = text_of(text)
    measured = None if calibration is None else Calibration.load(calibration)
    network, tokenizer = load_runtime(runtime, model, held_in, weights)
    network.attach()
    parts = text_passages(tokenizer, words, passage, passages, starts)
    with counted("reading", sum(part.shape[1] for part in parts) * (1 + len(names))) as read:
        policies = {name: Policy(name, sliding=sliding) for name in names}
        rows = evaluate_formats(network, parts, policies, calibration=measured, progress=read)
    if as_json:
        about = {
            "model": model, "runtime": runtime, "text_sha": text_sha256(words), "passage": passage,
            "calibrated": measured is not None, "weights": weights, "sliding": sliding,
        }  # fmt: skip
        return print_json([row.to_json(**about) for row in rows])
    _print(rows, model, layers)


def _print(rows: list[QualityRow], model: str, layers: bool) -> None:
    console = to_stdout()
    table = Table(
        title=f"{model}: {rows[0].n_tokens:,} tokens, dense PPL {rows[0].ppl_dense:.3f}",
        caption=ABOUT_HELD,
    )
    for column in ("format", "ΔPPL", "KL", "p99", "top-1", *HELD, "seconds"):
        table.add_column(column, justify="left" if column == "format" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.format, f"{row.delta_ppl_pct:+.2f} %", f"{row.kl_mean:.4f}", f"{row.kl_p99:.3f}", f"{row.top1:.3f}",
            *held_cells(asdict(row)), f"{row.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    if not layers:
        return
    for row in rows:
        each = Table(title=f"{row.format}: share of a layer's key and value energy that folding loses")
        for column in ("layer", "keys", "values"):
            each.add_column(column, justify="right")
        for i, (key, value) in enumerate(zip(row.key_error, row.value_error, strict=True)):
            each.add_row(str(i), f"{key:.2%}", f"{value:.2%}")
        console.print(each)
