"""Folded pages in an engine's pool: what a page's bytes are, and what one step of the engine does to a layer.

An engine hands out blocks of its pool and says for each sequence which blocks hold it. A block has one or more pages;
tokens of an unfinished page lie dense in a slot of a side buffer, and the page is folded into the pool when it is full.

A query at position t reads the pages before its own folded, and its own dense, even if that page is full by now. So
what it reads follows from the tokens before it alone: chunks, the batch and shared blocks change nothing. A
`LayerCache` with the window `WINDOW` reads the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.formats import Format, FormatPair
from kvfold.formats.base import Window, require_finite
from kvfold.formats.page import Pages
from kvfold.kernels.places import Places
from kvfold.quant.finite import finite
from kvfold.quant.packing import TILE

WINDOW = Window(recent=1)
"""What stays dense in a pool: a page folds when it is full, and its own queries read it dense."""


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
    """One tensor of a page's keys or values, in the bytes of the page.

    Attributes
    ----------
    name
        Its name in `Pages`.
    offset, nbytes
        Where its bytes begin, and how many they are.
    shape, dtype
        What they are, for one page of one head.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, page: Tensor) -> Tensor:
        """The part of pages (…, bytes)."""
        return page[..., self.offset : self.offset + self.nbytes].view(self.dtype).unflatten(-1, self.shape)


class PageLayout:
    """Keys and values of one page of one KV head as one run of bytes: codes first, then numbers, the wider first.

    Parameters
    ----------
    formats
        As `get_formats` gives them, not fitted to heads.

    Attributes
    ----------
    page_size
        Tokens a page.
    keys, values
        The parts of each side.
    used
        Bytes of a page.
    """

    def __init__(self, formats: FormatPair) -> None:
        self.page_size = formats.keys.page_size
        if formats.values.page_size != self.page_size:
            raise ValueError(
                f"keys have pages of {self.page_size} tokens, values of {formats.values.page_size}: they must agree"
            )
        sides = [list(_page_of(side).tensors()) for side in (formats.keys, formats.values)]
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


def _page_of(side: Format) -> Pages:
    """One folded page of nothing."""
    return side.fold(torch.zeros(side.page_size, side.head_dim))


class PagePool:
    """An engine's pool of blocks of one layer, as pages.

    Parameters
    ----------
    blocks
        (blocks, kv_heads, tokens a block, ·), each block one run of bytes.
    layout
        What a page is.
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
        """What decides where a block's pages lie: pools with the same are alike."""
        return self.block_bytes, self.pages_a_block, self.kv_heads, self.page_bytes

    def _at(self, block: NDArray[np.integer], page: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bytes from the first page to pages of blocks."""
        return block.astype(np.int64) * self.block_bytes + page * (self.page_bytes * self.kv_heads)

    def units(self, block_table: NDArray[np.integer]) -> NDArray[np.int64]:
        """`page_at` in steps of a page of one head, which GPU kernels count in.

        Raises
        ------
        ValueError
            If blocks do not lie whole such steps apart.
        """
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
        for page, new in zip(pages.tolist(), whole, strict=True):  # to index by tensors wakes all threads, even for few
            self.pages[page // self.pages_a_block, page % self.pages_a_block] = new

    def read(self, pages: Tensor) -> tuple[Pages, Pages]:
        """Keys and values of pages numbered `pages`, (N,): (1, kv_heads, N, …)."""
        whole = self.pages[pages // self.pages_a_block, pages % self.pages_a_block].transpose(0, 1)[None].contiguous()
        sides = []
        for parts in (self.layout.keys, self.layout.values):
            tensors: dict[str, Any] = {part.name: part.view(whole) for part in parts}
            sides.append(Pages(**tensors, tokens=len(pages) * self.layout.page_size))
        return sides[0], sides[1]


class Slots:
    """Who has which slot of the tails: one for each unfinished page of a live sequence, by the page's number.

    A page belongs to one sequence at a time, which writes it from its first token on without gaps. So a page that is
    begun anew belongs to somebody else, and an unfinished page without a slot is an error, never a guess.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._slot_of: dict[int, int] = {}
        self._free = list(range(count))
        self._after: list[int] = []  # free from the next step on: layers of this one still read them

    def __len__(self) -> int:
        """How many are in use."""
        return len(self._slot_of)

    def begin_step(self) -> None:
        """Make what the step before gave back usable."""
        self._free += self._after
        self._after = []

    def of(self, page: int) -> int:
        """The slot of an unfinished page.

        Raises
        ------
        RuntimeError
            If it has none.
        """
        if page not in self._slot_of:
            raise RuntimeError(
                f"the unfinished tokens of page {page} are lost: the engine goes on with a page that it had given back"
            )
        return self._slot_of[page]

    def take(self, page: int) -> int:
        """A slot for a page that is begun."""
        if page in self._slot_of:  # its owner left without a word
            return self._slot_of[page]
        if not self._free:
            raise RuntimeError(
                f"all {self.count} slots for unfinished pages are in use: the engine runs more sequences than it said"
            )
        self._slot_of[page] = self._free.pop()
        return self._slot_of[page]

    def pass_on(self, page: int, next_page: int) -> int:
        """The slot of a page that becomes full, for the next page of its sequence."""
        slot = self._slot_of.pop(page)
        self.release([next_page])  # its owner left without a word
        self._slot_of[next_page] = slot
        return slot

    def finish(self, page: int) -> None:
        """Give a page's slot back at the end of this step."""
        self._after.append(self._slot_of.pop(page))

    def release(self, pages: Iterable[int]) -> None:
        """Give back the slots of pages whose sequence is gone."""
        for page in pages:
            if (slot := self._slot_of.pop(page, None)) is not None:
                self._free.append(slot)


@dataclass(frozen=True)
class Folding:
    """Pages of one sequence that a step completes.

    Attributes
    ----------
    slot, held
        Slot of the first page's tokens before this step, and how many they are.
    first, count
        The first of the sequence's new tokens in the batch, and how many of them these pages take.
    """

    slot: int
    held: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Step:
    """What one step of an engine is to all layers that share pages.

    Attributes
    ----------
    rows
        int64, (sequences, 5): the first new token in the batch, how many there are, the sequence's length with them,
        the slot of the tokens before in its unfinished page, and the slot for what is left after; -1 for none.
    block_table
        (sequences, blocks), as the engine gave it.
    foldings
        What becomes full.
    folded
        Numbers of those pages: int64, in the order of `foldings`.
    tokens
        New tokens of all sequences.
    """

    rows: NDArray[np.int64]
    block_table: NDArray[np.integer]
    foldings: list[Folding]
    folded: Tensor
    tokens: int

    def left(self, page_size: int) -> NDArray[np.int64]:
        """New tokens that stay in unfinished pages, (3, tokens): slot, place in the page, place in the batch."""
        parts = [np.empty((3, 0), dtype=np.int64)]
        for first, count, length, _, slot in self.rows.tolist():
            start = max(length // page_size * page_size, length - count)
            at = np.arange(start, length if slot >= 0 else start)
            parts.append(np.stack((np.full_like(at, slot), at % page_size, at + first + count - length)))
        return np.concatenate(parts, axis=1)


def plan(
    starts: Sequence[int], lengths: Sequence[int], block_table: NDArray[np.integer], slots: Slots, pages_a_block: int,
    page_size: int,
) -> Step:  # fmt: skip
    """Plan a step, giving slots to pages that are begun.

    Parameters
    ----------
    starts
        First new token of each sequence in the batch, and the end of the last: (sequences + 1).
    lengths
        Tokens of each sequence, new ones included.
    block_table
        (sequences, blocks): block numbers; what lies beyond a sequence's length is not looked at.

    Raises
    ------
    RuntimeError
        If the tokens of an unfinished page are not there.
    """
    slots.begin_step()
    rows: list[tuple[int, int, int, int, int]] = []
    own: list[int] = []
    foldings: list[Folding] = []
    folded: list[int] = []
    for i, length in enumerate(lengths):
        first, count = starts[i], starts[i + 1] - starts[i]
        if not count:
            continue
        table = block_table[i]

        def number(page: int, table: NDArray[np.integer] = table) -> int:
            return int(table[page // pages_a_block]) * pages_a_block + page % pages_a_block

        before = length - count
        opened, held, last = before // page_size, before % page_size, length // page_size
        tail = slots.of(number(opened)) if held else -1
        if last > opened:
            taken = last * page_size - before
            foldings.append(Folding(tail, held, first, taken))
            folded += [number(page) for page in range(opened, last)]
        if not length % page_size:
            next_tail = -1
            if held:
                slots.finish(number(opened))
        elif not held:
            next_tail = slots.take(number(last))
        else:
            next_tail = tail if last == opened else slots.pass_on(number(opened), number(last))
        rows.append((first, count, length, tail, next_tail))
        own.append(i)
    return Step(
        np.array(rows, dtype=np.int64).reshape(-1, 5), block_table[own], foldings,
        torch.tensor(folded, dtype=torch.int64), int(starts[-1]),
    )  # fmt: skip


class PagedLayer:
    """One layer's keys and values in an engine: its pool, its tails, its formats.

    Parameters
    ----------
    formats
        Fitted, if they must be.
    pool
        The engine's blocks of this layer.
    slots
        How many sequences the engine runs at a time.
    dtype
        The model's.
    """

    def __init__(self, formats: FormatPair, pool: PagePool, slots: int, dtype: torch.dtype) -> None:
        if formats.awaits_fit:
            raise ValueError(
                "formats must be fitted before pages are shared: one sequence's statistics are not another's"
            )
        self.formats = formats
        self.pool = pool
        shape = (slots, pool.kv_heads, formats.keys.page_size)
        device = pool.pages.device
        self.tail_keys = torch.zeros(*shape, formats.keys.head_dim, dtype=dtype, device=device)
        self.tail_values = torch.zeros(*shape, formats.values.head_dim, dtype=dtype, device=device)

    def fold(self, step: Step, key: Tensor, value: Tensor) -> None:
        """Fold what a step completes, before attention reads.

        Parameters
        ----------
        key, value
            New tokens, (tokens, kv_heads, dim).

        Raises
        ------
        ValueError
            If a page holds a NaN or an infinity, or a scale leaves float16's range.
        """
        if not step.foldings:
            return
        folded = []
        for fmt, x in zip((self.formats.keys, self.formats.values), self._full(step, key, value), strict=True):
            if not finite(x):
                raise ValueError(
                    "a key or value is NaN or infinite: the model's own computation broke before the cache"
                )
            folded.append(fmt.fold_from(x))
            require_finite(folded[-1])
        self.pool.write(step.folded, (folded[0], folded[1]))

    def fold_in_place(self, step: Step, units: Tensor, key: Tensor, value: Tensor) -> None:
        """`fold` by GPU kernels, straight into the pool.

        Nobody waits to see a NaN, an infinity or a scale beyond float16: attention over such a page gives NaN.

        Parameters
        ----------
        units
            `PagePool.units_of` the pages that become full.
        """
        if not step.foldings:
            return
        layout, pair = self.pool.layout, (self.formats.keys, self.formats.values)
        for fmt, parts, x in zip(pair, (layout.keys, layout.values), self._full(step, key, value), strict=True):
            fmt.fold_into(x, Places({part.name: self.pool.elements(part) for part in parts}, units))

    def _full(self, step: Step, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all pages that become full, (1, kv_heads, tokens, dim)."""
        sides = []
        for tails, new in ((self.tail_keys, key), (self.tail_values, value)):
            parts = []
            for folding in step.foldings:
                if folding.held:
                    parts.append(tails[folding.slot, :, : folding.held])
                parts.append(new[folding.first : folding.first + folding.count].transpose(0, 1))
            sides.append(torch.cat(parts, 1)[None])
        return sides[0], sides[1]

    def keep_tails(self, left: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy what new tokens leave of unfinished pages (`Step.left`) into their slots, after attention has read."""
        slot, at, token = left
        self.tail_keys[slot, :, at] = key[token]
        self.tail_values[slot, :, at] = value[token]
