"""Attention over folded pages in whole numbers on NVIDIA's tensor cores: `attend_pages` of
kvfold/kernels/triton/attend.py once more, step by step as there.

Triton chooses which thread has what, and brings numbers through memory to where a product wants them. Gluon is the same
language with layouts said by hand, so that threads have words where `ptx.py` wants them and products need nothing else.
kvfold/kernels/gluon/numbers.py has the rules of rounding.

In each product levels are A, and queries or weights are B. So scores are (tokens, rows) here, and sums (channels,
rows). A NaN spreads by largest numbers, which multiply all that is rounded by them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.language.core import PropagateNan

from kvfold.kernels.gluon import numbers, ptx

BLOCK = gl.constexpr(numbers.BLOCK)
NAN = gl.constexpr(PropagateNan.ALL)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32, as in the twin
MAGIC = gl.constexpr(12582912.0)  # 1.5 · 2²³: after adding it, a number's lowest bits are the nearest whole number
ONES = gl.constexpr(0x3C003C00)  # a pair of halves


@constexpr_function
def _doubled(first, count, dim):
    """Bases first, 2 · first, … of dimension `dim` of two, `count` of them."""
    return [[first << i if d == dim else 0 for d in (0, 1)] for i in range(count)]


@constexpr_function
def _log2(n):
    return n.bit_length() - 1


@constexpr_function
def sums_layout(lanes, rows, warps):
    """Sums as `mma` leaves them, (lanes, rows). Each warp has neighbouring tiles of 16 lanes."""
    tiles = _doubled(16, _log2(lanes // 16), 0)
    own = len(tiles) - _log2(warps)
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], *tiles[:own], *_doubled(8, _log2(rows // 8), 1)],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], tiles[own:], [], [lanes, rows],
    )  # fmt: skip


@constexpr_function
def out_layout(values, rows, warps):
    """Sums of values. If lanes are tokens, of 128 channels a warp, as `ptx.multiply_lanes` leaves them."""
    if not values.token_lanes:
        return sums_layout(16 * warps, rows, warps)
    order = ptx.steps(values.runs[0].bits)
    steps = [order[0][1], order[0][2], order[1][0], order[2][0]]
    return gl.DistributedLinearLayout(
        [[0, 1], *([step, 0] for step in steps), *_doubled(8, _log2(rows // 8), 1)],
        [[0, 2], [0, 4], *_doubled(16, 3, 0)], _doubled(128, _log2(warps), 0), [], [128 * warps, rows],
    )  # fmt: skip


@constexpr_function
def plain_layout(rows, dim, warps):
    """Queries' channels that are not coded, as B has them: four for each t of each 16."""
    return gl.DistributedLinearLayout(
        _doubled(1, 2, 1) + _doubled(16, _log2(dim // 16), 1) + _doubled(8, _log2(rows // 8), 0),
        _doubled(4, 2, 1) + _doubled(1, 3, 0), [[0, 0]] * _log2(warps), [], [rows, dim],
    )  # fmt: skip


@constexpr_function
def query_layout(rows, bits, one, warps):
    """Queries as B has them, (rows, channels): of four tiles, or of one, in the order of `ptx.steps(bits)`."""
    order = ptx.steps(bits)
    byte = [[0, order[0][1]], [0, order[0][2]]]
    quad = [[0, order[1][0]], [0, order[2][0]]]
    register = byte if one else byte + quad
    lane = quad if one else _doubled(16, 2, 1)
    return gl.DistributedLinearLayout(
        register + _doubled(8, _log2(rows // 8), 0), lane + _doubled(1, 3, 0), [[0, 0]] * _log2(warps), [],
        [rows, 16 if one else 64],
    )  # fmt: skip


@constexpr_function
def weights_layout(rows, warps):
    """Weights as B has them, (tokens, rows), of four tiles; a tile's tokens in their own order."""
    return gl.DistributedLinearLayout(
        _doubled(1, 4, 0) + _doubled(8, _log2(rows // 8), 1), _doubled(16, 2, 0) + _doubled(1, 3, 1),
        [[0, 0]] * _log2(warps), [], [64, rows],
    )  # fmt: skip


@constexpr_function
def thread_layout(warps):
    lane = [[1 << i] for i in range(5)]
    return gl.DistributedLinearLayout([], lane, [[32 << i] for i in range(_log2(warps))], [], [32 * warps])


@constexpr_function
def registers(count, warps):
    """Types of `count` registers of each thread."""
    return (gl.distributed_type(gl.int32, [32 * warps], thread_layout(warps)),) * count


@constexpr_function
def _same(kind, count):
    return (kind,) * count


@constexpr_function
def constraints(outputs, inputs, kind="r"):
    return ",".join(["=&r"] * outputs + [kind] * inputs)


@constexpr_function
def words(bits, one):
    """How many words a thread has of a tile."""
    return len(ptx.offsets(bits, one))


@constexpr_function
def pairs(bits, one):
    return len(ptx.pairs(bits, one))


@constexpr_function
def planes(bits):
    return len(ptx.planes(bits))


@constexpr_function
def shift_of(bits, plane):
    return ptx.shifts(bits)[ptx.planes(bits)[plane]]


@constexpr_function
def steps_of(bits):
    """How far the steps of t lie from those of 0, by both bits of t, upper first."""
    order = ptx.steps(bits)
    return order[2][0], order[1][0]


@constexpr_function
def bias(bits):
    return ptx.BIAS[bits]


@constexpr_function
def own_tiles(run, values, warps):
    """Tiles of a run of values that a warp has, or eights of tiles if lanes are tokens."""
    return -(-run.tiles // (8 * warps if values.token_lanes else warps))


@constexpr_function
def tiles_before(values, r, warps):
    return sum(own_tiles(run, values, warps) for run in values.runs[:r])


@gluon.jit
def _larger(x, y):
    return gl.maximum(x, y, propagate_nan=NAN)


@gluon.jit
def _asm(text: gl.constexpr, args, COUNT: gl.constexpr, INPUTS: gl.constexpr):
    """Registers that a text gives, of arguments in registers."""
    return gl.inline_asm(text, constraints(COUNT, INPUTS), args, registers(COUNT, gl.num_warps()), is_pure=True)


@gluon.jit
def _load(address, vector, BITS: gl.constexpr, ONE: gl.constexpr, TILES: gl.constexpr, STRIDE: gl.constexpr):
    COUNT: gl.constexpr = words(BITS, ONE) * TILES
    return gl.inline_asm(ptx.load(BITS, ONE, TILES, STRIDE), constraints(COUNT, 2, "l"), (address, vector),
                         registers(COUNT, gl.num_warps()), is_pure=True)  # fmt: skip


@gluon.jit
def _multiply(
    sums, tables, own, b, shifts, RUN: gl.constexpr, ONE: gl.constexpr, TILES: gl.constexpr, KIND: gl.constexpr
):
    """`sums`, one for each byte of B, with the products of a run's words and B added."""
    COLUMNS: gl.constexpr = len(sums) * sums[0].shape[1] // 8
    COUNT: gl.constexpr = 4 * TILES * COLUMNS
    return gl.inline_asm(
        ptx.multiply(RUN.bits, ONE, TILES, COLUMNS, KIND),
        constraints(COUNT, COUNT + len(own) + len(b) + len(shifts) + len(tables)), sums + own + b + shifts + tables,
        _same(sums[0].type, len(sums)), is_pure=True,
    )  # fmt: skip


@gluon.jit
def _zeros(COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.zeros(LAYOUT.shape, gl.int32, LAYOUT),)
    return found


@gluon.jit
def _too_low(b, BITS: gl.constexpr, KIND: gl.constexpr, BYTES: gl.constexpr, SUMS: gl.constexpr):
    """How much the products with B are too low: `ptx.BIAS` times the sums of its columns."""
    COLUMNS: gl.constexpr = BYTES * SUMS.shape[1] // 8
    ROW: gl.constexpr = gl.distributed_type(gl.int32, [SUMS.shape[1]], gl.SliceLayout(0, SUMS))
    return _number(gl.inline_asm(ptx.total(bias(BITS), len(b) // COLUMNS, COLUMNS, KIND),
                                 constraints(2 * COLUMNS, len(b)), b, _same(ROW, BYTES), is_pure=True))  # fmt: skip


@gluon.jit
def _reciprocal(x):
    """1 / x of normal numbers, to a unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _number(y):
    """Sums of one byte, or of two."""
    if len(y) == 2:
        return (y[0] * 256 + y[1]).to(gl.float32)
    else:  # the compiler goes on after a return
        return y[0].to(gl.float32)


@gluon.jit
def _table(tables, t, RUN: gl.constexpr):
    """A run's table. Where t has a part in the address, the compiler keeps the words in a thread's registers; it would
    copy them there for each look-up from the registers of a warp."""
    if RUN.bits == 1:
        return ()
    else:  # the compiler goes on after a return
        COUNT: gl.constexpr = ptx.table_words(RUN.bits)
        at = tables + (RUN.table + t % 2 * ptx.table_length(RUN.bits))
        return gl.inline_asm(ptx.load_table(RUN.bits), constraints(COUNT, 1, "l"), (at,),
                             registers(COUNT, gl.num_warps()), is_pure=False)  # fmt: skip


@gluon.jit
def _rows(start, fresh, kv_head, REPEAT: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """New token and query head of this program's rows, and which rows there are."""
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=LAYOUT)
    return start + row % fresh, kv_head * REPEAT + row // fresh, row < REPEAT * fresh


@gluon.jit
def _queries(
    query, start, fresh, kv_head, BITS: gl.constexpr, CHUNK: gl.constexpr, KEYS: gl.constexpr, HEADS: gl.constexpr,
    REPEAT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """q̃ of a chunk's channels."""
    LAYOUT: gl.constexpr = query_layout(ROWS, BITS, CHUNK.one, gl.num_warps())
    new, head, live = _rows(start, fresh, kv_head, REPEAT, ROWS, gl.SliceLayout(1, LAYOUT))
    channel = 16 * CHUNK.first + gl.arange(0, 16 if CHUNK.one else 64, layout=gl.SliceLayout(0, LAYOUT))
    at = (new.to(gl.int64) * HEADS + head) * (KEYS.code_dim + KEYS.plain_dim)
    inside = channel < min(16 * (CHUNK.first + CHUNK.tiles), KEYS.code_dim)
    return gl.load(query + at[:, None] + channel[None, :], mask=live[:, None] & inside[None, :], other=0)


@gluon.jit
def _run_queries(
    query, start, fresh, kv_head, RUN: gl.constexpr, KEYS: gl.constexpr, HEADS: gl.constexpr, REPEAT: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """q̃ of a run in pairs of halves, by chunks; what a 1 stands for; its sum."""
    ROWS: gl.constexpr = SUMS.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    found = ()
    one, total = gl.full([ROWS], 1e-30, gl.float32, ROW), gl.zeros([ROWS], gl.float32, ROW)
    for i in gl.static_range(len(RUN.chunks)):
        x = _queries(query, start, fresh, kv_head, RUN.bits, RUN.chunks[i], KEYS, HEADS, REPEAT, ROWS)
        found = found + (x,)
        one = _larger(one, gl.convert_layout(gl.reduce(gl.abs(x), 1, _larger), ROW))
        total += gl.convert_layout(gl.sum(x, 1), ROW)
    one += 0 * one  # an infinity becomes NaN, which reaches the output
    in_pairs = ()
    for i in gl.static_range(len(RUN.chunks)):
        x = found[i] * gl.convert_layout(1 / one, gl.SliceLayout(1, found[i].type.layout))[:, None]
        in_pairs = in_pairs + (_pairs(x, RUN.bits, RUN.chunks[i].one),)
    return in_pairs, one, total


@gluon.jit
def _pairs(x, BITS: gl.constexpr, ONE: gl.constexpr):
    COLUMNS: gl.constexpr = x.shape[0] // 8
    COUNT: gl.constexpr = pairs(BITS, ONE) * COLUMNS
    return _asm(ptx.halves(BITS, ONE, COLUMNS), (x,), COUNT, 2 * COUNT)


@gluon.jit
def _of_channels(part, t, BITS: gl.constexpr, CHUNK: gl.constexpr, VECTORS: gl.constexpr):
    """What a page has of a chunk's channels, in pairs."""
    at = part + 16 * CHUNK.first
    if CHUNK.one:
        at += t // 2 * steps_of(BITS)[0] + t % 2 * steps_of(BITS)[1]
    else:
        at += 16 * gl.minimum(t, CHUNK.tiles - 1)
    COUNT: gl.constexpr = pairs(BITS, CHUNK.one)
    return gl.inline_asm(ptx.load_pairs(BITS, CHUNK.one, VECTORS), constraints(COUNT, 1, "l"), (at,),
                         registers(COUNT, gl.num_warps()), is_pure=True)  # fmt: skip


@constexpr_function
def b_row(rows, warps):
    """The layout of what belongs to B's columns."""
    return gl.SliceLayout(1, query_layout(rows, 1, True, warps))


@gluon.jit
def _round(v, one, t, RUN: gl.constexpr, SUMS: gl.constexpr):
    """Pairs q̃ ⊙ S as B: whole numbers of 8 bits, or of 16 as 256 · upper + lower; what a 1 of these stands for."""
    ROWS: gl.constexpr = SUMS.shape[1]
    COLUMNS: gl.constexpr = ROWS // 8
    ROW: gl.constexpr = b_row(ROWS, gl.num_warps())
    most = gl.full([ROWS], 1e-7, gl.float32, ROW)
    for i in gl.static_range(len(v)):
        most = _larger(most, _largest(v[i], COLUMNS, ROW))
    found = ()
    for i in gl.static_range(len(v)):
        found = found + (_rounded(v[i], most, RUN, RUN.chunks[i].one, COLUMNS),)
    most = gl.inline_asm(ptx.exchange(COLUMNS), constraints(2 * COLUMNS, COLUMNS + 1), (most, t),
                         gl.distributed_type(gl.float32, [ROWS], gl.SliceLayout(0, SUMS)), is_pure=True)  # fmt: skip
    return found, one * most * (RUN.step / (32512 if RUN.two_bytes else 127))


@gluon.jit
def _largest(v, COLUMNS: gl.constexpr, ROW: gl.constexpr):
    return gl.inline_asm(ptx.largest(len(v) // COLUMNS, COLUMNS), constraints(COLUMNS, len(v)), v,
                         gl.distributed_type(gl.float32, [8 * COLUMNS], ROW), is_pure=True)  # fmt: skip


@gluon.jit
def _rounded(v, most, RUN: gl.constexpr, ONE: gl.constexpr, COLUMNS: gl.constexpr):
    COUNT: gl.constexpr = (1 if ONE else 4) * COLUMNS * (2 if RUN.two_bytes else 1)
    return _asm(ptx.round_pairs(RUN.bits, ONE, COLUMNS, RUN.two_bytes), v + (most,), COUNT, len(v) + COLUMNS)


@gluon.jit
def _times(q, s, ROWS: gl.constexpr):
    return _asm(ptx.times(len(s), ROWS // 8), q + s, len(q), len(q) + len(s))


@gluon.jit
def _dot(q, z, ROWS: gl.constexpr, ROW: gl.constexpr):
    """Sums of products of pairs, for each row."""
    return gl.inline_asm(ptx.dot(len(z), ROWS // 8), constraints(ROWS // 4, len(q) + len(z)), q + z,
                         gl.distributed_type(gl.float32, [ROWS], ROW), is_pure=True)  # fmt: skip


@gluon.jit
def _run_dot(q, one, centre, t, RUN: gl.constexpr, VECTORS: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr):
    """q̃·z of a run's channels, and Σ q̃ if there is no centre."""
    total = gl.zeros([ROWS], gl.float32, ROW)
    for i in gl.static_range(len(q)):
        if centre is None:
            z = (t * 0 + ONES,) * pairs(RUN.bits, RUN.chunks[i].one)
        else:
            z = _of_channels(centre, t, RUN.bits, RUN.chunks[i], VECTORS)
        total += _dot(q[i], z, ROWS, ROW)
    return total * one


@gluon.jit
def _run_words(page, t, RUN: gl.constexpr, KEYS: gl.constexpr):
    """A run's words, by chunks."""
    own = ()
    for i in gl.static_range(len(RUN.chunks)):
        own = own + (_chunk_words(page + 8 * RUN.chunks[i].before, t, RUN.bits, RUN.chunks[i], 32 * KEYS.all_bits),)
    return own


@gluon.jit
def _chunk_words(address, t, BITS: gl.constexpr, CHUNK: gl.constexpr, STRIDE: gl.constexpr):
    if CHUNK.one:
        return _load(address, address + t // 2 * 16, BITS, True, 4 // gl.num_warps(), STRIDE)
    else:
        address += 8 * BITS * gl.minimum(t, CHUNK.tiles - 1)
        return _load(address, address, BITS, False, 4 // gl.num_warps(), STRIDE)


@gluon.jit
def _shifts(t, BITS: gl.constexpr, ONE: gl.constexpr):
    """How far a thread shifts the words of each plane, of one tile."""
    found = ()
    if ONE:
        for k in gl.static_range(planes(BITS)):
            found = found + (t // 2 * shift_of(BITS, k)[0] + t % 2 * shift_of(BITS, k)[1],)
    return found


@constexpr_function
def kind_of(x):
    return "f16" if x.element_ty == gl.float16 else "f32"


@gluon.jit
def _of_tokens(part, at, GROUPS: gl.constexpr, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """What tokens of a block have. at: where the thread's first token is."""
    KIND: gl.constexpr = kind_of(part.dtype)
    TILES: gl.constexpr = SUMS.shape[0] // 16 // gl.num_warps()
    STRIDE: gl.constexpr = GROUPS * (2 if KIND == "f16" else 4)
    return gl.inline_asm(
        ptx.load_of_tokens(TILES, STRIDE, KIND), "=&f," * (2 * TILES) + "l", (part + at * GROUPS + GROUP,),
        gl.distributed_type(gl.float32, [SUMS.shape[0]], gl.SliceLayout(1, SUMS)), is_pure=True,
    )  # fmt: skip


@gluon.jit
def _rounded_run(q, one, channel_scale, t, RUN: gl.constexpr, VECTORS: gl.constexpr, SUMS: gl.constexpr):
    """A run's q̃ ⊙ S as B, by chunks; what a 1 of it stands for; what is added to its products."""
    ROWS: gl.constexpr = SUMS.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    v = q
    if channel_scale is not None and RUN.centred:
        v = ()
        for i in gl.static_range(len(q)):
            v = v + (_times(q[i], _of_channels(channel_scale, t, RUN.bits, RUN.chunks[i], VECTORS), ROWS),)
    b, worth = _round(v, one, t, RUN, SUMS)
    base = gl.zeros([ROWS], gl.float32, ROW)
    if RUN.middle != 0:
        base = _run_dot(v, one, None, t, RUN, VECTORS, ROWS, ROW) * RUN.middle
    if bias(RUN.bits) != 0:
        for i in gl.static_range(len(b)):
            base += worth * _too_low(b[i], RUN.bits, "s8", 2 if RUN.two_bytes else 1, SUMS)
    return b, worth, base


@gluon.jit
def _run_products(b, tables, own, t, RUN: gl.constexpr, SUMS: gl.constexpr):
    """Products of a run's codes with B, (tokens, rows)."""
    y = _zeros(2 if RUN.two_bytes else 1, SUMS)
    for i in gl.static_range(len(b)):
        y = _multiply(y, tables, own[i], b[i], _shifts(t, RUN.bits, RUN.chunks[i].one), RUN, RUN.chunks[i].one,
                      4 // gl.num_warps(), "s8")  # fmt: skip
    return _number(y)


@gluon.jit
def _value_words(code, begin, g, t, warp, VALUES: gl.constexpr):
    """Words of a block of values, by runs and tiles."""
    found = ()
    for r in gl.static_range(len(VALUES.runs)):
        found = found + (_run_value_words(code, begin, g, t, warp, VALUES.runs[r], VALUES),)
    return found


@gluon.jit
def _run_value_words(code, begin, g, t, warp, RUN: gl.constexpr, VALUES: gl.constexpr):
    OWN: gl.constexpr = own_tiles(RUN, VALUES, gl.num_warps())
    own = ()
    if VALUES.token_lanes:
        address = (
            code + (begin // 16 + t) * (8 * VALUES.all_bits) + 8 * RUN.before + (warp * OWN * 8 + g) * (8 * RUN.bits)
        )
        COUNT: gl.constexpr = len(ptx.lane_offsets(RUN.bits))
        for i in gl.static_range(OWN):
            own = own + (
                gl.inline_asm(
                    ptx.load_lanes(RUN.bits),
                    constraints(COUNT, 1, "l"),
                    (address + i * 64 * RUN.bits,),
                    registers(COUNT, gl.num_warps()),
                    is_pure=True,
                ),
            )
    else:
        BIT: gl.constexpr = VALUES.page_size // 2  # words of a bit of a tile of channels
        address = code + BIT * RUN.before + (begin // 16 + t) * (8 * RUN.bits) + g
        address += gl.minimum(warp * OWN, RUN.tiles - OWN) * (BIT * RUN.bits)
        for i in gl.static_range(OWN):
            own = own + (_load(address + i * BIT * RUN.bits, address, RUN.bits, False, 1, 0),)
    return own


@gluon.jit
def _channels(RUN: gl.constexpr, TILE: gl.constexpr, VALUES: gl.constexpr, OUT: gl.constexpr):
    """The channels of sums of a run's tile."""
    OWN: gl.constexpr = own_tiles(RUN, VALUES, gl.num_warps())
    lane = gl.arange(0, OUT.shape[0], layout=gl.SliceLayout(1, OUT))
    if VALUES.token_lanes:
        return 16 * RUN.first + 128 * (lane // 128 * OWN + TILE) + lane % 128
    else:  # the compiler goes on after a return
        return 16 * (RUN.first + TILE + gl.minimum(lane // 16 * OWN, RUN.tiles - OWN)) + lane % 16


@gluon.jit
def _value_products(own, b, tables, RUN: gl.constexpr, VALUES: gl.constexpr, OUT: gl.constexpr):
    """Products of a tile's words, or of eight tiles', with B."""
    BYTES: gl.constexpr = 2 if VALUES.two_bytes else 1
    if VALUES.token_lanes:
        COLUMNS: gl.constexpr = BYTES * OUT.shape[1] // 8
        ALL: gl.constexpr = gl.distributed_type(gl.int32, OUT.shape, OUT)
        return _number(gl.inline_asm(
            ptx.multiply_lanes(RUN.bits, COLUMNS, "u8"),
            constraints(32 * COLUMNS, len(own) + len(b) + len(tables)), own + b + tables, _same(ALL, BYTES),
            is_pure=True,
        ))  # fmt: skip
    else:  # the compiler goes on after a return
        return _number(_multiply(_zeros(BYTES, OUT), tables, own, b, (), RUN, False, 1, "u8"))


@gluon.jit
def _whole_bytes(x, BITS: gl.constexpr, BYTE: gl.constexpr):
    """One byte of whole weights, as B."""
    ROWS: gl.constexpr = x.shape[1]
    return _asm(ptx.pack(BITS, ROWS // 8, BYTE), (x,), ROWS // 2, 2 * ROWS)


@gluon.jit
def _run_sums(
    summed, decay, x, one, inner, outer, total, tables, own, centre, channel_scale, RUN: gl.constexpr,
    FIRST: gl.constexpr, VALUES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Σ p·y of a run's channels over older blocks and this one, by tiles.

    inner, outer: what channel scales multiply beside the products, and what is added after it. total: what multiplies
    the centre.
    """
    BYTES: gl.constexpr = 2 if VALUES.two_bytes else 1
    ORDER: gl.constexpr = 1 if VALUES.token_lanes else RUN.bits
    b = _whole_bytes(x, ORDER, BYTES - 1)
    if VALUES.two_bytes:
        b = b + _whole_bytes(x, ORDER, 0)
    worth = one * RUN.step
    if bias(RUN.bits) != 0:
        inner += worth * _too_low(b, RUN.bits, "u8", BYTES, OUT)
    found = ()
    for i in gl.static_range(own_tiles(RUN, VALUES, gl.num_warps())):
        y = _value_products(own[i], b, tables, RUN, VALUES, OUT)
        found = found + (
            _with_block(summed[FIRST + i] * decay[None, :], y, worth, inner, outer, total, centre, channel_scale,
                        _channels(RUN, i, VALUES, OUT), VALUES),
        )  # fmt: skip
    return found


@gluon.jit
def _with_block(sums, y, worth, inner, outer, total, centre, channel_scale, channel, VALUES: gl.constexpr):
    """`sums` and Σ p·y of a block, whose products are y."""
    inside = channel < VALUES.centre_dim
    if centre is not None:
        sums += total[None, :] * gl.load(centre + channel, mask=inside, other=0).to(gl.float32)[:, None]
    if channel_scale is None:
        return (sums + (inner + outer)[None, :]) + y * worth[None, :]
    else:  # the compiler goes on after a return
        s = gl.load(channel_scale + channel, mask=inside, other=1).to(gl.float32)
        return (sums + outer[None, :]) + (inner[None, :] + y * worth[None, :]) * s[:, None]


@gluon.jit
def _plain_queries(
    query, start, fresh, kv_head, KEYS: gl.constexpr, HEADS: gl.constexpr, REPEAT: gl.constexpr, ROWS: gl.constexpr
):
    """Pairs of the channels that are not coded."""
    if KEYS.plain_dim == 0:
        return ()
    else:  # the compiler goes on after a return
        LAYOUT: gl.constexpr = plain_layout(ROWS, KEYS.plain_dim, gl.num_warps())
        new, head, live = _rows(start, fresh, kv_head, REPEAT, ROWS, gl.SliceLayout(1, LAYOUT))
        at = (new.to(gl.int64) * HEADS + head) * (KEYS.code_dim + KEYS.plain_dim) + KEYS.code_dim
        channel = gl.arange(0, KEYS.plain_dim, layout=gl.SliceLayout(0, LAYOUT))
        x = gl.load(query + at[:, None] + channel[None, :], mask=live[:, None], other=0)
        COUNT: gl.constexpr = KEYS.plain_dim * ROWS // 64
        return _asm(ptx.in_pairs(COUNT), (x,), COUNT, 2 * COUNT)


@gluon.jit
def _plain_scores(q, plain, KEYS: gl.constexpr, SUMS: gl.constexpr):
    """Products with channels that are not coded. plain: where the thread's are."""
    TILES: gl.constexpr = 4 // gl.num_warps()
    COLUMNS: gl.constexpr = SUMS.shape[1] // 8
    COUNT: gl.constexpr = TILES * KEYS.plain_dim // 4
    own = gl.inline_asm(ptx.load_plain(TILES, KEYS.plain_dim), constraints(COUNT, 1, "l"), (plain,),
                        registers(COUNT, gl.num_warps()), is_pure=True)  # fmt: skip
    return gl.inline_asm(ptx.multiply_plain(TILES, KEYS.plain_dim, COLUMNS),
                         constraints(4 * TILES * COLUMNS, COUNT + len(q)), own + q,
                         gl.distributed_type(gl.float32, SUMS.shape, SUMS), is_pure=True)  # fmt: skip


@gluon.jit
def _block_scores(
    q, ones, q_sums, rounded, tables, code, scale, offset, centre, channel_scale, unit, token, t, KEYS: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """q̃·y of a block, (tokens, rows). code: where the thread's words of it begin."""
    ROWS: gl.constexpr = SUMS.shape[1]
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    base = gl.zeros([ROWS], gl.float32, ROW)
    for r in gl.static_range(len(KEYS.runs)):
        if channel_scale is not None:
            at = channel_scale + unit * KEYS.centre
            rounded = rounded + (_rounded_run(q[r], ones[r], at, t, KEYS.runs[r], KEYS.vectors, SUMS),)
        if centre is not None and KEYS.runs[r].centred:
            base += _run_dot(q[r], ones[r], centre + unit * KEYS.centre, t, KEYS.runs[r], KEYS.vectors, ROWS, ROW)
        if scale is None or KEYS.scaled_shifts:
            base += rounded[r][2]
    scores = gl.zeros(SUMS.shape, gl.float32, SUMS) + base[None, :]
    for r in gl.static_range(len(KEYS.runs)):
        own = _run_words(code, t, KEYS.runs[r], KEYS)
        y = _run_products(rounded[r][0], _table(tables, t, KEYS.runs[r]), own, t, KEYS.runs[r], SUMS)
        if scale is None or KEYS.scaled_shifts:
            scores += y * rounded[r][1][None, :]
        else:
            s = _of_tokens(scale + unit * KEYS.scale, token, KEYS.groups, KEYS.runs[r].group, SUMS)
            scores += (y * rounded[r][1][None, :] + rounded[r][2][None, :]) * s[:, None]
        if offset is not None:
            a = _of_tokens(offset + unit * KEYS.offset, token, KEYS.groups, KEYS.runs[r].group, SUMS)
            scores += a[:, None] * q_sums[r][None, :]
    if KEYS.scaled_shifts:
        scores *= _of_tokens(scale + unit * KEYS.scale, token, 1, 0, SUMS)[:, None]
    return scores


@gluon.jit
def _weigh(scores, visible, maximum, softcap, SOFTCAP: gl.constexpr):
    """Unnormalised probabilities, the new maximum, and the factor on older sums."""
    scores += 0 * scores  # an infinity becomes NaN, which reaches the output
    if SOFTCAP:
        scores = softcap * (2 / (1 + gl.exp2(scores * (-2 * LOG2E / softcap))) - 1)
    scores = gl.where(visible, scores, float("-inf"))
    grown = _larger(maximum, gl.reduce(scores, 0, _larger))
    finite = _larger(grown * LOG2E, LOWEST)
    return gl.exp2(scores * LOG2E - finite[None, :]), grown, gl.exp2(maximum * LOG2E - finite)


@gluon.jit
def _unmasked(mask, by_sequence, by_head, by_query, columns, sequence, head, query, position, visible):
    """`visible` where the mask lets a query read."""
    at = sequence.to(gl.int64) * by_sequence + head.to(gl.int64) * by_head + query.to(gl.int64) * by_query
    inside = visible & (position < columns)[:, None]
    return inside & (gl.load(mask + at[None, :] + position[:, None], mask=inside, other=0) != 0)


@gluon.jit
def _group_weights(p, scale, unit, token, GROUP: gl.constexpr, VALUES: gl.constexpr, OUT_ROW: gl.constexpr):
    """A scale group's weights: as they are, as whole numbers, and what a 1 of these stands for."""
    w = p
    if scale is not None:
        w = p * _of_tokens(scale + unit * VALUES.scale, token, VALUES.groups, GROUP, p.type.layout)[:, None]
    NUMBERS: gl.constexpr = 65535.0 if VALUES.two_bytes else 255.0
    most = _larger(gl.reduce(w, 0, _larger), 1e-30)
    x = (w * (NUMBERS * _reciprocal(most))[None, :] + MAGIC).to(gl.int32, bitcast=True)
    x = gl.convert_layout(x, weights_layout(w.shape[1], gl.num_warps()))
    return w, x, gl.convert_layout(most * (1 / NUMBERS), OUT_ROW)


@gluon.jit
def _block_sums(
    summed, decay, p, p_sum, tables, own, t, scale, offset, centre, channel_scale, unit, token, VALUES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Σ p·y of older blocks and this one, by tiles. own: the words of this one."""
    ROW: gl.constexpr = gl.SliceLayout(0, OUT)
    older = gl.convert_layout(decay, ROW)
    found = ()
    group = _group_weights(p, scale, unit, token, VALUES.runs[0].group, VALUES, ROW)
    for r in gl.static_range(len(VALUES.runs)):
        if r > 0 and VALUES.runs[r].group != VALUES.runs[r - 1].group:
            group = _group_weights(p, scale, unit, token, VALUES.runs[r].group, VALUES, ROW)
        inner, outer = gl.zeros_like(p_sum), gl.zeros_like(p_sum)
        if offset is not None:
            a = _of_tokens(offset + unit * VALUES.offset, token, VALUES.groups, VALUES.runs[r].group, p.type.layout)
            if VALUES.scaled_shifts:
                inner += gl.sum(p * a[:, None], 0)
            else:
                outer += gl.sum(p * a[:, None], 0)
        if VALUES.runs[r].middle != 0:
            inner += gl.sum(group[0], 0) * VALUES.runs[r].middle
        found = found + _run_sums(
            summed, older, group[1], group[2], gl.convert_layout(inner, ROW), gl.convert_layout(outer, ROW),
            gl.convert_layout(gl.sum(group[0], 0) if VALUES.scaled_shifts else p_sum, ROW),
            _table(tables, t, VALUES.runs[r]), own[r], centre if centre is None else centre + unit * VALUES.centre,
            channel_scale if channel_scale is None else channel_scale + unit * VALUES.centre, VALUES.runs[r],
            tiles_before(VALUES, r, gl.num_warps()), VALUES, OUT,
        )  # fmt: skip
    return found


@gluon.jit(
    do_not_specialize=["width", "TOKENS", "position", "mask_columns", "mask_sequence", "mask_head", "mask_query"]
)
def attend_pages(
    query, maxima, totals, sums,
    first, count, pages, table, stop, skipped,
    mask, mask_sequence, mask_head, mask_query, mask_columns, position,
    k_code, k_tables, k_scale, k_offset, k_centre, k_channel_scale, k_plain,
    v_code, v_tables, v_scale, v_offset, v_centre, v_channel_scale,
    width, softcap,
    TOKENS, HEADS: gl.constexpr, REPEAT: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, ROWS: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    """Softmax states of queries over pages: arguments as of the twin, but for `tables`, those of levels."""
    KV_HEADS: gl.constexpr = HEADS // REPEAT
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = sums_layout(64, ROWS, WARPS)
    ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    OUT: gl.constexpr = out_layout(VALUES, ROWS, WARPS)
    OUT_ROW: gl.constexpr = gl.SliceLayout(0, OUT)
    BLOCKS: gl.constexpr = KEYS.page_size // BLOCK

    sequence, kv_head, split = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS, gl.program_id(2)
    fresh, start = gl.load(count + sequence), gl.load(first + sequence)
    if gl.program_id(0) * ROWS >= REPEAT * fresh:
        return
    new, head, live = _rows(start, fresh, kv_head, REPEAT, ROWS, ROW)
    limit = gl.load(stop + new, mask=live, other=0)
    held = gl.minimum(gl.load(pages + sequence), gl.cdiv(gl.max(limit, 0), KEYS.page_size))
    part = gl.cdiv(held, gl.num_programs(2))
    thread = gl.arange(0, 32 * WARPS, layout=thread_layout(WARPS))
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    token, own_token = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)), warp * (64 // WARPS) + g
    q, ones, q_sums, rounded, summed = (), (), (), (), ()
    for r in gl.static_range(len(KEYS.runs)):
        of_run = _run_queries(query, start, fresh, kv_head, KEYS.runs[r], KEYS, HEADS, REPEAT, SUMS)
        q, ones, q_sums = q + (of_run[0],), ones + (of_run[1],), q_sums + (of_run[2],)
        if k_channel_scale is None:
            rounded = rounded + (_rounded_run(q[r], ones[r], None, t, KEYS.runs[r], KEYS.vectors, SUMS),)
    q_plain = _plain_queries(query, start, fresh, kv_head, KEYS, HEADS, REPEAT, ROWS)
    for _ in gl.static_range(tiles_before(VALUES, len(VALUES.runs), WARPS)):
        summed = summed + (gl.zeros(OUT.shape, gl.float32, OUT),)
    maximum, total = gl.full([ROWS], float("-inf"), gl.float32, ROW), gl.zeros([ROWS], gl.float32, ROW)
    for block in range(split * part * BLOCKS, gl.minimum((split + 1) * part, held) * BLOCKS):
        page, begin = block // BLOCKS, block % BLOCKS * BLOCK
        if table is None:
            unit = (sequence * KV_HEADS + kv_head).to(gl.int64) * width + page
        else:
            unit = gl.load(table + sequence * width + page).to(gl.int64) + kv_head
        scores = _block_scores(
            q, ones, q_sums, rounded, k_tables,
            k_code + unit * KEYS.code + (begin // 16 + warp * (4 // WARPS)) * (8 * KEYS.all_bits) + g,
            k_scale, k_offset, k_centre, k_channel_scale, unit, begin + own_token, t, KEYS, SUMS,
        )  # fmt: skip
        if KEYS.plain_dim:
            scores += _plain_scores(
                q_plain, k_plain + unit * KEYS.plain + (begin + own_token) * KEYS.plain_dim + 4 * t, KEYS, SUMS
            )
        own = _value_words(v_code + unit * VALUES.code, begin, g, t, warp, VALUES)
        at = page * KEYS.page_size + begin + token
        visible = at[:, None] < limit[None, :]
        if skipped is not None:
            visible = visible & (at >= gl.load(skipped + sequence))[:, None]
        if mask is not None:
            visible = _unmasked(mask, mask_sequence, mask_head, mask_query, mask_columns, sequence, head, new - start,
                                position + at, visible)  # fmt: skip
        p, maximum, decay = _weigh(scores, visible, maximum, softcap, SOFTCAP)
        p_sum = gl.sum(p, 0)
        total = total * decay + p_sum
        summed = _block_sums(summed, decay, p, p_sum, v_tables, own, t, v_scale, v_offset, v_centre, v_channel_scale,
                             unit, begin + own_token, VALUES, OUT)  # fmt: skip
    to = (split * TOKENS + new).to(gl.int64) * HEADS + head
    gl.store(maxima + to, maximum, mask=live)
    gl.store(totals + to, total, mask=live)
    to, live = gl.convert_layout(to, OUT_ROW), gl.convert_layout(live, OUT_ROW)
    for r in gl.static_range(len(VALUES.runs)):
        _store_run(sums, summed, to, live, VALUES.runs[r], tiles_before(VALUES, r, WARPS), VALUES, OUT)


@gluon.jit
def _store_run(sums, summed, to, live, RUN: gl.constexpr, FIRST: gl.constexpr, VALUES: gl.constexpr, OUT: gl.constexpr):
    for i in gl.static_range(own_tiles(RUN, VALUES, gl.num_warps())):
        channel = _channels(RUN, i, VALUES, OUT)
        gl.store(sums + to[None, :] * VALUES.code_dim + channel[:, None], summed[FIRST + i],
                 mask=live[None, :] & (channel < VALUES.code_dim)[:, None])  # fmt: skip
