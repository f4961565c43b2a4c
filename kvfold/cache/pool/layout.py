"""Byte layout of an engine's pool: pages of keys and values, each one run of bytes."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.formats import FormatPair
from kvfold.formats.page import Pages
from kvfold.quant.packing import TILE


def why_not_paged(formats: FormatPair) -> str | None:
    """Why pages of these formats cannot be shared in a pool; None if they can."""
    if formats.shares_pages:
        return "values that are a view of keys are not read from a pool yet"
    for form in (formats.keys.form, formats.values.form):
        if form.only_reference is not None:
            return form.only_reference
        if any(width % TILE for width in form.groups):
            return f"its scales are for groups of {form.groups} channels, which are no multiples of {TILE}"
    if formats.values.awaits_fit:
        return "its values are fitted to each prompt, and a shared page belongs to none"
    if formats.keys.turns_back:
        return "it holds keys as they were before RoPE, and a shared page does not say at which position it stands"
    return None


@dataclass(frozen=True)
class Part:
    """One tensor of a page's keys or values, in the bytes of the page."""

    name: str  # in `Pages`
    offset: int  # where its bytes begin
    shape: tuple[int, ...]  # for one page of one head
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, page: Tensor) -> Tensor:
        """The part of pages (…, bytes)."""
        return page[..., self.offset : self.offset + self.nbytes].view(self.dtype).unflatten(-1, self.shape)


class PageLayout:
    """Keys and values of one page of one KV head as one run of bytes: codes, then numbers, wider dtypes first.

    Give `formats` as they were before they were fitted: a fitted format has tables for each head, and folds no single
    page. `keys` and `values` are the parts of each side, `used` the bytes of a page.
    """

    def __init__(self, formats: FormatPair) -> None:
        self.page_size = formats.keys.page_size
        if formats.values.page_size != self.page_size:
            raise ValueError(
                f"keys have pages of {self.page_size} tokens, values of {formats.values.page_size}: they must agree"
            )
        zeros = ((side, torch.zeros(side.page_size, side.head_dim)) for side in (formats.keys, formats.values))
        sides = [list(side.fold(page).tensors()) for side, page in zeros]
        parts: tuple[list[Part], list[Part]] = ([], [])
        at = 0
        for codes in (True, False):
            for side, tensors in enumerate(sides):
                for name, tensor in sorted(tensors, key=lambda named: -named[1].itemsize):
                    if (name == "code") == codes:
                        parts[side].append(Part(name, at, tuple(tensor.shape[1:]), tensor.dtype))
                        at += parts[side][-1].nbytes
        self.keys, self.values, self.used = tuple(parts[0]), tuple(parts[1]), at

    def slot_bytes(self, itemsize: int) -> int:
        """Bytes of the pool for a token and head, a multiple of `itemsize`."""
        return -(-self.used // (self.page_size * itemsize)) * itemsize


class PagePool:
    """An engine's pool of blocks of one layer, as pages.

    Blocks are (blocks, kv_heads, tokens a block, ·), each one run of bytes.
    """

    def __init__(self, blocks: Tensor, layout: PageLayout) -> None:
        count, self.kv_heads, tokens, _ = blocks.shape
        if tokens % layout.page_size or not blocks[0].is_contiguous():
            raise ValueError(
                f"blocks of {tokens} tokens with strides {blocks.stride()}: give runs of pages of {layout.page_size}"
            )
        self.layout = layout
        self.pages_a_block = tokens // layout.page_size
        self.page_bytes = blocks[0, 0].nbytes // self.pages_a_block
        if self.page_bytes < layout.used:
            raise ValueError(f"blocks have {self.page_bytes} bytes a page and head, a page takes {layout.used}")
        self.block_bytes = blocks.stride(0) * blocks.itemsize
        head, page = self.page_bytes, self.page_bytes * self.kv_heads
        self.pages = torch.as_strided(
            blocks.view(torch.uint8), (count, self.pages_a_block, self.kv_heads, self.page_bytes),
            (self.block_bytes, page, head, 1), blocks.storage_offset() * blocks.itemsize,
        )  # fmt: skip

    def page_at(self, block_table: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bytes from the first page to each page of sequences: (sequences, blocks) → (sequences, pages)."""
        at = self._at(block_table[..., None], np.arange(self.pages_a_block))
        return at.reshape(len(block_table), block_table.shape[1] * self.pages_a_block)

    @property
    def geometry(self) -> tuple[int, ...]:
        """What decides where a block's pages lie: offsets are equal in pools with equal geometry."""
        return self.block_bytes, self.pages_a_block, self.kv_heads, self.page_bytes

    def _at(self, block: NDArray[np.integer], page: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bytes from the first page to pages of blocks."""
        return block.astype(np.int64) * self.block_bytes + page * (self.page_bytes * self.kv_heads)

    def units(self, block_table: NDArray[np.integer]) -> NDArray[np.int64]:
        """`page_at` in units, pages of one head, for GPU kernels; raises ValueError if some lie between units."""
        return self._in_units(self.page_at(block_table))

    def units_of(self, pages: NDArray[np.integer]) -> NDArray[np.int64]:
        """`units` of pages by their numbers: (pages)."""
        return self._in_units(self._at(pages // self.pages_a_block, pages % self.pages_a_block))

    def _in_units(self, page_at: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.block_bytes % self.page_bytes:
            raise ValueError(
                f"blocks lie {self.block_bytes} bytes apart: GPU kernels want multiples of {self.page_bytes}"
            )
        return page_at // self.page_bytes

    def elements(self, part: Part) -> tuple[Tensor, int]:
        """All of the pool from the first page's `part` on, in its dtype; and how many elements a unit has."""
        count = (self.pages.shape[0] - 1) * self.block_bytes + self.pages[0].numel() - part.offset
        count = count // 4 * 4  # a page of an odd size may leave less than an element
        whole = torch.as_strided(self.pages, (count,), (1,), self.pages.storage_offset() + part.offset)
        return whole.view(part.dtype), self.page_bytes // part.dtype.itemsize

    def write(self, pages: Tensor, folded: tuple[Pages, Pages]) -> None:
        """Store keys and values, (1, kv_heads, N, …), as the pages numbered `pages`, int64, (N,)."""
        whole = torch.zeros(len(pages), self.kv_heads, self.page_bytes, dtype=torch.uint8, device=self.pages.device)
        for parts, side in zip((self.layout.keys, self.layout.values), folded, strict=True):
            for part in parts:
                tensor = getattr(side, part.name)[0].transpose(0, 1).reshape(len(pages), self.kv_heads, -1)
                own = slice(part.offset, part.offset + part.nbytes)
                whole[..., own] = tensor.contiguous().view(torch.uint8)
        for page, new in zip(pages.tolist(), whole, strict=True):  # indexing by tensors wakes all threads, even for few
            self.pages[page // self.pages_a_block, page % self.pages_a_block] = new

    def read(self, pages: Tensor) -> tuple[Pages, Pages]:
        """Keys and values of pages numbered `pages`, (N,): (1, kv_heads, N, …)."""
        return self._read(pages, self.layout.keys), self._read(pages, self.layout.values)

    def read_keys(self, pages: Tensor) -> Pages:
        """The keys of `read`."""
        return self._read(pages, self.layout.keys)

    def _read(self, pages: Tensor, parts: tuple[Part, ...]) -> Pages:
        whole = self.pages[pages // self.pages_a_block, pages % self.pages_a_block]
        whole = whole.transpose(0, 1)[None].contiguous()
        tensors: dict[str, Any] = {part.name: part.view(whole) for part in parts}
        return Pages(**tensors, tokens=len(pages) * self.layout.page_size)
