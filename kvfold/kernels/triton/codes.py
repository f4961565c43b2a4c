"""Reading and writing the codes of pages in place, in the layout of kvfold/quant/packing.py."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Shape:
    """Compile-time constants of one side's pages (keys or values).

    A unit is a page of one head. Units lie one after the other; each part of a page has its own stride.
    """

    # P, and how many channels are read.
    page_size: int
    code_dim: int
    # Groups of 16 channels of a code, and the sum of their bits; 0 if "codes" are float16 numbers.
    tiles: int
    all_bits: int
    # Groups with equal bits and levels: (the first, how many: a power of two, bits, the sum of bits before).
    runs: tuple[tuple[int, int, int, int], ...]
    planes: int  # the sum of the plane widths that occur: a bit mask
    even: int  # bits of every group; 0 if groups differ in bits or levels
    token_lanes: bool  # whether lanes are tokens, as for keys and for values that are a view of keys
    levels: int  # entries of each group's table
    groups: int  # of scales
    # Channels that have a centre or scale, and channels that are not coded.
    centre_dim: int
    plain_dim: int
    unit_levels: bool  # whether levels of a token are brought to length 1
    scaled_shifts: bool  # whether s multiplies z, and S multiplies a
    # Strides from unit to unit: in 32-bit words for codes, in elements for the others.
    code: int
    scale: int
    offset: int
    centre: int
    plain: int

    @property
    def by_runs(self) -> bool:
        """Whether tokens are best unfolded run by run: groups differ, and nothing is needed of all channels at once."""
        return self.token_lanes and bool(self.runs) and self.even == 0 and not self.unit_levels


@triton.jit
def _word(tile, bits, inside, WIDTH: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr):
    """The word of a lane in vector VECTOR of the plane of WIDTH bits; `tile` is where the lane's words begin."""
    if EVEN > 0:
        return tl.load(tile + 8 * (EVEN // (2 * WIDTH) * (2 * WIDTH)) + 16 * VECTOR, mask=inside, other=0)
    has = inside & (bits // WIDTH % 2 == 1)
    return tl.load(tile + 8 * (bits // (2 * WIDTH) * (2 * WIDTH)) + 16 * VECTOR, mask=has, other=0)


@triton.jit
def _plane(first, second, third, fourth, shift, bits, WIDTH: tl.constexpr):
    """16 steps of a plane, (A, B, 16), from the words of their four fields, shifted to their place in the code."""
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    words = tl.join(tl.join(words, words), tl.join(words, words))  # each thread has all steps of its words
    steps = tl.reshape(words, (first.shape[0], first.shape[1], 16)) >> shift[None, None, :]
    return (steps & (2**WIDTH - 1)) << (bits // (2 * WIDTH) * (2 * WIDTH))


@triton.jit
def _look_up(table, code):
    """table[code] of (A, B, 2, …), by a load for each part (A, B): one load would leave look-ups to other threads."""
    a, b = tl.split(code)
    if len(code.shape) == 3:  # else, as the compiler goes on after a return
        return tl.join(tl.load(table + a), tl.load(table + b))
    else:
        return tl.join(_look_up(table, a), _look_up(table, b))


@triton.jit
def tile_levels(tile, lane, table, bits, inside, EVEN: tl.constexpr, PLANES: tl.constexpr):
    """lut[code] of tiles (A, B) with one lane each, as (16 · A, B), a tile's steps one after the other.

    Each word is read once. tile: where a tile's words begin; table: its levels; bits: its bits if EVEN is 0, else EVEN;
    inside: whether it exists. All but EVEN and PLANES broadcast to (A, B).
    """
    own = tile + lane
    step = tl.arange(0, 16)
    field, byte = step // 4, step % 4 * 8
    wide = bits if EVEN > 0 else bits[:, :, None]
    code = tl.zeros((own.shape[0], own.shape[1], 16), tl.int32)
    if PLANES & 8:
        a, b = _word(own, bits, inside, 8, 0, EVEN), _word(own, bits, inside, 8, 1, EVEN)
        c, d = _word(own, bits, inside, 8, 2, EVEN), _word(own, bits, inside, 8, 3, EVEN)
        code |= _plane(a, b, c, d, byte, wide, 8)
    if PLANES & 4:
        a, b = _word(own, bits, inside, 4, 0, EVEN), _word(own, bits, inside, 4, 1, EVEN)
        code |= _plane(a, a, b, b, byte + field % 2 * 4, wide, 4)
    if PLANES & 2:
        a = _word(own, bits, inside, 2, 0, EVEN)
        code |= _plane(a, a, a, a, byte + field * 2, wide, 2)
    if PLANES & 1:  # a word for two lanes
        a = _word(tile + lane % 8, bits, inside, 1, 0, EVEN) >> (lane // 8 * 4)
        code |= _plane(a, a, a, a, byte + field, wide, 1)
    level = _look_up(table, tl.reshape(code, (own.shape[0], own.shape[1], 2, 2, 2, 2)))
    return tl.reshape(tl.permute(level, (0, 2, 3, 4, 5, 1)), (16 * own.shape[0], own.shape[1]))


@triton.jit
def _put(to, bytes, mask, JOINS: tl.constexpr):
    """Store bytes; if JOINS, set their bits in those that are there."""
    if JOINS:
        bytes |= tl.load(to, mask=mask, other=0)
    tl.store(to, bytes, mask=mask)


@triton.jit
def _store_plane(to, tiles, bits, there, WIDTH: tl.constexpr, JOINS: tl.constexpr):
    """Bytes of one plane of tiles (tokens, lane, channels, field, j), `to` (tokens, channels) in tiles."""
    TOKENS: tl.constexpr = tiles.shape[0]
    CHANNELS: tl.constexpr = tiles.shape[2]
    above = bits // (2 * WIDTH) * (2 * WIDTH)  # bits in wider planes, which come first and are lower
    plane = (tiles >> above[None, None, :, None, None]) & (2**WIDTH - 1)
    to += 32 * above[None, :]
    has = there & (bits // WIDTH % 2 == 1)[None, :]
    j = tl.arange(0, 4)
    if WIDTH == 1:
        shift = 4 * tl.arange(0, 2)[:, None, None, None, None] + tl.arange(0, 4)[:, None]
        bytes = tl.sum(tl.sum(tl.reshape(plane, (TOKENS, 2, 8, CHANNELS, 4, 4)) << shift[None], 4), 1)
        at = 4 * tl.arange(0, 8)[:, None, None] + j
        _put(to[:, None, :, None] + at[None], bytes.to(tl.uint8), has[:, None, :, None], JOINS)
    else:
        VECTORS: tl.constexpr = WIDTH // 2
        FIELDS: tl.constexpr = 8 // WIDTH
        shift = WIDTH * tl.arange(0, FIELDS)[:, None]
        whole = tl.reshape(plane, (TOKENS, 16, CHANNELS, VECTORS, FIELDS, 4)) << shift[None, None, None, None]
        at = 4 * tl.arange(0, 16)[:, None, None, None] + 64 * tl.arange(0, VECTORS)[:, None] + j
        bytes = tl.sum(whole, 4).to(tl.uint8)
        _put(to[:, None, :, None, None] + at[None], bytes, has[:, None, :, None, None], JOINS)


@triton.jit
def store_codes(
    page, code, tile, group, bits_of,
    PAGE_SIZE: tl.constexpr, TILES: tl.constexpr, ALL_BITS: tl.constexpr, PLANES: tl.constexpr,
    TOKEN_LANES: tl.constexpr, JOINS: tl.constexpr = False,
):  # fmt: skip
    """Pack int32 codes (tokens, channels), whole tiles from `tile` and `group` on, into the page at `page`.

    If JOINS, the page keeps the codes that it has, where these are 0.
    """
    TOKENS: tl.constexpr = code.shape[0] // 16
    CHANNELS: tl.constexpr = code.shape[1] // 16
    if TOKEN_LANES:
        tiles = tl.reshape(code, (TOKENS, 16, CHANNELS, 4, 4))
    else:
        tiles = tl.permute(tl.reshape(code, (TOKENS, 4, 4, CHANNELS, 16)), (0, 4, 3, 1, 2))
    tile += tl.arange(0, TOKENS)[:, None]
    group += tl.arange(0, CHANNELS)
    bits = tl.load(bits_of + group, mask=group < TILES, other=0)
    before = tl.load(bits_of + TILES + group, mask=group < TILES, other=0)[None, :]
    if TOKEN_LANES:
        to = page + 32 * (tile * ALL_BITS + before)
    else:
        to = page + 2 * PAGE_SIZE * before + 32 * tile * bits[None, :]
    there = tile * 16 < PAGE_SIZE
    if PLANES & 8:
        _store_plane(to, tiles, bits, there, 8, JOINS)
    if PLANES & 4:
        _store_plane(to, tiles, bits, there, 4, JOINS)
    if PLANES & 2:
        _store_plane(to, tiles, bits, there, 2, JOINS)
    if PLANES & 1:
        _store_plane(to, tiles, bits, there, 1, JOINS)
