"""Fitting formats to a prompt: what is kept of its first tokens, and the formats that result."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvfold.cache.prompt_costs import count_sampled, sampled
from kvfold.cache.schedule import Schedule
from kvfold.formats import FormatPair, KeyStatistics

Allot = Callable[[Tensor | None, Tensor, Tensor], FormatPair]
"""Decides the bits of formats that await them, from `PromptFit.queries`, keys and values of the first tokens."""


@dataclass(frozen=True, eq=False)
class PromptFit:
    """What a sequence's formats need of its first tokens' queries."""

    formats: FormatPair  # those that the sequence began with, not fitted
    schedule: Schedule
    # q² of the first queries after the sinks, averaged over the heads that share a KV head: bfloat16, (batch, kv_heads,
    # tokens, key_dim). Kept while a crop without a trace can go back to before the fit; else None.
    energy: Any = None
    # Some of those queries themselves (`prompt_costs.sampled`), bfloat16, if formats await bits; kept equally long.
    queries: Any = None

    @property
    def awaits_bits(self) -> bool:
        """Whether queries themselves are kept, beside their energies."""
        return self.formats.awaits_bits

    def counted(self, first: int) -> slice:
        """The tokens whose energies count, as a slice of those from position `first` on."""
        return slice(max(self.schedule.window.sinks - first, 0), max(self.schedule.fit_tokens - first, 0))

    def sampled(self, first: int) -> slice:
        """The tokens whose queries are kept, as a slice of those from position `first` on."""
        return sampled(first, self.schedule.window.sinks, self.schedule.fit_tokens)

    def with_more(self, energy: Any, queries: Any, join: Callable[[tuple[Any, Any], int], Any]) -> "PromptFit":
        """With more tokens' `energy` and `queries` (None: nothing to add), which `join` puts behind those held."""
        energy = energy if self.energy is None else join((self.energy, energy), 2)
        if self.queries is not None:
            queries = self.queries if queries is None else join((self.queries, queries), 2)
        return replace(self, energy=energy, queries=queries)

    def kept(self, length: int, newest: int) -> "PromptFit":
        """What is still of use once `length` slots are held, after a pass of `newest` tokens."""
        if self.schedule.not_undone(length, newest) >= self.schedule.fit_tokens:
            return replace(self, energy=None, queries=None)
        return self

    def cropped(self, length: int) -> "PromptFit":
        """What is left when all but the first `length` slots go."""
        sinks = self.schedule.window.sinks
        if self.energy is None or length <= sinks:  # the next tokens are another prompt, or the fit is final
            return replace(self, energy=None, queries=None)
        queries = None if self.queries is None else self.queries[:, :, : count_sampled(length, sinks)]
        return replace(self, energy=self.energy[:, :, : length - sinks], queries=queries)

    def map(self, change: Callable[[Any], Any]) -> "PromptFit":
        """Each tensor changed."""
        energy, queries = (None if x is None else change(x) for x in (self.energy, self.queries))
        return replace(self, energy=energy, queries=queries)

    def fitted(
        self, key: Tensor, value: Tensor, energy: Tensor, queries: Tensor | None, allot: Allot | None
    ) -> FormatPair:
        """The formats, fitted to the first `fit_tokens` tokens, dense, (batch, kv_heads, tokens, dim).

        `energy` and `queries` are what is held of their queries, as tensors; `allot` decides the bits of formats that
        await them.
        """
        formats = self.formats
        if formats.awaits_bits:
            assert allot is not None
            formats = allot(queries, key, value)
        fitted = []
        for fmt, x, read in ((formats.keys, key, energy), (formats.values, value, energy[:, :, :0])):
            about = KeyStatistics.of(x[:, :, self.schedule.window.sinks :], read, self.schedule.page_size)
            fitted.append(fmt.fitted(about) if fmt.awaits_fit else fmt)
        return formats.with_formats(*fitted)
