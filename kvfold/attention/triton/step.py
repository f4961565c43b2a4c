"""Single tokens in CUDA graphs: kernels that read from the device how long rows are."""

import copy

from torch import Tensor

from kvfold.attention.triton.rows import Told, attend_told, why_not
from kvfold.cache.rows import FoldedRows
from kvfold.kernels.modes import in_no_mode


def why_no_step(query: Tensor, rows: FoldedRows) -> str | None:
    """Why the next token of rows, with such a query, cannot go by a `GraphStep`; None if it can."""
    why = why_not(query, rows, None)
    if why is not None:
        return why
    if len(rows.stores) == 1 or rows.key_dim != rows.value_dim:
        return "values are a view of keys, or of another head_dim"
    if rows.schedule.by_token:
        for side in (rows.formats.keys, rows.formats.values):
            if side.token_code(query.device) is None:
                return f"{type(side).__name__} folds token by token, and no kernel does that alone"
    return None


def told_of_next(rows: FoldedRows) -> Told:
    """What kernels are told of rows once the next token has joined them."""
    longer = copy.copy(rows)
    longer.length += 1
    dense = longer.dense_span()
    return Told(longer, dense, *longer.reach(1, dense, causal=True))


class GraphStep:
    """Appends the next token to rows and attends with its query, as a `HeldRows.step`, by launches that go on.

    Replayed, they append and answer one token after the other, while tokens do nothing but join what is held. All that
    changes is in `numbers`, a tensor on the device: it must hold those of `told_of_next` before the launches run.
    """

    backend = "triton"

    def __init__(self, rows: FoldedRows, numbers: Tensor) -> None:
        self._rows, self._numbers, self._told = rows, numbers, told_of_next(rows)
        self.appended = self.answered = False  # whether the token came, and was answered, this way

    @in_no_mode
    def append(self, key: Tensor, value: Tensor, length: int) -> bool:
        """Write a token behind those held. It is not checked for NaN and infinities."""
        from kvfold.kernels.triton.append import append
        from kvfold.kernels.triton.fold import fold_token

        rows, told, tail = self._rows, self._told, self._rows.dense.tail
        if self.appended or key.shape[:3] != (rows.batch, rows.kv_heads, 1) or value.shape[:3] != key.shape[:3]:
            return False
        if tail is not None:
            append(key, value, *tail, told.dense(self._numbers)[-1].span.held)
        else:
            assert rows.dtypes is not None
            held = told.sequences(self._numbers).stop
            sides = ((key, rows.formats.keys, rows.keys), (value, rows.formats.values, rows.values))
            for (x, side, store), dtype in zip(sides, rows.dtypes, strict=True):
                how, pages = side.token_code(x.device), store.storage
                assert how is not None
                assert pages is not None
                assert pages.scale is not None
                fold_token(x.to(dtype), how, side.lanes, rows.page_size, pages.code, pages.scale, held)
        self.appended = True
        return True

    def attend(self, query: Tensor, out: Tensor, length: int, scaling: float, softcap: float, threads: int) -> bool:
        """Attention of that token, into `out`; False if it has not come this way."""
        if not self.appended or length != self._told.length:
            return False
        out.copy_(self._answer(query, scaling, softcap))
        self.answered = True
        return True

    @in_no_mode
    def _answer(self, query: Tensor, scaling: float, softcap: float) -> Tensor:
        return attend_told(query, self._rows, self._told, self._numbers, scaling, softcap=softcap or None)
