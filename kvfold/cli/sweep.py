"""`kvfold sweep`: the ablation, the staircase, a recommendation."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvfold.cache.files.paths import check_output
from kvfold.cli.options import (
    Dtype,
    Model,
    RuntimeName,
    TextFile,
    Weights,
    check_runtime,
    listed_integers,
    listed_names,
    load_runtime,
    parse_dtype,
    text_of,
    token_progress,
)
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate.passages import text_passages
from kvfold.evaluate.records import ABOUT_OF_BF16, OF_BF16, RUN, Row, open_rows
from kvfold.evaluate.sweep import Budgets, Steps, Sweep, cells, pareto, recommend
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import sources_of
from kvfold.integrations.text import text_sha256

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red", "invalid": "red"}


def sweep(
    model: Model = "smollm2",
    runtime: RuntimeName = "torch",
    out: Annotated[Path, typer.Option(help="JSON-lines file; runs that it holds already are not repeated.")] = Path(
        "sweep.jsonl"
    ),
    family: Annotated[str, typer.Option(help="kvfold, turboquant, hadamard or centred.")] = "kvfold",
    key_bits: Annotated[str, typer.Option(help="Bits of keys to try, separated by commas.")] = "8,6,5,4,3,2",
    value_bits: Annotated[str, typer.Option(help="Bits of values to try.")] = "8,6,4,3,2",
    page_sizes: Annotated[str, typer.Option(help="Tokens a page to try beside 64.")] = "32,128",
    residuals: Annotated[
        str | None, typer.Option(help="Residuals of keys to try; by default qjl,srht,sign if the family takes them.")
    ] = None,
    text: TextFile = None,
    passage: Annotated[int, typer.Option(max=LARGEST, help="Tokens of a passage.")] = 2048,
    passages: Annotated[int, typer.Option(max=LARGEST, help="How many passages, spread over the text.")] = 1,
    dtype: Dtype = None,
    weights: Weights = None,
    pass_abs: Annotated[float, typer.Option(help="pass: perplexity moves by no more than this,")] = 0.3,
    pass_pct: Annotated[float, typer.Option(help="and by no more than this, in percent.")] = 5.0,
    warn_abs: Annotated[float, typer.Option(help="warn: it moves by no more than this; beyond is fail.")] = 1.0,
    lossless_pct: Annotated[float, typer.Option(help="What a stage of the ablation may move it, in percent,")] = 0.5,
    lossless_kl: Annotated[float, typer.Option(help="and its KL to the dense cache, in nats a token.")] = 0.005,
    as_json: Json = False,
) -> None:
    """Find the format for a model: prove each stage right, then walk down in bits, one variable at a time.

    The ablation comes first: the attached model with nothing folded (identity), conversion into pages without codes
    (bridge), 8-bit keys, 8-bit values, both, and a residual. Each must change next to nothing. If one does, there is
    a bug, and nothing is swept over it.

    The staircase then tries key bits, value bits, page sizes and residuals, each from the best of the step before.
    Every run appends a row to --out. Killed and started again, it goes on where it was. What a cache holds is
    counted at the end of a passage, so a short passage counts mostly the dense window. Of the formats that pass and
    hold at most 5 % more than the smallest, the one with the least KL is recommended.
    """
    budgets = Budgets(pass_abs, pass_pct, warn_abs, lossless_pct, lossless_kl)
    steps = Steps(
        listed_integers("key_bits", key_bits), listed_integers("value_bits", value_bits),
        listed_integers("page_sizes", page_sizes), None if residuals is None else listed_names(residuals),
    )  # fmt: skip
    held_in = parse_dtype(dtype)
    check_runtime(runtime)
    words = text_of(text)
    check_output(out, "out", (text, *sources_of(model)))
    open_rows(out, RUN)  # raises now if it cannot be appended to
    network, tokenizer = load_runtime(runtime, model, held_in, weights)
    parts = text_passages(tokenizer, words, passage, passages)
    about = {"model": model, "text_sha": text_sha256(words), "passage": passage, "dtype": network.dtype}
    if runtime != "torch":  # rows from before there was another do not say it
        about["runtime"] = runtime
    if weights is not None:  # nor this
        about["weights"] = weights
    with token_progress() as progress:
        task = progress.add_task("", total=None)

        def started(stage: str, format: str, tokens: int | None) -> None:
            if tokens is None:
                progress.console.print(f"[dim]{stage}: {format} is in {out} already[/]", highlight=False)
            else:
                progress.reset(task, description=f"{stage}: {format}", total=tokens)

        job = Sweep(
            network, parts, out, about, family=family, budgets=budgets, steps=steps,
            started=started, progress=lambda n: progress.advance(task, n),
        )  # fmt: skip
        ablation, rows = job.run()
    best = recommend(rows, budgets)
    front = {id(row) for row in pareto(rows)}
    if as_json:
        names = [row["config"]["format"] for row in rows if id(row) in front]
        document = {"ablation": ablation, "staircase": rows, "pareto": names}
        return print_json(document | {"recommended": best.format, "why": best.reason})
    caption = f"* on the Pareto front; {ABOUT_OF_BF16}; rows are in {out}"
    table = Table(title=f"{model}: {job.n_tokens:,} tokens", caption=caption)
    _print(table, ablation, rows, front)
    Console(stderr=True).print(f"[bold]{best.format}[/]: {best.reason}", highlight=False)


def _print(table: Table, ablation: Sequence[Row], rows: Sequence[Row], front: Collection[int]) -> None:
    """Print both in a table; rows whose id is in `front` get a star."""
    for column in ("stage", "format", "ΔPPL", "", "KL", OF_BF16, "verdict"):
        name = column in ("stage", "format")
        table.add_column(
            column, justify="left" if name else "right", no_wrap=not name, overflow="fold" if name else "ellipsis"
        )
    for row in ablation:
        table.add_row(*_cells(row, ""))
    table.add_section()
    for row in rows:
        table.add_row(*_cells(row, "*" if id(row) in front else ""))
    to_stdout().print(table)


def _cells(row: Row, mark: str) -> list[str]:
    stage, format, delta, percent, kl, held, verdict = cells(row)
    return [stage, format + mark, delta, f"{percent} %", kl, held, f"[{COLOURS[verdict]}]{verdict}[/]"]
