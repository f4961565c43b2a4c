"""One layer's keys and values in an engine."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.cache.pool.firsts import places_for
from kvfold.cache.pool.layout import PagePool
from kvfold.cache.pool.plan import EngineStep, slots_for
from kvfold.formats import FormatPair
from kvfold.kernels.places import Places
from kvfold.quant.finite import finite


class PagedLayer:
    """One layer's keys and values in an engine: its pool, its formats; tails and first tokens in the model's dtype.

    Formats are fitted, if they must be. There is room for the unfinished pages and first tokens of `sequences`, each of
    which drafts up to `drafts` tokens at a time (`kvfold.cache.pool.plan.Slots`).

    `broken` names the pages that cannot be held: a NaN or an infinity is in them, or a scale leaves float16's range.
    What a sequence computes behind such a page means nothing, so attention gives NaN there. Others are not touched.
    """

    def __init__(
        self, formats: FormatPair, pool: PagePool, sequences: int, dtype: torch.dtype, drafts: int = 0
    ) -> None:
        if formats.awaits_fit or formats.needs_calibration:
            raise ValueError(
                "formats must be fitted before pages are shared: one sequence's statistics are not another's"
            )
        self.formats = formats
        self.pool = pool
        tails = slots_for(sequences, drafts), pool.kv_heads, formats.keys.page_size
        firsts, device = (places_for(sequences), pool.kv_heads), pool.pages.device
        self.tail_keys = torch.zeros(*tails, formats.keys.head_dim, dtype=dtype, device=device)
        self.tail_values = torch.zeros(*tails, formats.values.head_dim, dtype=dtype, device=device)
        self.first_keys = torch.zeros(*firsts, formats.keys.head_dim, dtype=dtype, device=device)
        self.first_values = torch.zeros(*firsts, formats.values.head_dim, dtype=dtype, device=device)
        self.broken: set[int] = set()

    def fold(self, step: EngineStep, key: Tensor, value: Tensor) -> EngineStep:
        """Fold the pages that a step completes by new tokens, (tokens, kv_heads, dim), before attention reads.

        First tokens among them get their places. Returns the part of the step that is of sequences without broken
        pages.
        """
        self.keep_firsts(torch.from_numpy(step.begins()), key, value)
        if self.broken:
            self.broken.difference_update(*(self._pages(step, i)[1] for i in range(len(step.rows))))
            step = self._unbroken(step)
        if self._write(step, key, value):
            return step
        size = self.pool.layout.page_size
        self.give_up(step, [i for i in range(len(step.rows)) if not self._write(step.only([i], size), key, value)])
        return self._unbroken(step)

    def give_up(self, step: EngineStep, rows: Iterable[int]) -> None:
        """Mark the pages that hold new tokens of some sequences of a step as broken."""
        for row in rows:
            joined, begun = self._pages(step, row)
            self.broken |= joined | begun

    def _unbroken(self, step: EngineStep) -> EngineStep:
        """The part of a step that is of sequences without broken pages."""
        size, per = self.pool.layout.page_size, self.pool.pages_a_block
        rows = [i for i in range(len(step.rows)) if self.broken.isdisjoint(step.pages(i, per, size)[0])]
        return step.only(rows, size)

    def _pages(self, step: EngineStep, row: int) -> tuple[set[int], set[int]]:
        """The page that a sequence's new tokens join, if they join one, and the pages that they begin."""
        size = self.pool.layout.page_size
        pages, complete = step.pages(row, self.pool.pages_a_block, size)
        begun = complete + (step.rows[row][3] >= 0)
        return set(pages[complete:begun]), set(pages[begun:])

    def _write(self, step: EngineStep, key: Tensor, value: Tensor) -> bool:
        """Fold the pages that a step completes into the pool; False, with nothing written, if they cannot be held."""
        if not step.foldings:
            return True
        folded = []
        for fmt, x in zip((self.formats.keys, self.formats.values), self._full(step, key, value), strict=True):
            folded.append(fmt.fold_from(x))
            if not (finite(x) and all(finite(own) for _, own in folded[-1].tensors() if own.is_floating_point())):
                return False
        self.pool.write(step.folded, (folded[0], folded[1]))
        return True

    def fold_in_place(self, step: EngineStep, units: Tensor, key: Tensor, value: Tensor) -> None:
        """`fold` by GPU kernels, straight into the pool, at `units`: `PagePool.units_of` the pages that become full.

        A check for a NaN, an infinity or a scale beyond float16 would wait for the GPU. Without it, attention over such
        a page gives NaN.
        """
        if not step.foldings:
            return
        layout, pair = self.pool.layout, (self.formats.keys, self.formats.values)
        for fmt, parts, x in zip(pair, (layout.keys, layout.values), self._full(step, key, value), strict=True):
            fmt.fold_into(x, Places({part.name: self.pool.elements(part) for part in parts}, units))

    def _full(self, step: EngineStep, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages that become full, (1, kv_heads, tokens, dim)."""
        sides = []
        for tails, new in ((self.tail_keys, key), (self.tail_values, value)):
            parts = []
            for folding in step.foldings:
                if folding.held:
                    parts.append(tails[folding.slot, :, : folding.held])
                parts.append(new[folding.first : folding.first + folding.count].transpose(0, 1))
            sides.append(torch.cat(parts, 1)[None])
        return sides[0], sides[1]

    def keep_firsts(self, begins: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy first tokens among new ones (`EngineStep.begins`) into their places, before attention reads."""
        if begins.shape[1]:
            place, token = begins
            self.first_keys[place] = key[token]
            self.first_values[place] = value[token]

    def keep_tails(self, left: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy new tokens that stay dense (`EngineStep.left`) into their slots, after attention has read."""
        slot, at, token = left
        self.tail_keys[slot, :, at] = key[token]
        self.tail_values[slot, :, at] = value[token]
