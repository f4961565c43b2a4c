"""Folding on GPUs: the kernels behind kvfold/kernels/ops.py, whose truths are in kvfold/quant."""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton import on_its_device
from kvfold.quant.packing import TILE, Lanes, code_bytes, padded
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.scales import SCALE_RULES
from kvfold.quant.tables import on


@triton.jit
def _pack_plane(codes, packed, at, bits, group, tile, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
                TOKEN_LANES: tl.constexpr, stride, WIDTH: tl.constexpr):  # fmt: skip
    """Bytes of one plane of a group's tiles."""
    above = bits // (2 * WIDTH) * (2 * WIDTH)
    byte = tl.arange(0, 32 * WIDTH)[None, :]
    whole = tl.zeros_like(tile + byte)
    for k in tl.static_range(8 // WIDTH):
        if WIDTH == 1:
            field, slot = k % 4, byte + 32 * (k // 4)
        else:
            field, slot = byte // 64 * (8 // WIDTH) + k, byte % 64
        lane, step = slot // 4, 4 * field + slot % 4
        if TOKEN_LANES:
            token, channel = tile * 16 + lane, group * 16 + step
        else:
            token, channel = tile * 16 + step, group * 16 + lane
        code = tl.load(codes + token * DIM + channel, mask=(token < PAGE_SIZE) & (channel < DIM), other=0).to(tl.int32)
        whole |= ((code >> above) & (2**WIDTH - 1)) << (k * WIDTH)
    to = packed + at + tile * stride + 32 * above + byte
    tl.store(to, whole.to(tl.uint8), mask=(tile * 16 < PAGE_SIZE) & (byte >= 0))


@triton.jit
def _pack(codes, packed, bits_of, page_bytes, groups, all_bits, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
          TOKEN_LANES: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """One group of 16 channels of a page."""
    page, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bits, before = tl.load(bits_of + group), tl.load(bits_of + groups + group)
    if TOKEN_LANES:
        at, stride = 32 * before, 32 * all_bits
    else:
        at, stride = 2 * PAGE_SIZE * before, 32 * bits
    tile = tl.arange(0, TILES)[:, None]
    codes += page * PAGE_SIZE * DIM
    packed += page * page_bytes
    if bits // 8 % 2 == 1:
        _pack_plane(codes, packed, at, bits, group, tile, DIM, PAGE_SIZE, TOKEN_LANES, stride, 8)
    if bits // 4 % 2 == 1:
        _pack_plane(codes, packed, at, bits, group, tile, DIM, PAGE_SIZE, TOKEN_LANES, stride, 4)
    if bits // 2 % 2 == 1:
        _pack_plane(codes, packed, at, bits, group, tile, DIM, PAGE_SIZE, TOKEN_LANES, stride, 2)
    if bits % 2 == 1:
        _pack_plane(codes, packed, at, bits, group, tile, DIM, PAGE_SIZE, TOKEN_LANES, stride, 1)


@on_its_device
def pack(codes: Tensor, bits: Sequence[int], lanes: Lanes) -> Tensor:
    """`kvfold.quant.packing.pack`."""
    page_size, dim = codes.shape[-2:]
    codes = codes.contiguous()
    packed = codes.new_empty((*codes.shape[:-2], code_bytes(page_size, bits)))
    pages = codes.shape[:-2].numel()
    if pages:
        _pack[(pages, len(bits))](
            codes, packed, bits_table(tuple(bits), codes.device), packed.shape[-1], len(bits), sum(bits), DIM=dim,
            PAGE_SIZE=page_size, TOKEN_LANES=lanes == "tokens", TILES=triton.next_power_of_2(page_size // TILE),
        )  # fmt: skip
    return packed


@cache
def bits_table(bits: tuple[int, ...], device: torch.device) -> Tensor:
    """Bits of each group of 16 channels, and the sum of those before it: int32, (2, groups)."""
    before = [sum(bits[:group]) for group in range(len(bits))]
    return torch.tensor([bits, before], dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["slot", "tokens", "pages"])
def _encode(
    y, edges, levels, code, scale, centre, slot, tokens, pages,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr, CENTRED: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes, scales and centre of one page of rotated vectors, which begin at `slot` of their first page."""
    page = tl.program_id(0).to(tl.int64)
    row, number = page // pages, page % pages
    channel, offset = tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    real = (channel < DIM)[None, :]
    y += row * tokens * DIM
    middle = tl.zeros([CHANNELS], tl.float32)
    if CENTRED:
        for block in range(0, PAGE_SIZE, BLOCK):
            at = number * PAGE_SIZE + block + offset
            middle += tl.sum(tl.load(y + at[:, None] * DIM + channel[None, :], mask=real, other=0), 0)
        stored = (middle / PAGE_SIZE).to(tl.float16)
        tl.store(centre + page * DIM + channel, stored, mask=channel < DIM)
        middle = stored.to(tl.float32)  # from the centre as stored
    for block in range(0, PAGE_SIZE, BLOCK):
        own = block + offset
        at = number * PAGE_SIZE + own - slot
        there = (at >= 0) & (at < tokens)
        v = tl.load(y + at[:, None] * DIM + channel[None, :], mask=there[:, None] & real, other=0)
        v = tl.where(there[:, None] & real, v - middle[None, :], 0.0)
        square = tl.sum(v * v, 1)
        unit = v / tl.maximum(tl.sqrt(square), 1.1754943508222875e-38)[:, None]
        found = tl.zeros([BLOCK, CHANNELS], tl.int32)
        for i in tl.static_range(BITS):  # how many edges are below
            half = 2 ** (BITS - 1 - i)
            found += tl.where(unit > tl.load(edges + found + half - 1), half, 0)
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
        to = page * PAGE_SIZE + own
        found = tl.where(there[:, None], found, 0)
        tl.store(code + to[:, None] * DIM + channel[None, :], found.to(tl.uint8), mask=real)
        tl.store(scale + to, tl.where(there, s, 0.0).to(tl.float16))


@on_its_device
def fold_rotated(x: Tensor, how: RotatedCode, lanes: Lanes, page_size: int, slot: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kvfold.kernels.ops.fold_rotated`: packed codes, scales, and centres if there are any."""
    assert how.rule in SCALE_RULES
    y = how.transform.apply(x.float()).contiguous()
    tokens, dim = y.shape[-2:]
    pages = -(-(slot + tokens) // page_size)
    lead = (*y.shape[:-2], pages)
    code = y.new_empty((*lead, page_size, dim), dtype=torch.uint8)
    scale = y.new_empty((*lead, page_size), dtype=torch.float16)
    centre = y.new_empty((*lead, dim) if how.centred else (0,), dtype=torch.float16)
    levels = on(y.device, how.levels)
    count = code.shape[:-2].numel()
    if count:
        _encode[(count,)](
            y, 0.5 * (levels[1:] + levels[:-1]), levels, code, scale, centre, slot, tokens, pages, DIM=dim,
            PAGE_SIZE=page_size, BITS=how.bits, RULE=how.rule, CENTRED=how.centred,
            CHANNELS=triton.next_power_of_2(dim), BLOCK=TILE,
        )  # fmt: skip
    return pack(code, [how.bits] * (padded(dim) // TILE), lanes), scale, centre


@triton.jit
def _closest_affine(
    y, centre, scale, lut, bits_of, code, chosen, candidates,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, LEVELS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One group of 16 channels of a page: the candidate with the least Σ e⁴."""
    page, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, channel = tl.arange(0, TOKENS)[:, None], group * 16 + tl.arange(0, 16)
    there, real = (token < PAGE_SIZE) & (channel < DIM)[None, :], channel < DIM
    bits = tl.load(bits_of + group)
    at = (page * PAGE_SIZE + token) * DIM + channel[None, :]
    v = tl.load(y + at, mask=there, other=0)
    lut += group * LEVELS
    best = tl.full([16], float("inf"), tl.float32)
    best_code, best_candidate = tl.zeros([TOKENS, 16], tl.int32), tl.zeros([16], tl.int32)
    for k in range(candidates):
        own = (page * candidates + k) * DIM + channel
        z, s = tl.load(centre + own, mask=real, other=0), tl.load(scale + own, mask=real, other=0)
        rest = tl.where(there, v - z[None, :], 0.0)
        unit = rest * (1 / tl.maximum(s, 5.9604644775390625e-08))[None, :]  # the smallest float16
        found = tl.zeros([TOKENS, 16], tl.int32)
        for i in range(bits):
            half = 1 << (bits - 1 - i)
            below = lut + found + half - 1
            found += tl.where(unit > 0.5 * (tl.load(below) + tl.load(below + 1)), half, 0)
        error = tl.where(there, rest - s[None, :] * tl.load(lut + found), 0.0)
        loss = tl.sum(error * error * (error * error), 0)
        better = loss < best
        best = tl.where(better, loss, best)
        best_code = tl.where(better[None, :], found, best_code)
        best_candidate = tl.where(better, k, best_candidate)
    tl.store(code + at, best_code.to(tl.uint8), mask=there)
    tl.store(chosen + page * DIM + channel, best_candidate.to(tl.uint8), mask=real)


@on_its_device
def closest_affine(y: Tensor, centre: Tensor, scale: Tensor, lut: Tensor, bits: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`kvfold.quant.affine.closest_affine`."""
    y, centre, scale, lut = (t.float().contiguous() for t in (y, centre, scale, lut))
    pages, page_size, dim = y.shape
    code = y.new_empty(y.shape, dtype=torch.uint8)
    chosen = y.new_empty((pages, dim), dtype=torch.uint8)
    if pages:
        _closest_affine[(pages, len(bits))](
            y, centre, scale, lut, bits_table(tuple(bits), y.device), code, chosen, centre.shape[1], DIM=dim,
            PAGE_SIZE=page_size, LEVELS=lut.shape[1], TOKENS=triton.next_power_of_2(page_size),
        )  # fmt: skip
    return code, chosen
