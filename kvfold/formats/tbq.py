"""TBQ and TBQP blocks of a fork of llama.cpp: Walsh–Hadamard, fixed levels, for TBQP a sign of each remainder."""

from dataclasses import dataclass
from functools import cached_property
from math import pi, sqrt

import torch
from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant import tbq
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream
from kvfold.quant.sharpening import sharpening, softening
from kvfold.quant.transforms import Matrix, Transform

HALF = 256
"""Longer vectors are stored as blocks of this size, with a scale each."""
ROPE = 64
"""Rotary channels at the end of an MLA key of 512 + 64: they stay float16."""


@dataclass(frozen=True)
class TBQ(BlockFormat):
    """x̂ = (d/D)·s⊙H·c: sign flips s, an unnormalised Walsh–Hadamard matrix H, levels c of N(0, 1), and d = ‖x‖.

    D = 512 has one H and a d for each half. D = 576 is an MLA key: a latent of 512 and 64 rotary channels, which stay
    float16. With `signs`, a code has one bit less, and each coordinate has a sign bit for the remainder. Up to D = 128
    that is the sign of the coordinate's remainder ("direct sign"), above it the sign after a second Hadamard transform
    (QJL). With `signs`, both halves of D = 512 take the d of the whole vector.
    """

    signs: bool = False
    """Whether one of the bits is a sign (TBQP)."""
    double: bool = False
    """Whether D = 64 goes through two sign flips and two H, with d the root mean square of the result."""

    summary = "Blocks of Walsh–Hadamard coordinates and fixed levels (TBQ; TBQP with signs of remainders)"
    source = "TBQ fork of llama.cpp"
    bit_range = (3, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim not in (64, 128, 256, 512, 512 + ROPE):
            raise ValueError(f"head_dim = {self.head_dim}: TBQ blocks are of 64, 128, 256, 512 or 576")
        if self.double and self.head_dim != 64:
            raise ValueError(f"double = True: for head_dim = 64, not {self.head_dim}")

    @property
    def coded(self) -> int:
        """Channels that become codes."""
        return min(self.head_dim, 512)

    @property
    def halves(self) -> int:
        """Blocks of a vector: each has its own scales."""
        return max(self.coded // HALF, 1)

    @property
    def level_bits(self) -> int:
        """Bits of a code, without the sign."""
        return self.bits - self.signs

    @property
    def block_bytes(self) -> int:
        scales = 2 * self.halves * (1 + self.signs)
        return scales + self.coded * self.bits // 8 + 2 * (self.head_dim - self.coded)

    @cached_property
    def form(self) -> PageForm:
        first, projection = self._rotations
        unit = self.coded if self.double else sqrt(self.coded)
        bits = uniform_bits(self.coded, self.level_bits)
        levels = tuple(level / unit for level in tbq.levels(self.level_bits))
        groups = (self.coded // self.halves,) * self.halves
        plain = self.head_dim - self.coded
        if not self.signs:
            lut = level_table({self.level_bits: levels}, bits)
            groups = groups if self.halves > 1 else ()
            return PageForm(self.coded, self.page_size, bits, lut, first, self.lanes, groups, plain)
        gain = sqrt(pi / 2) / self.coded if self._projects else 1 / unit
        bits = (*bits, *uniform_bits(self.coded, 1))
        lut = level_table({self.level_bits: levels, 1: (-gain, gain)}, bits)
        second = first.matrix if projection is None else projection.matrix @ first.matrix
        both = torch.cat((first.matrix, second))
        return PageForm(2 * self.coded, self.page_size, bits, lut, Matrix(both, both.mT), self.lanes, 2 * groups, plain)

    @property
    def _projects(self) -> bool:
        """Whether signs are those of a projection (QJL)."""
        return self.coded >= HALF

    @cached_property
    def _rotations(self) -> tuple[Transform, Transform | None]:
        """The first rotation, and that of projected remainders; a cache in this format holds them beside its form."""
        first = tbq.rotation(self.coded, self.double)
        return first, tbq.qjl_rotation(self.coded) if self.signs and self._projects else None

    def encode(self, x: Tensor) -> TokenCodes:
        size = x.shape[-1]
        first, second = self._rotations
        x, plain = (x[..., : self.coded], x[..., self.coded :].half()) if self.coded < size else (x, None)
        # w has unit variance for a vector of length 1, times √D if `double`; y has a root mean square of 1 either way.
        w = first.apply(x) * (self.coded if self.double else sqrt(self.coded))
        parts = 1 if self.signs else self.halves  # with signs, halves share their scales
        d = w.unflatten(-1, (parts, -1)).square().mean(-1).sqrt()
        y = w / d.repeat_interleave(self.coded // parts, -1)
        y = y.where(y.isfinite(), 0)
        code = tbq.codes(y, self.level_bits)
        scale = d.expand(*d.shape[:-1], self.halves)
        if self.signs:
            remainder = y - torch.tensor(tbq.levels(self.level_bits), device=x.device)[code.int()]
            if second is not None:
                size_of_remainder = remainder.square().sum(-1, keepdim=True).sqrt()
                remainder = second.apply(remainder)
            else:
                size_of_remainder = remainder.abs().mean(-1, keepdim=True)
            code = torch.cat((code, (remainder >= 0).to(torch.uint8)), -1)
            scale = torch.cat((scale, (size_of_remainder * d).expand_as(scale)), -1)
        return TokenCodes(code, scale.half(), plain=plain)

    def sharpness(self, count: Tensor) -> Tensor | None:
        rule = {64: softening, 256: sharpening}.get(self.head_dim)
        return None if rule is None else rule(count, self.bits, self.signs)

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        size, parts = self.coded // self.halves, []
        for h in range(self.halves):
            own = slice(h * size, (h + 1) * size)
            parts.append(to_bytes(tokens.scale[..., h :: self.halves]))  # d, and d_qjl with signs
            parts.append(to_stream(tokens.code[..., : self.coded][..., own], self.level_bits))
            if self.signs:
                parts.append(to_stream(tokens.code[..., self.coded :][..., own], 1))
        if tokens.plain is not None:
            parts.append(to_bytes(tokens.plain))
        return torch.cat(parts, -1)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        size, scales = self.coded // self.halves, 1 + self.signs
        widths = [2 * scales, size * self.level_bits // 8] + ([size // 8] if self.signs else [])
        plain = None
        if self.coded < self.head_dim:
            blocks, rope = blocks.split((blocks.shape[-1] - 2 * ROPE, 2 * ROPE), -1)
            plain = from_bytes(rope, torch.float16)
        fields = [part.split(widths, -1) for part in blocks.chunk(self.halves, -1)]
        scale = torch.stack([from_bytes(f[0], torch.float16) for f in fields], -1).flatten(-2)  # d of all, then d_qjl
        code = torch.cat([from_stream(f[1], self.level_bits) for f in fields], -1)
        if self.signs:
            code = torch.cat((code, *(from_stream(f[2], 1) for f in fields)), -1)
        return TokenCodes(code, scale, plain=plain)
