"""Folding on GPUs: the kernels behind kvfold/kernels/ops.py, whose references are in kvfold/quant.

A page is read once and written in its stored form; everything in between stays in registers.
"""

from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.arguments import check_channelwise, check_dim, heads_of, order_of_heads
from kvfold.kernels.places import Places
from kvfold.kernels.triton import all_registers, on_its_device
from kvfold.kernels.triton.codes import store_codes
from kvfold.quant.packing import TILE, Lanes, code_bytes, padded
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.scales import SCALE_RULES
from kvfold.quant.tables import on


@triton.jit
def _pack(
    codes, packed, bits_of, page_bytes,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, PAGE_SIZE: tl.constexpr, TILES: tl.constexpr, ALL_BITS: tl.constexpr,
    PLANES: tl.constexpr, TOKEN_LANES: tl.constexpr,
):  # fmt: skip
    """16 tokens of a page."""
    page, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, channel = tile * 16 + tl.arange(0, 16)[:, None], tl.arange(0, CHANNELS)[None, :]
    code = tl.load(codes + (page * PAGE_SIZE + token) * DIM + channel, mask=channel < DIM, other=0)
    store_codes(packed + page * page_bytes, code.to(tl.int32), tile, 0, bits_of, PAGE_SIZE, TILES, ALL_BITS, PLANES,
                TOKEN_LANES)  # fmt: skip


@on_its_device
def pack(codes: Tensor, bits: Sequence[int], lanes: Lanes) -> Tensor:
    """`kvfold.quant.packing.pack`."""
    page_size, dim = codes.shape[-2:]
    if page_size % TILE or len(bits) != padded(dim) // TILE:
        raise ValueError(f"codes are {tuple(codes.shape)}, bits {list(bits)}: give pages of 16·n, and ⌈D/16⌉ bits")
    codes = codes.contiguous()
    packed = codes.new_empty((*codes.shape[:-2], code_bytes(page_size, bits)))
    pages = codes.shape[:-2].numel()
    if pages:
        _pack[pages, page_size // TILE](
            codes, packed, bits_table(tuple(bits), codes.device), packed.shape[-1], DIM=dim,
            CHANNELS=triton.next_power_of_2(padded(dim)), **_compiled_for(bits, lanes, page_size),
        )  # fmt: skip
    return packed


def _compiled_for(bits: Sequence[int], lanes: Lanes, page_size: int) -> dict[str, Any]:
    """Compile-time arguments of `store_codes`."""
    return {"PAGE_SIZE": page_size, "TILES": len(bits), "ALL_BITS": sum(bits), "PLANES": reduce(or_, bits),
            "TOKEN_LANES": lanes == "tokens"}  # fmt: skip


@cache
def bits_table(bits: tuple[int, ...], device: torch.device) -> Tensor:
    """Bits of each group of 16 channels, and the sum of those before it: int32, (2, groups)."""
    before = [sum(bits[:group]) for group in range(len(bits))]
    return torch.tensor([bits, before], dtype=torch.int32, device=device)


@triton.jit
def _rotated(x, matrix, at, there, by_token, channel, IN: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr):
    """R·x of the tokens `at`, float32, (tokens, channels); 0 for those that are not there."""
    y = tl.zeros([at.shape[0], channel.shape[0]], tl.float32)
    for start in range(0, IN, STEP):
        k = start + tl.arange(0, STEP)
        own = tl.load(x + at.to(tl.int64)[:, None] * by_token + k[None, :], mask=there[:, None] & (k < IN)[None, :],
                      other=0)  # fmt: skip
        rows = tl.load(matrix + channel[None, :] * IN + k[:, None], mask=(channel < DIM)[None, :] & (k < IN)[:, None],
                       other=0)  # fmt: skip
        y += tl.dot(own.to(tl.float32), rows, input_precision="ieee")
    return y


@triton.jit
def _coded(v, real, edges, levels, BITS: tl.constexpr, RULE: tl.constexpr):
    """Codes of vectors, (tokens, channels), and their scales; `real`: which channels there are."""
    square = tl.sum(v * v, 1)
    direction = v / tl.maximum(tl.sqrt(square), 1.1754943508222875e-38)[:, None]
    found = tl.zeros([v.shape[0], v.shape[1]], tl.int32)
    for i in tl.static_range(BITS):  # binary search: how many edges are below
        half = 2 ** (BITS - 1 - i)
        found += tl.where(direction > tl.load(edges + found + half - 1), half, 0)
    level = tl.where(real, tl.load(levels + found), 0.0)
    product, length = tl.sum(v * level, 1), tl.sum(level * level, 1)
    if RULE == "raw":
        s = tl.sqrt(square)
    else:
        if RULE == "matched":
            above, below = tl.sqrt(square), tl.sqrt(length)
        elif RULE == "least_squares":
            above, below = product, length
        else:
            above, below = square, product
        s = tl.where((above != 0) & (below != 0), above / tl.where(below != 0, below, 1.0), 0.0)
    return found, s


@triton.jit
def _unit(units, page, row, number):
    """The unit of a page of a head: by the order of programs, or beside the first head's unit."""
    if units is None:
        return page
    else:  # the compiler goes on after a return
        return tl.load(units + number) + row


@triton.jit(
    do_not_specialize=["slot", "tokens", "pages", "heads", "by_row", "by_head", "by_code", "by_scale", "by_centre"]
)
def _fold_rotated(
    x, matrix, edges, levels, bits_of, units, code, scale, centre, by_code, by_scale, by_centre,
    slot, tokens, pages, heads, by_row, by_head, by_token,
    IN: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr, CENTRED: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILES: tl.constexpr, ALL_BITS: tl.constexpr, PLANES: tl.constexpr,
    TOKEN_LANES: tl.constexpr,
):  # fmt: skip
    """One page of tokens of one head, which begin at `slot` of their first page; `kvfold.quant.rotated.encode`."""
    page = tl.program_id(0).to(tl.int64)
    row, number = page // pages, page % pages
    unit = _unit(units, page, row, number)
    x += row // heads * by_row + row % heads * by_head
    channel, offset = tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    real = (channel < DIM)[None, :]
    middle = tl.zeros([CHANNELS], tl.float32)
    if CENTRED:
        for block in range(0, PAGE_SIZE, BLOCK):
            at = number * PAGE_SIZE + block + offset
            middle += tl.sum(_rotated(x, matrix, at, at >= 0, by_token, channel, IN, DIM, STEP), 0)
        stored = (middle / PAGE_SIZE).to(tl.float16)
        tl.store(centre + unit * by_centre + channel, stored, mask=channel < DIM)
        middle = stored.to(tl.float32)  # the centre as stored
    for block in range(0, PAGE_SIZE, BLOCK):
        own = block + offset
        at = number * PAGE_SIZE + own - slot
        there = (at >= 0) & (at < tokens)
        v = _rotated(x, matrix, at, there, by_token, channel, IN, DIM, STEP)
        v = tl.where(there[:, None] & real, v - middle[None, :], 0.0)
        found, s = _coded(v, real, edges, levels, BITS, RULE)
        tl.store(scale + unit * by_scale + own, tl.where(there, s, 0.0).to(tl.float16))
        found = tl.where(there[:, None] & real, found, 0)
        store_codes(code + unit * by_code, found, block // 16, 0, bits_of, PAGE_SIZE, TILES, ALL_BITS, PLANES,
                    TOKEN_LANES)  # fmt: skip


@triton.jit(do_not_specialize=["width", "heads", "by_row", "by_head", "by_code", "by_scale"])
def _fold_token(
    x, matrix, edges, levels, bits_of, held, code, scale, by_code, by_scale, width, heads, by_row, by_head,
    IN: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr, CHANNELS: tl.constexpr,
    STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, TILES: tl.constexpr, ALL_BITS: tl.constexpr, PLANES: tl.constexpr,
    TOKEN_LANES: tl.constexpr,
):  # fmt: skip
    """A token of one head, the last of `held`, into its free slot; `kvfold.quant.rotated.encode`."""
    head = tl.program_id(0).to(tl.int64)
    after = tl.load(held) - 1
    page, slot = after // PAGE_SIZE, after % PAGE_SIZE
    unit = head * width + page
    channel, offset = tl.arange(0, CHANNELS), tl.arange(0, 16)
    real, there = (channel < DIM)[None, :], offset == slot % 16
    x += head // heads * by_row + head % heads * by_head
    v = _rotated(x, matrix, offset * 0, there, 0, channel, IN, DIM, STEP)
    found, s = _coded(tl.where(there[:, None] & real, v, 0.0), real, edges, levels, BITS, RULE)
    tl.store(scale + unit * by_scale + slot // 16 * 16 + offset, s.to(tl.float16), mask=there)
    found = tl.where(there[:, None] & real, found, 0)
    store_codes(code + unit * by_code, found, slot // 16, 0, bits_of, PAGE_SIZE, TILES, ALL_BITS, PLANES, TOKEN_LANES,
                JOINS=True)  # fmt: skip


@on_its_device
def fold_token(
    x: Tensor, how: RotatedCode, lanes: Lanes, page_size: int, code: Tensor, scale: Tensor, held: Tensor
) -> None:
    """Fold a token of each head, (batch, heads, 1, dim), into the slot before slot `held` of its pages.

    code: (batch, heads, pages, bytes), scale: (batch, heads, pages, page_size, 1); the slot must be empty. `held` is an
    int32 on the device: so a CUDA graph can fold one token after the other.
    """
    assert how.rule in SCALE_RULES
    assert not how.centred
    assert code.is_contiguous()
    assert scale.is_contiguous()
    matrix, levels = how.transform.matrix_on(x.device), on(x.device, how.levels)
    check_dim(x, matrix.shape[1])
    x, dim = x if x.stride(-1) == 1 else x.contiguous(), matrix.shape[0]
    bits = (how.bits,) * (padded(dim) // TILE)
    _fold_token[(x.shape[:2].numel(),)](
        x, matrix, 0.5 * (levels[1:] + levels[:-1]), levels, bits_table(bits, x.device), held, code, scale,
        code.shape[3], page_size, code.shape[2], x.shape[1], *x.stride()[:2],
        IN=matrix.shape[1], DIM=dim, BITS=how.bits, RULE=how.rule, CHANNELS=triton.next_power_of_2(padded(dim)),
        STEP=TILE, **_compiled_for(bits, lanes, page_size),
    )  # fmt: skip


def fold_rotated(x: Tensor, how: RotatedCode, lanes: Lanes, page_size: int, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kvfold.kernels.ops.fold_rotated`: packed codes, scales, and centres if there are any."""
    dim = how.transform.matrix_on(x.device).shape[0]
    lead = (*x.shape[:-2], -(-(slot + x.shape[-2]) // page_size))
    code = x.new_empty((*lead, code_bytes(page_size, (how.bits,) * (padded(dim) // TILE))), dtype=torch.uint8)
    scale = x.new_empty((*lead, page_size), dtype=torch.float16)
    centre = x.new_empty((*lead, dim) if how.centred else (0,), dtype=torch.float16)
    parts = {"code": (code, code.shape[-1]), "scale": (scale, page_size), "centre": (centre, dim)}
    fold_rotated_into(x, how, lanes, page_size, slot, Places(parts))
    return code, scale, centre


@on_its_device
def fold_rotated_into(x: Tensor, how: RotatedCode, lanes: Lanes, page_size: int, slot: int, places: Places) -> None:
    """`fold_rotated`, with each part written to its place."""
    assert how.rule in SCALE_RULES
    matrix, levels = how.transform.matrix_on(x.device), on(x.device, how.levels)
    check_dim(x, matrix.shape[1])
    dim, flat, tokens = matrix.shape[0], heads_of(x), x.shape[-2]
    bits, pages = (how.bits,) * (padded(dim) // TILE), -(-(slot + tokens) // page_size)
    (code, by_code), (scale, by_scale), (centre, by_centre) = map(places.of, ("code", "scale", "centre"))
    channels, programs = triton.next_power_of_2(padded(dim)), x.shape[:-2].numel() * pages
    if programs:
        _fold_rotated[(programs,)](
            flat, matrix, 0.5 * (levels[1:] + levels[:-1]), levels, bits_table(bits, x.device), places.units,
            code, scale, centre, by_code, by_scale, by_centre, slot, tokens, pages, flat.shape[1], *flat.stride()[:3],
            IN=matrix.shape[1], DIM=dim, BITS=how.bits, RULE=how.rule, CENTRED=how.centred, CHANNELS=channels,
            BLOCK=min(page_size & -page_size, max(4096 // channels, TILE), 64), STEP=TILE,
            **_compiled_for(bits, lanes, page_size), **all_registers(x.device),
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["pages", "heads", "by_row", "by_head", "order_row", "order_head", "by_code", "by_channel"]
)
def _fold_channelwise(
    x, order, lut, bits_of, units, code, centre, scale, by_code, by_channel,
    pages, heads, by_row, by_head, by_token, order_row, order_head,
    DIM: tl.constexpr, LEVELS: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILES: tl.constexpr, ALL_BITS: tl.constexpr, PLANES: tl.constexpr,
    TOKEN_LANES: tl.constexpr,
):  # fmt: skip
    """One group of 16 channels of a page; `kvfold.quant.affine.encode`."""
    page, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, number = page // pages, page % pages
    place = _unit(units, page, row, number)
    token, channel = tl.arange(0, TOKENS)[:, None], group * 16 + tl.arange(0, 16)
    real, source = channel < DIM, channel
    held = (token < PAGE_SIZE) & (channel >= 0)[None, :]
    there = held & real[None, :]
    if order is not None:
        order += row // heads * order_row + row % heads * order_head
        source = tl.load(order + channel, mask=real, other=0).to(tl.int32)
    x += row // heads * by_row + row % heads * by_head
    v = tl.load(x + (number * PAGE_SIZE + token) * by_token + source[None, :], mask=there, other=0).to(tl.float32)
    mean = tl.sum(v, 0) / PAGE_SIZE
    low, high = tl.min(tl.where(held, v, float("inf")), 0), tl.max(tl.where(held, v, float("-inf")), 0)
    about = tl.where(there, v - mean[None, :], 0.0)
    variance = tl.sum(about * about, 0) / PAGE_SIZE
    bits = tl.load(bits_of + group)
    lut += group * LEVELS
    top = tl.load(lut + (1 << bits) - 1)
    best = tl.full([16], float("inf"), tl.float32)
    best_centre, best_scale = tl.zeros([16], tl.float32), tl.zeros([16], tl.float32)
    best_code = tl.zeros([TOKENS, 16], tl.int32)
    for k in range(2 * STEPS):
        z = tl.where(k < STEPS, mean, 0.5 * (low + high)).to(tl.float16).to(tl.float32)
        deviation = tl.sqrt(variance + (z - mean) * (z - mean))
        reach = tl.maximum(tl.maximum(high - z, z - low) / top, deviation)
        s = (deviation + (reach - deviation) * ((k % STEPS) / max(STEPS - 1, 1))).to(tl.float16).to(tl.float32)
        rest = tl.where(there, v - z[None, :], 0.0)
        unit = rest * (1 / tl.maximum(s, 5.9604644775390625e-08))[None, :]  # the smallest float16
        found = tl.zeros([TOKENS, 16], tl.int32)
        for i in range(bits):
            half = 1 << (bits - 1 - i)
            below = lut + found + half - 1
            found += tl.where(unit > 0.5 * (tl.load(below) + tl.load(below + 1)), half, 0)
        error = tl.where(there, rest - s[None, :] * tl.load(lut + found), 0.0)
        loss = tl.sum(error * error * (error * error), 0)
        better = (loss < best) | (k == 0)
        best, best_centre, best_scale = (
            tl.where(better, loss, best),
            tl.where(better, z, best_centre),
            tl.where(better, s, best_scale),
        )
        best_code = tl.where(better[None, :], found, best_code)
    tl.store(centre + place * by_channel + channel, best_centre.to(tl.float16), mask=real)
    tl.store(scale + place * by_channel + channel, best_scale.to(tl.float16), mask=real)
    best_code = tl.where(there, best_code, 0)
    store_codes(code + place * by_code, best_code, 0, group, bits_of, PAGE_SIZE, TILES, ALL_BITS, PLANES, TOKEN_LANES)


def fold_channelwise(
    x: Tensor, order: Tensor | None, lut: Tensor, bits: Sequence[int], steps: int, lanes: Lanes, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`kvfold.kernels.ops.fold_channelwise`: packed codes, centres and scales."""
    check_channelwise(x, order, lut, bits, steps, page_size)
    dim, lead = x.shape[-1], (*x.shape[:-2], x.shape[-2] // page_size)
    code = x.new_empty((*lead, code_bytes(page_size, bits)), dtype=torch.uint8)
    centre, scale = (x.new_empty((*lead, dim), dtype=torch.float16) for _ in range(2))
    parts = {"code": (code, code.shape[-1]), "centre": (centre, dim), "channel_scale": (scale, dim)}
    fold_channelwise_into(x, order, lut, bits, steps, lanes, page_size, Places(parts))
    return code, centre, scale


@on_its_device
def fold_channelwise_into(
    x: Tensor, order: Tensor | None, lut: Tensor, bits: Sequence[int], steps: int, lanes: Lanes, page_size: int,
    places: Places,
) -> None:  # fmt: skip
    """`fold_channelwise`, with each part written to its place."""
    check_channelwise(x, order, lut, bits, steps, page_size)
    flat, pages, lut = heads_of(x), x.shape[-2] // page_size, on(x.device, lut)
    (code, by_code), (centre, by_channel), (scale, _) = map(places.of, ("code", "centre", "channel_scale"))
    order, *order_strides = order_of_heads(None if order is None else on(x.device, order), flat)
    if flat.numel():
        _fold_channelwise[x.shape[:-2].numel() * pages, len(bits)](
            flat, order, lut, bits_table(tuple(bits), x.device), places.units, code, centre, scale, by_code,
            by_channel, pages, flat.shape[1], *flat.stride()[:3], *order_strides, DIM=x.shape[-1],
            LEVELS=lut.shape[1], STEPS=steps, TOKENS=triton.next_power_of_2(page_size),
            **_compiled_for(bits, lanes, page_size),
        )  # fmt: skip
