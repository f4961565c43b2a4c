"""The base of formats that other systems store as rows of bytes."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.formats.base import Format, pad_tokens
from kvfold.formats.page import Pages, TokenCodes


@dataclass(frozen=True)
class BlockFormat(Format):
    """A format whose vectors other systems store as blocks of bytes.

    Its pages hold the same numbers in the page form's order. So attention reads them like any other pages, and blocks
    convert to pages and back without loss.
    """

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Bytes of one vector."""

    @abstractmethod
    def to_blocks(self, tokens: TokenCodes) -> Tensor:
        """Tokens (…, T, ·) as bytes: uint8, (…, T, block_bytes)."""

    @abstractmethod
    def from_blocks(self, blocks: Tensor) -> TokenCodes:
        """Undo `to_blocks`."""

    def to_bytes(self, pages: Pages) -> Tensor:
        """Blocks of folded vectors: uint8, (…, tokens, block_bytes)."""
        tokens = self.form.unpack(pages).map_tokens(lambda t: t.flatten(-3, -2)[..., : pages.tokens, :])
        return self.to_blocks(tokens)

    def from_bytes(self, blocks: Tensor, position: int = 0) -> Pages:
        """Pages of vectors that come as blocks.

        Parameters
        ----------
        blocks
            uint8, (…, tokens, block_bytes), at least one token.
        position
            Position of the first token in its sequence; few formats care.

        Raises
        ------
        TypeError
            If `blocks` is not uint8.
        ValueError
            On a wrong shape, codes that name no level, or scales that are no finite numbers.
        """
        if blocks.dtype != torch.uint8:
            raise TypeError(f"blocks has dtype {blocks.dtype}: give bytes, torch.uint8")
        if blocks.ndim < 2 or blocks.shape[-1] != self.block_bytes or blocks.shape[-2] == 0:
            raise ValueError(
                f"blocks has shape {tuple(blocks.shape)}: give (…, tokens, {self.block_bytes}), at least one token; "
                f"a vector of {self.head_dim} takes {self.block_bytes} bytes"
            )
        tokens = self.from_blocks(blocks)
        self.check(tokens)
        pages = self.form.pack(pad_tokens(tokens, 0, -blocks.shape[-2] % self.page_size).paged(self.page_size))
        pages.tokens, pages.first = blocks.shape[-2], position
        return pages

    def check(self, tokens: TokenCodes) -> None:
        """Raise ValueError if `fold` could not have made these tokens, read from blocks."""
        signed = self.form.signed_scale
        for name in ("scale", "offset", "plain"):
            part: Tensor | None = getattr(tokens, name)
            if part is None:
                continue
            if not part.isfinite().all():
                raise ValueError(f"blocks: a {name} is a NaN or an infinity, so these are not blocks of this format")
            if name == "scale" and not signed and (part < 0).any():
                raise ValueError("blocks: a scale is negative, so these are not blocks of this format")
