"""TBQX3 blocks of the TBQ fork of llama.cpp, which has removed them.

The key before RoPE as radii, angles and tangent signs, and nothing else.
"""

from dataclasses import dataclass
from functools import cached_property
from math import pi

import torch
from torch import Tensor

from kvfold.formats.before_rope import DIM, PAIRS, BeforeRope
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.kernels import ops
from kvfold.quant import polar
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream
from kvfold.quant.transforms import orthogonal

ANGLE_BITS = 3


@dataclass(frozen=True, eq=False)
class PolarForm(PageForm):
    """Pages of radii, angles and signs, 64 of each: reading turns them by the token's position.

    R would differ from token to token, which the kernels' page form does not allow, so only the reference reads these.
    """

    frequencies: tuple[float, ...] = ()
    """RoPE's ω_f."""

    @cached_property
    def only_reference(self) -> str | None:
        return "tbqx3 turns each key to its position when it is read"

    def levels(self, pages: Pages) -> Tensor:
        code = ops.unpack(pages.code, self.page_size, self.code_dim, list(self.bits), self.lanes)
        radius, angle, sign = code.chunk(3, -1)
        content = polar.decode(radius, angle, ANGLE_BITS)
        # Half a cell along the tangent i·e^{iφ}, as the sign says.
        content = content * torch.complex(torch.ones(()), (2.0 * sign - 1) * (pi / 16))
        n = pages.code.shape[-2]
        positions = pages.first + torch.arange(n * self.page_size, device=code.device).view(n, self.page_size)
        return polar.from_pairs(polar.turn(content, positions, self.frequencies))


@dataclass(frozen=True)
class TBQX3(BeforeRope):
    """k_f = σ·r·e^{iφ}·(1 ± i·π/16), turned to the token's position: 58 bytes of σ, radii, angles and tangent signs."""

    summary = "Keys before RoPE as radii and angles, turned to their position when read (by the reference alone)"
    source = "TBQ fork of llama.cpp, removed there"

    @property
    def block_bytes(self) -> int:
        return 2 + PAIRS * (polar.RADIUS_BITS + ANGLE_BITS + 1) // 8

    @cached_property
    def form(self) -> PageForm:
        groups = PAIRS // 16
        bits = (polar.RADIUS_BITS,) * groups + (ANGLE_BITS,) * groups + (1,) * groups
        return PolarForm(
            3 * PAIRS, self.page_size, bits, torch.zeros(3 * groups, 8), orthogonal("identity", DIM), self.lanes,
            groups=(DIM,), frequencies=self.omega,
        )  # fmt: skip

    def encode_at(self, x: Tensor, position: int) -> TokenCodes:
        positions = position + torch.arange(x.shape[-2], device=x.device)
        pairs = polar.turn(polar.to_pairs(x), positions, self.omega, back=True)
        codes = polar.encode(pairs, ANGLE_BITS)
        off = pairs * torch.polar(torch.ones(()), -polar.centres(codes.angle, ANGLE_BITS))
        code = torch.cat((codes.radius, codes.angle, (off.imag >= 0).to(torch.uint8)), -1)
        return TokenCodes(code, codes.sigma.half())

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        radius, angle, sign = tokens.code.chunk(3, -1)
        parts = to_stream(radius, polar.RADIUS_BITS), to_stream(angle, ANGLE_BITS), to_stream(sign, 1)
        return torch.cat((to_bytes(tokens.scale), *parts), -1)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        sigma, radius, angle, sign = blocks.split((2, 24, 24, 8), -1)
        codes = from_stream(radius, polar.RADIUS_BITS), from_stream(angle, ANGLE_BITS), from_stream(sign, 1)
        return TokenCodes(torch.cat(codes, -1), from_bytes(sigma, torch.float16))
