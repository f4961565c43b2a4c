"""Uniform codes after a Hadamard rotation (SKaiNET), with its optional residual."""

import struct
from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream
from kvfold.quant.kotlin import random_signs
from kvfold.quant.transforms import Matrix, walsh_hadamard

GROUP = 32
_HEADER = struct.Struct("<iBHBH")


@dataclass(frozen=True)
class Uniform(BlockFormat):
    """x̂ = R⁻¹·(s·code). R flips signs, then applies a Walsh–Hadamard transform to the first 2^k coordinates, for the
    largest 2^k up to D. Codes are symmetric whole numbers, and s = max|y|/(2^(b−1) − 1) for each 32 coordinates,
    float16.

    The residual is a sign of each remainder and their root mean square ("QJL" in SKaiNET, though nothing is projected).
    A block holds seed, bits, count and the residual's bits and count; then s and codes; then the residual's s and
    signs.
    """

    residual: bool = False
    """Whether there is a residual, whose signs `bits` do not count."""

    summary = "Uniform codes in groups of 32 after sign flips and a Walsh–Hadamard transform"
    source = "SKaiNET"
    bit_range = (2, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 3, 4, 8):
            raise ValueError(f"bits = {self.bits}: uniform codes have 2, 3, 4 or 8")
        if self.head_dim % GROUP:
            raise ValueError(f"head_dim = {self.head_dim}: uniform codes take multiples of {GROUP}")

    @property
    def _groups(self) -> int:
        return self.head_dim // GROUP

    @property
    def block_bytes(self) -> int:
        signs = 2 + self.head_dim // 8 if self.residual else 0
        return _HEADER.size + 2 * self._groups + self.head_dim * self.bits // 8 + signs

    @property
    def _header(self) -> bytes:
        counts = (1, self.head_dim) if self.residual else (0, 0)
        return _HEADER.pack(self.seed, self.bits, self.head_dim, *counts)

    def _rotation(self) -> Tensor:
        power = 1 << (self.head_dim.bit_length() - 1)
        matrix = np.eye(self.head_dim)
        matrix[:power, :power] = walsh_hadamard(np.eye(power)) / sqrt(power)
        return torch.from_numpy(matrix * random_signs(self.head_dim, self.seed)).float()

    @cached_property
    def form(self) -> PageForm:
        bits, middle = uniform_bits(self.head_dim, self.bits), 2 ** (self.bits - 1)
        levels = {self.bits: tuple(float(code - middle) for code in range(2 * middle)), 1: (-1.0, 1.0)}
        groups: tuple[int, ...] = (GROUP,) * self._groups
        matrix, code_dim = self._rotation(), self.head_dim
        if self.residual:
            bits, groups = (*bits, *uniform_bits(self.head_dim, 1)), (*groups, self.head_dim)
            matrix, code_dim = torch.cat((matrix, matrix)), 2 * code_dim
        lut, rotation = level_table(levels, bits), Matrix(matrix, matrix.mT if self.residual else None)
        return PageForm(code_dim, self.page_size, bits, lut, rotation, self.lanes, groups)

    def encode(self, x: Tensor) -> TokenCodes:
        y = self.form.transform.apply(x)[..., : self.head_dim].unflatten(-1, (-1, GROUP))
        middle = 2 ** (self.bits - 1)
        scale = y.abs().amax(-1, keepdim=True) / (middle - 1)
        steps = (y * scale.reciprocal()).where(scale != 0, 0).round().clamp(1 - middle, middle - 1)
        code, stored = (steps + middle).to(torch.uint8).flatten(-2), scale.squeeze(-1).half()
        if not self.residual:
            return TokenCodes(code, stored)
        remainder = (y - steps * scale).flatten(-2)
        size = remainder.square().mean(-1, keepdim=True).sqrt().half()
        return TokenCodes(torch.cat((code, (remainder >= 0).to(torch.uint8)), -1), torch.cat((stored, size), -1))

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        header = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        code, signs = tokens.code.split((self.head_dim, tokens.code.shape[-1] - self.head_dim), -1)
        parts = [header.expand(*code.shape[:-1], -1), to_bytes(tokens.scale[..., : self._groups])]
        parts.append(to_stream(code, self.bits))
        if self.residual:
            parts += [to_bytes(tokens.scale[..., self._groups :]), to_stream(signs, 1)]
        return torch.cat(parts, -1)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        widths = (_HEADER.size, 2 * self._groups, self.head_dim * self.bits // 8)
        header, scale, code, rest = blocks.split((*widths, self.block_bytes - sum(widths)), -1)
        other = (header != torch.frombuffer(bytearray(self._header), dtype=torch.uint8)).any(-1)
        if other.any():
            names = ("seed", "bits", "count", "residual bits", "residual count")
            found = dict(zip(names, _HEADER.unpack(bytes(header[other][0].tolist())), strict=True))
            raise ValueError(
                f"blocks: one says {found}, this format is "
                f"{dict(zip(names, _HEADER.unpack(self._header), strict=True))}: fold and read with equal ones"
            )
        codes, scales = from_stream(code, self.bits), from_bytes(scale, torch.float16)
        if (codes == 0).any():
            raise ValueError(f"blocks: a code is 0, but symmetric codes of {self.bits} bits start at 1")
        if self.residual:
            codes = torch.cat((codes, from_stream(rest[..., 2:], 1)), -1)
            scales = torch.cat((scales, from_bytes(rest[..., :2], torch.float16)), -1)
        return TokenCodes(codes, scales)
