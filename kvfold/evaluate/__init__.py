"""Evaluation: how close a folded cache stays to a dense one, on real text."""

from kvfold.evaluate.fidelity import Fidelity, FidelityMeter, read_in_lockstep
from kvfold.evaluate.text import standard_text

__all__ = ["Fidelity", "FidelityMeter", "read_in_lockstep", "standard_text"]
