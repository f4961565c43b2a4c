"""Scores and sums over folded pages: kvfold/formats/page.py has the formula x̂ = R⁻¹·(z + a + s · S ⊙ lut[code]), and
that of scaled shifts.

A program has few query rows, so work on each value that it reads is shared by few and counts. Therefore scales of whole
tokens are applied to scores or probabilities. A page's centre and channel scales are applied to the sum of its values.
"""

import triton
import triton.language as tl

from kvfold.kernels.triton.codes import tile_levels


@triton.jit
def multiply(x, y, EXACT: tl.constexpr):
    """x @ y in float32: of float32 numbers, or of float16 ones on tensor cores."""
    if EXACT:
        return tl.dot(x, y.to(tl.float32), input_precision="ieee")
    return tl.dot(x.to(tl.float16), y.to(tl.float16))


@triton.jit
def of_tokens(part, groups_of, at, token, channel, SHAPE: tl.constexpr):
    """A part of each token and its channels' scale group, `at` in it, in float32; token and channel broadcast."""
    if SHAPE.groups == 1:
        return tl.load(part + at + token).to(tl.float32)
    else:  # the compiler goes on after a return
        real = (token >= 0) & (channel < SHAPE.code_dim)
        group = tl.load(groups_of + channel // 16, mask=channel < SHAPE.code_dim, other=0)
        return tl.load(part + at + token * SHAPE.groups + group, mask=real, other=0).to(tl.float32)


@triton.jit
def _scaled(y, groups_of, scale, offset, unit, token, channel, SHAPE: tl.constexpr):
    """Levels with the scale and offset of their token and channel group; token and channel broadcast."""
    y = y.to(tl.float32)
    if scale is not None:
        y *= of_tokens(scale, groups_of, unit * SHAPE.scale, token, channel, SHAPE)
    if offset is not None:
        y += of_tokens(offset, groups_of, unit * SHAPE.offset, token, channel, SHAPE)
    return y


@triton.jit
def _score(
    query, live, y, groups_of, scale, offset, centre, channel_scale, unit, token, channel, LATE: tl.constexpr,
    SHAPE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q·(z + a + s · S ⊙ y) of some channels, levels y (channels, tokens); without s if LATE."""
    tl.static_assert(offset is None or channel_scale is None)  # or this would not be z + a + s · S ⊙ y
    if SHAPE.groups > 1:
        y = _scaled(y, groups_of, scale, offset, unit, token[None, :], channel[:, None], SHAPE)
    elif not LATE:
        if scale is not None:
            y *= tl.load(scale + unit * SHAPE.scale + token).to(y.dtype)[None, :]
        if offset is not None:
            y += tl.load(offset + unit * SHAPE.offset + token).to(y.dtype)[None, :]
    centred = channel < SHAPE.centre_dim
    if channel_scale is not None:
        y *= tl.load(channel_scale + unit * SHAPE.centre + channel, mask=centred, other=1).to(y.dtype)[:, None]
    if centre is not None:
        y += tl.load(centre + unit * SHAPE.centre + channel, mask=centred, other=0).to(y.dtype)[:, None]
    q = tl.load(query + channel[None, :], mask=live[:, None] & (channel < SHAPE.code_dim)[None, :], other=0)
    return multiply(q, y, EXACT)


@triton.jit
def run_levels(
    page, lut, token, FIRST: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, BEFORE: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """Levels (channels, tokens) of one of SHAPE's runs, and which channels these are."""
    group = tl.arange(0, GROUPS)[:, None]
    tile = page + 8 * ((token // 16 * SHAPE.all_bits)[None, :] + BEFORE + BITS * group)
    inside = (group >= 0) & (token >= 0)[None, :]
    y = tile_levels(tile, (token % 16)[None, :], lut + FIRST * SHAPE.levels, BITS, inside, BITS, BITS)
    return y, FIRST * 16 + tl.arange(0, 16 * GROUPS)


@triton.jit
def key_scores(
    query, live, code, lut, groups_of, scale, offset, centre, channel_scale, unit, token,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, SHAPE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """q̃·y of the tokens of a block of a page, (ROWS, BLOCK), without channels that are not coded."""
    late: tl.constexpr = (SHAPE.groups == 1 and offset is None) and (centre is None or SHAPE.scaled_shifts)
    scores = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    if SHAPE.all_bits == 0:
        channel = tl.arange(0, K)
        y = tl.load(code + unit * SHAPE.code + token[None, :] * SHAPE.code_dim + channel[:, None],
                    mask=(channel < SHAPE.code_dim)[:, None] & (token >= 0)[None, :], other=0)  # fmt: skip
        scores += _score(query, live, y, groups_of, scale, offset, centre, channel_scale, unit, token, channel, late,
                         SHAPE, EXACT)  # fmt: skip
    for i in tl.static_range(len(SHAPE.runs)):
        y, channel = run_levels(code + unit * SHAPE.code, lut, token, SHAPE.runs[i][0], SHAPE.runs[i][1],
                                SHAPE.runs[i][2], SHAPE.runs[i][3], SHAPE)  # fmt: skip
        if SHAPE.unit_levels:
            tl.static_assert(late)
            own = tl.where((channel < SHAPE.code_dim)[:, None], y.to(tl.float32), 0.0)
            squares += tl.sum(own * own, 0)
        scores += _score(query, live, y, groups_of, scale, offset, centre, channel_scale, unit, token, channel, late,
                         SHAPE, EXACT)  # fmt: skip
    if SHAPE.unit_levels:
        scores /= tl.sqrt(tl.maximum(squares, 1e-30))[None, :]
    if late and scale is not None:
        scores *= tl.load(scale + unit * SHAPE.scale + token).to(tl.float32)[None, :]
    return scores


@triton.jit
def page_levels(page, lut, bits_of, token, first, channel, BLOCK: tl.constexpr, SHAPE: tl.constexpr):
    """Levels (tokens, channels) of a block of a page that begins at token `first`."""
    if SHAPE.all_bits == 0:  # the "codes" are numbers
        inside = (token >= 0)[:, None] & (channel < SHAPE.code_dim)[None, :]
        return tl.load(page + token[:, None] * SHAPE.code_dim + channel[None, :], mask=inside, other=0)
    else:  # the compiler goes on after a return
        return _coded_levels(page, lut, bits_of, token, first, BLOCK, channel.shape[0], SHAPE)


@triton.jit
def _coded_levels(page, lut, bits_of, token, first, BLOCK: tl.constexpr, V: tl.constexpr, SHAPE: tl.constexpr):
    groups: tl.constexpr = (SHAPE.code_dim + 15) // 16
    group = tl.arange(0, V // 16)[:, None] if SHAPE.token_lanes else tl.arange(0, V)[None, :] // 16
    inside = group < groups
    if SHAPE.even > 0:
        bits, before, table = SHAPE.even, SHAPE.even * group, lut
    else:
        bits = tl.load(bits_of + group, mask=inside, other=0)
        before = tl.load(bits_of + SHAPE.tiles + group, mask=inside, other=0)
        table = lut + tl.where(inside, group, 0) * SHAPE.levels
    if SHAPE.token_lanes:
        tile, lane = page + 8 * ((token // 16 * SHAPE.all_bits)[None, :] + before), (token % 16)[None, :]
        inside = inside & (token >= 0)[None, :]
        return tl.trans(tile_levels(tile, lane, table, bits, inside, SHAPE.even, SHAPE.planes))
    else:  # the compiler goes on after a return
        row = first // 16 + tl.arange(0, BLOCK // 16)[:, None]
        tile, lane = page + SHAPE.page_size // 2 * before + 8 * row * bits, tl.arange(0, V)[None, :] % 16
        return tile_levels(tile, lane, table, bits, inside & (row >= 0), SHAPE.even, SHAPE.planes)


@triton.jit
def weighted_values(
    p, code, lut, bits_of, groups_of, scale, offset, centre, channel_scale, unit, token, channel, first,
    BLOCK: tl.constexpr, SHAPE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Σ p·y over the tokens of a block of a page that begins at token `first`: (rows, channels)."""
    real = channel < SHAPE.code_dim
    y = page_levels(code + unit * SHAPE.code, lut, bits_of, token, first, channel, BLOCK, SHAPE)
    if SHAPE.unit_levels:
        y = tl.where(real[None, :], y.to(tl.float32), 0.0)
        y /= tl.sqrt(tl.maximum(tl.sum(y * y, 1), 1e-30))[:, None]
    w = p
    if SHAPE.groups > 1:
        y = _scaled(y, groups_of, scale, offset, unit, token[:, None], channel[None, :], SHAPE)
    elif scale is not None:
        w *= tl.load(scale + unit * SHAPE.scale + token).to(tl.float32)[None, :]
    summed = multiply(w, y, EXACT)
    inside = channel < SHAPE.centre_dim
    shift = tl.zeros([p.shape[0]], tl.float32)
    if offset is not None and SHAPE.groups == 1:
        a = tl.load(offset + unit * SHAPE.offset + token).to(tl.float32)
        shift += tl.sum(p * a[None, :], 1)
    if SHAPE.scaled_shifts:
        summed += shift[:, None]
    if channel_scale is not None:
        s = tl.load(channel_scale + unit * SHAPE.centre + channel, mask=inside, other=1).to(tl.float32)
        summed *= s[None, :]
    if not SHAPE.scaled_shifts:
        summed += shift[:, None]
    if centre is not None:
        z = tl.load(centre + unit * SHAPE.centre + channel, mask=inside, other=0).to(tl.float32)
        summed += tl.sum(w if SHAPE.scaled_shifts else p, 1)[:, None] * z[None, :]
    return summed
