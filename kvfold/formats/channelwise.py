"""More bits for channels that queries weigh more: how kvfold folds keys."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import Tensor

from kvfold.formats.base import PAGE_WINDOW, Window
from kvfold.formats.ordered import Ordered
from kvfold.formats.page import PageForm, Pages, TokenCodes, level_table
from kvfold.formats.statistics import KeyStatistics
from kvfold.kernels import ops
from kvfold.kernels.places import Places
from kvfold.quant import affine
from kvfold.quant.codebooks import even_flat_levels, flat_levels, on_grid
from kvfold.quant.packing import TILE, padded
from kvfold.quant.transforms import ChannelOrder, as_they_come

PATTERNS = {
    4: ("1111", "3221", "5322", "6433", "7544", "8655", "8866", "8888"),
    8: ("11111111", "43222111", "54333222", "65444333", "76555444", "87666555", "88877666", "88888888"),
    16: (
        "1111111111111111", "4333222222211111", "5544333333322221", "6655444444433332",
        "7766555555544443", "8877666666655554", "8888877777766666", "8888888888888888",
    ),
}  # fmt: skip
"""Bits of equal parts of a head's channels, the most important first, by the number of parts, for means of 1 to 8.

Those of 4 are from SmolLM2, of 64 channels; those of 16 from Gemma 3 270M, of 256; those of 8 lie between."""

SCALES = 8
"""How many scales are tried for each channel, from its deviation to its largest value."""


@dataclass(frozen=True)
class Channelwise(Ordered):
    """Each channel of a page has its own centre and scale, and more bits the more queries weigh it.

    x̂ = z + S ⊙ lut[code], with channels in the order of E[q_c²]·Var(k_c): errors in channels that queries hardly weigh
    hardly move a score. The order comes from the first tokens of a prompt, or from a calibration. The bits of each
    place in the order are fixed, so that all pages of all heads are alike.

    z is the mean of the page or the middle of its range. S is one of `SCALES` steps from the standard deviation to the
    scale that reaches the largest value. The pair with the least Σ e⁴ is taken: fourth powers protect outliers, which
    are the tokens that get attention.
    """

    summary = "Codes with a centre and scale for each channel of a page, more bits where queries look"
    source = "kvfold, after KIVI (arXiv 2402.02750) and reverse water-filling"

    @property
    def window(self) -> Window:
        return PAGE_WINDOW

    @property
    def awaits_fit(self) -> bool:
        return self.order is None and len(set(self._bits)) > 1  # with equal bits, order does not matter

    @property
    def _bits(self) -> tuple[int, ...]:
        return spread_bits(self.bits, padded(self.head_dim) // TILE)

    @property
    def by_quarters(self) -> bool:
        """Whether channels have the bits that they had before heads were cut into finer parts."""
        return self._bits == spread_bits(self.bits, len(self._bits), 4)

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
        code, centre, scale = affine.encode(y, self.form.lut, self._bits, SCALES)
        return TokenCodes(code=code, centre=centre, channel_scale=scale)

    def fold_from(self, x: Tensor, slot: int = 0, position: int = 0) -> Pages:
        code, centre, scale = ops.fold_channelwise(
            x, self.order, self.form.lut, list(self._bits), SCALES, self.lanes, self.page_size
        )
        return Pages(code, centre=centre, channel_scale=scale, tokens=x.shape[-2])

    def fold_into(self, x: Tensor, places: Places) -> None:
        from kvfold.kernels.triton import fold

        fold.fold_channelwise_into(x, self.order, self.form.lut, self._bits, SCALES, self.lanes, self.page_size, places)


@cache
def _levels(bits: tuple[int, ...]) -> Tensor:
    """The level table, shared by all formats with the same bits."""
    return level_table({b: even_flat_levels(b) if b == 7 else on_grid(flat_levels(b)) for b in set(bits)}, bits)


def spread_bits(bits: int, groups: int, parts: int | None = None) -> tuple[int, ...]:
    """Bits of each group of 16 channels, with a mean of `bits`.

    Wide heads have finer parts, if these are whole groups. With four parts that are none, the mean is a little lower
    (2.8 instead of 3 for 80 channels). Fewer than four groups all have the same bits. `parts`: one of `PATTERNS`.
    """
    if groups < 4:
        return (bits,) * groups
    parts = parts or next((parts for parts in (16, 8) if groups % parts == 0), 4)
    pattern = PATTERNS[parts][bits - 1]
    return tuple(int(pattern[int((group + 0.5) * parts / groups)]) for group in range(groups))
