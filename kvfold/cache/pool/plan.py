"""What one step of an engine does to pages: which become full, and where unfinished ones have their tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.cache.pool.firsts import FirstTokens


class Slots:
    """Slots of the tails: one for each page of a live sequence whose tokens are dense, by the page's number.

    A page belongs to one sequence at a time, which writes it from its first token on without gaps. So a page that is
    begun again has a new owner. A sequence that goes on in a page without a slot has lost tokens: that is an error.

    `firsts` has the places of first tokens.
    """

    def __init__(self, sequences: int, drafts: int = 0) -> None:
        self.count, self.firsts = slots_for(sequences, drafts), FirstTokens(sequences)
        self._slot_of: dict[int, int] = {}
        self._free = list(range(self.count))
        self._after: list[int] = []  # free from the next step on: layers of this one still read them

    def __len__(self) -> int:
        """How many are in use."""
        return len(self._slot_of)

    def begin_step(self) -> None:
        """Make the slots that the step before gave back usable."""
        self._free += self._after
        self._after = []

    def of(self, page: int) -> int:
        """The slot of a page that has tokens in it; raises RuntimeError if it has none."""
        if page not in self._slot_of:
            raise RuntimeError(
                f"the unfinished tokens of page {page} are lost: the engine goes on with a page that it had given back"
            )
        return self._slot_of[page]

    def take(self, page: int) -> int:
        """A slot for a page that is begun."""
        if page in self._slot_of:  # its former owner left without `release`, or drafts that were rejected lay in it
            return self._slot_of[page]
        if not self._free:
            raise RuntimeError(
                f"all {self.count} slots for unfinished pages are in use: the engine runs more sequences than it said"
            )
        self._slot_of[page] = self._free.pop()
        return self._slot_of[page]

    def pass_on(self, page: int, next_page: int) -> int:
        """The slot of a page that is complete, for the next dense page of its sequence."""
        slot = self._slot_of.pop(page)
        if next_page in self._slot_of:
            self._after.append(slot)
        else:
            self._slot_of[next_page] = slot
        return self._slot_of[next_page]

    def finish(self, page: int) -> None:
        """Give a page's slot back at the end of this step."""
        self._after.append(self._slot_of.pop(page))

    def release(self, pages: Iterable[int]) -> None:
        """Give back the slots of pages that nothing reads from them any more."""
        for page in pages:
            if (slot := self._slot_of.pop(page, None)) is not None:
                self._free.append(slot)


def slots_for(sequences: int, drafts: int) -> int:
    """How many slots an engine needs for its sequences, of which each drafts up to so many tokens at a time.

    Drafts that may be taken back can begin a page behind one that they complete.
    """
    return sequences * (2 if drafts else 1)


@dataclass(frozen=True)
class Folding:
    """Pages of one sequence that a step completes."""

    # Slot of the first page's tokens before this step, and how many they are.
    slot: int
    held: int
    # Place in the batch of the sequence's first new token, and how many new tokens these pages take.
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class EngineStep:
    """One step of an engine, the same for all layers that share pages."""

    # int64, (sequences, 8): the first new token's place in the batch, the count of new tokens, the sequence's length
    # with them, the slot of the page that the first new token joins (-1 if that is its first), the page from which on
    # new tokens are kept dense, the slots of that page and the next (-1 if no token is in them), and the place of the
    # sequence's first token (-1 if it is read folded).
    rows: NDArray[np.int64]
    block_table: NDArray[np.integer]  # (sequences, blocks), as the engine gave it
    foldings: list[Folding]  # pages that become full
    folded: Tensor  # numbers of those pages: int64, in the order of `foldings`
    tokens: int  # new tokens of all sequences

    def left(self, page_size: int) -> NDArray[np.int64]:
        """New tokens that stay dense, (3, tokens): slot, place in the page, place in the batch."""
        parts = [np.empty((3, 0), dtype=np.int64)]
        for first, count, length, _, kept, *slots, _ in self.rows.tolist():
            at = np.arange(max(kept * page_size, length - count), length)
            slot = np.array(slots)[at // page_size - kept]
            parts.append(np.stack((slot, at % page_size, at + first + count - length)))
        return np.concatenate(parts, axis=1)

    def begins(self) -> NDArray[np.int64]:
        """First tokens among the new ones, (2, sequences): place of the token, place in the batch."""
        begun = self.rows[self.rows[:, 1] == self.rows[:, 2]]
        return np.stack((begun[:, 7], begun[:, 0]))

    def pages(self, row: int, pages_a_block: int, page_size: int) -> tuple[list[int], int]:
        """Numbers of all pages that a sequence has tokens in; and how many of them were complete before this step."""
        _, count, length, *_ = self.rows[row].tolist()
        last = -(-length // page_size)
        blocks = self.block_table[row].astype(np.int64)[: -(-last // pages_a_block)]
        numbers = blocks[:, None] * pages_a_block + np.arange(pages_a_block)
        return numbers.ravel()[:last].tolist(), (length - count) // page_size

    def only(self, rows: Sequence[int], page_size: int) -> "EngineStep":
        """The part of this step that is of some sequences; their tokens keep their places in the batch."""
        firsts = {int(self.rows[i][0]) for i in rows}
        foldings, folded, at = [], list[int](), 0
        for folding in self.foldings:
            pages = (folding.held + folding.count) // page_size
            if folding.first in firsts:
                foldings.append(folding)
                folded += self.folded[at : at + pages].tolist()
            at += pages
        chosen = list(rows)
        return EngineStep(
            self.rows[chosen], self.block_table[chosen], foldings, torch.tensor(folded, dtype=torch.int64), self.tokens
        )


def plan(
    starts: Sequence[int], lengths: Sequence[int], block_table: NDArray[np.integer], slots: Slots, pages_a_block: int,
    page_size: int, drafts: int = 0,
) -> EngineStep:  # fmt: skip
    """Plan a step, giving slots to pages that are begun, and places to first tokens.

    `starts` has the first new token of each sequence in the batch, and the end of the last: (sequences + 1). `lengths`
    counts the tokens of each sequence, new ones included. `block_table` has block numbers, (sequences, blocks); entries
    beyond a sequence's length are ignored.

    A sequence with 2 to 1 + `drafts` new tokens may come back with fewer tokens, but for the first of these. Pages that
    the others complete are folded, because later ones read them so, and stay dense, too, until they are confirmed.

    Raises RuntimeError if the tokens of an unfinished page are not there, or no slot is free.
    """
    slots.begin_step()
    if drafts:
        slots.release(_confirmed(starts, lengths, block_table, pages_a_block, page_size))
    for i, length in enumerate(lengths):  # before others ask, who may share a page that is begun in this step
        if starts[i + 1] - starts[i] == length > 0:
            slots.firsts.begin(_number(block_table[i], 0, pages_a_block))
    rows: list[tuple[int, ...]] = []
    own: list[int] = []
    foldings: list[Folding] = []
    folded: list[int] = []
    for i, length in enumerate(lengths):
        first, count = starts[i], starts[i + 1] - starts[i]
        if not count:
            continue

        def number(page: int, table: NDArray[np.integer] = block_table[i]) -> int:
            return _number(table, page, pages_a_block)

        before = length - count
        confirmed = before + 1 if count <= 1 + drafts else length
        opened, held, last = before // page_size, before % page_size, length // page_size
        tail = slots.of(number(opened)) if held else -1
        if last > opened:
            taken = last * page_size - before
            foldings.append(Folding(tail, held, first, taken))
            folded += [number(page) for page in range(opened, last)]
        kept, dense = confirmed // page_size, [-1, -1]
        passes = held and kept > opened
        for page in range(kept, -(-length // page_size)):
            if passes:
                dense[0], passes = slots.pass_on(number(opened), number(page)), False
            else:
                dense[page - kept] = slots.take(number(page))
        if passes:
            slots.finish(number(opened))
        slots.firsts.forget(number(page) for page in range(max(-(-before // page_size), 1), -(-length // page_size)))
        rows.append((first, count, length, tail, kept, *dense, slots.firsts.of(number(0))))
        own.append(i)
    return EngineStep(
        np.array(rows, dtype=np.int64).reshape(-1, 8), block_table[own], foldings,
        torch.tensor(folded, dtype=torch.int64), int(starts[-1]),
    )  # fmt: skip


def _confirmed(
    starts: Sequence[int], lengths: Sequence[int], block_table: NDArray[np.integer], pages_a_block: int, page_size: int
) -> set[int]:
    """Pages that the step before completed by drafts, all of which were right: sequences go on behind them."""
    behind, going_on = set(), set()
    for i, length in enumerate(lengths):
        before = length - (starts[i + 1] - starts[i])
        if before >= page_size:
            behind.add(_number(block_table[i], before // page_size - 1, pages_a_block))
        if before % page_size:
            going_on.add(_number(block_table[i], before // page_size, pages_a_block))
    return behind - going_on  # one that shares a page may be ahead of its owner, which completes it in this step


def _number(table: NDArray[np.integer], page: int, pages_a_block: int) -> int:
    """The number of a sequence's page, by its blocks."""
    return int(table[page // pages_a_block]) * pages_a_block + page % pages_a_block
