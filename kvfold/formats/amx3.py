"""AMX3 blocks of the TBQ fork of llama.cpp.

A tbq3 block for attention, and beside it the key before RoPE for scores of importance.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.before_rope import DIM, PAIRS, BeforeRope
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.formats.tbq import TBQ
from kvfold.quant import polar
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream

ANGLE_BITS = 4


@dataclass(frozen=True)
class AMX3(BeforeRope):
    """Part A, 50 bytes, is a `tbq3` block; attention reads nothing else. Part B, 58 bytes, holds σ, 3-bit radii and
    4-bit angles of the pairs k[f] + i·k[f + 64] with RoPE turned back. From it, eviction scores keys without unfolding
    them.
    """

    summary = "tbq3 blocks with the key before RoPE beside them, as radii and angles"
    source = "TBQ fork of llama.cpp"

    @property
    def block_bytes(self) -> int:
        return self._attention.block_bytes + 2 + PAIRS * (polar.RADIUS_BITS + ANGLE_BITS) // 8

    @cached_property
    def _attention(self) -> TBQ:
        return TBQ(DIM, 3, self.page_size, lanes=self.lanes)

    @property
    def form(self) -> PageForm:
        return self._attention.form

    def encode_at(self, x: Tensor, position: int) -> TokenCodes:
        positions = position + torch.arange(x.shape[-2], device=x.device)
        pairs = polar.turn(polar.to_pairs(x), positions, self.omega, back=True)
        codes = polar.search(pairs, polar.encode(pairs, ANGLE_BITS), ANGLE_BITS)
        radius, angle = to_stream(codes.radius, polar.RADIUS_BITS), to_stream(codes.angle, ANGLE_BITS)
        beside = torch.cat((to_bytes(codes.sigma.half()), radius, angle), -1)
        return replace(self._attention.encode(x), beside=beside)

    def before_rope(self, pages: Pages) -> Tensor:
        """Keys before RoPE, from part B: complex64, (…, tokens, 64), pair f being k[f] + i·k[f + 64]."""
        assert pages.beside is not None
        sigma, radius, angle = pages.beside.flatten(-3, -2)[..., : pages.tokens, :].split((2, 24, 32), -1)
        scale = from_bytes(sigma, torch.float16).float()
        codes = from_stream(radius, polar.RADIUS_BITS), from_stream(angle, ANGLE_BITS)
        return polar.decode(*codes, ANGLE_BITS) * scale

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.beside is not None
        return torch.cat((self._attention.to_blocks(tokens), tokens.beside), -1)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        attention, beside = blocks.split((self._attention.block_bytes, 58), -1)
        sigma = from_bytes(beside[..., :2], torch.float16)
        if not (sigma.isfinite() & (sigma >= 0)).all():
            raise ValueError("blocks: a σ is negative or no finite number, so these are not blocks of this format")
        return replace(self._attention.from_blocks(attention), beside=beside.contiguous())
