"""What a layer holds: the rows of a batch, the same for tensors and for MLX arrays."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kvfold.cache.budgets import bits_in, with_bits
from kvfold.cache.config import LayerConfig
from kvfold.cache.held import HeldRows
from kvfold.cache.prompt_costs import count_sampled, far_errors
from kvfold.cache.report import LayerReport
from kvfold.cache.spans import DenseSpan
from kvfold.formats import FormatPair, Window
from kvfold.formats.base import OutOfRange
from kvfold.kernels.modes import in_no_mode

R = TypeVar("R", bound=HeldRows)


@dataclass(eq=False)
class RowGroup(Generic[R]):
    """Batch rows with the same left padding, hence the same length."""

    batch_rows: Tensor  # their indices in the batch, int64, (rows,)
    padding: int  # padding columns before their first token
    rows: R

    @cached_property
    def count(self) -> int:
        """How many rows."""
        return len(self.batch_rows)

    @property
    def bits(self) -> dict[int, int] | None:
        """Bits of keys (0) and values (1), if the first tokens gave them; None if not, or not yet."""
        formats = self.rows.formats
        if formats.awaits_bits or not self.rows.fit.awaits_bits:
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
    """What one `append` of a layer made readable, for the attention of the same forward pass."""

    layer: "HeldLayer"  # the cache that holds everything else
    first_column: int  # column of the first new token, which is how many columns the cache held before
    columns: int
    # For each of the layer's groups, the dense tokens that the new queries may read. None after a `HeldRows.step`:
    # `dense` then takes those that the rows hold.
    spans: list[DenseSpan | None] | None
    observed: bool = False  # Whether `observe` has seen their queries. Layers that share a cache attend more than once.

    @property
    def is_step(self) -> bool:
        """Whether this is one token, the newest, whose query may go to a `HeldRows.step` as it is."""
        if not self.layer.takes_steps or (self.spans is not None and not self.observed):
            return False
        return self.columns == 1 and self.first_column + 1 == self.layer.columns

    @property
    def awaits_queries(self) -> bool:
        """Whether formats wait for the queries of these tokens, which `observe` has not seen."""
        return not self.observed and any(group.rows.awaits_queries for group in self.layer.groups)

    def newest(self, columns: int) -> "Appended":
        """Only the last `columns` of these, if only they have queries."""
        return replace(self, first_column=self.first_column + self.columns - columns, columns=columns)

    @property
    def dense(self) -> list[DenseSpan | None]:
        """For each of the layer's groups, the dense tokens that the new queries may read."""
        if self.spans is None:
            self.spans = [group.rows.dense_span() for group in self.layer.groups]
        return self.spans


class HeldLayer(ABC):
    """Keys and values of one layer, of a batch that arrives in columns.

    Row b's first `padding[b]` columns are padding and are never stored. Rows with equal padding share tensors.
    """

    groups: list[RowGroup[Any]]

    def __init__(self, config: LayerConfig) -> None:
        self.config = config
        self.clear()

    @property
    def index(self) -> int:
        """The layer's number."""
        return self.config.index

    def clear(self) -> None:
        """Forget everything."""
        self.columns = 0  # that came, padding included
        self.groups = []  # the rows of the batch that have had a token
        # Whether a `HeldRows.step` may take a token, whose query `observe` then does not see: all rows are in one
        # group, and attention takes their queries unchanged.
        self.takes_steps = False
        if self.config.budgets is not None:
            self.config.budgets.shares.clear()
        # (batch, heads, tokens, key_dim), of the newest columns, for eviction policies; None if none are kept.
        self.newest_queries: Tensor | None = None
        # Shapes, dtypes and devices that `LayerCache._check` accepted last.
        self._fits: tuple[object, ...] | None = None
        self._formats: FormatPair | None = None
        self._like: tuple[Tensor, Tensor] | None = None  # empty tensors with shape, dtype and device

    def begin(self, key: Tensor, value: Tensor) -> FormatPair:
        """Take shape, dtype and device from the first keys and values; return the formats that sequences begin with."""
        formats = self.config.formats_of(key.shape[-1], value.shape[-1])
        self._formats = self.config.calibrated(formats, key.shape[1], key.shape[3])
        kept = [x.new_empty(*x.shape[:2], 0, x.shape[3], dtype=self.config.stored_dtype(x.dtype)) for x in (key, value)]
        self._like = kept[0], kept[1]
        return self._formats

    @abstractmethod
    def observe(self, query: Any, new: Appended, scaling: float | None = None) -> None:
        """Show the newest queries, those of `new`, to formats that are fitted to queries; then attention may read.

        `scaling` is the factor on scores; None: key_dim^−½.
        """

    @property
    def folded_as(self) -> str:
        """Names of the formats of the longest rows' pages: one name if keys and values share it, else "keys:values"."""
        longest = min(self.groups, key=lambda group: group.padding, default=None)
        if longest is None or longest.bits is None:
            return self.config.format
        bits = {number: longest.bits[number] for number in bits_in(self.config.format)}
        return with_bits(self.config.format, bits)

    def _allot(
        self, padding: int, scaling: float | None, queries: Tensor | None, key: Tensor, value: Tensor
    ) -> FormatPair:
        """The formats, not fitted, with bits that the first tokens of the rows with this padding decide."""
        budgets = self.config.budgets
        assert budgets is not None
        assert self._formats is not None
        window, costs = self._formats.window, None
        if queries is not None and queries.shape[2] == count_sampled(key.shape[2], window.sinks):
            costs = far_errors(queries, key, value, window, scaling)
        names = budgets.decide(self.index, padding, costs, [x.shape[1] * x.shape[3] for x in (key, value)])
        return self.config.formats_named(names, key.shape[3], value.shape[3])

    def _explained(self, error: ValueError) -> ValueError:
        """An error that rows raised, as one that names this layer."""
        what = str(error)
        if isinstance(error, OutOfRange):
            what = f"{what.partition(':')[0]}; {self.config.kept_dense}"
        return ValueError(f"layer {self.index}: {what}")

    def window_start(self, columns: int) -> int:
        """The first column that tokens after the first `columns` read: 0 unless the layer has a sliding window."""
        return max(columns - self.config.sliding + 1, 0) if self.config.sliding else 0

    def check_crop(self, columns: int) -> None:
        """Raise ValueError if a crop to `columns` columns would go back to where tokens were evicted.

        Raises RuntimeError, as layers of transformers do, if a sliding window has left behind what it would need again.
        """
        whole_from = max(
            (group.padding + group.rows.whole_from for group in self.groups if group.rows.evicted), default=0
        )
        if self.config.sliding and columns > 0 and self.window_start(columns) < whole_from:
            raise RuntimeError(
                f"layer {self.index}: crop to {columns} tokens, but its sliding window has left those before "
                f"{whole_from} behind: crop by at most {self.undo} tokens, call activate_past_recording() before the "
                "tokens come that are to go, or keep windows dense (sliding=False)"
            )
        if 0 < columns < whole_from:
            raise ValueError(
                f"layer {self.index}: crop to {columns} tokens, but tokens before {whole_from} were evicted, and which "
                "would have stayed then is not known: crop to more, or reset the cache"
            )

    @in_no_mode
    def crop(self, columns: int) -> int:
        """Keep the first `columns` columns.

        Returns how many kept tokens of a row, at most, go on with folded values although a cache that never held more
        columns would hold them dense; 0 if the crop leaves no trace. Raises ValueError as `check_crop`.
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

    @property
    def shape(self) -> tuple[int, int, int, int] | None:
        """Batch rows, KV heads, and coordinates of a key and of a value; None before the first token."""
        if self._like is None:
            return None
        batch, kv_heads, _, key_dim = self._like[0].shape
        return batch, kv_heads, key_dim, self._like[1].shape[3]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that keys are rounded to before they are stored; None before the first token."""
        return None if self._like is None else self._like[0].dtype

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return 0 if self._like is None else self._like[0].shape[0]

    @property
    def window(self) -> Window | None:
        """What stays dense around whole pages; None before the first token, and if tokens fold as they come."""
        return None if self._formats is None or self._formats.folds_by_token else self._formats.window

    @property
    def undo(self) -> int:
        """How many columns of the newest pass can be cropped without a trace."""
        return 0 if self._formats is None else self._formats.window.undo

    @property
    def value_dim(self) -> int:
        """Coordinates of a value; 0 before the first token."""
        return 0 if self._like is None else self._like[1].shape[3]

    @property
    def value_count(self) -> int:
        """Numbers that a dense cache would hold for the tokens that came: keys and values, padding aside."""
        most = self.config.sliding - 1 if self.config.sliding else self.columns
        return self._values_per_token * sum(group.count * min(group.rows.seen, most) for group in self.groups)

    @property
    def _values_per_token(self) -> int:
        if self._like is None:
            return 0
        own = self._like[:1] if self.config.values_of_keys else self._like
        return sum(like.shape[1] * like.shape[3] for like in own)

    def report(self, held_bytes: int) -> LayerReport:
        """What this layer holds, in `held_bytes` bytes of its own."""
        dense = self._values_per_token * sum(group.count * group.rows.unfolded for group in self.groups)
        return LayerReport(
            self.index, self.folded_as, self.columns, self.evicted_count, self.value_count, dense, held_bytes
        )

    def folded_shares(self) -> list[float]:
        """Of each row's tokens that came, the share that is held folded; 0 of rows without tokens."""
        shares = [0.0] * self.batch
        for group in self.groups:
            rows = group.rows
            for row in group.batch_rows.tolist() if rows.seen else ():
                shares[row] = 1 - (rows.unfolded + rows.evicted) / rows.seen
        return shares

    @property
    def evicted_count(self) -> int:
        """Tokens that each head has forgotten, summed over rows; not those that a sliding window has left behind."""
        return 0 if self.config.sliding else sum(group.count * group.rows.evicted for group in self.groups)

    def own(self) -> list[object]:
        """Objects that hold this layer's own tensors: pages, dense tokens, row indices."""
        return [
            (
                group.batch_rows,
                group.rows.dense,
                group.rows.fit.energy,
                group.rows.fit.queries,
                group.rows.positions,
                *group.rows.pages(),
                self.newest_queries,
            )
            for group in self.groups
        ]

    def tables(self) -> list[object]:
        """Objects that hold tables, most of which other layers share."""
        return [self.config.statistics, *((group.rows.formats, group.rows.fit.formats) for group in self.groups)]
