"""polar4 and polar4-u8 rows (pypto-lib): 4-bit indices of a rotated unit vector, rescaled when read."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, Pages, TokenCodes, level_table, uniform_bits
from kvfold.quant.bitstream import from_bytes, to_bytes
from kvfold.quant.codebooks import gaussian
from kvfold.quant.transforms import Matrix, Transform

DIM = 128
PAGE = 128
"""Rows of one page in its stacked layout."""
EPSILON = 1e-6
STEPS = 200
"""Steps of the iteration for the levels. They do not quite converge, but rows depend on them (.2416 is the largest)."""


@dataclass(frozen=True)
class Polar4(BlockFormat):
    """x̂ = γ·R·ĉ/‖ĉ‖ with y = bf16(x/γ)·R, indices of y among 16 levels of N(0, 1/128), and γ = ‖x‖ in float32.

    Rows have 128 index bytes and γ (polar4-u8: 132 bytes), or two indices a byte (polar4: 68 bytes). Attention reads
    pages in its own precision; `unfold_bfloat16` rounds where that system does.
    """

    layer: int = 0
    """The layer whose rotation is used."""

    summary = "Rows of 4-bit indices and a float32 norm, brought back to length when read; a byte an index in polar4-u8"
    source = "pypto-lib: TurboQuant KV cache for Qwen3 on NPUs"
    bit_range = (4, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim != DIM:
            raise ValueError(f"head_dim = {self.head_dim}: polar4 rows are of {DIM}")
        if self.bits not in (4, 8):
            raise ValueError(f"bits = {self.bits}: polar4 has 4, polar4-u8 has 8")

    def at(self, layer: int, frequencies: tuple[float, ...] | None) -> "Polar4":
        return replace(self, layer=layer)

    @property
    def block_bytes(self) -> int:
        return DIM * self.bits // 8 + 4

    @cached_property
    def form(self) -> PageForm:
        bits = uniform_bits(DIM, self.bits)
        levels = polar_levels()
        lut = level_table({self.bits: (*levels, *levels[-1:] * (2**self.bits - 16))}, bits)
        return PageForm(DIM, self.page_size, bits, lut, polar_rotation(self.layer), self.lanes, unit_levels=True)

    def encode(self, x: Tensor) -> TokenCodes:
        norm = (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        y = self.form.transform.apply((x / norm).bfloat16().float())
        levels = torch.tensor(polar_levels(), device=x.device)
        return TokenCodes(
            torch.bucketize(y, 0.5 * (levels[1:] + levels[:-1]), right=True, out_int32=True).to(torch.uint8), norm
        )

    def unfold_bfloat16(self, pages: Pages) -> Tensor:
        """x̂ rounded where that system rounds: bfloat16, (…, tokens, 128)."""
        assert pages.scale is not None
        tokens = self.form.unpack(pages)
        c = torch.tensor(polar_levels(), device=pages.code.device)[tokens.code.int()]
        c = c * (c.square().sum(-1, keepdim=True) + EPSILON).rsqrt() * pages.scale
        x = polar_rotation(self.layer).invert(c.bfloat16().float())
        return x.bfloat16().flatten(-3, -2)[..., : pages.tokens, :]

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        code = tokens.code if self.bits == 8 else tokens.code[..., : DIM // 2] | tokens.code[..., DIM // 2 :] << 4
        return torch.cat((code, to_bytes(tokens.scale)), -1)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        code = blocks[..., :-4]
        if self.bits == 4:
            code = torch.cat((code & 15, code >> 4), -1)
        elif (code > 15).any():
            raise ValueError(f"blocks: an index is {code.max().item()}, polar4-u8 has 16 levels")
        return TokenCodes(code.contiguous(), from_bytes(blocks[..., -4:], torch.float32))

    def to_stacked(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """Rows as that system stacks them for one layer, block by block, head by head, for pages (kv_heads, tokens).

        They are codes, uint8, (blocks · kv_heads · 128, 128 or 64), and norms, float32, (the same rows, 1). Rows beyond
        the last token are 0.
        """
        if pages.code.ndim != 3:
            raise ValueError(f"pages have {pages.code.ndim - 2} leading dimensions: give those of (kv_heads, tokens)")
        rows = pad(self.to_bytes(pages), (0, 0, 0, -pages.tokens % PAGE))  # (kv_heads, blocks · 128, bytes)
        rows = rows.unflatten(1, (-1, PAGE)).transpose(0, 1).flatten(0, 2)
        return rows[:, :-4].contiguous(), from_bytes(rows[:, -4:], torch.float32)

    def from_stacked(self, codes: Tensor, norms: Tensor, kv_heads: int, tokens: int) -> Pages:
        """Undo `to_stacked`."""
        rows = codes.shape[0]
        fits = kv_heads > 0 and rows % (kv_heads * PAGE) == 0 and 0 < tokens <= rows // kv_heads
        if not fits or norms.shape != (rows, 1) or norms.dtype != torch.float32:
            raise ValueError(
                f"codes has {rows} rows and norms are {norms.dtype} of the shape {tuple(norms.shape)}: give (blocks · "
                f"kv_heads = {kv_heads} · {PAGE}) rows of both, norms float32, enough for tokens = {tokens}"
            )
        blocks = torch.cat((codes, to_bytes(norms)), -1).unflatten(0, (-1, kv_heads, PAGE)).transpose(0, 1)
        return self.from_bytes(blocks.flatten(1, 2)[:, :tokens])


@cache
def polar_levels() -> tuple[float, ...]:
    """The 16 levels, iterated from the midpoints of equal cells within ±3.5/√128."""
    density = gaussian()
    levels = (np.arange(16) + 0.5) * 7 / 16 - 3.5
    for _ in range(STEPS):
        edges = np.concatenate(([-np.inf], 0.5 * (levels[1:] + levels[:-1]), [np.inf]))
        levels = np.diff(density.first_moment(edges)) / np.diff(density.cdf(edges))
    return tuple((levels / DIM**0.5).tolist())


@cache
def polar_rotation(layer: int) -> Transform:
    """Rᵀ of a layer, rounded to bfloat16: R is the Q of torch's Gaussian matrix, its columns signed by diag(R).

    That system multiplies rows by R from the right: x·R, which is Rᵀ·x here.
    """
    gaussian = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(42 + 1000 * layer))
    q, r = np.linalg.qr(gaussian.double().numpy())  # in float64: float32's last bits depend on the number of threads
    return Matrix(torch.from_numpy(q * np.sign(np.diag(r))).bfloat16().float().mT)
