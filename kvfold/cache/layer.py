"""The folded cache of one layer: a batch of sequences, each folded as if it were alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite

import torch
from torch import Tensor

from kvfold.cache.budgets import PromptBudgets, bits_in, choice, with_bits
from kvfold.cache.prompt_costs import count_looked_at, far_errors
from kvfold.cache.rows import FoldedRows, RowsState, looked_at_once
from kvfold.cache.saved import FLOATS, Contents
from kvfold.cache.saved_rows import rows_from_saved, rows_to_saved
from kvfold.cache.spans import DenseSpan
from kvfold.formats import FormatPair, KeyStatistics, Window, get_formats
from kvfold.formats.base import OutOfRange
from kvfold.kernels.modes import in_no_mode
from kvfold.quant.finite import finite

LARGEST_SAVED = 2**20
"""A file that asks for more rows or heads is refused before it gets the memory."""


@dataclass(eq=False)
class RowGroup:
    """Batch rows with the same left padding, hence the same length.

    Attributes
    ----------
    batch_rows
        Their indices in the batch, int64, (rows,).
    padding
        Padding columns before their first token.
    rows
        Their cache.
    """

    batch_rows: Tensor
    padding: int
    rows: FoldedRows

    @cached_property
    def count(self) -> int:
        """How many rows."""
        return len(self.batch_rows)

    @property
    def bits(self) -> dict[int, int] | None:
        """Bits of keys (0) and values (1), if the first tokens gave them; None if not, or not yet."""
        formats = self.rows.formats
        if formats.awaits_bits or not self.rows.unfitted.awaits_bits:
            return None
        return {0: formats.keys.bits, 1: formats.values.bits}

    def own(self, columns: Tensor, first: int) -> Tensor:
        """These rows' tokens among batch columns (batch, heads, n, …) that start at column `first`."""
        skip = self.padding - first
        if self.count < columns.shape[0]:
            columns = columns.index_select(0, self.batch_rows)
        return columns[:, :, skip:] if skip > 0 else columns


@dataclass(eq=False)
class Appended:
    """What one `LayerCache.append` made readable, for the attention of the same forward pass.

    Attributes
    ----------
    layer
        The cache that holds everything else.
    first_column
        Column of the first new token: what the cache held before.
    columns
        New columns.
    spans
        For each of the layer's groups, the dense tokens that the new queries may read; None for those that are held,
        after a `FoldedRows.step`.
    observed
        Whether `LayerCache.observe` has seen their queries. Layers that share a cache attend more than once.
    """

    layer: "LayerCache"
    first_column: int
    columns: int
    spans: list[DenseSpan | None] | None
    observed: bool = False

    @property
    def is_step(self) -> bool:
        """Whether this is one token, the newest, whose query may go to a `FoldedRows.step` as it is."""
        if not self.layer.takes_steps or (self.spans is not None and not self.observed):
            return False
        return self.columns == 1 and self.first_column + 1 == self.layer.columns

    @property
    def awaits_queries(self) -> bool:
        """Whether formats wait for the queries of these tokens, which `LayerCache.observe` has not seen."""
        return not self.observed and any(group.rows.awaits_queries for group in self.layer.groups)

    def newest(self, columns: int) -> "Appended":
        """Only the last `columns` of these, for queries of which there are no more."""
        return replace(self, first_column=self.first_column + self.columns - columns, columns=columns)

    @property
    def dense(self) -> list[DenseSpan | None]:
        """For each of the layer's groups, the dense tokens that the new queries may read."""
        if self.spans is None:
            self.spans = [group.rows.dense_span() for group in self.layer.groups]
        return self.spans


@dataclass(eq=False)
class LayerState:
    """A `LayerCache` at one moment, by reference."""

    columns: int
    groups: list[tuple[RowGroup, RowsState]]
    formats: FormatPair | None
    like: tuple[Tensor, Tensor] | None
    newest_queries: Tensor | None


class LayerCache:
    """Folded keys and values of one layer.

    A batch arrives in columns. Row b's first `padding[b]` columns are padding and are never stored;
    rows with equal padding share tensors.

    Parameters
    ----------
    format
        "both" or "keys:values" (`kvfold.formats.FORMATS`).
    index
        The layer's number, for messages.
    dense_dtype
        dtype of what stays dense. None: that of the keys if it has 16 bits, else float16.
    window
        What stays dense; None: what the formats say.
    statistics
        What a format that is fitted goes by; None: it waits for those of each sequence's first tokens.
    frequencies
        RoPE's ω_f, for formats that turn keys back; None: not known.
    values_of_keys
        Whether a value is the first channels of its key, as in multi-head latent attention: it is held once.
    sharpen
        Whether attention scales scores as the keys' format says (`Format.sharpness`).
    budgets
        What gives this layer, among others of its cache, bits by its first tokens; None: it has those of its format.
        Rows of a batch with as much padding share them.

    Attributes
    ----------
    keeps_queries
        How many of the newest queries to keep, for whoever evicts by them.
    takes_steps
        Whether all rows are in one group, and their queries go to attention as they are, so that a `FoldedRows.step`
        may take a token; nobody observes its query then.
    newest_queries
        They, (batch, heads, tokens, key_dim), of the newest columns; None if none are kept.

    Raises
    ------
    ValueError
        On the first keys, if `sharpen` is True and their format has no rule for it.
    """

    def __init__(
        self,
        format: str,
        index: int = 0,
        dense_dtype: torch.dtype | None = None,
        window: Window | None = None,
        statistics: KeyStatistics | None = None,
        frequencies: tuple[float, ...] | None = None,
        values_of_keys: bool = False,
        sharpen: bool = False,
        budgets: PromptBudgets | None = None,
    ) -> None:
        self.format = format
        self.index = index
        self.dense_dtype = dense_dtype
        self.window = window
        self.statistics = statistics
        self.frequencies = frequencies
        self.values_of_keys = values_of_keys
        self.sharpen = sharpen
        self.budgets = budgets
        self.keeps_queries = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.columns = 0
        self.groups: list[RowGroup] = []
        self.takes_steps = False
        if self.budgets is not None:
            self.budgets.shares.clear()
        self.newest_queries: Tensor | None = None
        self._fits: tuple[object, ...] | None = None  # what `_check` had nothing to say of last
        self._formats: FormatPair | None = None
        self._like: tuple[Tensor, Tensor] | None = None  # empty tensors with shape, dtype and device

    # Growing

    def append(self, key: Tensor, value: Tensor, padding: Sequence[int] | None = None) -> Appended:
        """Add columns to every row.

        Parameters
        ----------
        key, value
            Shape (batch, kv_heads, n, dim), floating point, finite; the dims may differ.
        padding
            Padding columns before each row's first token; None for none. Counts for rows that have
            not started yet.

        Raises
        ------
        ValueError
            On a NaN or infinity, or a shape, dtype or device that differs from what the cache
            holds. The cache is unchanged then. On other devices single tokens are looked at when their page is full,
            and attention over a NaN or infinity gives NaN until then.
        """
        if self.takes_steps and not self.keeps_queries and self.groups[0].rows.append_by_step(key, value):
            self.columns += 1
            return Appended(self, self.columns - 1, 1, None)
        self._check(key, value)
        first_column, n = self.columns, key.shape[2]
        dense = self._join(key, value)
        if dense is None:
            dense = self._grow(key, value, padding)
        self.takes_steps = len(self.groups) == 1 and not self.awaits_rows and not self.sharpen
        self.columns += n
        return Appended(self, first_column, n, dense)

    @in_no_mode
    def _join(self, key: Tensor, value: Tensor) -> list[DenseSpan | None] | None:
        """Append tokens that do no more than join those held, as most that are decoded; None if these do."""
        n = key.shape[2]
        rows = 0
        for group in self.groups:
            if not group.rows.only_joins(n):
                return None
            rows += group.count
        if self._like is None or rows < key.shape[0]:  # some have not had their first token yet
            return None
        if key.requires_grad or value.requires_grad:
            key, value = key.detach(), value.detach()
        dtypes = self._like[0].dtype, self._like[1].dtype
        undone = self.groups  # after an interrupt nobody knows which were written
        try:
            for number, group in enumerate(self.groups):
                own = key, value
                if group.count < rows or group.padding > self.columns:
                    own = group.own(key, self.columns), group.own(value, self.columns)
                if not group.rows.write(*own, dtypes):
                    undone = self.groups[:number]
                    return None  # `_grow` says which number is not finite
            undone = []
        except ValueError as error:
            raise self._explained(error) from None
        finally:
            for group in undone:
                group.rows.unwrite()
        dense = []
        for group in self.groups:
            dense.append(group.rows.join(n))  # does not fail
        return dense

    @in_no_mode
    def _grow(self, key: Tensor, value: Tensor, padding: Sequence[int] | None) -> list[DenseSpan | None]:
        """Append any tokens."""
        n, batch = key.shape[2], key.shape[0]
        skipped = [0] * batch
        if self.awaits_rows:
            padding = [0] * batch if padding is None else padding
            if len(padding) != batch:
                raise ValueError(f"padding has {len(padding)} entries for a batch of {batch}")
            skipped = [min(max(columns - self.columns, 0), n) for columns in padding]
        formats = self._formats or self._fitted(self.formats_of(key.shape[-1], value.shape[-1]), key)
        key = self._as_stored(key, "key", skipped, formats)
        value = (
            key[..., : value.shape[-1]] if self.values_of_keys else self._as_stored(value, "value", skipped, formats)
        )
        self._formats = formats
        groups = self.groups + (self._starting(padding, n, key) if padding is not None and self.awaits_rows else [])

        try:
            pending = [
                group.rows.prepare(group.own(key, self.columns), group.own(value, self.columns)) for group in groups
            ]
        except ValueError as error:
            raise self._explained(error) from None
        # Nothing below fails.
        dense = [group.rows.commit(tokens) for group, tokens in zip(groups, pending, strict=True)]
        self.groups = groups
        if self._like is None:
            self._like = tuple(x.new_empty(batch, x.shape[1], 0, x.shape[3]) for x in (key, value))  # type: ignore[assignment]
        return dense

    @in_no_mode
    def observe(self, query: Tensor | None, new: Appended, scaling: float | None = None) -> None:
        """Show the queries of the tokens just appended to formats that go by them; then attention may read.

        Only the first call for `new` counts. A call that fails does not take the tokens back, as `append` would:
        `restore` the state of before.

        Parameters
        ----------
        query
            (batch, heads, n, key_dim) for the n columns of `new`; None if they are not known.
        scaling
            Factor on scores; None: key_dim^−½.

        Raises
        ------
        ValueError
            On a query of another shape, or with a NaN or an infinity, or if a page's scale leaves float16's range.
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

    @property
    def folded_as(self) -> str:
        """Names of the formats that pages of the longest rows are folded with, "both" or "keys:values"."""
        longest = min(self.groups, key=lambda group: group.padding, default=None)
        if longest is None or longest.bits is None:
            return self.format
        return with_bits(self.format, {number: longest.bits[number] for number in bits_in(self.format)})

    def _allot(
        self, padding: int, scaling: float | None, queries: Tensor | None, key: Tensor, value: Tensor
    ) -> FormatPair:
        """The formats, not fitted, with bits by the first tokens of the rows with this padding."""
        assert self.budgets is not None
        assert self._formats is not None
        window, costs = self._formats.window, None
        if queries is not None and queries.shape[2] == count_looked_at(key.shape[2], window.sinks):
            costs = far_errors(queries, key, value, window, scaling)
        names = self.budgets.decide(self.index, padding, costs, [x.shape[1] * x.shape[3] for x in (key, value)])
        return self._formats_named(names, key.shape[3], value.shape[3])

    def formats_of(self, key_dim: int, value_dim: int) -> FormatPair:
        """The formats that each sequence starts with: not fitted, and without bits of a share."""
        pair = self._formats_named(self.format, key_dim, value_dim)
        return pair if self.budgets is None else replace(pair, awaits_bits=True)

    def _formats_named(self, names: str, key_dim: int, value_dim: int) -> FormatPair:
        pair = get_formats(names, key_dim, value_dim, self.window, values_of_keys=self.values_of_keys)
        if self.sharpen and pair.keys.sharpness(torch.ones(1)) is None:
            raise ValueError(
                f"sharpen = True, but there is no rule for keys of {key_dim} in {names!r}: it is for tbq and tbqp keys "
                "of 64 or 256"
            )
        return pair.at(self.index, self.frequencies)

    def _fitted(self, formats: FormatPair, key: Tensor) -> FormatPair:
        """`formats` as `statistics` would have them."""
        if self.statistics is None or not formats.keys.awaits_fit:
            return formats
        expected, given = (key.shape[1], key.shape[3]), tuple(self.statistics.key_variance.shape)
        if given != expected:
            raise ValueError(
                f"layer {self.index}: the calibration is of {given[0]} heads of {given[1]}, keys have {expected[0]} "
                f"heads of {expected[1]}: calibrate this model"
            )
        return formats.with_formats(formats.keys.fitted(self.statistics), formats.values)

    def _starting(self, padding: Sequence[int], n: int, key: Tensor) -> list[RowGroup]:
        """New groups for rows whose first token is among the next `n` columns."""
        assert self._formats is not None
        batch, kv_heads = key.shape[:2]
        started = {int(row) for group in self.groups for row in group.batch_rows.tolist()}
        members: dict[int, list[int]] = {}
        for row in range(batch):
            if row not in started and padding[row] < self.columns + n:
                if padding[row] < self.columns:
                    raise ValueError(
                        f"padding[{row}] = {padding[row]}, but {self.columns} columns of row {row} were padding"
                    )
                members.setdefault(padding[row], []).append(row)
        return [
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
            if self._stored_dtype(new) != held.dtype:
                raise ValueError(f"{where}: {name} is {new.dtype}, the cache keeps its dense tokens as {held.dtype}")
        self._fits = given

    def _stored_dtype(self, x: Tensor) -> torch.dtype:
        if self.dense_dtype is not None:
            return self.dense_dtype
        return x.dtype if x.dtype.itemsize == 2 else torch.float16

    def _as_stored(self, x: Tensor, name: str, skipped: Sequence[int], formats: FormatPair) -> Tensor:
        """`x` in the stored dtype; row b's first `skipped[b]` columns are padding and may hold anything."""
        stored = x.detach().to(self._stored_dtype(x))
        if any(skipped):
            stored = stored.clone() if stored.data_ptr() == x.data_ptr() else stored
            for row, columns in enumerate(skipped):
                stored[row, :, :columns] = 0
        if x.shape[2] == 1 and not looked_at_once(x):
            return stored
        if finite(stored):
            return stored
        row, head, token, channel = (~stored.isfinite()).nonzero()[0].tolist()
        bad = x[row, head, token, channel].item()
        remedy = (
            "the model's own computation broke before the cache"
            if not torch.tensor(bad).isfinite()
            else f"too large for {stored.dtype}; {self._remedy(formats)}"
        )
        raise ValueError(
            f"layer {self.index}: {name} at position {self.columns + token} (row {row}, head {head}, "
            f"channel {channel}) is {bad}: {remedy}"
        )

    def _remedy(self, formats: FormatPair) -> str:
        """What to do about a number that is too large for the stored dtype."""
        if formats.folds_by_token:  # with a scale in float16
            return self._kept_dense
        return f"pass dense_dtype=torch.float32, or, if it is to fold, {self._kept_dense}"

    @property
    def _kept_dense(self) -> str:
        return f"keep this layer dense: policy=Policy({self.format!r}, exceptions=[({self.index}, 'dense')])"

    def _explained(self, error: ValueError) -> ValueError:
        """An error of rows as one of this layer."""
        what = str(error)
        if isinstance(error, OutOfRange):
            what = f"{what.partition(':')[0]}; {self._kept_dense}"
        return ValueError(f"layer {self.index}: {what}")

    # Shrinking and rearranging

    def check_crop(self, columns: int) -> None:
        """Raise ValueError if tokens were evicted from what a crop to `columns` columns would go back to."""
        whole_from = max(
            (group.padding + group.rows.whole_from for group in self.groups if group.rows.evicted), default=0
        )
        if 0 < columns < whole_from:
            raise ValueError(
                f"layer {self.index}: crop to {columns} tokens, but tokens before {whole_from} were evicted, and which "
                "would have stayed then is not known: crop to more, or reset the cache"
            )

    @in_no_mode
    def crop(self, columns: int) -> int:
        """Keep the first `columns` columns; return `FoldedRows.crop`'s count for the row that lost most.

        Raises
        ------
        ValueError
            As `check_crop`.
        """
        if columns >= self.columns:
            return 0
        self.check_crop(columns)
        lost, self.newest_queries = 0, None
        for group in self.groups:
            kept = max(columns - group.padding - group.rows.evicted, 0)
            lost = max(lost, group.rows.crop(kept if columns > group.padding else 0))
        self.groups, self.takes_steps = [group for group in self.groups if group.rows.length], False
        self.columns = min(self.columns, columns)
        if self.columns == 0:
            self.clear()
        return lost

    @in_no_mode
    def select(self, rows: Tensor) -> None:
        """Let new row i be what row `rows[i]` was; repeats and omissions allowed.

        Raises
        ------
        IndexError
            If there is no such row.
        """
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

    # Going back

    def state(self) -> "LayerState":
        """What `restore` needs to forget all later columns, without copies."""
        rows = [(group, group.rows.state()) for group in self.groups]
        return LayerState(self.columns, rows, self._formats, self._like, self.newest_queries)

    @in_no_mode
    def restore(self, state: "LayerState") -> None:
        """Be as when `state` was taken; only appends may have happened since."""
        self.columns, self._formats, self._like = state.columns, state.formats, state.like
        self.newest_queries, self._fits = state.newest_queries, None
        for group, rows in state.groups:
            group.rows.restore(rows)
        self.groups, self.takes_steps = [group for group, _ in state.groups], False

    # Into a file and back

    def to_saved(self) -> Contents:
        """What is held, without unused capacity, and what it takes to go on."""
        window, statistics = self.window, self.statistics
        saved = Contents(
            {
                "format": self.format,
                "budgets": self.budgets is not None,
                "dense_dtype": None if self.dense_dtype is None else _name(self.dense_dtype),
                "window": None if window is None else [window.sinks, window.recent, window.undo],
                "calibrated": statistics is not None,
                "frequencies": None if self.frequencies is None else list(self.frequencies),
                "values_of_keys": self.values_of_keys,
                "sharpen": self.sharpen,
                "shape": None if self.shape is None else list(self.shape),
                "dtype": None if self._like is None else _name(self._like[0].dtype),
                "columns": self.columns,
                "groups": len(self.groups),
            }
        )
        if statistics is not None:
            saved.tensors = {"query_energy": statistics.query_energy, "key_variance": statistics.key_variance}
        for number, group in enumerate(self.groups):
            part = rows_to_saved(group.rows)
            part.data |= {"batch_rows": group.batch_rows.tolist(), "padding": group.padding}
            part.data["bits"] = None if group.bits is None else [group.bits[n] for n in bits_in(self.format)]
            saved.put(f"group{number}", part)
        return saved

    @classmethod
    def from_saved(cls, saved: Contents, index: int = 0) -> "LayerCache":
        """The layer that `to_saved` told of, on the CPU; all of `saved` is taken out.

        Raises
        ------
        ValueError
            If its parts do not fit together, or a format or calibration has another shape.
        """
        format = saved.take("format", str)
        dense_dtype = None if saved.lacks("dense_dtype") else saved.dtype("dense_dtype")
        window = None
        if not saved.lacks("window"):
            window = Window(*saved.numbers("window", 3))
        statistics = None
        if saved.take("calibrated", bool):
            variance = saved.tensor("key_variance", FLOATS.values(), (None, None))
            energy = saved.tensor("query_energy", FLOATS.values(), tuple(variance.shape))
            statistics = KeyStatistics(energy, variance)
        frequencies = None
        if not saved.lacks("frequencies"):
            frequencies = tuple(saved.take("frequencies", list))
            if any(type(f) is not float or not isfinite(f) for f in frequencies):
                raise ValueError(f"{saved.where}frequencies are no finite numbers")
        values_of_keys = saved.take("values_of_keys", bool)
        sharpen = saved.take("sharpen", bool)
        layer = cls(format, index, dense_dtype, window, statistics, frequencies, values_of_keys, sharpen)
        if saved.take("budgets", bool):
            layer.budgets = PromptBudgets({index: format})
        layer.columns = saved.number("columns")
        groups = saved.number("groups")
        if saved.lacks("shape"):
            if layer.columns or groups or not saved.lacks("dtype"):
                raise ValueError(f"{saved.where}shape is missing")
        else:
            layer._fill(saved, groups)
        saved.done()
        return layer

    def _fill(self, saved: Contents, groups: int) -> None:
        """Take the rows of all groups out of `saved`."""
        batch, kv_heads, key_dim, value_dim = saved.numbers("shape", 4, 1, LARGEST_SAVED)
        dtype = saved.dtype("dtype")
        if dtype != self.dense_dtype and (self.dense_dtype is not None or dtype.itemsize != 2):
            raise ValueError(f"{saved.where}dtype is {dtype}, which dense_dtype = {self.dense_dtype} does not make")
        unfitted = self.formats_of(key_dim, value_dim)
        key, value = (torch.empty(batch, kv_heads, 0, dim, dtype=dtype) for dim in (key_dim, value_dim))
        self._like, self._formats = (key, value), self._fitted(unfitted, key)
        taken: set[int] = set()
        for number in range(groups):
            part = saved.part(f"group{number}")
            own = part.numbers("batch_rows", most=batch - 1)
            padding = part.number("padding", most=self.columns - 1)
            if not own or len({*own} - taken) < len(own):
                raise ValueError(f"{part.where}batch_rows name no row, or one twice")
            taken.update(own)
            like, folds = (key[: len(own)], value[: len(own)]), self._formats
            if not part.lacks("bits"):
                folds = self._formats_named(self._names_of(part), key_dim, value_dim)
            rows = rows_from_saved(part, self._formats, folds, like, self.columns - padding)
            self.groups.append(RowGroup(torch.tensor(own), padding, rows))

    def _names_of(self, saved: Contents) -> str:
        """Names of the formats that rows fold with, whose bits are taken out of `saved`.

        Raises
        ------
        ValueError
            If they cannot be what the first tokens gave this layer.
        """
        asked = bits_in(self.format)
        bits = dict(zip(asked, saved.numbers("bits", len(asked), 1, 8), strict=True))
        if self.budgets is None or any(bits[number] not in choice(own) for number, own in asked.items()):
            raise ValueError(f"{saved.where}bits are {[*bits.values()]}, which no tokens give {self.format!r}")
        return with_bits(self.format, bits)

    # Reading

    @property
    def shape(self) -> tuple[int, int, int, int] | None:
        """Batch rows, KV heads, and coordinates of a key and of a value; None before the first token."""
        if self._like is None:
            return None
        batch, kv_heads, _, key_dim = self._like[0].shape
        return batch, kv_heads, key_dim, self._like[1].shape[3]

    @property
    def awaits_rows(self) -> bool:
        """Whether some row has not had its first token yet."""
        return self._like is None or sum(group.count for group in self.groups) < self._like[0].shape[0]

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return 0 if self._like is None else self._like[0].shape[0]

    @property
    def undo(self) -> int:
        """How many of the newest columns can always be cropped without a trace."""
        return 0 if self._formats is None else self._formats.window.undo

    @property
    def value_dim(self) -> int:
        """Coordinates of a value; 0 before the first token."""
        return 0 if self._like is None else self._like[1].shape[3]

    @property
    def value_count(self) -> int:
        """Numbers that a dense cache would hold for the tokens that came: keys and values, padding aside."""
        if self._like is None:
            return 0
        own = self._like[:1] if self.values_of_keys else self._like
        per_token = sum(like.shape[1] * like.shape[3] for like in own)
        return per_token * sum(group.count * group.rows.seen for group in self.groups)

    @property
    def evicted_count(self) -> int:
        """Tokens of all rows that each head has forgotten."""
        return sum(group.count * group.rows.evicted for group in self.groups)

    def own(self) -> list[object]:
        """What holds this layer's own tensors: pages, dense tokens, row indices."""
        return [
            (
                group.batch_rows,
                group.rows.sinks,
                group.rows.tail,
                group.rows.query_energy,
                group.rows.queries,
                group.rows.positions,
                *group.rows.pages(),
                self.newest_queries,
            )
            for group in self.groups
        ]

    def tables(self) -> list[object]:
        """What holds tables, most of which other layers share."""
        return [self.statistics, *((group.rows.formats, group.rows.unfitted) for group in self.groups)]

    @in_no_mode
    def unfold(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dense keys and values of every column, (batch, kv_heads, columns, dim); padding reads as 0."""
        assert self._like is not None
        if self.evicted_count:
            raise ValueError(
                f"layer {self.index}: tokens were evicted, so there is no dense copy of all columns: read it with an "
                "attached model (kvfold.attach)"
            )
        out = [like.new_zeros(*like.shape[:2], self.columns, like.shape[3], dtype=dtype) for like in self._like]
        for group in self.groups:
            for target, source in zip(out, group.rows.unfold(), strict=True):
                target[group.batch_rows, :, group.padding :] = source.to(dtype)
        return out[0], out[1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
