"""Attention over folded caches: `reference` is the truth."""

from kvfold.attention.dense import attend_dense
from kvfold.attention.reference import attend, attend_rows

__all__ = ["attend", "attend_dense", "attend_rows"]
