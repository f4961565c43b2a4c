"""Growing storage for folded pages."""

from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from kvfold.formats.page import PageForm, Pages

PAGE_DIM = 2
"""Pages of a cache have the shape (batch, kv_heads, N, …)."""

GROWTH = 64
"""Capacity grows by 1/64: what is reserved and unused stays below 1.6 % of a long sequence, and copies stay rare."""


def expected_room(count: int) -> float:
    """Pages that are reserved beyond `count`, on average: how many there are depends on how the tokens came."""
    return max(count // GROWTH - 1, 0) / 2


@dataclass(eq=False)
class Room:
    """Storage that stores share. A larger one takes its place in all of them, so that the smaller one is freed."""

    pages: Pages


@dataclass(frozen=True, eq=False)
class PageStore:
    """Pages of one stream (the keys or the values of a layer), in storage that is reserved ahead of need.

    Adding pages makes another store. Both share storage, as new pages are written behind those held. Two methods
    write to held pages, and so change older stores, too: `with_tokens` fills free slots, `without_slots` empties slots.
    """

    form: PageForm  # how pages are read
    origin: int = 0  # slot of the first token
    count: int = 0  # pages held
    room: Room | None = None  # None before the first page

    @property
    def storage(self) -> Pages | None:
        """The pages, and reserved room; None before the first page."""
        return None if self.room is None else self.room.pages

    @property
    def capacity(self) -> int:
        """Pages that storage has room for."""
        return 0 if self.storage is None else self.storage.code.shape[PAGE_DIM]

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """A view of pages `start` to `stop`."""
        stop = self.count if stop is None else min(stop, self.count)
        assert self.storage is not None
        view = self.storage.map(lambda t: t[:, :, start:stop])
        size = self.form.page_size
        return replace(view, tokens=(stop - start) * size, first=self.origin + start * size)

    @property
    def describes_pages(self) -> bool:
        """Whether pages have a centre or channel scales, so that a token's codes have a meaning in its page only."""
        return self.storage is not None and (self.storage.centre is not None or self.storage.channel_scale is not None)

    def read_as(self, form: PageForm) -> Self:
        """The same pages in another form."""
        return replace(self, form=form)

    def with_pages(self, pages: Pages) -> Self:
        """With whole pages after the last."""
        added = pages.code.shape[PAGE_DIM]
        room = self._reserved(self.count + added, like=pages)
        for target, source in _paired(room.pages, pages, self.count):
            target.copy_(source)
        return replace(self, count=self.count + added, room=room)

    def reserve(self, count: int) -> None:
        """Have room for `count` pages, so that storage stays where it is until they are full; none before a page."""
        if self.storage is not None:
            self._reserved(count, like=self.storage)

    def with_tokens(self, pages: Pages, first: int) -> Self:
        """With the tokens of `pages` in the same slots of the pages from page `first` on.

        Held pages among those are written in place; their slots must be free. Pages that are not held yet are added.
        Unused slots are zero in `pages` and here, so codes are combined by OR, and scales by addition. Only for formats
        that fold token by token: their pages have no metadata to combine.
        """
        added = first + pages.code.shape[PAGE_DIM] - self.count
        grown = self
        if added > 0:
            grown = self.with_empty(added, pages)
        assert grown.storage is not None
        for target, source in _paired(grown.storage, pages, first):
            if target.is_floating_point():
                target.add_(source)
            else:
                target.bitwise_or_(source)
        return grown

    def with_empty(self, count: int, like: Pages | None = None) -> Self:
        """With so many pages more, without tokens, shaped as those held or as `like`.

        For formats that fold token by token.
        """
        like = like or self.storage
        assert like is not None
        return self.with_pages(like.map(lambda t: t.new_zeros(*t.shape[:PAGE_DIM], count, *t.shape[PAGE_DIM + 1 :])))

    def first(self, count: int) -> Self:
        """The first `count` pages, in less storage once less than half of it is in use."""
        first = replace(self, count=count)
        return first._copied() if 2 * count < self.capacity else first

    def trimmed(self) -> Self:
        """The same pages, without more room than growth reserves."""
        return self._copied() if self.capacity > self.count + self.count // GROWTH else self

    def without_slots(self, page: int, slot: int) -> Self:
        """With the last page, number `page`, emptied from slot `slot` on, in place."""
        self.form.clear(self.pages(page, page + 1), slot)
        return self

    def holding(self, storage: Pages, count: int) -> Self:
        """With `storage`, which has room for `count` pages, in place of these pages."""
        return replace(self, count=count, room=Room(storage) if count else None)

    def select(self, rows: Tensor) -> Self:
        """The batch rows `rows`, in that order, repeats allowed."""
        if self.storage is None:
            return self
        return replace(self, room=Room(self.storage.map(lambda t: t.index_select(0, rows.to(t.device)))))

    def _copied(self) -> Self:
        """The same pages in storage of their own, without room for more."""
        return self.holding(self.pages().map(self._copied_part), self.count)

    def _copied_part(self, part: Any) -> Any:
        """A copy of a part of storage, which does not keep the whole alive."""
        return part.clone()

    def _reserved(self, count: int, like: Pages) -> Room:
        """Room for `count` pages, these among them."""
        if self.room is not None and count <= self.capacity:
            return self.room
        capacity = max(count, self.capacity + self.capacity // GROWTH)
        if self.room is None:
            return Room(like.map_named(lambda _, t: self._grown(None, t, capacity)))
        held = self.room.pages
        self.room.pages = like.map_named(lambda name, t: self._grown(getattr(held, name), t, capacity))
        return self.room

    def _grown(self, held: Any, template: Tensor, capacity: int) -> Any:
        """Storage for a part of `capacity` pages, which begins with the pages of storage `held`."""
        storage = template.new_empty((*template.shape[:PAGE_DIM], capacity, *template.shape[PAGE_DIM + 1 :]))
        if held is not None:
            storage[:, :, : self.count] = held[:, :, : self.count]
        return storage


def _paired(storage: Pages, pages: Pages, first: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of storage, from page `first` on, and the tensor to write there."""
    stored = dict(storage.tensors())
    n = pages.code.shape[PAGE_DIM]
    return [(stored[name].narrow(PAGE_DIM, first, n), tensor) for name, tensor in pages.tensors()]
