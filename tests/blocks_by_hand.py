"""Every block format written out one number at a time, from the formulas alone: what the tests hold the package to.

Each format turns one vector into its bytes and back; `CASES` has them by name. Run as a program, this file rewrites
`golden_blocks.json`: vectors, their bytes, and what the bytes decode to. All is in double precision except where a
format says float32, float16 or bfloat16. So that any careful float32 code must come to the same bytes, vectors are
taken only where every rounding and comparison is well clear of a tie (see `Watch`).
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path

import torch

Vector = list[float]

# ---------------------------------------------------------------- near misses, rounding, packing


@dataclass
class Watch:
    """The closest that any decision so far came to going the other way; 1 = just far enough for float32 code."""

    closest: float = math.inf

    def see(self, distance: float, needed: float) -> None:
        self.closest = min(self.closest, distance / needed)

    def tie(self, steps: float, needed: float) -> None:
        """A number in units of what it is rounded to: how far from halfway between two of them."""
        self.see(abs(steps % 1 - 0.5), needed)


WATCH = Watch()


def float32(x: float) -> float:
    """x rounded to float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bfloat16(x: float) -> float:
    """x rounded to 8 significant bits, ties to even."""
    ulp = 2.0 ** (math.frexp(x)[1] - 8)
    WATCH.tie(x / ulp, 0.001)
    return round(x / ulp) * ulp


def half(x: float) -> bytes:
    """x rounded to 11 significant bits, or to 2⁻²⁴ where that is coarser: a float16."""
    WATCH.tie(x / 2.0 ** max(math.frexp(x)[1] - 11, -24), 0.02)
    return struct.pack("<e", x)


def floats(kind: str, data: bytes) -> Vector:
    """The little-endian numbers in data: kind e = float16, f = float32."""
    return [x for (x,) in struct.iter_unpack("<" + kind, data)]


def pack(codes: list[int], bits: int) -> bytes:
    """Code k at bits k·b to k·b + b − 1 of one long little-endian number."""
    return sum(code << bits * k for k, code in enumerate(codes)).to_bytes(len(codes) * bits // 8, "little")


def unpack(data: bytes, bits: int) -> list[int]:
    """The codes that `pack` was given."""
    number = int.from_bytes(data, "little")
    return [number >> bits * k & (1 << bits) - 1 for k in range(len(data) * 8 // bits)]


def index(x: float, bounds: Vector, needed: float = 1e-4) -> int:
    """The number of bounds ≤ x."""
    WATCH.see(min(abs(x - b) for b in bounds), needed)
    return sum(b <= x for b in bounds)


def midpoints(levels: Vector) -> Vector:
    return [(a + b) / 2 for a, b in pairwise(levels)]


def both_signs(positive: Vector) -> Vector:
    return [-x for x in reversed(positive)] + positive


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(x: Vector) -> float:
    return math.sqrt(dot(x, x))


def rms(x: Vector) -> float:
    return norm(x) / math.sqrt(len(x))


# ---------------------------------------------------------------- TBQ3, TBQ4, TBQP3, TBQP4

CENTROIDS = {
    2: both_signs([0.4528, 1.5104]),
    3: both_signs([0.2451, 0.7560, 1.3440, 2.1520]),
    4: both_signs([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6180, 2.0690, 2.7326]),
}
BOUNDARIES = {
    2: [-0.9816, 0.0, 0.9816],
    3: [-1.7480, -1.0500, -0.5006, 0.0, 0.5006, 1.0500, 1.7480],
    4: [
        *(-2.4008, -1.8435, -1.4371, -1.0993, -0.7996, -0.5225, -0.2583, 0.0),
        *(0.2583, 0.5225, 0.7996, 1.0993, 1.4371, 1.8435, 2.4008),
    ],
}


def signs(table: str) -> Vector:
    """±1 from bits, least significant first: a 1 is −1."""
    return [1.0 - 2.0 * bit for bit in unpack(bytes.fromhex(table), 1)]


SIGNS_512 = signs(
    "a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb"
    "d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85"
)
QJL_SIGNS = {
    256: SIGNS_512[256:],
    512: signs(
        "214e758d12a104886c5d2cb38ce200d430c215382bb0a532f8be8a1d4386f36f"
        "bc9bddcb058a09f32f39173c6fb8757874446f2a6a23250d614f35bb047bbc3d"
    ),
}
SECOND_SIGNS_64 = signs("b37f24d68945ea1c")


def times(a: Vector, b: Vector) -> Vector:
    return [x * y for x, y in zip(a, b, strict=True)]


def hadamard(x: Vector) -> Vector:
    """H·x without a factor: H₁ = 1, H₂ₙ = [[Hₙ, Hₙ], [Hₙ, −Hₙ]]."""
    if len(x) == 1:
        return x
    a, b = hadamard(x[: len(x) // 2]), hadamard(x[len(x) // 2 :])
    return [p + q for p, q in zip(a, b, strict=True)] + [p - q for p, q in zip(a, b, strict=True)]


@dataclass(frozen=True)
class Tbq:
    """One TBQ (or, with `residual_sign`, TBQP) type: `transformed` values a vector, then `rope` values as float16.

    In each form the stored scale d is the RMS of the transformed vector w: for one unnormalised transform, ‖x‖.
    """

    level_bits: int
    residual_sign: bool
    transformed: int
    rope: int = 0
    twice: bool = False

    @property
    def part(self) -> int:
        """Values in one block."""
        return min(self.transformed, 256)

    @property
    def qjl(self) -> bool:
        """Whether signs are of H(s₂⊙r) rather than of r."""
        return self.transformed >= 256

    def forward(self, x: Vector) -> Vector:
        """w = H(s⊙x), or H(S₂⊙H(S₁⊙x))."""
        w = hadamard(times(SIGNS_512[: len(x)], x))
        return hadamard(times(SECOND_SIGNS_64, w)) if self.twice else w

    def back(self, w: Vector) -> Vector:
        """x = s⊙H(w)/D, or S₁⊙H(S₂⊙H(w))/D²."""
        if self.twice:
            w = [v / len(w) for v in times(SECOND_SIGNS_64, hadamard(w))]
        return [v / len(w) for v in times(SIGNS_512[: len(w)], hadamard(w))]

    def scales(self, w: Vector) -> Vector:
        """d of each block: the RMS of its own part of w; of the whole of it where residual signs are kept."""
        parts = [w[i : i + self.part] for i in range(0, len(w), self.part)]
        return [rms(w if self.residual_sign else p) for p in parts]

    def residual(self, r: Vector, d: float) -> tuple[float, list[int]]:
        """QJL: ‖r‖·d and H(s₂⊙r) ≥ 0; direct sign: mean|r|·d and r ≥ 0."""
        seen = hadamard(times(QJL_SIGNS[len(r)], r)) if self.qjl else r
        size = norm(r) if self.qjl else sum(map(abs, r)) / len(r)
        for v in seen:
            WATCH.see(abs(v), 1e-4 * max(1.0, rms(seen)))
        return size * d, [int(v >= 0) for v in seen]

    def encode(self, x: Vector) -> bytes:
        """For each block: d, [d_qjl], codes of w/d, [signs of r = w/d − c]; then the RoPE part."""
        w = self.forward(x[: self.transformed])
        scales = self.scales(w)
        unit = [v / (scales[j // self.part] or 1.0) for j, v in enumerate(w)]
        codes = [index(u, BOUNDARIES[self.level_bits]) for u in unit]
        r = [u - CENTROIDS[self.level_bits][c] for u, c in zip(unit, codes, strict=True)]
        d_qjl, bits = self.residual(r, scales[0]) if self.residual_sign else (0.0, [])
        out = b""
        for k, d in enumerate(scales):
            mine = slice(k * self.part, (k + 1) * self.part)
            out += half(d) + (half(d_qjl) if self.residual_sign else b"")
            out += pack(codes[mine], self.level_bits) + pack(bits[mine], 1)
        return out + b"".join(map(half, x[self.transformed :]))

    def fields(self, row: bytes) -> tuple[Vector, float, Vector, Vector]:
        """d·c of all blocks, d_qjl, the residual's signs as ±1, and the RoPE part."""
        scaled: Vector = []
        d_qjl, bits = 0.0, []
        for _ in range(self.transformed // self.part):
            head, row = floats("e", row[: 2 + 2 * self.residual_sign]), row[2 + 2 * self.residual_sign :]
            code_bytes, sign_bytes = self.part * self.level_bits // 8, self.part // 8 * self.residual_sign
            scaled += [head[0] * CENTROIDS[self.level_bits][c] for c in unpack(row[:code_bytes], self.level_bits)]
            bits += unpack(row[code_bytes : code_bytes + sign_bytes], 1)
            d_qjl, row = head[-1], row[code_bytes + sign_bytes :]
        return scaled, d_qjl, [2.0 * b - 1.0 for b in bits], floats("e", row)

    def decode(self, row: bytes) -> Vector:
        """The centroids alone, transformed back; then the RoPE part."""
        scaled, _, _, rope = self.fields(row)
        return self.back(scaled) + rope

    def score(self, q: Vector, row: bytes) -> float:
        """q·x̂ + d_qjl·Σ sign·Q_wht/D (D² after two transforms), or d_qjl·√(π/2)·Σ sign·H(s₂⊙Q_wht)/D²."""
        _, d_qjl, sign, _ = self.fields(row)
        q_wht = self.forward(q[: self.transformed])
        divisor: float = self.transformed ** (2 if self.twice else 1)
        if self.qjl:
            q_wht = hadamard(times(QJL_SIGNS[self.transformed], q_wht))
            divisor = self.transformed**2 / math.sqrt(math.pi / 2)
        return dot(q, self.decode(row)) + d_qjl * dot(sign, q_wht) / divisor


# ---------------------------------------------------------------- Q8_0 and Q4_0, as in ggml


def blocks_of(items: Vector, size: int = 32) -> Iterator[Vector]:
    return (items[i : i + size] for i in range(0, len(items), size))


def q8_0_block(x: Vector) -> bytes:
    """d = max|x|/127; q = x/d rounded, halves away from 0."""
    d = float32(max(map(abs, x)) / 127)
    inverse = float32(1 / d) if d else 0.0
    scaled = [float32(v * inverse) for v in x]
    for v in scaled:
        WATCH.tie(v, 1e-4)
    return half(d) + bytes(int(math.copysign(math.floor(abs(v) + 0.5), v)) & 255 for v in scaled)


def q4_0_block(x: Vector) -> bytes:
    """d = m/−8 with m the first value of largest size; q = ⌊x/d + 8.5⌋ up to 15; byte j = q[j] | q[j+16] << 4."""
    d = float32(max(x, key=abs) / -8)
    inverse = float32(1 / d) if d else 0.0
    shifted = [float32(float32(v * inverse) + 8.5) for v in x]
    for v in shifted:
        WATCH.tie(v + 0.5, 1e-4)
    q = [min(15, int(v)) for v in shifted]
    return half(d) + bytes(q[j] | q[j + 16] << 4 for j in range(16))


def q8_0_encode(x: Vector) -> bytes:
    return b"".join(map(q8_0_block, blocks_of(x)))


def q4_0_encode(x: Vector) -> bytes:
    return b"".join(map(q4_0_block, blocks_of(x)))


def q8_0_decode(row: bytes) -> Vector:
    """x̂ = d·q."""
    return [d * q for d, *codes in struct.iter_unpack("<e32b", row) for q in codes]


def q4_0_decode(row: bytes) -> Vector:
    """x̂ = d·(q − 8), the low nibbles first."""
    blocks = struct.iter_unpack("<e16B", row)
    return [d * (q - 8) for d, *b in blocks for q in [v & 15 for v in b] + [v >> 4 for v in b]]


# ---------------------------------------------------------------- TQ3 and TQ4

TQ_LEVELS = {
    3: both_signs([0.0217497133497666, 0.0670292218440566, 0.1187950167018509, 0.1890403719434884]),
    4: both_signs(
        [
            *(0.0117328498192312, 0.0353901768727086, 0.0596213061688922, 0.0850748102440574),
            *(0.1127658636629929, 0.1443097007690654, 0.1831710841564345, 0.2396125330713870),
        ]
    ),
}
MASK = (1 << 64) - 1


def splitmix64(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def rotate_left(x: int, k: int) -> int:
    return (x << k | x >> 64 - k) & MASK


def xoshiro256(seed: int) -> Iterator[int]:
    """xoshiro256**, its four words from SplitMix64."""
    a, b, c, d = islice(splitmix64(seed), 4)
    while True:
        yield rotate_left(b * 5 & MASK, 7) * 9 & MASK
        c, d, shifted = c ^ a, d ^ b, b << 17 & MASK
        b, a = b ^ c, a ^ d
        c, d = c ^ shifted, rotate_left(d, 45)


def normals(seed: int) -> Iterator[float]:
    """√(−2 ln u₁)·cos(2π u₂), u = the top 53 bits; u₁ = 0 is drawn again."""
    uniforms = ((word >> 11) * 2.0**-53 for word in xoshiro256(seed))
    while True:
        u1 = next(u for u in uniforms if u)
        yield math.sqrt(-2 * math.log(u1)) * math.cos(2 * math.pi * next(uniforms))


@cache
def tq_rotation() -> list[Vector]:
    """Rows of Π: normals filled in row by row, columns by modified Gram–Schmidt, rounded to float32."""
    source = normals(42)
    rows = [list(islice(source, 128)) for _ in range(128)]
    done: list[Vector] = []
    for column in map(list, zip(*rows, strict=True)):
        for other in done:
            along = dot(other, column)
            column = [v - along * o for v, o in zip(column, other, strict=True)]
        length = norm(column)
        done.append([v / length for v in column])
    return [[float32(v) for v in row] for row in zip(*done, strict=True)]


def tq_encode(x: Vector, bits: int) -> bytes:
    """float32 ‖x‖, then the level nearest to each coordinate of Π·x/‖x‖."""
    length = norm(x)
    unit = [v / (length or 1.0) for v in x]
    bounds = midpoints(TQ_LEVELS[bits])
    codes = [index(dot(row, unit), bounds, 1e-4 / math.sqrt(128)) for row in tq_rotation()]
    return struct.pack("<f", length) + pack(codes, bits)


def tq_decode(block: bytes, bits: int) -> Vector:
    """x̂ = ‖x‖·Πᵀ·c."""
    (length,) = floats("f", block[:4])
    levels = [length * TQ_LEVELS[bits][c] for c in unpack(block[4:], bits)]
    return [dot(list(column), levels) for column in zip(*tq_rotation(), strict=True)]


# ---------------------------------------------------------------- POLAR4

EPSILON = 1e-6  # its model's


@cache
def gaussian_levels(number: int) -> tuple[float, ...]:
    """Lloyd–Max levels of N(0,1) as 200 steps find them: each the mean of its cell, cells parted at the midpoints."""
    levels = [7 * (i + 0.5) / number - 3.5 for i in range(number)]
    for _ in range(200):
        edges = [-math.inf, *midpoints(levels), math.inf]
        density = [math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges]
        below = [(1 + math.erf(e / math.sqrt(2))) / 2 for e in edges]
        cells = zip(pairwise(density), pairwise(below), strict=True)
        levels = [(d0 - d1) / (p1 - p0) for (d0, d1), (p0, p1) in cells]
    return tuple(levels)


def polar_levels() -> Vector:
    """The 16 levels of N(0, 1/128)."""
    return [level / math.sqrt(128) for level in gaussian_levels(16)]


@cache
def polar_rotation(layer: int) -> list[Vector]:
    """R: QR of a layer's own Gaussian matrix, Q·sign(diag R), in bfloat16.

    The QR is in double: a float32 one differs with the number of threads, and so some ten entries of R by an ulp.
    """
    generator = torch.Generator().manual_seed(42 + 1000 * layer)
    q, r = torch.linalg.qr(torch.randn(128, 128, generator=generator).double())
    return (q * r.diagonal().sign()).bfloat16().double().tolist()


def polar_encode(x: Vector, layer: int, packed: bool) -> bytes:
    """idx = #(y ≥ b) of y = x̂ R, x̂ = x/γ; a byte each, or byte c = idx[c+64] << 4 | idx[c]; then float32 γ."""
    gamma = float32(math.sqrt(dot(x, x) + EPSILON))
    unit = [bfloat16(float32(v / gamma)) for v in x]
    bounds = midpoints(polar_levels())
    turned = [dot(unit, list(column)) for column in zip(*polar_rotation(layer), strict=True)]
    idx = [index(y, bounds, 2e-3 / math.sqrt(128)) for y in turned]
    stored = bytes(idx[c + 64] << 4 | idx[c] for c in range(64)) if packed else bytes(idx)
    return stored + struct.pack("<f", gamma)


def polar_decode(row: bytes, layer: int, packed: bool) -> Vector:
    """bf16(c·rsqrt(Σc² + ε)·γ) @ Rᵀ."""
    stored, (gamma,) = row[:-4], floats("f", row[-4:])
    idx = [b & 15 for b in stored] + [b >> 4 for b in stored] if packed else list(stored)
    levels = [float32(level) for level in polar_levels()]
    c = [levels[i] for i in idx]
    scale = float32(1 / math.sqrt(dot(c, c) + EPSILON))
    turned = [bfloat16(float32(float32(v * scale) * gamma)) for v in c]
    return [dot(turned, line) for line in polar_rotation(layer)]


# ---------------------------------------------------------------- AMX3_1 and TBQX3_1

RADII = [0.3399, 0.6422, 0.8651, 1.0730, 1.2869, 1.5277, 1.8371, 2.4546]
RADIUS_BOUNDS = [math.sqrt(-2 * math.log(1 - k / 8)) for k in range(1, 8)]
TBQ3_1 = Tbq(3, False, 128)


def polar(r: float, phi: float) -> complex:
    return complex(r * math.cos(phi), r * math.sin(phi))


def turn(f: int, position: int, base: float) -> complex:
    """e^{iθ}, θ = position·base^(−2f/128)."""
    return polar(1.0, position * base ** (-2 * f / 128))


def content(x: Vector, position: int, base: float) -> list[complex]:
    """k_f = (x[f] + i·x[f+64])·e^{−iθ}: the key before its rotary embedding."""
    return [complex(x[f], x[f + 64]) * turn(f, position, base).conjugate() for f in range(64)]


def pair_scale(pairs: list[complex]) -> float:
    """σ = √(Σr²/128), at least 1/1024."""
    return max(math.sqrt(sum(abs(k) ** 2 for k in pairs) / 128), 1 / 1024)


def angle(p: complex) -> float:
    """φ in [−π, π)."""
    phi = math.atan2(p.imag, p.real)
    return -math.pi if phi == math.pi else phi


def centre(cell: int, cells: int) -> float:
    """(i + ½)·2π/n − π."""
    return (cell + 0.5) * 2 * math.pi / cells - math.pi


def nearest_cells(p: complex, cells: int) -> tuple[int, int]:
    """Radius index by the bounds, angle index by the cell that φ lies in."""
    WATCH.see(abs(p), 1e-3)
    place = (angle(p) + math.pi) / (2 * math.pi / cells)
    WATCH.tie(place + 0.5, 1e-4 * cells)
    return index(abs(p), RADIUS_BOUNDS), int(place) % cells


def search(p: complex) -> tuple[int, int]:
    """Of radii ri ± 2 and angles φi ± 2, the pair with the largest p·p̂ − 0.7·|p − p̂|²."""
    r, phi = nearest_cells(p, 16)
    steps = range(-2, 3)
    gains: dict[tuple[int, int], float] = {}
    for code in [(min(max(r + i, 0), 7), (phi + j) % 16) for i in steps for j in steps]:
        guess = polar(RADII[code[0]], centre(code[1], 16))
        gains[code] = (p.conjugate() * guess).real - 0.7 * abs(p - guess) ** 2
    best, second = sorted(gains.values(), reverse=True)[:2]
    WATCH.see(best - second, 1e-4 * max(1.0, abs(p) ** 2))
    return max(gains, key=lambda code: gains[code])


def amx3_encode(x: Vector, position: int, base: float) -> bytes:
    """TBQ3_1's block, then float16 σ, 3-bit radii and 4-bit angles of the key before its rotary embedding."""
    pairs = content(x, position, base)
    sigma = pair_scale(pairs)
    codes = [search(k / sigma) for k in pairs]
    return TBQ3_1.encode(x) + half(sigma) + pack([r for r, _ in codes], 3) + pack([phi for _, phi in codes], 4)


def amx3_decode(block: bytes) -> Vector:
    """What attention reads: the TBQ3_1 block."""
    return TBQ3_1.decode(block[:50])


def amx3_pre_rope(block: bytes) -> Vector:
    """What eviction reads: k_f = σ·r·e^{iφ}, real parts first; no rotation."""
    (sigma,) = floats("e", block[50:52])
    codes = zip(unpack(block[52:76], 3), unpack(block[76:], 4), strict=True)
    pairs = [sigma * polar(RADII[r], centre(phi, 16)) for r, phi in codes]
    return [k.real for k in pairs] + [k.imag for k in pairs]


def tbqx3_encode(x: Vector, position: int, base: float) -> bytes:
    """float16 σ, 3-bit radii, 3-bit angles, and a bit that is 1 where φ − centre ≥ 0."""
    pairs = content(x, position, base)
    sigma = pair_scale(pairs)
    codes = [nearest_cells(k / sigma, 8) for k in pairs]
    offsets = [angle(k) - centre(phi, 8) for k, (_, phi) in zip(pairs, codes, strict=True)]
    for offset in offsets:
        WATCH.see(abs(offset), 1e-4)
    radii, angles = [r for r, _ in codes], [phi for _, phi in codes]
    return half(sigma) + pack(radii, 3) + pack(angles, 3) + pack([int(o >= 0) for o in offsets], 1)


def tbqx3_decode(block: bytes, position: int, base: float) -> Vector:
    """k_f = (r·e^{iφ} ± (r·π/16)·i·e^{iφ})·e^{iθ}, r times σ."""
    (sigma,) = floats("e", block[:2])
    codes = zip(unpack(block[2:26], 3), unpack(block[26:50], 3), unpack(block[50:], 1), strict=True)
    pairs = []
    for f, (r, phi, up) in enumerate(codes):
        tangent = complex(1, math.pi / 16 if up else -math.pi / 16)
        pairs.append(polar(sigma * RADII[r], centre(phi, 8)) * tangent * turn(f, position, base))
    return [k.real for k in pairs] + [k.imag for k in pairs]


# ---------------------------------------------------------------- all of them by name


@dataclass(frozen=True)
class Case:
    """One type: how a vector becomes bytes and back, and what else a test must know of it."""

    head_dim: int
    block_bytes: int
    encode: Callable[[Vector], bytes]
    decode: Callable[[bytes], Vector]
    score: Callable[[Vector, bytes], float] | None = None
    pre_rope: Callable[[bytes], Vector] | None = None
    notes: Mapping[str, float] = field(default_factory=dict)


def tbq_cases() -> dict[str, Case]:
    """The 24 TBQ and TBQP types; `_0x2` is `_0` at head_dim 512."""
    types = {"tbq3": (3, False), "tbq4": (4, False), "tbqp3": (2, True), "tbqp4": (3, True)}
    shapes = {"_0": (256, 0), "_0x2": (512, 0), "_1": (128, 0), "_2": (64, 0), "_3": (64, 0), "_4": (512, 64)}
    sizes = {
        "tbq3": [98, 196, 50, 26, 26, 324],
        "tbq4": [130, 260, 66, 34, 34, 388],
        "tbqp3": [100, 200, 52, 28, 28, 328],
        "tbqp4": [132, 264, 68, 36, 36, 392],
    }
    cases = {}
    for name, (level_bits, residual_sign) in types.items():
        for (suffix, (transformed, rope)), size in zip(shapes.items(), sizes[name], strict=True):
            tbq = Tbq(level_bits, residual_sign, transformed, rope, twice=suffix == "_3")
            score = tbq.score if residual_sign else None
            cases[name + suffix] = Case(transformed + rope, size, tbq.encode, tbq.decode, score)
    return cases


def tq_case(bits: int, size: int) -> Case:
    return Case(128, size, partial(tq_encode, bits=bits), partial(tq_decode, bits=bits), notes={"norm_ulp": 1})


def polar_case(layer: int, packed: bool, size: int) -> Case:
    encode = partial(polar_encode, layer=layer, packed=packed)
    decode = partial(polar_decode, layer=layer, packed=packed)
    return Case(128, size, encode, decode, notes={"layer": layer, "norm_ulp": 1})


def amx3_case(position: int, base: float) -> Case:
    encode = partial(amx3_encode, position=position, base=base)
    return Case(128, 108, encode, amx3_decode, pre_rope=amx3_pre_rope, notes={"position": position, "base": base})


def tbqx3_case(position: int, base: float) -> Case:
    encode = partial(tbqx3_encode, position=position, base=base)
    decode = partial(tbqx3_decode, position=position, base=base)
    return Case(128, 58, encode, decode, notes={"position": position, "base": base})


CASES = {
    **tbq_cases(),
    "q8_0": Case(128, 136, q8_0_encode, q8_0_decode),
    "q4_0": Case(128, 72, q4_0_encode, q4_0_decode),
    "tq3": tq_case(3, 52),
    "tq4": tq_case(4, 68),
    "polar4_u8": polar_case(3, False, 132),
    "polar4": polar_case(3, True, 68),
    "amx3_1": amx3_case(37, 1e6),
    "tbqx3_1": tbqx3_case(21, 1e4),
}

# ---------------------------------------------------------------- the golden file


def bell(seed: int, size: int) -> Vector:
    """Σ of 12 uniforms − 6, from a linear congruence, in steps of 1/64: near to Gaussian and exact in float16."""
    values = []
    for _ in range(size):
        total = 0
        for _ in range(12):
            seed = (6364136223846793005 * seed + 1442695040888963407) & MASK
            total += seed >> 32
        values.append((round(total / 2**26) - 384) / 64)
    return values


def vector(kind: str, seed: int, size: int) -> Vector:
    """A Gaussian vector as it is, with two big channels, or tiny."""
    x = bell(seed, size)
    if kind == "outliers":
        x[5], x[size // 2 + 9] = -24.0, 17.0
    return [v / 2048 for v in x] if kind == "tiny" else x


def clear_of_ties(kind: str, seed: int, case: Case) -> Vector:
    """The first vector from a seed on that bfloat16 holds exactly and that float32 code must treat as we do."""
    while True:
        x = vector(kind, seed, case.head_dim)
        WATCH.closest = math.inf
        case.decode(case.encode(x))
        if WATCH.closest >= 1 and all(bfloat16(v) == v for v in x):
            return x
        seed += 1


def hexed(x: Vector) -> str:
    """As little-endian float32."""
    return struct.pack(f"<{len(x)}f", *x).hex()


def golden(case: Case) -> dict[str, object]:
    """One type's entry."""
    vectors = [clear_of_ties(kind, 1000 * i, case) for i, kind in enumerate(["gaussian", "outliers", "tiny"])]
    rows = [case.encode(x) for x in vectors]
    assert all(len(row) == case.block_bytes for row in rows)
    entry: dict[str, object] = {"head_dim": case.head_dim, "block_bytes": case.block_bytes, **case.notes}
    entry["vectors"] = [hexed(x) for x in vectors]
    entry["blocks"] = [row.hex() for row in rows]
    entry["decoded"] = [hexed(case.decode(row)) for row in rows]
    if case.pre_rope:
        entry["pre_rope"] = [hexed(case.pre_rope(row)) for row in rows]
    if case.score:
        query = bell(3000, case.head_dim)
        entry["query"] = hexed(query)
        entry["scores"] = [case.score(query, row) for row in rows]
    return entry


if __name__ == "__main__":
    entries = {name: golden(case) for name, case in CASES.items()}
    Path(__file__).with_name("golden_blocks.json").write_text(json.dumps(entries, indent=1) + "\n")
