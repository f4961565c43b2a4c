"""What one step of an engine does to pages: which become full, and where unfinished ones have their tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Slots:
    """Slots of the tails: one for each unfinished page of a live sequence, by the page's number.

    A page belongs to one sequence at a time, which writes it from its first token on without gaps. So a page that is
    begun again has a new owner. A sequence that goes on in a page without a slot has lost tokens: that is an error.
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
        """Make the slots that the step before gave back usable."""
        self._free += self._after
        self._after = []

    def of(self, page: int) -> int:
        """The slot of an unfinished page; raises RuntimeError if it has none."""
        if page not in self._slot_of:
            raise RuntimeError(
                f"the unfinished tokens of page {page} are lost: the engine goes on with a page that it had given back"
            )
        return self._slot_of[page]

    def take(self, page: int) -> int:
        """A slot for a page that is begun."""
        if page in self._slot_of:  # its former owner left without `release`
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
        self.release([next_page])  # its former owner may have left without doing so
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

    # int64, (sequences, 5): the first new token's place in the batch, the count of new tokens, the sequence's length
    # with them, and the slots of its unfinished page before and after the step; -1 for none.
    rows: NDArray[np.int64]
    block_table: NDArray[np.integer]  # (sequences, blocks), as the engine gave it
    foldings: list[Folding]  # pages that become full
    folded: Tensor  # numbers of those pages: int64, in the order of `foldings`
    tokens: int  # new tokens of all sequences

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
) -> EngineStep:  # fmt: skip
    """Plan a step, giving slots to pages that are begun.

    `starts` has the first new token of each sequence in the batch, and the end of the last: (sequences + 1). `lengths`
    counts the tokens of each sequence, new ones included. `block_table` has block numbers, (sequences, blocks); entries
    beyond a sequence's length are ignored. Raises RuntimeError if the tokens of an unfinished page are not there, or no
    slot is free.
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
    return EngineStep(
        np.array(rows, dtype=np.int64).reshape(-1, 5), block_table[own], foldings,
        torch.tensor(folded, dtype=torch.int64), int(starts[-1]),
    )  # fmt: skip
