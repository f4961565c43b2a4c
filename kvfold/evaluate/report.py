"""`kvfold report`: one page of HTML from the rows that the other commands wrote."""

import io
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cache.files.paths import check_input
from kvfold.evaluate import compare, plots, sweep
from kvfold.evaluate.behaviour import TASKS, Outcome, notes_on, sum_up, table_of
from kvfold.evaluate.behaviour.needle import Needle
from kvfold.evaluate.quality import versions
from kvfold.evaluate.records import (
    ABOUT_HELD,
    HELD,
    OF_BF16,
    OUTCOME,
    QUALITY,
    RUN,
    Row,
    check_row,
    held_cells,
    read_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"
"""A placeholder: lines drawn in it take the colour of the page's text."""

COMPARISON: Row = {
    "format": str, "executors": [str], "tokens": int, "generated": int, "first_divergence": (int, None),
    "versions": (dict, None), "model": (str, None),
    "layers": [
        {
            "layer": int, "key_match": (float, None), "value_match": (float, None), "scale_error": (float, None),
            "hidden_cosine": float, "hidden_cosine_min": float,
            "key_bits": ([float], None), "value_bits": ([float], None),
        }
    ],
}  # fmt: skip
"""Fields of a document of `kvfold compare`, written as in `kvfold.evaluate.records`."""

PLAN: Row = {
    "model": (str, None), "memory": int, "context": int, "versions": (dict, None),
    "rows": [
        {"format": str, "bytes_per_token": float, "held_bytes": int, "longest_context": int, "users": int}
    ],
}  # fmt: skip
"""Fields of a document of `kvfold plan`."""

ISOLATED = tuple(f"ablation/{name}" for name in ("identity", "bridge", "keys", "values"))


@dataclass
class TableOf:
    """A table of the page."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """A part of the page."""

    title: str
    notes: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    tables: list[TableOf] = field(default_factory=list)
    side: bool = False


@dataclass
class Results:
    """Rows by the command that wrote them."""

    quality: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)
    outcomes: list[Row] = field(default_factory=list)
    comparisons: list[Row] = field(default_factory=list)
    plans: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Results":
        """Rows of files that `kvfold eval`, `sweep`, `tasks`, `compare` and `plan` wrote, in any order."""
        results = cls()
        for path in paths:
            for number, row in enumerate(_documents(path), start=1):
                results._add(row, f"{str(path)!r}, row {number}")
        return results

    def _add(self, row: Row, where: str) -> None:
        own, shape, rows = self._kind_of(row, where)
        for each in rows:
            check_row(each, shape, where)
            if shape is OUTCOME:
                _check_outcome(each, where)
        own += rows

    def _kind_of(self, row: Row, where: str) -> tuple[list[Row], Row, list[Row]]:
        """The list for a row, the fields that it must have, and its rows: a document of a whole job has many."""
        if "staircase" in row:
            check_row(row, {"ablation": [dict], "staircase": [dict]}, where)
            return self.sweep, RUN, row["ablation"] + row["staircase"]
        if "outcomes" in row:
            check_row(row, {"outcomes": [dict]}, where)
            about = {key: row[key] for key in ("model", "versions") if key in row}
            return self.outcomes, OUTCOME, [about | outcome for outcome in row["outcomes"]]
        if "verdict" in row:
            return self.sweep, RUN, [row]
        if "case" in row:
            return self.outcomes, OUTCOME, [row]
        if "kl_mean" in row:
            return self.quality, QUALITY, [row]
        if "first_divergence" in row:
            return self.comparisons, COMPARISON, [row]
        if "rows" in row and "memory" in row:
            return self.plans, PLAN, [row]
        raise ValueError(
            f"{where}: a row that no kvfold command writes (its keys: {', '.join(list(row)[:8])}): give files of "
            "eval --json, sweep, tasks, compare --json or plan --json"
        )


def _check_outcome(row: Row, where: str) -> None:
    """Raise unless the task is known, and the values that its cases are grouped by are plain."""
    if row["task"] not in TASKS:
        raise ValueError(f"{where}: task is {row['task']!r}, none of {', '.join(TASKS)}")
    for key in TASKS[row["task"]].group_by:
        if row["task"] == Needle.name:
            check_row(row["about"].get(key), float, f"{where}, about, {key}")
        elif isinstance(row["about"].get(key), list | dict):
            raise ValueError(f"{where}, about, {key} is {row['about'][key]!r}, where one word or number belongs")


def _documents(path: Path) -> Iterator[Row]:
    try:
        content = json.loads(check_input(path, "results").read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        yield from read_rows(path)
        return
    for row in content if isinstance(content, list) else [content]:
        if not isinstance(row, dict):
            raise ValueError(f"{str(path)!r} holds a {type(row).__name__} where a row of results belongs")
        yield row


def render(results: Results, title: str = "kvfold") -> str:
    """The page, styles and plots included: it loads nothing else."""
    try:
        from jinja2 import Environment
    except ImportError:
        raise ValueError("the report needs jinja2: install kvfold[plots]") from None
    sections = [
        *_quality(results.quality), *_sweep(results.sweep), *_tasks(results.outcomes),
        *_comparisons(results.comparisons), *_plans(results.plans),
    ]  # fmt: skip
    if not sections:
        raise ValueError("the files hold no results: run kvfold eval, sweep, tasks, compare or plan first")
    everything = results.quality + results.sweep + results.outcomes + results.comparisons + results.plans
    models = sorted(
        {str(row.get("model") or (row["eval"].get("model") if "verdict" in row else None) or "") for row in everything}
        - {""}
    )
    template = files("kvfold.evaluate").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            title=title,
            subtitle=f"{', '.join(models)} · {datetime.now(UTC):%Y-%m-%d}",
            sections=sections,
            machine=_machine(everything),
        )
    )


def _svg(draw: Callable[..., "Figure"], *arguments: Any) -> str:
    """A figure as SVG; its lines and letters take the colour of the page's text, and it fills the page's width."""
    from matplotlib import rc_context

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(ink, INK)
    style |= {f"{part}.facecolor": "none" for part in ("figure", "axes", "legend", "savefig")}
    with rc_context(style | {"svg.fonttype": "none", "svg.hashsalt": "kvfold"}):
        out = io.StringIO()
        draw(*arguments).savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = svg.replace("'DejaVu Sans', ", "").replace("'DejaVu Sans'", "sans-serif")
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )


def _quality(rows: Sequence[Row]) -> Iterator[Section]:
    texts: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        texts.setdefault((row.get("model"), row.get("text_sha"), row.get("passage"), row["n_tokens"]), []).append(row)
    for (model, text_sha, passage, tokens), own in texts.items():
        section = Section(f"Quality: {model}, {tokens:,} tokens")
        section.notes.append(
            f"Dense perplexity {own[0]['ppl_dense']:.3f}. Every prediction went through the real cache and attention. "
            f"{ABOUT_HELD[0].upper()}{ABOUT_HELD[1:]}, at the end of a passage, {passage} tokens. "
            f"Text SHA-256 {str(text_sha)[:12]}…"
        )
        section.figures.append(_svg(plots.pareto_plot, own, sweep.pareto(own)))
        section.figures += [_svg(plots.layer_errors, row) for row in own if _has_layers(row)]
        section.tables.append(
            TableOf(
                ("format", *HELD, "held MB", "PPL", "ΔPPL", "KL", "KL p99", "top-1", "seconds"),
                [
                    (
                        row["format"], *held_cells(row), f"{row['held_bytes'] / 1e6:.2f}",
                        f"{row['ppl']:.3f}", f"{row['delta_ppl_pct']:+.2f} %", f"{row['kl_mean']:.4f}",
                        f"{row['kl_p99']:.3f}", f"{row['top1']:.3f}", f"{row['seconds']:.0f}",
                    )
                    for row in own
                ],
            )
        )  # fmt: skip
        yield section


def _has_layers(row: Row) -> bool:
    """Whether a row has each layer's losses by folding keys and values."""
    keys, values = (row.get(name) or () for name in ("key_error", "value_error"))
    return len(keys) == len(values) > 0


def _sweep(rows: Sequence[Row]) -> Iterator[Section]:
    sweeps: dict[str, list[Row]] = {}
    for row in rows:
        sweeps.setdefault(json.dumps([row["eval"], row["config"].get("family")], sort_keys=True), []).append(row)
    for own in sweeps.values():
        text = own[0]["eval"]
        about = f"{own[0]['config'].get('family')}, {text.get('model', '')}, {text['n_tokens']:,} tokens"
        last = {row["config"]["format"]: row for row in own}  # a later row replaces that of a stage that failed
        ablation = [row for row in last.values() if row["stage"].startswith("ablation/")]
        # The last stages fold both sides, so the staircase may start from them.
        stairs = [row for row in last.values() if row["stage"] not in ISOLATED]
        if ablation:
            section = Section(f"Ablation: {about}")
            section.notes.append("Each stage must change next to nothing; nothing is swept over one that fails.")
            section.tables.append(_runs(ablation))
            yield section
        if len(stairs) > 2:
            section = Section(f"Staircase: {about}")
            points = [{**row, "format": row["config"]["format"]} for row in stairs]
            section.figures.append(_svg(plots.pareto_plot, points, sweep.pareto(points)))
            section.tables.append(_runs(stairs))
            yield section


def _runs(rows: Sequence[Row]) -> TableOf:
    columns = ("stage", "format", "ΔPPL", "in %", "KL", OF_BF16, "verdict")
    return TableOf(columns, [sweep.cells(row) for row in rows])


def _tasks(rows: Sequence[Row]) -> Iterator[Section]:
    jobs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        jobs.setdefault(tuple(row.get(key) for key in ("task", "model", "seed", "dtype")), []).append(row)
    for (name, model, _, _), own in jobs.items():
        task = TASKS[name]()
        outcomes = [Outcome(**{key: row[key] for key in Outcome.__dataclass_fields__}) for row in own]
        figures = sum_up(task, outcomes)
        section = Section(f"{name.capitalize()}: {task.summary}" + (f" ({model})" if model else ""), side=True)
        if name == "needle":
            for format in dict.fromkeys(row["format"] for row in own):
                grid = [row for row in own if row["format"] == format]
                section.figures.append(_svg(plots.needle_grid, grid))
        section.notes += notes_on(task, figures)
        columns, lines = table_of(task, figures)
        if lines:
            section.tables.append(TableOf(columns, lines))
        yield section


def _comparisons(rows: Sequence[Row]) -> Iterator[Section]:
    for row in rows:
        part = row["first_divergence"]
        section = Section(f"{row['format']}: {' and '.join(row['executors'])}")
        section.notes.append(
            f"{row['tokens']:,} tokens read; of {row['generated']} written greedily, "
            + ("all are the same." if part is None else f"the first {part} are the same.")
        )
        section.tables.append(TableOf(compare.COLUMNS, [compare.cells(layer) for layer in row["layers"]]))
        yield section


def _plans(rows: Sequence[Row]) -> Iterator[Section]:
    for row in rows:
        model = row.get("model") or "numbers given"
        section = Section(f"Plan: {model}, {row['memory'] / 1e9:g} GB, {row['context']:,} tokens each")
        section.tables.append(
            TableOf(
                ("format", "bytes/token", "one sequence MB", "longest context", "users"),
                [
                    (
                        each["format"], f"{each['bytes_per_token']:,.0f}", f"{each['held_bytes'] / 1e6:,.1f}",
                        f"{each['longest_context']:,}", f"{each['users']:,}",
                    )
                    for each in row["rows"]
                ],
            )
        )  # fmt: skip
        yield section


def _machine(rows: Sequence[Row]) -> TableOf:
    measured = next((row["versions"] for row in rows if row.get("versions")), versions())
    own = [("processor of the report's machine", _processor()), ("its cores", str(os.cpu_count()))]
    return TableOf(("", ""), [*measured.items(), *own])


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.machine()
