"""Pages as dense numbers, for prompts: their many rows share what it costs to unfold a number."""

import triton
import triton.language as tl

from kvfold.kernels.triton.pages import of_tokens, page_levels, run_levels


@triton.jit
def _store_numbers(to, y, scale, offset, centre, channel_scale, groups, unit, token, channel, SHAPE: tl.constexpr):
    """R·x̂ of levels y, (tokens, channels), into the rows at `to`, (tokens, 1)."""
    y, token, channel = y.to(tl.float32), token[:, None], channel[None, :]
    real, inside = channel < SHAPE.code_dim, channel < SHAPE.centre_dim
    if SHAPE.unit_levels:
        y = tl.where(real, y, 0.0)
        y /= tl.sqrt(tl.maximum(tl.sum(y * y, 1), 1e-30))[:, None]
    if scale is not None:
        s = of_tokens(scale, groups, unit * SHAPE.scale, token, channel, SHAPE)
        y *= s
    if offset is not None and SHAPE.scaled_shifts:
        y += of_tokens(offset, groups, unit * SHAPE.offset, token, channel, SHAPE)
    if channel_scale is not None:
        y *= tl.load(channel_scale + unit * SHAPE.centre + channel, mask=inside, other=1).to(tl.float32)
    if offset is not None and not SHAPE.scaled_shifts:
        y += of_tokens(offset, groups, unit * SHAPE.offset, token, channel, SHAPE)
    if centre is not None:
        z = tl.load(centre + unit * SHAPE.centre + channel, mask=inside, other=0).to(tl.float32)
        y += s * z if SHAPE.scaled_shifts else z
    tl.store(to + channel, y.to(to.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["width", "first"])
def unfold(
    to, pages, table, code, lut, bits, groups, scale, offset, centre, channel_scale, plain, width, first,
    KV_HEADS: tl.constexpr, SHAPE: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """R·x̂ of each sequence's pages from `first` on, followed by channels that are not coded.

    kvfold/formats/page.py has the formula. to: (sequences, KV_HEADS, tokens, code_dim + plain_dim), of any float type,
    tokens of as many pages as there are programs for; nothing is written for pages that a sequence has not. table: as
    in `attend_pages`. BLOCK divides a page.
    """
    BLOCKS: tl.constexpr = SHAPE.page_size // BLOCK
    sequence, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    page, begin = first + tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * BLOCK
    if page >= tl.load(pages + sequence):
        return
    if table is None:
        unit = tl.program_id(1).to(tl.int64) * width + page
    else:
        unit = tl.load(table + sequence * width + page).to(tl.int64) + kv_head
    token = begin + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = SHAPE.code_dim + SHAPE.plain_dim
    place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    to += (place * BLOCK + tl.arange(0, BLOCK))[:, None] * WIDTH
    if SHAPE.by_runs:
        for i in tl.static_range(len(SHAPE.runs)):
            y, channel = run_levels(code + unit * SHAPE.code, lut, token, SHAPE.runs[i][0], SHAPE.runs[i][1],
                                    SHAPE.runs[i][2], SHAPE.runs[i][3], SHAPE)  # fmt: skip
            _store_numbers(to, tl.trans(y), scale, offset, centre, channel_scale, groups, unit, token, channel, SHAPE)
    else:
        channel = tl.arange(0, V)
        y = page_levels(code + unit * SHAPE.code, lut, bits, token, begin, channel, BLOCK, SHAPE)
        _store_numbers(to, y, scale, offset, centre, channel_scale, groups, unit, token, channel, SHAPE)
    if SHAPE.plain_dim:
        own = tl.arange(0, PLAIN)[None, :]
        rest = tl.load(plain + unit * SHAPE.plain + token[:, None] * SHAPE.plain_dim + own, mask=own < SHAPE.plain_dim)
        tl.store(to + SHAPE.code_dim + own, rest.to(to.dtype.element_ty), mask=own < SHAPE.plain_dim)
