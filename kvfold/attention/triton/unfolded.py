"""Pages for the many rows of a prompt: as dense tokens, some pages at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvfold.attention.triton.sides import Side
from kvfold.attention.triton.spans import Dense, Sequences, Span, block_of
from kvfold.quant.packing import TILE

ROWS = 64
"""Rows of a KV head from which on pages are unfolded first: with fewer, to read codes takes fewer instructions."""
WIDEST = 1_024
"""Channels of a key, those of residuals among them, of which a block of tokens has room beside its queries."""
BYTES = 2**24
"""Memory for unfolded pages, which the caches of large GPUs hold, …"""
PAGES = 4
"""… and pages of each sequence that are unfolded at a time in any case, as softmax states are read again for each."""


def are_unfolded(keys: Side, values: Side, of: Sequences, repeat: int) -> bool:
    """Whether pages are read unfolded.

    They are not where some sequence has few rows, which would lose what the others gain; nor where pages hold numbers,
    perhaps beyond float16's range, for there is nothing to gain.
    """
    coded = keys.shape.all_bits and values.shape.all_bits
    return bool(coded) and of.fewest * repeat >= ROWS and keys.shape.code_dim + keys.shape.plain_dim <= WIDEST


def unfolded(
    keys: Side, values: Side, of: Sequences, units: tuple[Tensor | None, int], *,
    tokens: int, kv_heads: int, exact: bool,
) -> Iterator[Dense]:  # fmt: skip
    """Pages as dense tokens before R⁻¹: float16, or float32 if `exact`. Each overwrites the one before.

    Positions count from the first folded token. Numbers beyond float16's range become infinite, as those of dense
    tokens do, so that outputs are NaN. tokens: new ones of all sequences.
    """
    from triton import next_power_of_2

    from kvfold.kernels.triton.unfold import unfold

    device, sequences, size = of.pages.device, len(of.pages), keys.shape.page_size
    # Values that are a view of keys are the same numbers, unless levels are brought to length 1 over other channels.
    viewed = values.shape.token_lanes and not values.shape.unit_levels
    sides = (keys,) if viewed else (keys, values)
    widths = [side.shape.code_dim + side.shape.plain_dim for side in sides]
    dtype = torch.float32 if exact else torch.float16
    a_page = sequences * kv_heads * size * sum(widths) * dtype.itemsize
    pages = min(max(BYTES // a_page, PAGES), of.most_pages)
    numbers = [torch.empty(sequences, kv_heads, pages * size, width, dtype=dtype, device=device) for width in widths]
    key, value = numbers[0], numbers[-1][..., : values.shape.code_dim]
    places = torch.arange(sequences, dtype=torch.int32, device=device)
    start = torch.zeros(tokens, dtype=torch.int32, device=device)
    if of.skipped is not None:
        start += of.skipped.repeat_interleave(of.count, output_size=tokens)
    for first in range(0, of.most_pages, pages):
        for side, to in zip(sides, numbers, strict=True):
            channels = max(next_power_of_2(side.shape.code_dim), TILE)
            block = block_of(size, channels, 8192)
            unfold[pages * size // block, sequences * kv_heads](
                to, of.pages, units[0], **side.arguments("", ("tables",)), width=units[1], first=first,
                KV_HEADS=kv_heads, SHAPE=side.shape, BLOCK=block, V=channels,
                PLAIN=max(next_power_of_2(side.shape.plain_dim), TILE), num_warps=1 if side.shape.by_runs else 4,
            )  # fmt: skip
        held = (of.pages * size - first * size).clamp(0, pages * size)
        span = Span(places, held, torch.full_like(places, first * size), start, of.stop)
        yield Dense(span, key, value, key.stride()[:3], value.stride()[:3])
