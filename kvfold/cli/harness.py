"""`kvfold harness`: tasks of lm-eval with folded caches, beside a dense one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvfold.cache.calibration import Calibration
from kvfold.cache.files.paths import check_output
from kvfold.cli.options import (
    DENSE,
    CalibrationFile,
    Dtype,
    Formats,
    Model,
    Weights,
    formats_beside_dense,
    listed_names,
    parse_dtype,
)
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate.quality import versions
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model, sources_of
from kvfold.integrations.transformers import FoldedCache

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def harness(
    tasks: Annotated[
        str, typer.Option(help="Tasks of lm-eval, separated by commas, or YAML files that describe some.")
    ],
    model: Model = "smollm2",
    formats: Formats = "kvfold-4",
    include: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder with YAML files of more tasks.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Take only this many questions of each task, to try it.")
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=0, max=LARGEST, help="Solved examples before each question; by default the task's."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=LARGEST, help="Texts that are generated at once.")] = 1,
    dtype: Dtype = None,
    weights: Weights = None,
    calibration: CalibrationFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write all that lm-eval returns, every answer included, to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run tasks of the evaluation harness (lm-eval) with folded caches, and with a dense one.

    The harness's own command scores a model without a cache, so it cannot see what a folded one changes. Here every
    text is read through one. Formats fold nothing in a prompt's first 256 tokens or so: give tasks with long prompts
    (--shots makes them longer). The table says what share of the tokens was folded. Data are read as lm-eval reads
    them, most from a hub; a task in a YAML file may name local files.
    """
    names, held_in = formats_beside_dense(formats), parse_dtype(dtype)
    if out is not None:
        check_output(out, "out", (calibration, *sources_of(model)))
    measured = None if calibration is None else Calibration.load(calibration)
    from kvfold.integrations.harness import FoldedLM, TaskManager, simple_evaluate  # says how to get lm-eval

    manager = TaskManager(include_path=None if include is None else str(include))
    wanted = _found(listed_names(tasks), manager)
    network, tokenizer = load_model(model, held_in, weights)
    for name in names:
        FoldedCache(network.config, name, calibration=measured)  # raises now if they do not fit
    results: dict[str, Any] = {}
    for name in (DENSE, *names):
        reader = FoldedLM(
            network, name, calibration=None if name == DENSE else measured, tokenizer=tokenizer, batch_size=batch
        )
        results[name] = simple_evaluate(
            reader, tasks=wanted, num_fewshot=shots, limit=limit, task_manager=manager, apply_chat_template=chat,
            log_samples=out is not None, confirm_run_unsafe_code=False,
        ) | {"folded_share": reader.folded_share}  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(results, indent=2, default=str), encoding="utf-8")
    rows = list(_rows(results))
    if as_json:
        about = {
            "model": model,
            "weights": weights,
            "limit": limit,
            "versions": versions(("torch", "transformers", "lm_eval")),
        }
        shares = {name: result["folded_share"] for name, result in results.items()}
        return print_json(about | {"folded_share": shares, "rows": rows})
    _print(rows, {name: results[name]["folded_share"] for name in names}, model)


def _found(names: list[str], manager: "TaskManager") -> list[str]:
    """Tasks, groups and tags of lm-eval by name or pattern, and YAML files; ValueError on a name that is none."""
    if not names:
        raise ValueError("tasks = '': name at least one; `lm_eval ls tasks` lists them")
    found: list[str] = []
    for name in names:
        matching = manager.match_tasks([name]) or [name] * Path(name).is_file()
        found += matching
        if not matching:
            raise ValueError(
                f"tasks = {name!r}: lm-eval knows no such task, group or tag, and there is no such file; "
                "`lm_eval ls tasks` lists them, and --include adds a folder of your own"
            )
    return [*dict.fromkeys(found)]


def _rows(results: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row a task, metric and cache: what it scored, the standard error, and what dense scored."""
    dense = results[DENSE]["results"]
    for task, figures in dense.items():
        for key, value in figures.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or metric in ("alias", "sample_len"):
                continue
            for format, result in results.items():
                own = result["results"][task]
                error = own.get(f"{metric}_stderr,{filtered}")
                yield {
                    "task": task, "metric": metric, "filter": filtered, "format": format, "value": own[key],
                    "stderr": error if isinstance(error, float) else None, "dense": value,
                    "cases": result["n-samples"].get(task, {}).get("effective"),
                }  # fmt: skip


def _print(rows: list[dict[str, Any]], folded: dict[str, float], model: str) -> None:
    table = Table(title=f"{model}, tasks of lm-eval")
    for column in ("task", "metric", "cases", DENSE, *folded):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']}, {row['filter']}"
        line = lines.setdefault((row["task"], metric), [row["task"], metric, str(row["cases"] or "")])
        error = "" if row["stderr"] is None else f" ± {row['stderr']:.4f}"
        line.append(f"{row['value']:.4f}{error}" if row["format"] == DENSE else f"{row['value']:.4f}")
    for line in lines.values():
        table.add_row(*line)
    console = to_stdout()
    console.print(table)
    for format, share in folded.items():
        if share:
            console.print(f"[dim]{format}: {share:.0%} of the tokens were folded.[/]", highlight=False)
        else:
            console.print(
                f"[yellow]{format} folded nothing, so its figures are a dense cache's: no text was long enough, or no "
                "layer folds. --shots makes prompts longer.[/]", highlight=False,
            )  # fmt: skip
