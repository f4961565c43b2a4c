"""Attention over folded caches."""

from kvfold.attention.backend import BACKENDS
from kvfold.attention.dense import attend_dense
from kvfold.attention.dispatch import attend

__all__ = ["BACKENDS", "attend", "attend_dense"]
