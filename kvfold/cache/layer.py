"""The folded cache of one layer: a batch of sequences, each folded as if it were alone."""

from collections.abc import Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.batch import Appended, HeldLayer, RowGroup
from kvfold.cache.config import LayerConfig
from kvfold.cache.rows import FoldedRows, NotFinite
from kvfold.kernels.modes import in_no_mode

LayerState = tuple[dict[str, Any], list[dict[str, Any]]]
"""Attributes of a `LayerCache` at one moment, and of its groups' rows, by reference."""


class LayerCache(HeldLayer):
    """`HeldLayer` in tensors."""

    groups: list[RowGroup[FoldedRows]]

    def __init__(self, config: LayerConfig) -> None:
        super().__init__(config)
        self.keeps_queries = 0  # how many of the newest, for eviction policies that use them

    # Growing

    def append(self, key: Tensor, value: Tensor, padding: Sequence[int] | None = None) -> Appended:
        """Add columns to every row.

        Keys and values are (batch, kv_heads, n, dim), floating point, finite; the dims may differ. `padding` counts
        padding columns before each row's first token, None for none; it matters for rows that have not started yet.

        Raises ValueError on a NaN or infinity, or a shape, dtype or device that differs from what the cache holds, and
        TypeError on numbers that are not floating point. The cache is unchanged then. Except on CPUs, single tokens are
        checked when their page is full; until then attention over a NaN or infinity gives NaN.
        """
        before = self.state()
        try:
            if self.takes_steps and not self.keeps_queries and self.groups[0].rows.append_by_step(key, value):
                self.columns += 1
                return Appended(self, self.columns - 1, 1, None)
            return self._append(key, value, padding)
        except BaseException:
            self.restore(before)
            raise

    @in_no_mode
    def _append(self, key: Tensor, value: Tensor, padding: Sequence[int] | None) -> Appended:
        """`append` without the fast path; a failure may leave traces."""
        self._check(key, value)
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()
        if self._like is None:
            self.begin(key, value)
        assert self._like is not None
        if self.awaits_rows:
            self._start_rows(padding, key)
        dtypes = self._like[0].dtype, self._like[1].dtype
        dense = []
        for group in self.groups:
            own = group.own(key, self.columns), group.own(value, self.columns)
            try:
                dense.append(group.rows.append(*own, dtypes))
            except NotFinite:
                raise self._not_finite(group, *own) from None
            except ValueError as error:
                raise self._explained(error) from None
        first_column, self.columns = self.columns, self.columns + key.shape[2]
        self.takes_steps = len(self.groups) == 1 and not self.awaits_rows and not self.config.sharpen
        return Appended(self, first_column, key.shape[2], dense)

    @in_no_mode
    def observe(self, query: Tensor | None, new: Appended, scaling: float | None = None) -> None:
        """As `HeldLayer.observe`; `query` is (batch, heads, n, key_dim) for the n columns of `new`, None if not known.

        Only the first call for `new` counts. A call that fails does not remove the tokens again, as `append` would:
        `restore` the earlier state. `scaling` is the factor on scores; None: key_dim^−½.

        Raises ValueError on a query of another shape, or with a NaN or an infinity, or if a page's scale leaves
        float16's range.
        """
        if new.observed:
            return
        awaiting = [group for group in self.groups if group.rows.awaits_queries]
        if query is not None:
            self._check_query(query, new)
            if not all(group.own(query, new.first_column).isfinite().all() for group in awaiting):
                raise ValueError("query holds a NaN or an infinity: attention over it means nothing")
        new.observed = True
        if self.keeps_queries and query is not None:
            held = [] if self.newest_queries is None else [self.newest_queries]
            newest = torch.cat((*held, query[:, :, -self.keeps_queries :]), 2)
            self.newest_queries = newest[:, :, -self.keeps_queries :].clone()
        for group in awaiting:
            own = None if query is None else group.own(query, new.first_column)
            n = new.columns - max(group.padding - new.first_column, 0)
            try:
                group.rows.observe(own, n, partial(self._allot, group.padding, scaling))
            except ValueError as error:
                raise self._explained(error) from None

    def _check_query(self, query: Tensor, new: Appended) -> None:
        assert self._like is not None
        batch, kv_heads, _, key_dim = self._like[0].shape
        heads = query.shape[1] if query.ndim == 4 else 0
        if tuple(query.shape) != (batch, heads, new.columns, key_dim) or not heads or heads % kv_heads:
            raise ValueError(
                f"query has shape {tuple(query.shape)}: give (batch, heads, n, key_dim) = ({batch}, a multiple of "
                f"{kv_heads}, {new.columns}, {key_dim})"
            )

    def _start_rows(self, padding: Sequence[int] | None, key: Tensor) -> None:
        """Make groups for rows whose first token is among the columns of `key`."""
        assert self._formats is not None
        batch, kv_heads, n = key.shape[:3]
        padding = [0] * batch if padding is None else padding
        if len(padding) != batch:
            raise ValueError(f"padding has {len(padding)} entries for a batch of {batch}")
        started = {int(row) for group in self.groups for row in group.batch_rows.tolist()}
        members: dict[int, list[int]] = {}
        for row in range(batch):
            if row not in started and padding[row] < self.columns + n:
                if padding[row] < self.columns:
                    raise ValueError(
                        f"padding[{row}] = {padding[row]}, but {self.columns} columns of row {row} were padding"
                    )
                members.setdefault(padding[row], []).append(row)
        self.groups = self.groups + [
            RowGroup(torch.tensor(rows, device=key.device), columns, FoldedRows(self._formats, kv_heads))
            for columns, rows in members.items()
        ]

    def _check(self, key: Tensor, value: Tensor) -> None:
        given = (key.shape, key.dtype, key.device, value.shape, value.dtype, value.device)
        if given == self._fits:
            return
        where = f"layer {self.index}"
        if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"{where}: key {tuple(key.shape)} and value {tuple(value.shape)} must both have the shape "
                "(batch, kv_heads, tokens, dim), with equal batch, heads and tokens"
            )
        if not (key.is_floating_point() and value.is_floating_point()):
            raise TypeError(f"{where}: key is {key.dtype} and value is {value.dtype}; both must be floating point")
        if self._like is None:
            return
        for name, new, held in (("key", key, self._like[0]), ("value", value, self._like[1])):
            if new.shape[0] != held.shape[0]:
                raise ValueError(f"{where}: {name} has batch {new.shape[0]}, the cache holds {held.shape[0]} rows")
            if new.shape[1] != held.shape[1] or new.shape[3] != held.shape[3]:
                raise ValueError(
                    f"{where}: {name} has {new.shape[1]} heads of {new.shape[3]}, the cache holds {held.shape[1]} "
                    f"heads of {held.shape[3]}: was it filled by another model?"
                )
            if new.device != held.device:
                raise ValueError(f"{where}: {name} is on {new.device}, the cache is on {held.device}")
            if self.config.stored_dtype(new.dtype) != held.dtype:
                raise ValueError(f"{where}: {name} is {new.dtype}, the cache keeps its dense tokens as {held.dtype}")
        self._fits = given

    def _not_finite(self, group: RowGroup[FoldedRows], key: Tensor, value: Tensor) -> ValueError:
        """The error for a group's tokens that are not finite, or too large for the dtype that they are kept in."""
        assert self._like is not None
        assert self._formats is not None
        for name, x, like in (("key", key, self._like[0]), ("value", value, self._like[1])):
            bad = (~x.to(like.dtype).isfinite()).nonzero()
            if not len(bad):
                continue
            row, head, token, channel = bad[0].tolist()
            number = x[row, head, token, channel].item()
            if not isfinite(number):
                remedy = "the model's own computation broke before the cache"
            elif self._formats.folds_by_token:  # a wider dense_dtype would not help: scales are float16
                remedy = f"too large for {like.dtype}; {self.config.kept_dense}"
            else:
                remedy = (
                    f"too large for {like.dtype}; pass dense_dtype=torch.float32, or, if it is to fold, "
                    f"{self.config.kept_dense}"
                )
            column = max(self.columns, group.padding) + token
            return ValueError(
                f"layer {self.index}: {name} at position {column} (row {int(group.batch_rows[row])}, head {head}, "
                f"channel {channel}) is {number}: {remedy}"
            )
        raise AssertionError("all tokens are finite")

    # Shrinking and rearranging

    @in_no_mode
    def select(self, rows: Tensor) -> None:
        """Make each row i what row `rows[i]` was, repeats and omissions allowed; raises IndexError if there is none."""
        if self._like is None:
            return
        wanted = rows.tolist()
        if any(not 0 <= row < self.batch for row in wanted):
            raise IndexError(f"layer {self.index}: rows = {wanted}, but the cache holds rows 0 to {self.batch - 1}")
        kept = []
        for group in self.groups:
            place = {row: i for i, row in enumerate(group.batch_rows.tolist())}
            new = [i for i, row in enumerate(wanted) if row in place]
            if not new:
                continue
            selected = group.rows.selected(torch.tensor([place[wanted[i]] for i in new]))
            kept.append(RowGroup(torch.tensor(new, device=group.batch_rows.device), group.padding, selected))
        queries = self.newest_queries
        if queries is not None:
            queries = queries.index_select(0, rows.to(queries.device))
        like = tuple(t.new_empty(len(wanted), *t.shape[1:]) for t in self._like)
        vars(self).update(groups=kept, takes_steps=False, newest_queries=queries, _like=like, _fits=None)

    @in_no_mode
    def forget_outside(self) -> None:
        """Free whole pages that a sliding window has left behind, and had before the newest `undo` tokens came."""
        for group in self.groups:
            rows = group.rows
            pages = rows.evictable(self.config.sliding - 1 + self.undo) // rows.page_size
            if pages:
                none = torch.zeros(rows.batch, rows.kv_heads, pages, dtype=torch.bool, device=group.batch_rows.device)
                rows.evict(none, by_page=True)

    # Going back

    def state(self) -> LayerState:
        """What `restore` needs to forget all later columns, without copies."""
        return dict(vars(self)), [group.rows.state() for group in self.groups]

    @in_no_mode
    def restore(self, state: LayerState) -> None:
        """Go back to `state`; since then there may only have been appends, or a selection of rows."""
        own, rows = state
        for group, held in zip(own["groups"], rows, strict=True):
            group.rows.restore(held)
        vars(self).update(own | {"takes_steps": False, "_fits": None})

    # Reading

    @property
    def awaits_rows(self) -> bool:
        """Whether some row has not had its first token yet."""
        return self._like is None or sum(group.count for group in self.groups) < self._like[0].shape[0]

    @in_no_mode
    def unfold(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dense keys and values of the columns that a new token may read, (batch, kv_heads, columns, dim).

        These are all columns, or the last `sliding` - 1 if there is a sliding window. Padding reads as 0.
        """
        assert self._like is not None
        if self.evicted_count:
            raise ValueError(
                f"layer {self.index}: tokens were evicted, so there is no dense copy of all columns: read it with an "
                "attached model (kvfold.attach)"
            )
        columns = self.columns - self.window_start(self.columns)
        out = [like.new_zeros(*like.shape[:2], columns, like.shape[3], dtype=dtype) for like in self._like]
        for group in self.groups:
            first = max(columns - group.rows.length, 0)
            for target, source in zip(out, group.rows.unfold(), strict=True):
                target[group.batch_rows, :, first:] = source[:, :, source.shape[2] - (columns - first) :].to(dtype)
        return out[0], out[1]
