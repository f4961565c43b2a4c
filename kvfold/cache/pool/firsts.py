"""Where sequences have their first tokens, which stay dense in a pool.

Attention gives the first token more weight than any other, and its key lies far from those of others: folded, it costs
about as much as all others together (`benchmarks/quality/first_tokens.py`). A block of a pool has no room for it, so it
lies beside, and is found by the number of the first page.
"""

from collections.abc import Iterable

A_SEQUENCE = 4
"""Places for each sequence that an engine runs at a time, so that pages outlive their sequences with their tokens."""


class FirstTokens:
    """Places of first tokens by the number of a sequence's first page, for as many pages as were used last.

    A page that has lost its place is read as it was folded, its first token, too.
    """

    def __init__(self, sequences: int) -> None:
        self.count = places_for(sequences)
        self.missed = False  # whether a page was ever read without its place
        self._place_of: dict[int, int] = {}  # those that were used last at the end
        self._free = list(range(self.count))

    def begin(self, page: int) -> int:
        """The place of the first token of a page that begins a sequence."""
        place = self._place_of.pop(page, None)
        if place is None:
            if not self._free:
                oldest = next(iter(self._place_of))
                self._free.append(self._place_of.pop(oldest))
            place = self._free.pop()
        self._place_of[page] = place
        return place

    def of(self, page: int) -> int:
        """The place of a page's first token; -1 if it has none."""
        place = self._place_of.pop(page, -1)
        if place < 0:
            self.missed = True
        else:
            self._place_of[page] = place
        return place

    def forget(self, pages: Iterable[int]) -> None:
        """Pages that go on in a sequence, and begin none."""
        for page in pages:
            if (place := self._place_of.pop(page, None)) is not None:
                self._free.append(place)


def places_for(sequences: int) -> int:
    """How many first tokens an engine keeps that runs so many sequences at a time."""
    return A_SEQUENCE * sequences
