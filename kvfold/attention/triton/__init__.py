"""Attention on GPUs, in Triton (kvfold/kernels/triton/attend.py)."""

from kvfold.attention.triton.launch import QUERIES
from kvfold.attention.triton.pool import attend_pool
from kvfold.attention.triton.rows import DEVICES, attend_rows, step_of, why_not, why_not_pages

__all__ = ["DEVICES", "QUERIES", "attend_pool", "attend_rows", "step_of", "why_not", "why_not_pages"]
