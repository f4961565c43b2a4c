"""Running tasks, dense and folded side by side, and summing up."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.calibration import Calibration
from kvfold.evaluate.behaviour.case import Case, Outcome, Replies, Task
from kvfold.evaluate.behaviour.conversation import converse

DENSE = "dense"
ENOUGH = 0.2
"""Share of cases that a dense cache must solve for a task to say something about a folded one."""


def run_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    formats: Sequence[str],
    seed: int,
    known: Sequence[dict[str, Any]] = (),
    done: Callable[[Outcome, Replies], None] = lambda outcome, replies: None,
    *,
    calibration: Calibration | None = None,
) -> list[Outcome]:
    """Ask every case of a task with a dense cache, and then with each format.

    Parameters
    ----------
    model
        Attached.
    formats
        Names, or keys:values.
    seed
        Of the cases.
    known
        Rows of `outcome_row` from an earlier run; those cases are not asked again.
    done
        Called with each new outcome and its replies.
    calibration
        Statistics for folded caches; None: those of each prompt's first tokens.

    Returns
    -------
    list of Outcome
        Of all cases, in the order dense, then formats.
    """
    cases = task.cases(tokenizer, seed)
    longest = max(case.tokens for case in cases)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise ValueError(
            f"task = {task.name!r} has a case of {longest} tokens, but the model takes {limit}: give --lengths "
            "below it, or leave the task out of --tasks"
        )
    old = {(row["task"], row["case"], row["format"]): row for row in known}
    outcomes: dict[tuple[str, str], Outcome] = {}
    dense: dict[str, Replies] = {}
    for format in (DENSE, *formats):
        asked = []
        for case in cases:
            row = old.get((task.name, case.name, format))
            if row is None:
                asked.append(case)
                continue
            outcomes[format, case.name] = Outcome(**{name: row[name] for name in Outcome.__dataclass_fields__})
            if format == DENSE:
                dense[case.name] = row["replies"]

        def finish(case: Case, replies: Replies, folded: float, format: str = format) -> None:
            if format == DENSE:
                dense[case.name] = replies
            score, detail = task.score(case, replies, dense[case.name], tokenizer)
            tokens = sum(len(turn.ids) for turn in case.turns) + sum(len(reply) for reply in replies)
            outcome = Outcome(
                task.name, case.name, case.about, format, case.expected, tokenizer.decode(replies[-1]), score, detail,
                tokens, folded,
            )  # fmt: skip
            outcomes[format, case.name] = outcome
            done(outcome, replies)

        converse(model, tokenizer, asked, None if format == DENSE else format, finish, calibration=calibration)
    return [outcomes[format, case.name] for format in (DENSE, *formats) for case in cases]


def outcome_row(outcome: Outcome, replies: Replies, **about: Any) -> dict[str, Any]:
    """An outcome as a row for a file, with the replies that later formats are compared with."""
    return about | asdict(outcome) | ({"replies": replies} if outcome.format == DENSE else {})


@dataclass(frozen=True)
class TaskRow:
    """One format's figures on one group of a task's cases.

    Attributes
    ----------
    task, group, format
        What the figures are of.
    cases
        How many.
    dense, folded
        Mean score with a dense cache and with this format.
    kept
        Of the cases that the dense cache solves, the share that this format solves too; None if there are none.
    able
        Whether the model solves enough with a dense cache for the figures to say something.
    unfolded
        Cases that ended before the format had folded anything. They say nothing about it.
    """

    task: str
    group: dict[str, Any]
    format: str
    cases: int
    dense: float
    folded: float
    kept: float | None
    able: bool
    unfolded: int


def sum_up(task: Task, outcomes: Sequence[Outcome]) -> list[TaskRow]:
    """Figures of each group and format over the cases that all formats have; the total comes last, its group empty."""
    formats = list(dict.fromkeys(o.format for o in outcomes if o.format != DENSE))
    dense = {o.case: o for o in outcomes if o.format == DENSE}
    # A file of a job that was killed may lack some.
    held = [{o.case for o in outcomes if o.format == format} for format in formats]
    dense = {name: o for name, o in dense.items() if all(name in names for names in held)}
    groups: dict[tuple[Any, ...], list[str]] = {}
    for o in dense.values():
        groups.setdefault(tuple(o.about.get(key) for key in task.group_by), []).append(o.case)
    named = [(dict(zip(task.group_by, values, strict=True)), names) for values, names in groups.items()]
    if len(named) > 1:
        named.append(({}, list(dense)))
    rows = []
    for format in formats:
        own = {o.case: o for o in outcomes if o.format == format}
        for group, names in named:
            solved = [name for name in names if dense[name].score == 1]
            rows.append(
                TaskRow(
                    task=task.name,
                    group=group,
                    format=format,
                    cases=len(names),
                    dense=sum(dense[name].score for name in names) / len(names),
                    folded=sum(own[name].score for name in names) / len(names),
                    kept=sum(own[name].score == 1 for name in solved) / len(solved) if solved else None,
                    able=task.compares or len(solved) >= ENOUGH * len(names),
                    unfolded=sum(own[name].folded == 0 for name in names),
                )
            )
    return rows


def table_of(task: Task, rows: Sequence[TaskRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines of a table of a task's figures: each group, with the mean scores in percent."""
    formats = dict.fromkeys(row.format for row in rows)
    lines = []
    for group in dict.fromkeys(json.dumps(row.group) for row in rows):
        own = [row for row in rows if json.dumps(row.group) == group]
        label = ", ".join(f"{key} {value}" for key, value in own[0].group.items()) or "all"
        line = [label, str(own[0].cases)] + ([] if task.compares else [f"{own[0].dense:.0%}"])
        for row in own:
            kept = "" if row.kept is None or task.compares else f" ({row.kept:.0%})"
            line.append("unfolded" if row.unfolded == row.cases else f"{row.folded:.0%}{kept}" if row.able else "–")
        lines.append(line)
    return ["", "cases", *([] if task.compares else ["dense"]), *formats], lines


def notes_on(task: Task, rows: Sequence[TaskRow]) -> list[str]:
    """What a reader of `table_of` must know."""
    notes = []
    if not task.compares:
        notes.append("In brackets: of the cases that the dense cache solves, the share that stays solved.")
    if not all(row.able for row in rows):
        notes.append("–: the model cannot do it with a dense cache either, so there is no figure.")
    totals = {row.format: row for row in rows}  # the last of each
    for row in totals.values():
        if row.unfolded:
            notes.append(
                f"{row.format} folded nothing in {row.unfolded} of {row.cases} cases: they end too early, or no "
                "layer of this model folds. There it is a dense cache, and they say nothing about it."
            )
    return notes
