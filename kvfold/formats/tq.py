"""tq3 and tq4 blocks (ggml_turboquant): TurboQuant of 128 coordinates with a float32 norm."""

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, TokenCodes, level_table, uniform_bits
from kvfold.quant.bitstream import from_bytes, from_stream, to_bytes, to_stream
from kvfold.quant.nearest import nearest_level
from kvfold.quant.transforms import Matrix, Transform
from kvfold.quant.xoshiro import gaussian_rotation

DIM = 128

_LEVELS = {
    3: (0.0217497133497666, 0.0670292218440566, 0.1187950167018509, 0.1890403719434884),
    4: (
        0.0117328498192312, 0.0353901768727086, 0.0596213061688922, 0.0850748102440574,
        0.1127658636629929, 0.1443097007690654, 0.1831710841564345, 0.2396125330713870,
    ),
}  # fmt: skip
"""Positive halves of the levels. They have not quite converged, but blocks depend on them."""


@dataclass(frozen=True)
class TQ(BlockFormat):
    """x̂ = ‖x‖·Πᵀ·c: blocks of a float32 norm and 128 codes of 3 or 4 bits, 52 or 68 bytes."""

    seed: int = 42
    """Of the rotation, on which two systems must agree: this is ggml_turboquant's."""

    summary = "Blocks of TurboQuant codes with a float32 norm and a rotation of their own"
    source = "ggml_turboquant, for ik_llama.cpp"
    bit_range = (3, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim != DIM:
            raise ValueError(f"head_dim = {self.head_dim}: tq{self.bits} blocks are of {DIM}")

    @property
    def block_bytes(self) -> int:
        return 4 + DIM * self.bits // 8

    @cached_property
    def form(self) -> PageForm:
        half, bits = _LEVELS[self.bits], uniform_bits(DIM, self.bits)
        lut = level_table({self.bits: (*(-level for level in reversed(half)), *half)}, bits)
        return PageForm(DIM, self.page_size, bits, lut, _rotation(self.seed), self.lanes)

    def encode(self, x: Tensor) -> TokenCodes:
        norm = x.square().sum(-1, keepdim=True).sqrt()
        code, _ = nearest_level(self.form.transform.apply(x / norm.where(norm != 0, 1)), self.form.lut[0])
        return TokenCodes(code, norm)

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        return torch.cat((to_bytes(tokens.scale), to_stream(tokens.code, self.bits)), -1)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        return TokenCodes(from_stream(blocks[..., 4:], self.bits), from_bytes(blocks[..., :4], torch.float32))


@cache
def _rotation(seed: int) -> Transform:
    return Matrix(torch.from_numpy(gaussian_rotation(DIM, seed)).float())
