"""The base of formats that add something to another format."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from kvfold.formats.base import Format, Window
from kvfold.formats.statistics import KeyStatistics


@dataclass(frozen=True, kw_only=True)
class Wrapped(Format):
    """A format that folds as `base` does, and adds something."""

    base: Format

    @property
    def window(self) -> Window:
        return self.base.window

    @property
    def folds_by_token(self) -> bool:
        return self.base.folds_by_token

    @property
    def awaits_fit(self) -> bool:
        return self.base.awaits_fit

    def fitted(self, statistics: KeyStatistics) -> Self:
        return replace(self, base=self.base.fitted(statistics.first(self.base.head_dim)))

    def fit_tables(self) -> dict[str, Tensor]:
        return self.base.fit_tables()

    def with_fit_tables(self, tables: Mapping[str, Tensor]) -> Self:
        return replace(self, base=self.base.with_fit_tables(tables))

    def at(self, layer: int, frequencies: tuple[float, ...] | None) -> Self:
        base = self.base.at(layer, frequencies)
        return self if base is self.base else replace(self, base=base)

    def select(self, rows: Tensor) -> Self:
        base = self.base.select(rows)
        return self if base is self.base else replace(self, base=base)
