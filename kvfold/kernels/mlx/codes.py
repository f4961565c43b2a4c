"""Unpacking the codes of pages in MLX: the counterpart of `kvfold.quant.packing`."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.arrays import table
from kvfold.quant.packing import TILE, Lanes, plane_widths


def unpack_levels(
    packed: mx.array,
    lut: Tensor,
    kinds: Sequence[int],
    page_size: int,
    head_dim: int,
    bits: Sequence[int],
    lanes: Lanes,
) -> mx.array:
    """lut[code] of every code: float32, (…, page_size, head_dim).

    `packed` is uint8, (…, bytes of a page's codes). `lut` has the levels of each channel group: float32,
    (⌈head_dim/16⌉, levels). `kinds` has for each group the first one with the same bits and levels (`PageForm.kinds`).
    The others are as `kvfold.quant.packing.unpack_levels` has them.
    """
    lead, rows = packed.shape[:-1], page_size // TILE
    levels = table(lut)
    parts = []
    for start, stop in _runs(kinds):
        # All groups of a run have the same bits and levels.
        width, own = stop - start, bits[start]
        before, after = 32 * sum(bits[:start]), 32 * sum(bits[:stop])
        if lanes == "tokens":
            tiles = packed.reshape(*lead, rows, -1)[..., before:after].reshape(*lead, rows, width, 32 * own)
            codes = _unpack_tiles(tiles, own).swapaxes(-3, -2)  # (…, rows, 16 tokens, width, 16 channels)
        else:
            tiles = packed[..., rows * before : rows * after].reshape(*lead, width, rows, 32 * own)
            codes = _unpack_tiles(tiles, own)  # (…, width, rows, 16 channels, 16 tokens)
            codes = mx.moveaxis(codes.swapaxes(-2, -1), -4, -2)
        parts.append(mx.take(levels[start, : 2**own], codes).reshape(*lead, page_size, TILE * width))
    whole = parts[0] if len(parts) == 1 else mx.concatenate(parts, -1)
    return whole[..., :head_dim]


def _runs(kinds: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive channel groups of one kind, as (start, stop)."""
    start = 0
    for group in range(1, len(kinds) + 1):
        if group == len(kinds) or kinds[group] != kinds[start]:
            yield start, group
            start = group


def _unpack_tiles(packed: mx.array, bits: int) -> mx.array:
    """(…, 32·bits) bytes → (…, 16 lanes, 16 steps)."""
    lead, fields = packed.shape[:-1], None
    start = shift = 0
    for width in plane_widths(bits):
        byte = packed[..., start : start + 32 * width]
        shifts = mx.arange(0, 8, width, dtype=mx.uint8)[:, None]
        if width == 1:  # four fields of two slots to a byte
            plane = (byte.reshape(*lead, 1, 32) >> shifts) & 1
            plane = plane.reshape(*lead, 2, 4, 32).swapaxes(-3, -2)
        else:  # 8/width fields of one slot to a byte
            plane = (byte.reshape(*lead, width // 2, 1, 64) >> shifts) & (2**width - 1)
        plane = plane.reshape(*lead, 4, 64) << shift
        fields = plane if fields is None else fields | plane
        start += 32 * width
        shift += width
    assert fields is not None
    return fields.reshape(*lead, 4, TILE, 4).swapaxes(-3, -2).reshape(*lead, TILE, TILE)
