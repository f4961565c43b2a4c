"""PTX that turns codes into whole numbers in registers, and multiplies these on tensor cores.

`mma.m16n8k32` multiplies 16 × 32 bytes of A with 32 × 8 bytes of B. A thread (g, t) = (lane // 4, lane % 4) holds rows
g and g + 8 of A and column g of B, of each the bytes 4 · t … 4 · t + 3 of both halves of k, in one register each. k is
summed over, so its order is free if A and B have the same. Therefore levels are A, in the order in which codes lie in a
word, and queries or weights are B, rounded in that order. Levels are neither transposed nor brought to memory.

The 16 rows of A are the lanes of a tile (quant/packing.py). A thread has all codes of its lanes in one of four tiles
that follow each other along the steps: t chooses the tile. Of a tile alone ("one"), t chooses four of the 16 steps.

`prmt` turns four codes into four levels: each four bits of a selector choose a byte out of eight, and their highest bit
says to repeat that byte's sign instead. Eight levels are two registers. Longer tables are cut into eights: where the
highest bit says that a code is not of an eight, the byte is 0 or −1. Levels of the lower half of codes are negative,
those of the upper half are not. One register of each half is multiplied. As it is −1 or 0 where the other has the
level, sums are too low by one for each number, which `BIAS` tells of.

Texts are for `inline_asm` of Gluon: operands $0, $1, … are first what a text writes, then what it reads.
"""

from collections.abc import Callable, Sequence

from triton.experimental.gluon import constexpr_function
from triton.language import constexpr

SIGNS = constexpr(0x80808080)
"""Where selectors pick its bytes, their highest bits are made bytes 0x80 and 0xFF."""

BIAS = {1: -32, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
"""By bits: what is added to each number that a table's registers sum up to."""


@constexpr_function
def planes(bits: int) -> tuple[int, ...]:
    return tuple(width for width in (4, 2, 1) if bits & width)


@constexpr_function
def steps(bits: int) -> tuple[tuple[int, ...], ...]:
    """The steps of a tile in each of the four registers that hold its levels, byte for byte.

    Fields that share a selector differ: of a plane of 4 bits, they are 2·v and 2·v + 1, of a plane of 2 bits, k and
    k + 2. Single bits are bytes at once, one field each.
    """
    if bits == 1:
        return tuple(tuple(4 * field + j for j in range(4)) for field in range(4))
    pairs = ((0, 1), (2, 3)) if bits >= 4 else ((0, 2), (1, 3))
    return tuple(tuple(4 * f + j for j in (half, half + 1) for f in pair) for pair in pairs for half in (0, 2))


class Asm:
    """Lines of PTX, each distinct instruction once."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._known: dict[tuple[object, ...], str] = {}

    def __call__(self, instruction: str, *operands: object) -> str:
        """The register that the instruction writes."""
        key = (instruction, *operands)
        if key not in self._known:
            self._known[key] = f"x{len(self._known)}"
            self.line(instruction, self._known[key], *operands)
        return self._known[key]

    def new(self) -> str:
        """A register that no instruction has written yet."""
        self._known[len(self._known),] = register = f"x{len(self._known)}"
        return register

    def line(self, instruction: str, *operands: object) -> None:
        told = ", ".join(f"{x & 0xFFFFFFFF:#x}" if isinstance(x, int) else str(x) for x in operands)
        self._lines.append(f"{instruction} {told};")

    def floats(self, pair: str) -> tuple[str, str]:
        """Both halves of a register as float32 numbers."""
        low, high = self.new(), self.new()
        self.raw(f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, {pair}; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h; }}")
        return low, high

    def raw(self, line: str) -> None:
        self._lines.append(line)

    def shift(self, word: str, left: int) -> str:
        """`word` shifted to the left, or to the right if `left` is negative."""
        if left == 0:
            return word
        return self("shl.b32", word, left) if left > 0 else self("shr.b32", word, -left)

    def logic(self, function: Callable[[int, int, int], int], a: object, b: object, c: object) -> str:
        """A function of bits of three operands: `lop3`."""
        return self("lop3.b32", a, b, c, function(0xF0, 0xCC, 0xAA) & 0xFF)

    def text(self) -> str:
        return "\n".join(["{", f".reg .b32 x<{max(len(self._known), 1)}>;", *self._lines, "}"])


@constexpr_function
def _choose(a: int, b: int, mask: int) -> int:
    return (a & mask) | (b & ~mask)


@constexpr_function
def table(numbers: Sequence[int]) -> list[int]:
    """Tables of eight numbers each, as `levels` looks them up: two words each, four bytes to a word."""
    if len(numbers) == 2:
        return []
    if len(numbers) > 8:
        numbers = [x - 1 if i < len(numbers) // 2 else x for i, x in enumerate(numbers)]
    padded = [*numbers, *(0,) * (-len(numbers) % 8)]
    found = [sum((x & 0xFF) << 8 * i for i, x in enumerate(padded[at : at + 4])) for at in range(0, len(padded), 4)]
    return found if len(found) <= 4 else [*found, *(SIGNS.value,) * 4]


@constexpr_function
def table_words(bits: int) -> int:
    """Words of a table, and if codes have more than 4 bits, `SIGNS`."""
    return 0 if bits == 1 else 2 if bits < 4 else 4 if bits == 4 else 2**bits // 4 + 1


@constexpr_function
def table_length(bits: int) -> int:
    """Words of a table in memory."""
    return len(table(range(2**bits)))


@constexpr_function
def load_table(bits: int) -> str:
    """A register for each word of a table, and its address."""
    asm, count = Asm(), table_words(bits)
    for first in range(0, count, 4):
        own = [f"${first + i}" for i in range(min(count - first, 4))]
        asm.line(
            "ld.global" + {1: "", 2: ".v2", 4: ".v4"}[len(own)] + ".b32",
            f"{{{', '.join(own)}}}",
            f"[${count}+{4 * first}]",
        )
    return asm.text()


@constexpr_function
def load_of_tokens(tiles: int, stride: int, kind: str) -> str:
    """A float32 number for each token of a thread, g and g + 8 of each tile, and the address of the first one.

    stride: bytes from a token to the next. kind: "f16" or "f32".
    """
    asm, count = Asm(), 2 * tiles
    for k in range(count):
        if kind == "f32":
            asm.line("ld.global.f32", f"${k}", f"[${count}+{8 * k * stride}]")
        else:
            asm.raw(f"{{ .reg .b16 x; ld.global.b16 x, [${count}+{8 * k * stride}]; cvt.f32.f16 ${k}, x; }}")
    return asm.text()


@constexpr_function
def levels(
    asm: Asm, bits: int, table: Sequence[str], words: dict[tuple[int, int], str], half: int, index: int
) -> list[str]:  # fmt: skip
    """Registers whose sum, and BIAS, are the numbers of `steps(bits)[index]` of lane g + 8 · half.

    words: the lane's words by plane and vector; that of single bits is of both lanes.
    """
    first, upper = divmod(index, 2)
    if bits == 1:
        return [asm("and.b32", asm.shift(words[1, 0], 6 - 4 * half - index), 0x40404040)]
    if bits < 4:
        selector = asm("and.b32", asm.shift(words[2, 0], -2 * first), 0x33333333)
        if bits == 3:
            single = words[1, 0]
            spread = asm.logic(_choose, asm.shift(single, 2 - 4 * half), asm.shift(single, 4 - 4 * half), 0x0C0C0C0C)
            selector = asm.logic(lambda a, b, c: a | (b & c), selector, asm.shift(spread, -first), 0x44444444)
        return [asm("prmt.b32", *table, asm.shift(selector, -16 * upper))]
    word = words[4, first]
    pair = [asm.shift(word, -16 * upper), asm.shift(asm("xor.b32", word, 0x88888888), -16 * upper)]
    found = [asm("prmt.b32", *table[2 * i : 2 * i + 2], pair[i % 2]) for i in range(2**bits // 8)]
    if bits == 4:
        return found
    # A selector's highest bit as a byte: 0x80 or 0xFF. The sign of a level in `found` is that of its half in any case.
    signs = table[-1]
    masks = [
        asm("prmt.b32", signs, signs, asm.shift(x, -16 * upper)) for x in _upper_bits(asm, bits, words, half, first)
    ]
    if bits == 6:
        found = [asm.logic(_choose, found[i + 2], found[i], masks[1]) for i in (0, 1, 4, 5)]
    return [
        asm.logic(lambda a, b, c: (a & b) | c, found[0], found[1], masks[0]),
        asm.logic(lambda a, b, c: (a | b) & c, found[2], found[3], masks[0]),
    ]


@constexpr_function
def _upper_bits(asm: Asm, bits: int, words: dict[tuple[int, int], str], half: int, vector: int) -> list[str]:
    """The bits of codes beyond the lowest four, the highest first, each as the highest bits of selectors."""
    if bits == 5:
        bit = asm("and.b32", asm.shift(words[1, 0], -4 * half - 2 * vector), 0x03030303)
        return [asm("mul.lo.u32", bit, 8 + 64)]
    two = asm.shift(words[2, 0], -4 * vector)
    masked = ((0x0A0A0A0A, 4 + 16), (0x05050505, 8 + 32))
    return [asm("mul.lo.u32", asm("and.b32", two, mask), factor) for mask, factor in masked]


@constexpr_function
def offsets(bits: int, one: bool) -> list[tuple[int, int, int, int]]:
    """The words that a thread reads of a tile: plane, vector, half, and the offset in bytes.

    Of one tile only, a thread reads one vector of the plane of 4 bits, where its steps are.
    """
    found, start = [], 0
    for width in planes(bits):
        halves = (0,) if width == 1 else (0, 1)
        found += [
            (width, vector, half, start + 64 * vector + 32 * half)
            for half in halves for vector in range(2 if width == 4 and not one else 1)
        ]  # fmt: skip
        start += 32 * width
    return found


@constexpr_function
def shifts(bits: int) -> dict[int, tuple[int, int]]:
    """By plane, how far the bits of steps(bits)[index] lie to the right for each of both bits of index, upper first."""
    if bits == 1:
        return {1: (2, 1)}
    return {4: (0, 16), 2: (4 if bits >= 4 else 2, 16), 1: (2 if bits >= 4 else 1, 16)}


@constexpr_function
def load(bits: int, one: bool, tiles: int, stride: int) -> str:
    """Words of `tiles` rows of tiles that lie `stride` bytes apart.

    Operands: a word each, the address of a thread's first word, and if `one`, that in the plane of 4 bits.
    """
    found = offsets(bits, one)
    count, asm = len(found) * tiles, Asm()
    for i in range(tiles):
        for k, (width, _, _, offset) in enumerate(found):
            base = count + 1 if one and width == 4 else count
            asm.line("ld.global.b32", f"${i * len(found) + k}", f"[${base}+{i * stride + offset}]")
    return asm.text()


@constexpr_function
def multiply(bits: int, one: bool, tiles: int, columns: int, kind: str) -> str:
    """Adds products of `tiles` rows of tiles with 8 · `columns` columns of B.

    Operands: 4 sums a tile and column, the sums so far, words as `load` loads them, of B its registers for each column,
    if `one`, how far a thread shifts each plane's words, and its tables. kind: of B's bytes, "s8" or "u8".
    """
    found, asm = offsets(bits, one), Asm()
    sums, per = 4 * tiles * columns, 1 if one else 4
    first_word, first_b = 2 * sums, 2 * sums + len(found) * tiles
    first_shift = first_b + per * columns
    first_table = first_shift + (len(planes(bits)) if one else 0)
    tables = [f"${first_table + i}" for i in range(table_words(bits))]
    for i in range(tiles):
        halves: list[dict[tuple[int, int], str]] = [{}, {}]
        for k, (width, vector, half, _) in enumerate(found):
            word = f"${first_word + i * len(found) + k}"
            if one:
                word = asm("shr.b32", word, f"${first_shift + planes(bits).index(width)}")
            for each in (0, 1) if width == 1 else (half,):
                halves[each][width, vector] = word
        started = set()
        for index in range(0, per, 2):
            both = [
                levels(asm, bits, tables, halves[half], half, at)
                for at in (index, index + 1)[: 1 if one else 2]
                for half in (0, 1)
            ]
            for a in zip(*both, strict=True):
                for column in range(columns):
                    to = [f"${4 * (column * tiles + i) + r}" for r in range(4)]
                    c = to if column in started else [f"${sums + 4 * (column * tiles + i) + r}" for r in range(4)]
                    started.add(column)
                    b = [f"${first_b + per * column + at}" for at in range(index, index + len(both) // 2)]
                    asm.line(_mma(len(b), kind), *(f"{{{', '.join(x)}}}" for x in (to, a, b, c)))
    return asm.text()


@constexpr_function
def _mma(registers: int, kind: str) -> str:
    return f"mma.sync.aligned.m16n8k{16 * registers}.row.col.s32.s8.{kind}.s32"


@constexpr_function
def total(number: int, registers: int, columns: int, kind: str) -> str:
    """`number` times the sum of each column of B.

    Operands: two sums a column, then B's registers by columns.
    """
    asm = Asm()
    a = asm("mov.b32", sum((number & 0xFF) << 8 * i for i in range(4)))
    for column in range(columns):
        sums = [asm("mov.b32", 0)] * 4
        for index in range(0, registers, 2):
            b = [f"${2 * columns + registers * column + at}" for at in range(index, min(index + 2, registers))]
            to = [asm.new() for _ in range(4)]
            asm.line(_mma(len(b), kind), *(f"{{{', '.join(x)}}}" for x in (to, [a] * 2 * len(b), b, sums)))
            sums = to
        for r in (0, 1):
            asm.line("mov.b32", f"${2 * column + r}", sums[r])
    return asm.text()


@constexpr_function
def pairs(bits: int, one: bool) -> tuple[int, ...]:
    """The steps that lie in pairs of neighbours in a thread: the first of each pair. Of one tile, those for t = 0."""
    return tuple(sorted({step // 2 * 2 for step in steps(bits)[0]})) if one else tuple(range(0, 16, 2))


@constexpr_function
def halves(bits: int, one: bool, columns: int) -> str:
    """Pairs of halves of float32 numbers. Operands: a register for each pair and column, then the numbers, by columns
    in the order of `steps`."""
    asm, order, found = Asm(), [step for quad in steps(bits)[: 1 if one else 4] for step in quad], pairs(bits, one)
    first = len(found) * columns
    for column in range(columns):
        for k, step in enumerate(found):
            low, high = (f"${first + len(order) * column + order.index(at)}" for at in (step, step + 1))
            asm.line("cvt.rn.f16x2.f32", f"${len(found) * column + k}", high, low)
    return asm.text()


@constexpr_function
def load_pairs(bits: int, one: bool, vectors: bool) -> str:
    """What a page has for each channel: a register for each pair, then the address of the thread's first one.

    vectors: whether it can be read 16 bytes at a time.
    """
    found, asm = pairs(bits, one), Asm()
    if one or not vectors:
        for k, step in enumerate(found):
            asm.line("ld.global.b32", f"${k}", f"[${len(found)}+{2 * step}]")
    else:
        for k in (0, 4):
            own = ", ".join(f"${k + i}" for i in range(4))
            asm.line("ld.global.v4.b32", f"{{{own}}}", f"[${len(found)}+{4 * k}]")
    return asm.text()


@constexpr_function
def times(count: int, columns: int) -> str:
    """Products of pairs. Operands: a register each, the left factors by columns, the right factors of any column."""
    asm = Asm()
    for column in range(columns):
        for k in range(count):
            at = count * column + k
            asm.line("mul.f16x2", f"${at}", f"${count * columns + at}", f"${2 * count * columns + k}")
    return asm.text()


@constexpr_function
def largest(count: int, columns: int) -> str:
    """The largest size of the halves of each column g: a float32 number for each column, then pairs by columns."""
    asm = Asm()
    for column in range(columns):
        first, *others = (asm("abs.f16x2", f"${columns + count * column + k}") for k in range(count))
        for other in others:
            first = asm("max.NaN.f16x2", first, other)
        for lanes in (1, 2):
            first = asm("max.NaN.f16x2", first, asm("shfl.sync.bfly.b32", first, lanes, 0x1F, 0xFFFFFFFF))
        first = asm("max.NaN.f16x2", first, asm("prmt.b32", first, first, 0x1032))
        asm.line("mov.b32", f"${column}", asm.floats(first)[0])
    return asm.text()


@constexpr_function
def round_pairs(bits: int, one: bool, columns: int, two_bytes: bool) -> str:
    """Pairs times a factor as whole numbers: B's registers.

    Operands: B's registers by columns, if there are two bytes the upper ones and then the lower ones; pairs by columns;
    for each column a float32 number that becomes the largest whole one.
    """
    asm, order, found = Asm(), steps(bits)[: 1 if one else 4], pairs(bits, one)
    out, count = len(order) * columns, len(found)
    first = (2 if two_bytes else 1) * out
    for column in range(columns):
        factor = asm("rcp.approx.ftz.f32", f"${first + count * columns + column}")
        factor = asm("mul.f32", factor, "0f46FE0000" if two_bytes else "0f42FE0000")  # 32,512 or 127
        values = [f"${first + count * column + k}" for k in range(count)]
        if two_bytes:
            numbers = [x for value in values for x in _two_floats(asm, value, factor)]
        else:
            values = _eight_bits(asm, values, factor)
        for k, quad in enumerate(order):
            to = f"${len(order) * column + k}"
            if two_bytes:
                own = [numbers[2 * found.index(step // 2 * 2) + step % 2] for step in quad]
                asm.line("mov.b32", to, _bytes(asm, own, 1))
                asm.line("xor.b32", f"${out + len(order) * column + k}", _bytes(asm, own, 0), 0x80808080)
            else:
                a, b = sorted({found.index(step // 2 * 2) for step in quad})
                chosen = [4 * (found.index(step // 2 * 2) == b) + 2 * (step % 2) for step in quad]
                asm.line("prmt.b32", to, values[a], values[b], sum(x << 4 * i for i, x in enumerate(chosen)))
    return asm.text()


@constexpr_function
def _eight_bits(asm: Asm, values: list[str], factor: str) -> list[str]:
    """Pairs times a factor, as whole numbers in the lowest bits of halves. The factor is taken in two parts: a half
    may not hold it."""
    small = asm("min.f32", factor, "0f47000000")  # 2¹⁵
    rest = asm("mul.f32", factor, asm("rcp.approx.ftz.f32", small))
    small, rest = (asm("cvt.rn.f16x2.f32", x, x) for x in (small, rest))
    magic = asm("mov.b32", 0x66006600)
    return [asm("fma.rn.f16x2", asm("mul.f16x2", value, rest), small, magic) for value in values]


@constexpr_function
def _two_floats(asm: Asm, value: str, factor: str) -> list[str]:
    """A pair times a factor, rounded, and 128 more, in the lowest bits of float32 numbers."""
    return [asm("fma.rn.f32", x, factor, "0f4B400080") for x in asm.floats(value)]


@constexpr_function
def _bytes(asm: Asm, numbers: Sequence[str], byte: int) -> str:
    """One byte of each of four registers."""
    two = byte | (byte + 4) << 4
    return asm("prmt.b32", asm("prmt.b32", *numbers[:2], two), asm("prmt.b32", *numbers[2:], two), 0x5410)


@constexpr_function
def pack(bits: int, columns: int, byte: int) -> str:
    """B's registers for four tiles from whole numbers.

    Operands: B's registers by columns, then the numbers of each column, a tile's 16 steps in their own order.
    """
    asm, order = Asm(), steps(bits)
    for column in range(columns):
        for k, quad in enumerate(order):
            own = [f"${4 * columns + 16 * column + step}" for step in quad]
            asm.line("mov.b32", f"${4 * column + k}", _bytes(asm, own, byte))
    return asm.text()


@constexpr_function
def dot(count: int, columns: int) -> str:
    """Products of pairs, summed over a column, in float32.

    Operands: two sums a column; pairs by columns, as B; what they are multiplied with, the same in all lanes of one t.
    Two of the latter are A, one in rows g and one in rows g + 8, and each row is right for one of both products.
    """
    asm = Asm()
    first = 2 * columns + count * columns
    for column in range(columns):
        sums = [[asm("mov.b32", 0)] * 4 for _ in (0, 1)]
        for k in range(0, count, 2):
            a = [f"${first + k}", f"${first + k + 1}"]
            for row in (0, 1):
                to = [asm.new() for _ in range(4)]
                b = [f"${2 * columns + count * column + k + row}"]
                asm.line(
                    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
                    *(f"{{{', '.join(x)}}}" for x in (to, a, b, sums[row])),
                )
                sums[row] = to
        for r in (0, 1):
            asm.line("add.f32", f"${2 * column + r}", sums[0][r], sums[1][2 + r])
    return asm.text()


@constexpr_function
def exchange(columns: int) -> str:
    """What threads (g, ·) have, for rows g of each column, as sums have it: rows 2 · t and 2 · t + 1.

    Operands: two numbers a column, one a column, and t.
    """
    asm = Asm()
    lanes = [asm("shl.b32", f"${3 * columns}", 3)]
    lanes.append(asm("add.u32", lanes[0], 4))
    for column in range(columns):
        for r, lane in enumerate(lanes):
            asm.line("shfl.sync.idx.b32", f"${2 * column + r}", f"${2 * columns + column}", lane, 0x1F, 0xFFFFFFFF)
    return asm.text()


@constexpr_function
def lane_offsets(bits: int) -> list[tuple[int, int, int, int]]:
    """All words of a tile, as of `offsets`, but for each lane: plane, vector, lane, and the offset in bytes."""
    found, start = [], 0
    for width in planes(bits):
        lanes = 8 if width == 1 else 16
        found += [
            (width, vector, lane, start + 64 * vector + 4 * lane)
            for vector in range(width // 2 or 1) for lane in range(lanes)
        ]  # fmt: skip
        start += 32 * width
    return found


@constexpr_function
def load_lanes(bits: int) -> str:
    """All words of a tile. Operands: a register each, and the tile's address, a multiple of 16."""
    asm, count = Asm(), len(lane_offsets(bits))
    for first in range(0, count, 4):
        own = ", ".join(f"${first + i}" for i in range(4))
        asm.line("ld.global.v4.b32", f"{{{own}}}", f"[${count}+{lane_offsets(bits)[first][3]}]")
    return asm.text()


@constexpr_function
def multiply_lanes(bits: int, columns: int, kind: str) -> str:
    """Products with codes whose lanes are summed over: of a thread's tile, 16 lanes, for each of the 16 steps.

    A thread has a tile of its own, g of eight along the steps and t of four along the lanes. Four bytes of four lanes
    are transposed to four lanes of a step. Rows g of A are a step of `steps(bits)`, rows g + 8 the next one there.

    Operands: 4 sums for each pair of steps and column; words as `load_lanes` loads them; of B, four registers a column,
    lanes in their own order; the table.
    """
    asm, found = Asm(), lane_offsets(bits)
    sums, first_b = 32 * columns, 32 * columns + len(found)
    table_ = [f"${first_b + 4 * columns + i}" for i in range(table_words(bits))]
    words: list[dict[tuple[int, int], str]] = [{} for _ in range(16)]
    for k, (width, vector, lane, _) in enumerate(found):
        for each in (lane, lane + 8) if width == 1 else (lane,):
            words[each][width, vector] = f"${sums + k}"
    zero = asm("mov.b32", 0)
    started = set()
    for quad in range(4):
        by_lane = [levels(asm, bits, table_, words[lane], lane // 8, quad) for lane in range(16)]
        for part in zip(*by_lane, strict=True):
            of_steps = [_transposed(asm, part[4 * i : 4 * i + 4]) for i in range(4)]
            for k in (0, 2):
                for pair in (0, 1):
                    a = [of_steps[k + i][2 * pair + half] for i in (0, 1) for half in (0, 1)]
                    for column in range(columns):
                        to = [f"${4 * (8 * column + 2 * quad + pair) + r}" for r in range(4)]
                        c = to if (quad, pair, column) in started else [zero] * 4
                        started.add((quad, pair, column))
                        b = [f"${first_b + 4 * column + k + i}" for i in (0, 1)]
                        asm.line(_mma(2, kind), *(f"{{{', '.join(x)}}}" for x in (to, a, b, c)))
    return asm.text()


@constexpr_function
def _transposed(asm: Asm, rows: Sequence[str]) -> list[str]:
    """Four registers of four bytes, transposed."""
    low = [asm("prmt.b32", *rows[i : i + 2], 0x5140) for i in (0, 2)]
    high = [asm("prmt.b32", *rows[i : i + 2], 0x7362) for i in (0, 2)]
    return [asm("prmt.b32", *x, how) for x in (low, high) for how in (0x5410, 0x7632)]


@constexpr_function
def load_plain(tiles: int, dim: int) -> str:
    """Halves of channels 4 · t … of each 16 of tokens g and g + 8 of `tiles` tiles.

    Operands: two registers each, and the address of the first.
    """
    asm, chunks = Asm(), dim // 16
    for i in range(tiles):
        for chunk in range(chunks):
            for half in (0, 1):
                k = 2 * (half + 2 * (chunk + chunks * i))
                at = 2 * dim * (16 * i + 8 * half) + 32 * chunk
                asm.line("ld.global.v2.b32", f"{{${k}, ${k + 1}}}", f"[${4 * tiles * chunks}+{at}]")
    return asm.text()


@constexpr_function
def multiply_plain(tiles: int, dim: int, columns: int) -> str:
    """Products of halves with pairs, in float32.

    Operands: 4 sums a tile and column; halves as `load_plain` loads them; two pairs for each 16 channels, by columns.
    """
    asm = Asm()
    sums, chunks = 4 * tiles * columns, dim // 16
    first_b = sums + 4 * tiles * chunks
    zero = asm("mov.b32", 0)
    for i in range(tiles):
        for column in range(columns):
            to = [f"${4 * (column * tiles + i) + r}" for r in range(4)]
            for chunk in range(chunks):
                at = sums + 4 * (chunk + chunks * i)
                a = [f"${at + k}" for k in (0, 2, 1, 3)]
                b = [f"${first_b + 2 * (chunk + chunks * column) + k}" for k in (0, 1)]
                c = to if chunk else [zero] * 4
                asm.line(
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
                    *(f"{{{', '.join(x)}}}" for x in (to, a, b, c)),
                )
    return asm.text()


@constexpr_function
def in_pairs(count: int) -> str:
    """Halves of neighbouring float32 numbers. Operands: a register for each pair, then the numbers."""
    asm = Asm()
    for k in range(count):
        asm.line("cvt.rn.f16x2.f32", f"${k}", f"${count + 2 * k + 1}", f"${count + 2 * k}")
    return asm.text()
