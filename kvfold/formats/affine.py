"""Group-affine codes (sanctum-mlx): values as whole steps from the minimum of their group."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream
from kvfold.quant.transforms import orthogonal

GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Affine(BlockFormat):
    """x̂ = zero + s·code for groups of channels of one token: zero = min, s = (max − min)/(2^b − 1), both float16.

    A block holds for each group s, zero, and the codes as a stream of bits.
    """

    group: int = 128
    """Channels that share s and zero; a head with fewer is one group."""

    summary = "Steps from the least to the largest of each group of channels, not rotated"
    source = "sanctum-mlx, after KVQuant (arXiv 2401.18079)"
    bit_range = (2, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group not in GROUPS:
            raise ValueError(f"group = {self.group}: choose one of {', '.join(map(str, GROUPS))}")
        if self.head_dim % self.width:
            raise ValueError(f"head_dim = {self.head_dim}: affine groups of {self.group} take multiples of it")

    @property
    def width(self) -> int:
        """Channels of a group."""
        return min(self.group, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.head_dim // self.width * 4 + self.head_dim * self.bits // 8

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(self.head_dim, self.bits)
        lut = level_table({self.bits: tuple(float(code) for code in range(2**self.bits))}, bits)
        groups = (self.width,) * (self.head_dim // self.width)
        identity = orthogonal("identity", self.head_dim)
        return PageForm(self.head_dim, self.page_size, bits, lut, identity, self.lanes, groups if groups[1:] else ())

    def encode(self, x: Tensor) -> TokenCodes:
        x, most = x.unflatten(-1, (-1, self.width)), 2**self.bits - 1
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        zero, scale = low.half(), ((high - low) / most).half()  # codes are computed from these, as stored
        steps = (x - zero.float()) / scale.float()
        code = steps.where(scale != 0, 0).round().clamp(0, most)
        return TokenCodes(code.to(torch.uint8).flatten(-2), scale.squeeze(-1), zero.squeeze(-1))

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        assert tokens.offset is not None
        codes = to_stream(tokens.code.unflatten(-1, (-1, self.width)), self.bits)
        scale, zero = (to_bytes(part.unsqueeze(-1)) for part in (tokens.scale, tokens.offset))
        return torch.cat((scale, zero, codes), -1).flatten(-2)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        scale, zero, codes = blocks.unflatten(-1, (self.head_dim // self.width, -1)).split(
            (2, 2, self.width * self.bits // 8), -1
        )
        scales = (from_bytes(part, torch.float16).squeeze(-1) for part in (scale, zero))
        return TokenCodes(from_stream(codes, self.bits).flatten(-2), *scales)
