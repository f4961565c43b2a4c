"""Pages read where they lie: what kvfold/quant/packing.py packs and kvfold/formats/page.py unfolds."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Shape:
    """What kernels know of one side's pages when they are compiled.

    A unit is a page of one head. Units lie one after the other, each part of a page at a stride of its own.

    Attributes
    ----------
    page_size, code_dim
        P, and how many channels are read.
    tiles, all_bits
        Groups of 16 channels of a code, and the sum of their bits; 0 if "codes" are float16 numbers.
    planes
        Widths of planes that occur, added up.
    even
        Bits of every group; 0 if they differ.
    token_lanes
        Whether lanes are tokens, as keys have it.
    levels
        Entries of each group's table.
    groups
        Scale groups.
    centre_dim, plain_dim
        Channels that have a centre or scale, and channels that are not coded.
    unit_levels
        Whether levels of a token are brought to length 1.
    code, scale, offset, centre, plain
        From unit to unit, in elements.
    """

    page_size: int
    code_dim: int
    tiles: int
    all_bits: int
    planes: int
    even: int
    token_lanes: bool
    levels: int
    groups: int
    centre_dim: int
    plain_dim: int
    unit_levels: bool
    code: int
    scale: int
    offset: int
    centre: int
    plain: int


@triton.jit
def _plane(code, at, slot, field, bits, valid, WIDTH: tl.constexpr):
    """The plane of WIDTH bits, moved to its place in the code; 0 where codes have none."""
    above = bits // (2 * WIDTH) * (2 * WIDTH)  # bits in wider planes, which come first and are lower
    if WIDTH == 1:
        byte, shift = slot % 32, slot // 32 * 4 + field
    else:
        byte, shift = field * WIDTH // 8 * 64 + slot, field % (8 // WIDTH) * WIDTH
    has = valid & (bits // WIDTH % 2 == 1)
    raw = tl.load(code + at + 32 * above + byte, mask=has, other=0).to(tl.int32)
    return ((raw >> shift) & (2**WIDTH - 1)) << above


@triton.jit
def read_codes(code, bits_of, token, channel, valid, SHAPE: tl.constexpr):
    """Codes of `token` and `channel`, which broadcast, of the page at `code`."""
    group = channel // 16
    if SHAPE.even > 0:
        bits = tl.zeros_like(group) + SHAPE.even
        before = group * SHAPE.even
    else:
        bits = tl.load(bits_of + group, mask=group < SHAPE.tiles, other=0)
        before = tl.load(bits_of + SHAPE.tiles + group, mask=group < SHAPE.tiles, other=0)
    if SHAPE.token_lanes:
        lane, step = token % 16, channel % 16
        at = 32 * (token // 16 * SHAPE.all_bits + before)
    else:
        lane, step = channel % 16, token % 16
        at = 2 * SHAPE.page_size * before + token // 16 * 32 * bits
    field, slot = step // 4, 4 * lane + step % 4
    found = tl.zeros_like(slot + field)
    if SHAPE.planes & 8:
        found |= _plane(code, at, slot, field, bits, valid, 8)
    if SHAPE.planes & 4:
        found |= _plane(code, at, slot, field, bits, valid, 4)
    if SHAPE.planes & 2:
        found |= _plane(code, at, slot, field, bits, valid, 2)
    if SHAPE.planes & 1:
        found |= _plane(code, at, slot, field, bits, valid, 1)
    return found


@triton.jit
def coordinates(
    code, lut, bits_of, scale_group_of, scale, offset, centre, channel_scale, unit, token, channel,
    CHANNELS: tl.constexpr, SCALED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """z + a + s · S ⊙ lut[code] of a unit in float32, channels along the axis CHANNELS; without s, unless SCALED."""
    valid = (token >= 0) & (channel < SHAPE.code_dim)
    at = code + unit * SHAPE.code
    if SHAPE.all_bits == 0:
        y = tl.load(at + token * SHAPE.code_dim + channel, mask=valid, other=0).to(tl.float32)
    else:
        index = read_codes(at, bits_of, token, channel, valid, SHAPE) + channel // 16 * SHAPE.levels
        y = tl.load(lut + index, mask=valid, other=0)
    if SHAPE.unit_levels:
        y = y / tl.sqrt(tl.maximum(tl.sum(y * y, CHANNELS, keep_dims=True), 1e-30))
    centred = channel < SHAPE.centre_dim
    if channel_scale is not None:
        y *= tl.load(channel_scale + unit * SHAPE.centre + channel, mask=centred, other=1).to(tl.float32)
    if SHAPE.groups > 1:
        group = tl.load(scale_group_of + channel // 16, mask=channel < SHAPE.code_dim, other=0)
    else:
        group = tl.zeros_like(channel)
    if SCALED and scale is not None:
        y *= tl.load(scale + unit * SHAPE.scale + token * SHAPE.groups + group, mask=valid, other=0).to(tl.float32)
    if offset is not None:
        y += tl.load(offset + unit * SHAPE.offset + token * SHAPE.groups + group, mask=valid, other=0).to(tl.float32)
    if centre is not None:
        y += tl.load(centre + unit * SHAPE.centre + channel, mask=centred, other=0).to(tl.float32)
    return y
