"""The base of formats that reorder each head's channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from kvfold.formats.base import Format


@dataclass(frozen=True)
class Ordered(Format):
    """A format whose `fitted` finds an order of channels."""

    order: Tensor | None = field(default=None, compare=False, repr=False)
    """As in `ChannelOrder`: int16, (heads, D) or (batch, heads, D). None: not fitted, channels as they come."""

    @property
    def folds_by_token(self) -> bool:
        return False

    def fit_tables(self) -> dict[str, Tensor]:
        return {} if self.order is None else {"order": self.order}

    def with_fit_tables(self, tables: Mapping[str, Tensor]) -> Self:
        order = tables.get("order")
        if order is None or len(tables) != 1:
            raise ValueError(f"{type(self).__name__} has a table called order, and not {', '.join(tables) or 'none'}")
        channels = torch.arange(self.head_dim, dtype=torch.int16)
        if order.dtype != torch.int16 or order.shape[-1] != self.head_dim or (order.sort(-1)[0] != channels).any():
            raise ValueError(f"order is no order of {self.head_dim} channels")
        return replace(self, order=order)

    def select(self, rows: Tensor) -> Self:
        if self.order is None or self.order.ndim == 2:
            return self
        return replace(self, order=self.order.index_select(0, rows.to(self.order.device)))
