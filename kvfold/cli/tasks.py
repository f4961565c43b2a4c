"""`kvfold tasks`: what a model still does with a folded cache."""

from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from kvfold.cache.calibration import Calibration
from kvfold.cache.files.paths import check_output
from kvfold.cli.options import (
    CalibrationFile,
    Dtype,
    Formats,
    Model,
    Weights,
    formats_beside_dense,
    listed_integers,
    listed_names,
    parse_dtype,
    token_progress,
)
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate import plots
from kvfold.evaluate.behaviour import TASKS, Outcome, Task, TaskRow, notes_on, outcome_row, run_task, sum_up, table_of
from kvfold.evaluate.behaviour.needle import Needle
from kvfold.evaluate.quality import versions
from kvfold.evaluate.records import OUTCOME, append_row, open_rows
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model, sources_of
from kvfold.integrations.transformers import FoldedCache, attach


def tasks(
    model: Model = "smollm2",
    formats: Formats = "kvfold-4,turboquant-4,turboquant-3",
    only: Annotated[str, typer.Option("--tasks", help=f"Which of {', '.join(TASKS)}.")] = ",".join(TASKS),
    lengths: Annotated[str, typer.Option(help="Tokens of the needle's haystacks.")] = "1000,2000,4000,7900",
    repeats: Annotated[
        int, typer.Option(min=1, max=LARGEST, help="Needles for each length and depth, from seeds of their own.")
    ] = 2,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST, help="Seed of the questions.")] = 0,
    out: Annotated[
        Path, typer.Option(help="JSON-lines file of outcomes; cases that it holds already are not repeated.")
    ] = Path("tasks.jsonl"),
    calibration: CalibrationFile = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the needle grid into this .png, .svg or .pdf.")] = None,
    dtype: Dtype = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Ask a model questions with a dense cache and with folded ones, and compare the answers.

    needle: a number in a long text. arithmetic: numbers and matrices, after 0 to 2,000 tokens of text. recall: a
    passphrase after a long reply. transliteration: names in another script. loops: do conversations end in a loop?
    divergence: how far greedy text stays the same. A task that the model cannot do with a dense cache gives no figure.
    """
    names, chosen = formats_beside_dense(formats), _chosen(only, lengths, repeats)
    plots.check(plot, (out, calibration, model))
    if plot is not None and not any(isinstance(task, Needle) for task in chosen):
        raise ValueError(f"plot = {str(plot)!r} draws the needle grid, but --tasks leaves the needle out")
    held_in = parse_dtype(dtype)
    check_output(out, "out", (calibration, *sources_of(model)))
    known = open_rows(out, OUTCOME)
    measured = None if calibration is None else Calibration.load(calibration)
    network, tokenizer = load_model(model, held_in, weights)
    attach(network)
    for name in names:
        FoldedCache(network.config, name, calibration=measured)  # raises now if they do not fit
    about: dict[str, Any] = {
        "model": model, "seed": seed, "dtype": str(network.dtype).removeprefix("torch."), "weights": weights
    }  # fmt: skip
    known = [row for row in known if {key: row.get(key) for key in about} == about]
    about["calibration"] = None if calibration is None else sha256(calibration.read_bytes()).hexdigest()
    known = [row for row in known if row["format"] == "dense" or row.get("calibration") == about["calibration"]]
    outcomes: dict[str, list[Outcome]] = {}
    with token_progress() as progress:
        for task in chosen:
            cases = task.cases(tokenizer, seed)
            bar = progress.add_task(task.name, total=sum(case.tokens for case in cases) * (1 + len(names)))
            lengths_of = {case.name: case.tokens for case in cases}
            reused = [r for r in known if r["task"] == task.name and r["format"] in ("dense", *names)]
            progress.advance(bar, sum(lengths_of.get(row["case"], 0) for row in reused))

            def done(outcome: Outcome, replies: Any, bar: Any = bar, lengths_of: dict[str, int] = lengths_of) -> None:
                append_row(out, outcome_row(outcome, replies, **about, versions=versions()))
                progress.advance(bar, lengths_of[outcome.case])

            outcomes[task.name] = run_task(network, tokenizer, task, names, seed, known, done, calibration=measured)
    rows = [row for task in chosen for row in sum_up(task, outcomes[task.name])]
    if plot is not None:
        plots.save(plots.needle_grid([outcome.to_json() for outcome in outcomes["needle"]]), plot)
    if as_json:
        every = [outcome.to_json() for each in outcomes.values() for outcome in each]
        return print_json(about | {"versions": versions(), "summary": [asdict(row) for row in rows], "outcomes": every})
    for task in chosen:
        _print(task, [row for row in rows if row.task == task.name], outcomes[task.name])


def _chosen(only: str, lengths: str, repeats: int) -> list[Task]:
    chosen: list[Task] = []
    for name in listed_names(only):
        if name not in TASKS:
            raise ValueError(f"tasks = {name!r}: choose among {', '.join(TASKS)}")
        task = TASKS[name]()
        if isinstance(task, Needle):
            task = replace(task, lengths=tuple(listed_integers("lengths", lengths)), repeats=repeats)
        chosen.append(task)
    if not chosen:
        raise ValueError(f"tasks = {only!r}: choose among {', '.join(TASKS)}")
    return chosen


def _print(task: Task, rows: list[TaskRow], outcomes: list[Outcome]) -> None:
    console = to_stdout()
    table = Table(title=f"{task.name}: {task.summary}")
    columns, lines = table_of(task, rows)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for line in lines:
        if line[0] == "all" and len(lines) > 1:
            table.add_section()
        table.add_row(*line)
    console.print(table)
    for note in notes_on(task, rows):
        console.print(f"[dim]{note}[/]", highlight=False)
    for outcome in outcomes:
        if task.name == "loops" and outcome.detail:
            console.print(f"[dim]{outcome.format}, {outcome.case}: {outcome.detail}[/]", highlight=False)
