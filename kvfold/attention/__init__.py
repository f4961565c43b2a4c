"""Attention over folded caches."""

from kvfold.attention.dense import attend_dense
from kvfold.attention.dispatch import BACKENDS, attend

__all__ = ["BACKENDS", "attend", "attend_dense"]
