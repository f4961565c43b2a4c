"""A fast path for single tokens: one C++ call appends, one answers (kvfold/kernels/cpu/step.h)."""

from torch import Tensor

from kvfold.attention.cpu.sides import INSTRUCTION_SETS, given_span, known_rows
from kvfold.cache.rows import FoldedRows
from kvfold.kernels.cpu import module
from kvfold.kernels.ops import DTYPES


def step_of(rows: FoldedRows, instruction_set: str = INSTRUCTION_SETS[0]) -> module.Step | None:
    """A step that appends the next tokens one by one and answers their queries; None if they need more than that."""
    left = rows.steps_left() if rows.key_dim == rows.value_dim else 0
    if not left:
        return None
    folds: list[tuple[int, module.TokenSide]] = []
    held = rows.dense
    read: list[Tensor | module.TokenSide] = [*(held.sinks or ())]
    if held.tail is not None:
        dense = {x.dtype for x in (*held.tail, *(held.sinks or ()))}
        if len(dense) > 1 or not dense <= DTYPES.keys():
            return None
        read += held.tail
    else:
        folder = rows.token_folder()
        if folder is None or rows.dtypes is None or not set(rows.dtypes) <= DTYPES.keys():
            return None
        folds = [(DTYPES[dtype], side) for dtype, side in zip(rows.dtypes, folder.sides, strict=True)]
        read += (*folder.tensors, *folder.sides)
    kernel = known_rows(rows, instruction_set)
    sinks, tail = given_span(rows.sink_span()), given_span(rows.dense_span())
    return module.Step(kernel, rows.length, rows.length + left, rows.keys.count, sinks, tail, folds, read)
