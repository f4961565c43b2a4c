"""Attention on a CPU, in C++ (kvfold/kernels/cpu/attend_impl.h)."""

from kvfold.attention.cpu.pool import attend_pool
from kvfold.attention.cpu.rows import attend_rows, reads_as, why_not
from kvfold.attention.cpu.sides import INSTRUCTION_SETS, INTEGER_SETS
from kvfold.attention.cpu.step import step_of

__all__ = ["INSTRUCTION_SETS", "INTEGER_SETS", "attend_pool", "attend_rows", "reads_as", "step_of", "why_not"]
