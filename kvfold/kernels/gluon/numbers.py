"""Codebooks in whole numbers of 8 bits, by the rules of the CPU's kernels (kvfold/kernels/cpu/integer.h).

A level is middle + step · number, with 254 steps from the lowest to the highest, or slightly fewer if levels are evenly
spaced. That is exact for levels on such a grid; elsewhere the error is far below the distance of levels of up to 4
bits. Queries have a scale for each run and page, and 8 bits; 16 where levels have 5 bits or more, or tokens have
offsets. Weights of values have a scale for each block of tokens and scale group, and 8 bits; 16 where a value has 5.

Three things differ. Single bits are ±32, as no table makes them. Runs are not joined to segments. Pages whose channels
and tokens both have scales are multiplied here, too, with 16 bits: the CPU has floats there.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kvfold.quant.packing import TILE

BLOCK = 64
"""Tokens that are read at a time: four tiles."""
MOST_BITS = 6
"""Codes of more bits are not looked up here."""
MOST_VALUE_BITS = 5
ROUNDED = 4
"""Levels of more bits must lie on the grid."""
WIDEST = 512
"""Channels of a run whose queries have 16 bits: with more, sums might leave 32 bits."""
SOURCES = hashlib.sha256(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("numbers.py", "ptx.py"))
).hexdigest()[:16]
"""Of what writes the instructions: Triton keeps compiled kernels on the disk, and does not see that it changes."""


@dataclass(frozen=True)
class Chunk:
    """Tiles of a run that are read together: up to four, or one. `before`: the sum of the bits of all tiles before."""

    first: int
    tiles: int
    one: bool
    before: int


@dataclass(frozen=True)
class Run:
    """Neighbouring channel tiles with equal levels, of one scale group; `before` as in `Chunk`."""

    first: int
    tiles: int
    bits: int
    before: int
    group: int
    step: float
    middle: float
    two_bytes: bool
    centred: bool  # whether its channels may have a centre or scale
    table: int  # where its levels begin in the tables: in words

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Three or four tiles are read together, which takes as long as reading two or three one by one."""
        found, first = [], 0
        while left := self.tiles - first:
            many = min(left, 4) if left > 2 else 1
            found.append(Chunk(self.first + first, many, left <= 2, self.before + self.bits * first))
            first += many
        return tuple(found)


@dataclass(frozen=True)
class Numbers:
    """Compile-time constants of one side's pages, as `kvfold.kernels.triton.codes.Shape` has them."""

    page_size: int
    code_dim: int
    all_bits: int
    runs: tuple[Run, ...]
    two_bytes: bool  # of weights
    groups: int
    centre_dim: int
    plain_dim: int
    token_lanes: bool  # whether lanes are tokens, as for keys and for values that are a view of keys
    scaled_shifts: bool
    vectors: bool  # whether what channels have can be read 16 bytes at a time
    # Strides from unit to unit: in 32-bit words for codes, in elements for the others.
    code: int
    scale: int
    offset: int
    centre: int
    plain: int
    sources: str = SOURCES

    @property
    def warps_of_view(self) -> int:
        """The most warps, a power of two, that share values which are a view of keys; 0 if they are not read.

        A warp has whole parts of 128 channels, of equal levels, and loads 16 bytes of codes at a time.
        """
        if self.code_dim % 128 or len(self.runs) > 1 or self.two_bytes or not self.vectors:
            return 0
        return self.code_dim // 128 & -(self.code_dim // 128)


def runs_of(
    lut: Tensor, bits: Sequence[int], kinds: Sequence[int], group_of_tile: Sequence[int], centred_tiles: int, *,
    fine: bool,
) -> tuple[tuple[Run, ...], list[int]] | None:  # fmt: skip
    """Runs of a codebook, (groups of 16 channels, levels), and their tables in memory; None if it does not fit.

    kinds: for each group, the first one with the same bits and levels. fine: whether queries have 16 bits in any case.
    """
    from kvfold.kernels.gluon import ptx

    runs, tables, before = list[Run](), list[int](), 0
    last = None
    for g, (b, kind, group) in enumerate(zip(bits, kinds, group_of_tile, strict=True)):
        what = kind, group, g < centred_tiles
        if runs and what == last:
            own = runs[-1]
            runs[-1] = Run(own.first, own.tiles + 1, *(getattr(own, name) for name in list(Run.__annotations__)[2:]))
        else:
            found = _in_numbers(lut[g, : 2**b].tolist()) if b <= MOST_BITS else None
            if found is None:
                return None
            numbers, step, middle = found
            runs.append(Run(g, 1, b, before, group, step, middle, b > ROUNDED or fine, what[2], len(tables)))
            tables += 2 * ptx.table(numbers)
        last, before = what, before + b
    if any(run.two_bytes and run.tiles > WIDEST // TILE for run in runs):
        return None
    return tuple(runs), tables


def _in_numbers(levels: list[float]) -> tuple[list[int], float, float] | None:
    low, high = min(levels), max(levels)
    middle = 0.5 * (low + high)
    step = max(high - low, 1e-30) / (64 if len(levels) == 2 else _grid(levels))
    exact = [(level - middle) / step for level in levels]
    numbers, half = [round(x) for x in exact], len(levels) // 2
    if len(levels) > 2**ROUNDED and any(abs(x - n) >= 0.01 for x, n in zip(exact, numbers, strict=True)):
        return None
    if len(levels) > 8 and (max(numbers[:half]) > 0 or min(numbers[half:]) < 0):
        return None
    if len(levels) == 2 and levels[0] > levels[1]:
        return None
    return numbers, step, 0.0 if abs(middle) < 1e-6 * step else middle


def _grid(levels: list[float]) -> int:
    """Steps from the lowest level to the highest: if levels are evenly spaced, equally many between all neighbours."""
    between = len(levels) - 1
    distance = (levels[-1] - levels[0]) / between
    even = all(abs(level - levels[0] - i * distance) <= 1e-4 * abs(distance) for i, level in enumerate(levels))
    return 254 - (254 % between if even else 0)
