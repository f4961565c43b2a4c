"""Several folded prompt caches as one batch of mlx-lm's, as its server wants them."""

import copy
import logging
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as theirs

from kvfold.attention.mlx import attend
from kvfold.cache.batch import Appended
from kvfold.integrations.mlx.attach import FoldedHandle, require_attached
from kvfold.integrations.mlx.layer import FoldedKVCache

logger = logging.getLogger("kvfold")

BATCHES = hasattr(import_module("mlx_lm.generate"), "PromptProcessingBatch")
"""Whether this mlx-lm makes batches of the caches that it is given. Before 0.32 it put dense ones in their place."""


class BatchHandle(FoldedHandle):
    """`FoldedHandle` of several caches: for each what was appended, None if it broke, and how many tokens it took."""

    def __init__(
        self, cache: "FoldedBatchCache", appended: Sequence[Appended | None], like: mx.array, part: int
    ) -> None:
        self.cache, self.appended_rows, self.part, self.dtype = cache, appended, part, like.dtype
        self.shape = (*like.shape[:2], max(row.offset for row in cache.rows), like.shape[3])
        self.ndim = 4

    def belongs_to(self, values: FoldedHandle) -> bool:
        assert isinstance(values, BatchHandle)
        return self.appended_rows is values.appended_rows and (self.part, values.part) == (0, 1)

    def read(
        self, queries: mx.array, values: FoldedHandle, scale: float, mask: mx.array | None, sinks: mx.array | None
    ) -> mx.array:
        """Attention of each row's new tokens over its own cache; what stands for padding gets zeros."""
        assert isinstance(values, BatchHandle)
        n, out = queries.shape[2], []
        for i, (row, appended, new) in enumerate(
            zip(self.cache.rows, self.appended_rows, self.cache.newest, strict=True)
        ):
            one = mx.zeros((1, queries.shape[1], n - new, values.shape[3]), queries.dtype)
            if new:
                own = None if mask is None else mask[i : i + 1, :, :new, : row.offset]
                if appended is None:
                    own_out = mx.full((1, queries.shape[1], new, values.shape[3]), mx.nan, queries.dtype)
                else:
                    with row.passes.reading():
                        own_out = attend(
                            queries[i : i + 1, :, :new], appended, scaling=scale, mask=own, sink_logits=sinks
                        )
                one = mx.concatenate((own_out, one), 2) if new < n else own_out
            out.append(one)
        return mx.concatenate(out, 0)


class FoldedBatchCache(theirs._BaseCache):  # type: ignore[misc]
    """One folded layer of several requests, each with a cache of its own: `FoldedKVCache.merge` makes it.

    A request keeps its pages as they are when others join or leave, so it gets what it would get alone. mlx-lm pads
    prompts of a batch on the right (`prepare`); padding is not kept.
    """

    def __init__(self, rows: list[FoldedKVCache]) -> None:
        self.rows = rows
        self.newest = [0] * len(rows)  # tokens that each row took in this pass
        self._left: list[int] | None = None  # tokens that prompts still have before their padding; None: no padding

    @property
    def offset(self) -> mx.array:
        """Tokens that each row holds: int32, (rows,)."""
        return mx.array([row.offset for row in self.rows])

    def size(self) -> int:
        """Tokens that the longest row holds."""
        return max((row.offset for row in self.rows), default=0)

    def empty(self) -> bool:
        """Whether nothing is held."""
        return not self.size()

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say how many of each row's coming tokens are its own: `lengths`. The others, on the right, are padding.

        Raises
        ------
        ValueError
            On padding on the left.
        """
        if left_padding is not None and any(left_padding):
            raise ValueError(f"left_padding = {list(left_padding)}: folded caches are padded on the right only")
        if lengths is not None and right_padding is not None and any(right_padding):
            self._left = list(lengths)

    def finalize(self) -> None:
        """The padded prompts have been read."""
        self._left = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[BatchHandle, BatchHandle]:
        """Add tokens, (rows, kv_heads, n, dim), less each row's padding; returns stand-ins, as `FoldedKVCache` does.

        A row whose keys or values hold a NaN or an infinity where they fold is broken: its attention gives NaN from
        then on, as a dense cache's would, and the log says so. Others are not touched.
        """
        require_attached()
        n, appended = keys.shape[2], list[Appended | None]()
        for i, row in enumerate(self.rows):
            new = n if self._left is None else min(n, self._left[i])
            self.newest[i] = new
            if self._left is not None:
                self._left[i] -= new
            appended.append(self._append(row, keys[i : i + 1, :, :new], values[i : i + 1, :, :new]) if new else None)
        return BatchHandle(self, appended, keys, 0), BatchHandle(self, appended, values, 1)

    @staticmethod
    def _append(row: FoldedKVCache, keys: mx.array, values: mx.array) -> Appended | None:
        was_whole = row.passes.broken is None
        try:
            with row.passes.one(row.layer):
                return row.layer.append(keys, values)
        except ValueError as error:
            if was_whole:
                logger.error("a request's cache is broken, and its answer means nothing: %s", error)
            return None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of `N` new tokens: "causal", None for one, or, if asked for, bool, (rows, 1, N, columns).

        In the array, a row's columns are its own tokens from the first on; `BatchHandle.read` takes them so.
        """
        if not return_array and window_size is None:
            return "causal" if N > 1 else None
        at = mx.array([row.offset for row in self.rows])[:, None, None, None] + mx.arange(N)[:, None]
        columns = mx.arange(self.size() + N)
        visible = columns <= at
        return visible if window_size is None else visible & (columns > at - window_size)

    def filter(self, batch_indices: Any) -> None:
        """Keep some rows, in this order."""
        indices = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        self.rows = [self.rows[i] for i in indices]
        self.newest = [self.newest[i] for i in indices]

    def extend(self, other: "FoldedBatchCache") -> None:
        """Add another batch's rows after these."""
        self.rows = [*self.rows, *other.rows]
        self.newest = [*self.newest, *other.newest]

    def extract(self, idx: int) -> FoldedKVCache:
        """A copy of one row, which goes on by itself."""
        row = self.rows[idx]
        return copy.deepcopy(row, {id(row.passes): row.passes.of_copy(row.layer.index)})

    def is_trimmable(self) -> bool:
        """False: mlx-lm trims caches of one request only."""
        return False

    @property
    def state(self) -> list[dict[str, mx.array]]:
        """All arrays, for `mx.eval`."""
        return [row.layer.to_arrays()[1] for row in self.rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows' own arrays."""
        return sum(row.nbytes for row in self.rows)


if BATCHES:
    # mlx-lm asks a cache whether it has this method, and calls it on the first of several.
    FoldedKVCache.merge = lambda self, caches: FoldedBatchCache(list(caches))
