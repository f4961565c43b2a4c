"""Ways to compute attention over folded caches.

A backend is a module, or an object, with the functions of `Backend`. To add one, write it beside
`kvfold/attention/cpu` and name it in `BACKENDS`, and in `FASTEST` for its devices; it must agree with
`kvfold.attention.naive`.
"""

from typing import Any, Protocol

from torch import Tensor

from kvfold.attention import cpu, reference, triton
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.plan import EngineStep
from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan


class Backend(Protocol):
    """Attention over rows of one length, and over the pages of an engine's pool."""

    def why_not(self, query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
        """Why `attend_rows` does not take a call; None if it does."""

    def attend_rows(
        self,
        query: Tensor,
        rows: FoldedRows,
        dense: DenseSpan | None,
        *,
        scaling: float,
        mask: Tensor | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `kvfold.attention.reference.attend_rows`; changes nothing."""

    def attend_pool(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: PagedLayer,
        step: EngineStep,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """As `kvfold.attention.reference.attend_pool`: folds full pages, attends, and keeps unfinished ones."""

    def step_of(self, rows: FoldedRows) -> Any:
        """A `HeldRows.step` for rows that this backend has just read; None if it has none for them."""


BACKENDS: dict[str, Backend] = {"cpu": cpu, "triton": triton, "reference": reference}
"""By name."""

FASTEST = {"cpu": "cpu", "cuda": "triton", "xpu": "triton"}
"""The backend that is asked first, by the device's type; on other devices the reference runs."""


def backend_of(name: str) -> Backend:
    """The backend of this name; raises ValueError if there is none."""
    if name not in BACKENDS:
        raise ValueError(f"backend = {name!r}: choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
