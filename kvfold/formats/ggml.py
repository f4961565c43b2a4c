"""q8_0 and q4_0: the blocks of 32 numbers that llama.cpp keeps its cache in."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant.bitstream import from_bytes, to_bytes
from kvfold.quant.transforms import orthogonal

GROUP = 32
"""Numbers of a block."""


@dataclass(frozen=True)
class Ggml(BlockFormat):
    """x̂ = d·q, 32 numbers sharing a float16 d: q from −127 to 127 (q8_0), or from −8 to 7 (q4_0).

    q8_0 has d = max|x|/127. q4_0 has d = −x_m/8 for the number x_m of the largest magnitude, so that d may be negative.
    """

    summary = "llama.cpp's blocks of 32 numbers and a scale, not rotated"
    source = "ggml's q8_0 and q4_0"
    bit_range = (4, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 8):
            raise ValueError(f"bits = {self.bits}: q4_0 has 4, q8_0 has 8")
        if self.head_dim % GROUP:
            raise ValueError(f"head_dim = {self.head_dim}: q{self.bits}_0 takes multiples of {GROUP}")

    @property
    def block_bytes(self) -> int:
        return self.head_dim // GROUP * (2 + GROUP * self.bits // 8)

    @cached_property
    def form(self) -> PageForm:
        bits, middle = uniform_bits(self.head_dim, self.bits), 2 ** (self.bits - 1)
        lut = level_table({self.bits: tuple(float(code - middle) for code in range(2 * middle))}, bits)
        return PageForm(
            self.head_dim, self.page_size, bits, lut, orthogonal("identity", self.head_dim), self.lanes,
            (GROUP,) * (self.head_dim // GROUP), signed_scale=self.bits == 4,
        )  # fmt: skip

    def encode(self, x: Tensor) -> TokenCodes:
        x = x.unflatten(-1, (-1, GROUP))
        largest = x.take_along_dim(x.abs().argmax(-1, keepdim=True), -1)  # the first of equals
        d = largest.abs() / 127 if self.bits == 8 else largest / -8
        scaled = x * d.reciprocal().where(d != 0, 0)
        half_away = (scaled + scaled.sign() * 0.5).trunc()
        code = half_away + 128 if self.bits == 8 else (scaled + 8.5).trunc().clamp_max(15)
        return TokenCodes(code.to(torch.uint8).flatten(-2), d.squeeze(-1).half())

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        code = tokens.code.unflatten(-1, (-1, GROUP))
        pairs = code[..., : GROUP // 2] | code[..., GROUP // 2 :] << 4
        data = code - 128 if self.bits == 8 else pairs  # wraps to the byte of a signed number
        return torch.cat((to_bytes(tokens.scale.unsqueeze(-1)), data), -1).flatten(-2)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        blocks = blocks.unflatten(-1, (self.head_dim // GROUP, -1))
        data = blocks[..., 2:]
        code = data + 128 if self.bits == 8 else torch.cat((data & 15, data >> 4), -1)
        return TokenCodes(code.flatten(-2), from_bytes(blocks[..., :2], torch.float16).squeeze(-1))
