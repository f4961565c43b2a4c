"""AMX3 blocks (seed 004): a tbq3 block for attention, and beside it the key before RoPE for scores of importance."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.base import pad_tokens
from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.formats.tbq import TBQ
from kvfold.quant import polar
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream

DIM = 128
BASE = 1e6
"""RoPE's base where no model says another: what that system assumes for all."""
ANGLE_BITS = 4


@dataclass(frozen=True)
class AMX3(BlockFormat):
    """Part A, 50 bytes, is `tbq3` and all that attention reads. Part B, 58 bytes, holds σ, 3-bit radii and 4-bit angles
    of the pairs k[f] + i·k[f + 64] with RoPE turned back, for eviction to score without unfolding a key.

    Attributes
    ----------
    head_dim
        128.
    bits
        3.
    frequencies
        RoPE's ω_f, 64 of them; (): those of base 10⁶.
    """

    bits: int = 3
    frequencies: tuple[float, ...] = ()

    summary = "tbq3 blocks with the key before RoPE beside them, as radii and angles"
    source = "TBQ fork of llama.cpp (seed 004)"
    bit_range = (3, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim != DIM:
            raise ValueError(f"head_dim = {self.head_dim}: amx3 blocks are of {DIM}")

    def at(self, layer: int, frequencies: tuple[float, ...] | None) -> "AMX3":
        return self if frequencies is None else replace(self, frequencies=frequencies)

    @property
    def block_bytes(self) -> int:
        return self._attention.block_bytes + 2 + DIM // 2 * (polar.RADIUS_BITS + ANGLE_BITS) // 8

    @cached_property
    def _attention(self) -> TBQ:
        return TBQ(DIM, 3, self.page_size, lanes=self.lanes)

    @property
    def form(self) -> PageForm:
        return self._attention.form

    def encode(self, x: Tensor, position: int = 0) -> TokenCodes:
        frequencies = self.frequencies or polar.default_frequencies(DIM, BASE)
        positions = position + torch.arange(x.shape[-2], device=x.device)
        pairs = polar.turn(polar.to_pairs(x), positions, frequencies, back=True)
        codes = polar.search(pairs, polar.encode(pairs, ANGLE_BITS), ANGLE_BITS)
        radius, angle = to_stream(codes.radius, polar.RADIUS_BITS), to_stream(codes.angle, ANGLE_BITS)
        beside = torch.cat((to_bytes(codes.sigma.half()), radius, angle), -1)
        return replace(self._attention.encode(x), beside=beside)

    def fold_from(self, x: Tensor, slot: int = 0, position: int = 0) -> Pages:
        after = -(slot + x.shape[-2]) % self.page_size
        tokens = pad_tokens(self.encode(x.float(), position), slot, after)
        return self.form.pack(tokens.paged(self.page_size))

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
