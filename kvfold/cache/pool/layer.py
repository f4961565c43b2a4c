"""One layer's keys and values in an engine."""

import torch
from torch import Tensor

from kvfold.cache.pool.layout import PagePool
from kvfold.cache.pool.plan import EngineStep
from kvfold.formats import FormatPair
from kvfold.formats.base import require_finite
from kvfold.kernels.places import Places
from kvfold.quant.finite import finite


class PagedLayer:
    """One layer's keys and values in an engine: its pool, its tails in the model's dtype, its formats.

    Formats are fitted, if they must be. There are as many `slots` as the engine runs sequences at a time.
    """

    def __init__(self, formats: FormatPair, pool: PagePool, slots: int, dtype: torch.dtype) -> None:
        if formats.awaits_fit or formats.needs_calibration:
            raise ValueError(
                "formats must be fitted before pages are shared: one sequence's statistics are not another's"
            )
        self.formats = formats
        self.pool = pool
        shape = (slots, pool.kv_heads, formats.keys.page_size)
        device = pool.pages.device
        self.tail_keys = torch.zeros(*shape, formats.keys.head_dim, dtype=dtype, device=device)
        self.tail_values = torch.zeros(*shape, formats.values.head_dim, dtype=dtype, device=device)

    def fold(self, step: EngineStep, key: Tensor, value: Tensor) -> None:
        """Fold the pages that a step completes by new tokens, (tokens, kv_heads, dim), before attention reads.

        Raises ValueError if a page holds a NaN or an infinity, or a scale leaves float16's range.
        """
        if not step.foldings:
            return
        folded = []
        for fmt, x in zip((self.formats.keys, self.formats.values), self._full(step, key, value), strict=True):
            if not finite(x):
                raise ValueError(
                    "a key or value is NaN or infinite: the model's own computation broke before the cache"
                )
            folded.append(fmt.fold_from(x))
            require_finite(folded[-1])
        self.pool.write(step.folded, (folded[0], folded[1]))

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

    def keep_tails(self, left: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy new tokens of unfinished pages (`EngineStep.left`) into their slots, after attention has read."""
        slot, at, token = left
        self.tail_keys[slot, :, at] = key[token]
        self.tail_values[slot, :, at] = value[token]
