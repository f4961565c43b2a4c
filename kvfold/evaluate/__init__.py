"""Evaluation: how close a folded cache stays to a dense one, on real text."""

from kvfold.evaluate.fidelity import Fidelity, FidelityMeter, read_in_lockstep
from kvfold.evaluate.passages import split_passages, text_passages
from kvfold.evaluate.quality import QualityRow, evaluate_formats
from kvfold.integrations.text import standard_text

__all__ = [
    "Fidelity",
    "FidelityMeter",
    "QualityRow",
    "evaluate_formats",
    "read_in_lockstep",
    "split_passages",
    "standard_text",
    "text_passages",
]
