"""Bits where queries look: how kvfold folds keys."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from kvfold.formats.base import Window
from kvfold.formats.ordered import Ordered
from kvfold.formats.page import PageForm, TokenCodes, level_table
from kvfold.formats.statistics import KeyStatistics
from kvfold.kernels import ops
from kvfold.quant.codebooks import flat_levels, on_grid
from kvfold.quant.packing import TILE, padded
from kvfold.quant.tables import on
from kvfold.quant.transforms import ChannelOrder, as_they_come

QUARTERS = {
    1: (1, 1, 1, 1), 2: (3, 2, 2, 1), 3: (5, 3, 2, 2), 4: (6, 4, 3, 3),
    5: (7, 5, 4, 4), 6: (8, 6, 5, 5), 7: (8, 8, 6, 6), 8: (8, 8, 8, 8),
}  # fmt: skip
"""Bits of the four quarters of a head's channels, the most important first, by their mean."""

SCALES = 8
"""How many scales are tried for each channel, from its deviation to its largest value."""


@dataclass(frozen=True)
class Channelwise(Ordered):
    """Each channel of a page has its own centre and scale, and bits by how much queries make of it.

    x̂ = z + S ⊙ lut[code], with channels in the order of E[q_c²]·Var(k_c): errors in channels that queries hardly
    touch hardly move a score. The order is found from the first tokens of a prompt, or given by a calibration; which
    place has how many bits is fixed, so that all pages of all heads are alike.

    z is the mean of the page or the middle of its range, S one of `SCALES` steps from the standard deviation to
    what reaches the largest value: whichever leaves the least Σ e⁴. Fourth powers look after outliers, which are the
    tokens that get attention.
    """

    summary = "Codes with a centre and scale for each channel of a page, more bits where queries look"
    source = "kvfold, after KIVI (arXiv 2402.02750) and reverse water-filling"

    @property
    def window(self) -> Window:
        return Window(sinks=16, recent=24, undo=24)

    @property
    def awaits_fit(self) -> bool:
        return self.order is None and len(set(self._bits)) > 1  # else all places are alike

    @property
    def _bits(self) -> tuple[int, ...]:
        return spread_bits(self.bits, padded(self.head_dim) // TILE)

    def fitted(self, statistics: KeyStatistics) -> "Channelwise":
        if statistics.key_variance.shape[-1] != self.head_dim:
            raise ValueError(
                f"statistics are of {statistics.key_variance.shape[-1]} channels, the format has {self.head_dim}"
            )
        return replace(self, order=statistics.order())

    @cached_property
    def form(self) -> PageForm:
        order = as_they_come(self.head_dim) if self.order is None else ChannelOrder(self.order)
        return PageForm(self.head_dim, self.page_size, self._bits, _levels(self._bits), order, self.lanes)

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)
        pages = y.reshape(-1, *y.shape[-2:])
        centre, scale = _candidates(
            pages, [self.form.lut[group, 2**b - 1].item() for group, b in enumerate(self.form.bits)]
        )
        lut = on(y.device, self.form.lut)
        code, chosen = ops.closest_affine(pages, centre.float(), scale.float(), lut, list(self.form.bits))
        index = chosen.long().unsqueeze(1)
        shape = (*y.shape[:-2], y.shape[-1])
        return TokenCodes(
            code=code.view(y.shape),
            centre=centre.take_along_dim(index, 1).view(shape),
            channel_scale=scale.take_along_dim(index, 1).view(shape),
        )


@cache
def _levels(bits: tuple[int, ...]) -> Tensor:
    """One level table for all that spread their bits alike."""
    return level_table({b: on_grid(flat_levels(b)) for b in set(bits)}, bits)


def _candidates(pages: Tensor, tops: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Centres and scales to try, as they will be stored: float16, (pages, 2·SCALES, D)."""
    mean = pages.mean(1, keepdim=True)
    low, high = pages.amin(1, keepdim=True), pages.amax(1, keepdim=True)
    centres = torch.cat((mean, 0.5 * (low + high)), 1).half()
    z = centres.float()
    # About z; without sqrt, which wakes all threads even for a few numbers.
    deviation = pages.std(1, correction=0, keepdim=True).hypot(z - mean)
    reach = (
        torch.maximum(high - z, z - low)
        / torch.tensor(tops, device=pages.device).repeat_interleave(TILE)[: z.shape[-1]]
    )
    steps = torch.linspace(0, 1, SCALES, device=pages.device).view(-1, 1, 1, 1)
    scales = deviation.lerp(torch.maximum(reach, deviation), steps)  # (SCALES, pages, 2, D)
    scales = scales.permute(1, 2, 0, 3).flatten(1, 2).half()
    return centres.repeat_interleave(SCALES, 1), scales


def spread_bits(bits: int, groups: int) -> tuple[int, ...]:
    """Bits of each group of 16 channels, with a mean of `bits`.

    If quarters are no whole groups the mean is a little less (2.8 in place of 3 for 80 channels); fewer than four
    groups all have the same.
    """
    if groups < 4:
        return (bits,) * groups
    return tuple(QUARTERS[bits][int((group + 0.5) * 4 / groups)] for group in range(groups))
