"""No codes at all: one side of a pair left dense."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfold.formats.block import BlockFormat
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.quant.bitstream import from_bytes, to_bytes
from kvfold.quant.transforms import orthogonal

LARGEST = 2.0**15


class DenseForm(PageForm):
    """Pages whose "codes" are float16 numbers."""

    def pack(self, tokens: TokenCodes) -> Pages:
        return Pages(tokens.code, tokens.scale, tokens=tokens.code.shape[-3] * self.page_size)

    def unpack(self, pages: Pages) -> TokenCodes:
        return TokenCodes(pages.code, pages.scale)

    def levels(self, pages: Pages) -> Tensor:
        return pages.code.float()

    def coordinates(self, tokens: TokenCodes) -> Tensor:
        return self.scaled(tokens.code.float(), tokens.scale, None)

    def clear(self, pages: Pages, slot: int) -> None:
        for _, part in pages.tensors():
            part[..., slot:, :] = 0


@dataclass(frozen=True)
class Float16(BlockFormat):
    """x as float16 in pages, neither rotated nor coded.

    For keys or values that stay dense beside folded ones (`float16:turboquant-3`). Used for both, it tells whether a
    fault lies in codes or in the code that stores and reads them. A vector's scale is a power of two, 1 unless the
    vector leaves float16's range. Blocks are the float16 numbers alone.
    """

    bits: int = 16

    summary = "Not folded: float16 numbers in pages"
    source = "kvfold"
    bit_range = (16, 16)

    @property
    def block_bytes(self) -> int:
        return 2 * self.head_dim

    @cached_property
    def form(self) -> PageForm:
        identity = orthogonal("identity", self.head_dim)
        return DenseForm(self.head_dim, self.page_size, (), torch.zeros(0, 0), identity, self.lanes)

    def encode(self, x: Tensor) -> TokenCodes:
        largest = x.abs().amax(-1, keepdim=True)
        scale = torch.exp2((largest / LARGEST).clamp_min(1).log2().ceil())
        return TokenCodes(code=(x / scale).half(), scale=scale.half())

    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        assert tokens.scale is not None
        if (tokens.scale > 1).any():
            raise ValueError(f"a vector is beyond {LARGEST:g}, which blocks of float16 numbers do not hold")
        return to_bytes(tokens.code)

    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        code = from_bytes(blocks, torch.float16)
        if not code.isfinite().all():
            raise ValueError("blocks: a number is a NaN or an infinity, so these are not blocks of this format")
        return TokenCodes(code, torch.ones_like(code[..., :1]))
