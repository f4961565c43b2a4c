"""Attention over folded pages and the dense tokens around them; kvfold/attention/reference.py has the formula.

A program takes up to ROWS rows (query heads times new tokens) of one sequence and KV head, and a part of the context:
its rows share each page that it reads. The parts' states are combined in a fixed order, so the same inputs give the
same outputs.
"""

import triton
import triton.language as tl

from kvfold.kernels.triton.pages import key_scores, multiply, weighted_values

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32: −∞ less it is −∞, and less −∞ would be NaN


@triton.jit
def _rows(first, count, sequence, head, REPEAT: tl.constexpr, ROWS: tl.constexpr):
    """New token and query head of this program's rows, and which rows there are."""
    new = tl.load(count + sequence)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return tl.load(first + sequence) + row % new, head * REPEAT + row // new, row < REPEAT * new


@triton.jit
def _capped(scores, softcap, SOFTCAP: tl.constexpr):
    scores += 0 * scores  # an infinity becomes NaN, which reaches the output
    if SOFTCAP:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    return scores


@triton.jit
def _weigh(scores, maximum):
    """Unnormalised probabilities, the new maximum, and the factor on older sums."""
    grown = tl.maximum(maximum, tl.max(scores, 1))
    finite = tl.maximum(grown * LOG2E, LOWEST)
    return tl.exp2(scores * LOG2E - finite[:, None]), grown, tl.exp2(maximum * LOG2E - finite)


@triton.jit
def _unmasked(mask, by_sequence, by_head, by_query, columns, sequence, head, query, position, visible):
    """`visible` where the mask lets a query read."""
    at = sequence.to(tl.int64) * by_sequence + head.to(tl.int64) * by_head + query.to(tl.int64) * by_query
    inside = visible & (position[None, :] < columns)
    return inside & (tl.load(mask + at[:, None] + position[None, :], mask=inside, other=0) != 0)


@triton.jit(
    do_not_specialize=["width", "TOKENS", "position", "mask_columns", "mask_sequence", "mask_head", "mask_query"]
)
def attend_pages(
    query, maxima, totals, sums,
    first, count, pages, table, stop, skipped,
    mask, mask_sequence, mask_head, mask_query, mask_columns, position,
    k_code, k_lut, k_groups, k_scale, k_offset, k_centre, k_channel_scale, k_plain,
    v_code, v_lut, v_bits, v_groups, v_scale, v_offset, v_centre, v_channel_scale,
    width, softcap,
    TOKENS, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr, V: tl.constexpr,
    SOFTCAP: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Softmax states of queries over pages.

    query: q̃ and plain channels, scaled, (tokens, heads, code_dim + plain_dim). maxima, totals: (parts, tokens, heads);
    sums: (parts, tokens, heads, code_dim). first, count, pages: of each sequence, its new tokens and pages. table:
    (sequences, width), the first head's unit of each page; None if units are (sequences, heads, width). stop: how many
    folded tokens each new token reads, the first `skipped` of its sequence excepted (None for 0). position: that of the
    first folded token, for the mask. BLOCK divides a page.
    """
    KV_HEADS: tl.constexpr = HEADS // REPEAT
    sequence, kv_head, split = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    if tl.program_id(0) * ROWS >= REPEAT * tl.load(count + sequence):
        return
    new, head, live = _rows(first, count, sequence, kv_head, REPEAT, ROWS)
    row = new.to(tl.int64) * HEADS + head
    q_width: tl.constexpr = KEYS.code_dim + KEYS.plain_dim
    own_query = query + row[:, None] * q_width
    if KEYS.plain_dim:
        plain = tl.arange(0, PLAIN)
        has_plain = plain < KEYS.plain_dim
        q_plain = tl.load(own_query + KEYS.code_dim + plain[None, :], mask=live[:, None] & has_plain[None, :], other=0)
    limit = tl.load(stop + new, mask=live, other=0)
    held = tl.minimum(tl.load(pages + sequence), tl.cdiv(tl.max(limit, 0), KEYS.page_size))
    part = tl.cdiv(held, tl.num_programs(2))
    channel = tl.arange(0, V)
    maximum, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, V], tl.float32)
    blocks: tl.constexpr = KEYS.page_size // BLOCK
    for block in range(split * part * blocks, tl.minimum((split + 1) * part, held) * blocks):
        page, token = block // blocks, block % blocks * BLOCK + tl.arange(0, BLOCK)
        if table is None:
            unit = (sequence * KV_HEADS + kv_head).to(tl.int64) * width + page
        else:
            unit = tl.load(table + sequence * width + page).to(tl.int64) + kv_head
        scores = key_scores(own_query, live, k_code, k_lut, k_groups, k_scale, k_offset, k_centre, k_channel_scale,
                            unit, token, ROWS, BLOCK, K, KEYS, EXACT)  # fmt: skip
        if KEYS.plain_dim:
            rest = tl.load(k_plain + unit * KEYS.plain + token[None, :] * KEYS.plain_dim + plain[:, None],
                           mask=(token >= 0)[None, :] & has_plain[:, None], other=0)  # fmt: skip
            scores += multiply(q_plain, rest.to(tl.float32), EXACT)
        at = page * KEYS.page_size + token
        visible = at[None, :] < limit[:, None]
        if skipped is not None:
            visible &= (at >= tl.load(skipped + sequence))[None, :]
        if mask is not None:
            visible = _unmasked(mask, mask_sequence, mask_head, mask_query, mask_columns, sequence, head,
                                new - tl.load(first + sequence), position + at, visible)  # fmt: skip
        scores = tl.where(visible, _capped(scores, softcap, SOFTCAP), float("-inf"))
        p, maximum, decay = _weigh(scores, maximum)
        total = total * decay + tl.sum(p, 1)
        summed = summed * decay[:, None] + weighted_values(
            p, v_code, v_lut, v_bits, v_groups, v_scale, v_offset, v_centre, v_channel_scale, unit, token, channel,
            block % blocks * BLOCK, BLOCK, VALUES, EXACT,
        )  # fmt: skip
    to = split * TOKENS * HEADS + row
    tl.store(maxima + to, maximum, mask=live)
    tl.store(totals + to, total, mask=live)
    tl.store(sums + to[:, None] * VALUES.code_dim + channel[None, :], summed,
             mask=live[:, None] & (channel < VALUES.code_dim)[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["TOKENS", "mask_columns", "mask_sequence", "mask_head", "mask_query"])
def attend_dense(
    query, maxima, totals, sums,
    first, count, place, held, position, start, stop,
    mask, mask_sequence, mask_head, mask_query, mask_columns,
    key, value, key_place, key_head, key_token, value_place, value_head, value_token,
    softcap,
    TOKENS, HEADS: tl.constexpr, REPEAT: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    """Softmax states of queries over dense tokens at consecutive positions.

    query: scaled, (tokens, heads, key_dim). maxima, totals, sums: as in `attend_pages`, with a part for each program of
    the third dimension, which reads its share of the tokens; with GOES_ON, states that are there go on. Of each
    sequence: place, where its tokens begin, in steps of key_place and value_place elements; held, how many they are;
    position, that of the first. Of each new token: start and stop of what it reads, positions.
    """
    KV_HEADS: tl.constexpr = HEADS // REPEAT
    sequence, kv_head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    if tl.program_id(0) * ROWS >= REPEAT * tl.load(count + sequence):
        return
    new, head, live = _rows(first, count, sequence, kv_head, REPEAT, ROWS)
    row = new.to(tl.int64) * HEADS + head
    state = tl.program_id(2).to(tl.int64) * TOKENS * HEADS + row
    channel, v_channel, token = tl.arange(0, K), tl.arange(0, V), tl.arange(0, BLOCK)
    q = tl.load(query + row[:, None] * KEY_DIM + channel[None, :], mask=live[:, None] & (channel < KEY_DIM)[None, :],
                other=0)  # fmt: skip
    origin = tl.load(position + sequence)
    low = tl.load(start + new, mask=live, other=2**30) - origin
    high = tl.minimum(tl.load(stop + new, mask=live, other=0) - origin, tl.load(held + sequence))
    begin, end = tl.maximum(tl.min(low, 0), 0) // BLOCK * BLOCK, tl.max(high, 0)
    share = tl.cdiv(tl.maximum(end - begin, 0), BLOCK * tl.num_programs(2)) * BLOCK
    begin += tl.program_id(2) * share
    all_from, all_to = tl.max(tl.where(live, low, 0), 0), tl.min(tl.where(live, high, 2**30), 0)
    at_place = tl.load(place + sequence).to(tl.int64)
    key += at_place * key_place + kv_head * key_head + begin.to(tl.int64) * key_token
    value += at_place * value_place + kv_head * value_head + begin.to(tl.int64) * value_token
    key_block, value_block = token[None, :] * key_token + channel[:, None], token[:, None] * value_token + v_channel
    to = sums + state[:, None] * VALUE_DIM + v_channel[None, :]
    inside = live[:, None] & (v_channel < VALUE_DIM)[None, :]
    if GOES_ON:
        maximum = tl.load(maxima + state, mask=live, other=float("-inf"))
        total, summed = tl.load(totals + state, mask=live, other=0), tl.load(to, mask=inside, other=0)
    else:
        maximum, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, V], tl.float32)
    for block in range(begin, tl.minimum(begin + share, end), BLOCK):
        at = block + token
        there = at < tl.load(held + sequence)
        k = tl.load(key + key_block, mask=there[None, :] & (channel < KEY_DIM)[:, None], other=0).to(tl.float32)
        scores = _capped(multiply(q, k, EXACT), softcap, SOFTCAP)
        if mask is not None or ((block < all_from) | (block + BLOCK > all_to)):
            visible = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            if mask is not None:
                visible = _unmasked(mask, mask_sequence, mask_head, mask_query, mask_columns, sequence, head,
                                    new - tl.load(first + sequence), origin + at, visible)  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        p, maximum, decay = _weigh(scores, maximum)
        total = total * decay + tl.sum(p, 1)
        v = tl.load(value + value_block, mask=there[:, None] & (v_channel < VALUE_DIM)[None, :], other=0)
        summed = summed * decay[:, None] + multiply(p, v.to(tl.float32), EXACT)
        key += BLOCK * key_token
        value += BLOCK * value_token
    tl.store(maxima + state, maximum, mask=live)
    tl.store(totals + state, total, mask=live)
    tl.store(to, summed, mask=inside)


@triton.jit(do_not_specialize=["rows", "parts", "rotated_parts"])
def combine(
    maxima, totals, rotated, plain, sink_logits, rotated_out, plain_out, rows, parts, rotated_parts,
    HEADS: tl.constexpr, CODE_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One row's states put together and divided by their total; 0 for a row that reads nothing.

    maxima, totals: (parts, rows), the first `rotated_parts` of them over pages. rotated: those parts' sums, (·, rows,
    code_dim); plain: the others', (·, rows, value_dim). sink_logits: (heads), or None.
    """
    row = tl.program_id(0).to(tl.int64)
    maximum = float("-inf")
    for i in range(parts):
        maximum = tl.maximum(maximum, tl.load(maxima + i * rows + row))
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    channel, v_channel = tl.arange(0, C), tl.arange(0, V)
    of_pages, of_dense = tl.zeros([C], tl.float32), tl.zeros([V], tl.float32)
    total = 0.0
    for i in range(parts):
        weight = tl.exp(tl.load(maxima + i * rows + row) - finite)
        total += weight * tl.load(totals + i * rows + row)
        if i < rotated_parts:
            at = (i * rows + row) * CODE_DIM
            of_pages += weight * tl.load(rotated + at + channel, mask=channel < CODE_DIM, other=0)
        else:
            at = ((i - rotated_parts) * rows + row) * VALUE_DIM
            of_dense += weight * tl.load(plain + at + v_channel, mask=v_channel < VALUE_DIM, other=0)
    if sink_logits is not None:
        total += tl.where(total > 0, tl.exp(tl.load(sink_logits + row % HEADS) - finite), 0.0)
    per = tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(rotated_out + row * CODE_DIM + channel, of_pages * per, mask=channel < CODE_DIM)
    tl.store(plain_out + row * VALUE_DIM + v_channel, of_dense * per, mask=v_channel < VALUE_DIM)
