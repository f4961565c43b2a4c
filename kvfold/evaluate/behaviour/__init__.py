"""Behaviour beyond perplexity: what a model still does with a folded cache (after the TBQ fork of llama.cpp)."""

from kvfold.evaluate.behaviour.arithmetic import Arithmetic
from kvfold.evaluate.behaviour.case import Case, Outcome, Task, Turn
from kvfold.evaluate.behaviour.divergence import Divergence
from kvfold.evaluate.behaviour.loops import Loops
from kvfold.evaluate.behaviour.needle import Needle
from kvfold.evaluate.behaviour.recall import Recall
from kvfold.evaluate.behaviour.run import TaskRow, notes_on, outcome_row, run_task, sum_up, table_of
from kvfold.evaluate.behaviour.transliteration import Transliteration

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Needle, Arithmetic, Recall, Transliteration, Loops, Divergence)
}
"""Every task by name."""

__all__ = [
    "TASKS", "Case", "Outcome", "Task", "TaskRow", "Turn", "notes_on", "outcome_row", "run_task", "sum_up", "table_of",
]  # fmt: skip
