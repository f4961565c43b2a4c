"""Growing storage for folded pages."""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from kvfold.formats.page import PageForm, Pages

PAGE_DIM = 2
"""Pages of a cache have the shape (batch, kv_heads, N, …)."""


class PageStore:
    """Pages of one stream (the keys or the values of a layer) in storage that grows ahead of need.

    Capacity grows by 1/32, so that what is reserved and unused stays below 3 % once a sequence is
    long, while copying stays amortised.
    """

    GROWTH = 32

    def __init__(self, form: PageForm, origin: int = 0) -> None:
        self.form = form
        self.origin = origin  # position of the first token
        self.count = 0
        self.storage: Pages | None = None  # capacity included

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """A view of pages `start` to `stop`."""
        stop = self.count if stop is None else min(stop, self.count)
        assert self.storage is not None
        view = self.storage.map(lambda t: t[:, :, start:stop])
        size = self.form.page_size
        return replace(view, tokens=(stop - start) * size, first=self.origin + start * size)

    @property
    def describes_pages(self) -> bool:
        """Whether pages have a centre or channel scales, so that a token's codes mean something in its page only."""
        return self.storage is not None and (self.storage.centre is not None or self.storage.channel_scale is not None)

    def append(self, pages: Pages) -> None:
        """Add whole pages after the last."""
        added = pages.code.shape[PAGE_DIM]
        self._reserve(self.count + added, like=pages)
        for target, source in self._paired(pages, self.count):
            target.copy_(source)
        self.count += added

    def merge(self, pages: Pages, first: int) -> None:
        """OR packed codes, and add scales, into pages from `first` on, adding pages at the end.

        Slots that a page does not use are zero, so tokens can join a part-full page this way.
        Only for formats that fold token by token: their pages have no metadata to combine.
        """
        added = first + pages.code.shape[PAGE_DIM] - self.count
        if added > 0:
            self.append(pages.map(lambda t: t.new_zeros(*t.shape[:PAGE_DIM], added, *t.shape[PAGE_DIM + 1 :])))
        for target, source in self._paired(pages, first):
            if target.is_floating_point():
                target.add_(source)
            else:
                target.bitwise_or_(source)

    def sharing(self, copied: bool = False) -> "PageStore":
        """A store of the same pages, or of copies of them, which changes without this one."""
        other = copy.copy(self)
        if copied and self.storage is not None:
            other.storage = self.storage.map(lambda t: self._copied(t[:, :, : self.count]))
        return other

    def truncate(self, count: int) -> None:
        """Keep the first `count` pages; give the storage back once less than half of it is in use."""
        self.count = count
        if count == 0:
            self.storage = None
        elif self.storage is not None and 2 * count < self._capacity:
            self.storage = self.storage.map(lambda t: self._copied(t[:, :, :count]))

    def give_back(self, count: int) -> None:
        """Keep the first `count` pages, and no more storage than growing up to there would have left."""
        self.count = count
        if count == 0:
            self.storage = None
        elif self.storage is not None and self._capacity > count + count // self.GROWTH:
            self.storage = self.storage.map(lambda t: self._copied(t[:, :, :count]))

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows`, in that order, repeats allowed."""
        if self.storage is not None:
            self.storage = self.storage.map(lambda t: t.index_select(0, rows.to(t.device)))

    def _copied(self, part: Any) -> Any:
        """A part of storage that does not keep the whole alive."""
        return part.clone()

    @property
    def _capacity(self) -> int:
        return 0 if self.storage is None else self.storage.code.shape[PAGE_DIM]

    def _reserve(self, count: int, like: Pages) -> None:
        if count <= self._capacity:
            return
        capacity = max(count, self._capacity + self._capacity // self.GROWTH)

        def grown(name: str, template: Tensor) -> Tensor:
            shape = list(template.shape)
            shape[PAGE_DIM] = capacity
            storage = template.new_empty(shape)
            if self.storage is not None:
                old = getattr(self.storage, name).narrow(PAGE_DIM, 0, self.count)
                storage.narrow(PAGE_DIM, 0, self.count).copy_(old)
            return storage

        self.storage = like.map_named(grown)

    def _paired(self, pages: Pages, first: int) -> list[tuple[Tensor, Tensor]]:
        """Storage of pages from `first` on, beside the tensors to write there."""
        assert self.storage is not None
        stored = dict(self.storage.tensors())
        n = pages.code.shape[PAGE_DIM]
        return [(stored[name].narrow(PAGE_DIM, first, n), tensor) for name, tensor in pages.tensors()]


class StoreView:
    """The pages of another stream, read in a form of one's own: values that are a view of keys."""

    def __init__(self, store: PageStore, form: PageForm) -> None:
        self.store = store
        self.form = form

    @property
    def storage(self) -> Pages | None:
        """Those of the other, capacity included."""
        return self.store.storage

    @property
    def count(self) -> int:
        """Pages held."""
        return self.store.count

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """A view of pages `start` to `stop`."""
        return self.store.pages(start, stop)
