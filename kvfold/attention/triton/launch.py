"""Arguments of the kernels, and their launch."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.triton.sides import Side
from kvfold.attention.triton.spans import Dense, Sequences, block_of
from kvfold.attention.triton.target import has_wide_programs
from kvfold.attention.triton.unfolded import are_unfolded, unfolded
from kvfold.quant.packing import TILE

QUERIES = 2_048
"""Most new tokens of all sequences that are attended at a time: their float32 states take memory."""
NO_MASK: dict[str, Any] = {"mask": None, "mask_sequence": 0, "mask_head": 0, "mask_query": 0, "mask_columns": 0}
WARPS = 16
"""Warps wanted for each multiprocessor: if there are too few rows for that, contexts are split."""
ROWS_OF_B = 8
"""Columns of a tensor core's right factor: the rows that a product of whole numbers takes at once."""
MOST_WARPS = 4
"""Each has at least one of the four tiles of tokens of a block."""
WIDE = 128
"""Rows of a program with 8 warps, for unfolded pages of as many channels at most, where `has_wide_programs`."""
MULTIPROCESSORS_OF_A_CPU = 2
"""The number assumed for the interpreter, so that contexts are split there too."""


def by_token(q: Tensor) -> Tensor:
    """(batch, kv_heads, repeat, n, dim) → (batch · n, heads, dim)."""
    return q.permute(0, 3, 1, 2, 4).reshape(q.shape[0] * q.shape[3], -1, q.shape[4]).contiguous()


def launch(
    query: Tensor, rotated_query: Tensor, of: Sequences, sides: tuple[Side, Side] | None,
    units: tuple[Tensor | None, int], spans: Sequence[Dense], *,
    kv_heads: int, value_dim: int, code_dim: int, softcap: float | None, sink_logits: Tensor | None,
    mask: dict[str, Any], position: int, exact: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output from pages, rotated, (tokens, heads, code_dim), and from dense tokens, (tokens, heads, value_dim).

    `sides`: None if no sequence has pages.
    `query` and `rotated_query`: q and q̃, scaled, float32, (tokens, heads, ·).
    """
    from triton import next_power_of_2

    from kvfold.kernels.triton import all_registers, attend

    tokens, heads, key_dim = query.shape
    sequences, repeat, rows = len(of.first), heads // kv_heads, tokens * heads
    unfolds = sides is not None and mask["mask"] is None and are_unfolded(*sides, of, repeat)
    widest = next_power_of_2(max(key_dim, value_dim, rotated_query.shape[2] if unfolds else 0, code_dim))
    some = max((4096 if exact else 8192) // widest, TILE)
    block_rows = min(max(next_power_of_2(repeat * of.most), TILE), some, 64)
    warps = 8 if exact and block_rows > TILE else 4  # by benchmarks/compile_kernels.py
    if unfolds and not exact and widest <= WIDE and repeat * of.most >= WIDE and has_wide_programs(query.device):
        block_rows, warps = WIDE, 8
    row_blocks = -(-repeat * of.most // block_rows)
    whole = None if sides is None or unfolds else _in_whole_numbers(*sides, repeat * of.most)
    page_rows, page_warps = whole or (block_rows, warps)
    page_blocks = -(-repeat * of.most // page_rows)
    splits = 0
    if sides is not None:
        splits = _splits(page_warps * page_blocks * sequences * kv_heads, of.most_pages, query.device)
    parts = splits + len(spans)
    maxima, totals = (query.new_empty(parts, rows) for _ in range(2))
    rotated = query.new_empty(max(splits, 1), rows, code_dim)
    plain = query.new_empty(max(len(spans), 1), rows, value_dim)
    common: dict[str, Any] = {
        "first": of.first, "count": of.count, "softcap": softcap or 0.0, "SOFTCAP": bool(softcap),
        "HEADS": heads, "REPEAT": repeat, "ROWS": block_rows, "num_warps": warps, "num_stages": 1,
    }  # fmt: skip

    def read(query: Tensor, dense: Dense, part: int, sums: Tensor, splits: int = 1, goes_on: bool = False) -> None:
        span, widths = dense.span, (dense.key.shape[-1], dense.value.shape[-1])
        k, v = (max(next_power_of_2(width), TILE) for width in widths)
        attend.attend_dense[row_blocks, sequences * kv_heads, splits](
            query, maxima[part], totals[part], sums, TOKENS=tokens, place=span.place, held=span.held,
            position=span.position, start=span.start, stop=span.stop, **mask,
            **_named("key", dense.key, dense.key_strides), **_named("value", dense.value, dense.value_strides),
            KEY_DIM=widths[0], VALUE_DIM=widths[1],
            BLOCK=block_of(64, max(k, v), 4096 if exact else 8192), K=k, V=v, EXACT=exact, GOES_ON=goes_on, **common,
        )  # fmt: skip

    if sides is not None and unfolds:
        for i, dense in enumerate(unfolded(*sides, of, units, tokens=tokens, kv_heads=kv_heads, exact=exact)):
            read(rotated_query, dense, 0, rotated, splits, goes_on=i > 0)
    elif sides is not None and whole is not None:
        from kvfold.kernels.gluon import attend as gluon

        (keys, values), without = sides, ("lut", "bits", "groups")
        gluon.attend_pages[page_blocks, sequences * kv_heads, splits](
            rotated_query, maxima, totals, rotated, pages=of.pages, table=units[0], width=units[1], stop=of.stop,
            skipped=of.skipped, position=position, **mask, **keys.arguments("k_", without),
            **values.arguments("v_", (*without, "plain")),
            TOKENS=tokens, KEYS=keys.numbers, VALUES=values.numbers,
            **common | {"ROWS": page_rows, "num_warps": page_warps}, **all_registers(query.device),
        )  # fmt: skip
    elif sides is not None:
        keys, values = sides
        k, v = (max(next_power_of_2(side.shape.code_dim), TILE) for side in sides)
        wide = exact or keys.shape.groups > 1 or values.shape.groups > 1  # numbers in float32
        block = block_of(keys.shape.page_size, max(k, v), 4096 if wide else 8192)
        attend.attend_pages[page_blocks, sequences * kv_heads, splits](
            rotated_query, maxima, totals, rotated, pages=of.pages, table=units[0], width=units[1], stop=of.stop,
            skipped=of.skipped, position=position, **mask,
            **keys.arguments("k_", ("bits", "tables")), **values.arguments("v_", ("plain", "tables")), TOKENS=tokens,
            KEYS=keys.shape, VALUES=values.shape, BLOCK=block, K=k, V=v,
            PLAIN=max(next_power_of_2(keys.shape.plain_dim), TILE), EXACT=exact, **common,
        )  # fmt: skip
    for i, dense in enumerate(spans):
        read(query, dense, splits + i, plain[i])
    rotated_out, plain_out = query.new_empty(tokens, heads, code_dim), query.new_empty(tokens, heads, value_dim)
    attend.combine[(rows,)](
        maxima, totals, rotated, plain, None if sink_logits is None else sink_logits.float().contiguous(), rotated_out,
        plain_out, rows, parts, splits, HEADS=heads, CODE_DIM=code_dim, VALUE_DIM=value_dim,
        C=next_power_of_2(code_dim), V=next_power_of_2(value_dim),
    )  # fmt: skip
    return rotated_out, plain_out


SUMS_OF_A_WARP = 1024
"""Sums of values for each warp of a program: a thread's part of them stays in its registers."""


def _in_whole_numbers(keys: Side, values: Side, rows: int) -> tuple[int, int] | None:
    """Rows and warps of a program that multiplies whole numbers; None if numbers are multiplied as they are.

    A program has 16 rows at most: with more, a thread's sums leave no registers for levels. It has 8 where channels
    have scales, as queries are rounded for each page, or values are a view of keys, whose channels are many.
    """
    if keys.numbers is None or values.numbers is None:
        return None
    if values.numbers.token_lanes:
        parts = values.numbers.warps_of_view
        return None if parts == 0 else (ROWS_OF_B, min(parts, MOST_WARPS))
    own = ROWS_OF_B if rows <= ROWS_OF_B or keys.numbers.centre_dim else 2 * ROWS_OF_B
    warps = max(values.numbers.code_dim * own // SUMS_OF_A_WARP, 1)
    return own, min(1 << (warps.bit_length() - 1), MOST_WARPS)


def _named(name: str, x: Tensor, strides: Sequence[int]) -> dict[str, Any]:
    return {name: x} | dict(zip((f"{name}_place", f"{name}_head", f"{name}_token"), strides, strict=True))


def _splits(warps: int, pages: int, device: torch.device) -> int:
    """How many parts a context is read in: enough for the GPU if `warps` read each, of four pages or more."""
    wanted = -(-WARPS * _multiprocessors(device) // warps)
    return max(min(wanted, pages // 4), 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return MULTIPROCESSORS_OF_A_CPU
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", None) or properties.gpu_subslice_count)
