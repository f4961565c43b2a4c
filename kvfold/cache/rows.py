"""Folded sequences of one length: sinks, pages and the dense tail of one layer.

Positions count a row's own tokens from 0. Tokens that were evicted leave no gap: what is held lies in slots, which also
count from 0, and slot and position are the same until then. After it, `positions` tells those of the oldest folded
tokens, and all that follow are further on by what was evicted.

What a query reads does not depend on how the tokens came: a page folds once `recent` tokens follow it, and a query at
position t reads it folded from the moment that happened, dense before. Whole prefill, chunked prefill and single steps
therefore agree.

Formats that are fitted to a prompt see statistics of its first 256 tokens. Nothing is folded
before; the query that completes them is the first that reads folded pages.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvfold.cache.compaction import fill_holes, fold_again, in_order, move_pages, move_tokens
from kvfold.cache.prompt_costs import count_looked_at, looked_at
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore, StoreView
from kvfold.formats import FormatPair, KeyStatistics
from kvfold.formats.base import require_finite
from kvfold.formats.page import Pages
from kvfold.kernels.copy import copy_finite
from kvfold.kernels.cpu import module as cpu
from kvfold.kernels.modes import in_no_mode
from kvfold.kernels.tokens import TokenFolder, TokenPages
from kvfold.quant.finite import finite

TAIL_STEP = 16
"""The dense tail grows by so many tokens at a time."""

Allot = Callable[[Tensor | None, Tensor, Tensor], FormatPair]
"""Gives formats that await bits theirs, by `FoldedRows.queries` of the first tokens, and by their keys and values."""

# By folded keys: so no memory outlives the pages that it belongs to.
_TOKEN_FOLDERS: WeakKeyDictionary[Pages, tuple[FormatPair, Pages | None, TokenFolder | None]] = WeakKeyDictionary()


@dataclass(eq=False)
class Pending:
    """New tokens, folded where ripe, that `FoldedRows.commit` stores.

    Attributes
    ----------
    key, value
        The new tokens.
    into_sinks, after_sinks
        How many of them are sinks, and how many come after.
    pages
        Folded pages for each of `FoldedRows.stores`, if there are any.
    dense
        The tail and the new tokens after the sinks; None if the formats fold by token.
    """

    key: Tensor
    value: Tensor
    into_sinks: int
    after_sinks: int
    pages: list[Pages] | None
    dense: DenseSpan | None


@dataclass(eq=False)
class RowsState:
    """`FoldedRows` at one moment, by reference: later appends do not change what it refers to."""

    length: int
    pages: int
    sinks: tuple[Tensor, Tensor] | None
    tail: tuple[Tensor, Tensor] | None
    tail_start: int
    formats: FormatPair
    query_energy: Tensor | None
    queries: Tensor | None


class FoldedRows:
    """Keys and values of one layer for batch rows that hold equally many tokens.

    Attributes
    ----------
    kv_heads
        KV heads of the layer.
    key_dim, value_dim
        Coordinates of a key and of a value.
    sides
        2, or 1 if values are a view of keys.
    length
        Tokens held by each row.
    evicted
        Tokens that each head of each row held and forgot.
    positions
        Those of the first folded tokens, int32, (batch, kv_heads, tokens); all after them are at slot + `evicted`. None
        if nothing was evicted.
    keys, values
        Folded pages; page n covers slots sinks + n·P to sinks + (n+1)·P.
    sinks
        The first tokens, dense.
    tail
        The newest tokens, dense, from slot `tail_start` on. It overlaps the pages that folded last, so that
        they can be undone. Absent if the formats fold by token.
    query_energy
        q² of the first queries after the sinks, averaged over the heads that share a KV head: bfloat16, (batch,
        kv_heads, tokens, key_dim). Kept until the format is fitted for good.
    queries
        Some of those queries themselves (`prompt_costs.looked_at`), kept as long, if the formats await bits by them.
    dtypes
        Of keys and values that came last, as they were rounded before they were stored; None before the first.
    step
        What appends a token and attends with its query while that changes nothing else here (`joins_left`). Attention
        makes it; whatever else changes, drops it.
    """

    def __init__(self, formats: FormatPair, kv_heads: int) -> None:
        if formats.keys.page_size != formats.values.page_size:
            raise ValueError(
                f"keys have pages of {formats.keys.page_size} tokens, values of {formats.values.page_size}: "
                "a layer's formats must agree on page_size"
            )
        self.formats = self.unfitted = formats
        self.kv_heads = kv_heads
        self.page_size = formats.keys.page_size
        self.key_dim, self.value_dim = formats.keys.head_dim, formats.values.head_dim
        self.window = formats.window
        self.length = 0
        self.evicted = 0
        self.positions: Tensor | None = None
        self.keys = PageStore(formats.keys.form, self.window.sinks)
        self.values: PageStore | StoreView
        if formats.shares_pages:
            self.values = StoreView(self.keys, formats.values.form)
        else:
            self.values = PageStore(formats.values.form, self.window.sinks)
        self.sides = len(self.stores)
        self.sinks: tuple[Tensor, Tensor] | None = None
        self.tail: tuple[Tensor, Tensor] | None = None
        self.tail_start = self.window.sinks
        self.fit_tokens = formats.fit_tokens
        self.query_energy: Tensor | None = None
        self.queries: Tensor | None = None
        self.dtypes: tuple[torch.dtype, torch.dtype] | None = None
        self.step: cpu.Step | None = None
        self._looked = -1  # pages that were looked at (`look`); -1: not even sinks

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "step": None}  # it points to these tensors, not to a copy's

    # What is where

    @property
    def stores(self) -> tuple[PageStore, ...]:
        """Where pages are: those of keys and of values, or of keys alone if values are a view of them."""
        return (self.keys,) if isinstance(self.values, StoreView) else (self.keys, self.values)

    @property
    def awaits_queries(self) -> bool:
        """Whether `observe` has a use for queries: until the format is fitted for good."""
        return self.formats.awaits_fit or self.query_energy is not None

    @property
    def batch(self) -> int:
        """Batch rows; 0 before the first token."""
        held = self.sinks or self.tail
        if held is not None:
            return held[0].shape[0]
        return 0 if self.keys.storage is None else self.keys.storage.code.shape[0]

    @property
    def folded_stop(self) -> int:
        """Slot after the last folded token."""
        pages_stop = self.window.sinks + self.keys.count * self.page_size
        return min(self.length, pages_stop) if self.formats.folds_by_token else pages_stop

    @property
    def seen(self) -> int:
        """Tokens that came."""
        return self.length + self.evicted

    def reach(self, n: int, dense: DenseSpan | None, causal: bool) -> tuple[list[int], list[int]]:
        """Slots up to which the newest `n` tokens read, as queries: folded, and at all.

        Parameters
        ----------
        dense
            What `commit` returned for them.
        causal
            Whether a query reads nothing after itself; else a mask decides alone.
        """
        first, length, size = self.window.sinks, self.length, self.page_size
        stop = list(range(length - n + 1, length + 1)) if causal else [length] * n
        if self.formats.folds_by_token:
            return [length] * n, stop
        # What lies before the dense tokens is held folded only.
        at_least = length if dense is None else dense.start
        waits, unripe = self.fit_tokens - self.evicted, self.window.recent + first
        folded = []
        for seen in range(length - n + 1, length + 1):
            pages = (seen - unripe) // size if seen >= waits else 0
            folded.append(max(first + pages * size, at_least))
        return folded, stop

    def full_pages(self, length: int, followed_by: int) -> int:
        """Pages of a row of `length` tokens that at least `followed_by` ≥ `recent` tokens follow."""
        if length + self.evicted - (followed_by - self.window.recent) < self.fit_tokens:
            return 0
        return max(length - self.window.sinks - followed_by, 0) // self.page_size

    def sink_span(self) -> DenseSpan | None:
        """The sinks held so far."""
        if self.sinks is None:
            return None
        return DenseSpan(self.sinks, start=0, first=0, tokens=min(self.length, self.window.sinks))

    def tail_span(self) -> DenseSpan | None:
        """The tail, with the tokens of it that are folded too."""
        if self.tail is None or self.length <= self.tail_start:
            return None
        return DenseSpan(self.tail, self.tail_start, first=0, tokens=self.length - self.tail_start)

    # Growing

    def only_joins(self, n: int) -> bool:
        """Whether `n` new tokens do no more than join those held.

        They join the tail, fold nothing and push nothing out of it; or one token folds by itself into a page that is
        not full.
        """
        if self.formats.folds_by_token:
            after = self.length - self.window.sinks
            return n == 1 and after > 0 and after % self.page_size > 0 and self.token_folder() is not None
        if self.tail is None or self.length < self.window.sinks:
            return False
        stop, held, window = self.length + n, self.keys.count, self.window
        if not self.formats.awaits_fit and self.full_pages(stop, window.recent) > held:
            return False
        dropped = min(self.full_pages(stop, window.recent + window.undo), held)
        return window.sinks + dropped * self.page_size <= self.tail_start

    def write(self, key: Tensor, value: Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
        """Write tokens behind the newest, which `only_joins`; `join` is what makes them held.

        Parameters
        ----------
        key, value
            As for `prepare`, in any floating dtype, and not known to be finite.
        dtypes
            What keys and values are rounded to before they fold; those that stay dense have their tail's.

        Returns
        -------
        bool
            Whether they are finite, as far as this device looks at them now (`looked_at_once`), and were written.

        Raises
        ------
        ValueError
            As `look`.
        """
        if self.tail is None:
            folder = self.token_folder()
            page, slot = divmod(self.length - self.window.sinks, self.page_size)
            return folder is not None and folder.fold((key, value)[: self.sides], dtypes[: self.sides], page, slot)
        at, n = self.length - self.tail_start, key.shape[2]
        if at + n > self.tail[0].shape[2]:
            self._widen_tail(at, at + n)
        new, tail = (key, value)[: self.sides], self.tail[: self.sides]
        if looked_at_once(key):
            return copy_finite(new, tail, at)
        self.look()
        if n > 1:
            return copy_finite(new, tail, at)
        for kept, token in zip(tail, new, strict=True):
            kept[:, :, at : at + n] = token
        return True

    def unwrite(self) -> None:
        """Leave no trace of what was written and is not to be held."""
        if self.tail is None and self.keys.count:
            self._crop_tokens(self.length - self.window.sinks)

    def join(self, n: int) -> DenseSpan | None:
        """Hold the `n` tokens that were written, and return what `commit` does."""
        self.step = None
        self.length += n
        return self.dense_span()

    def dense_span(self) -> DenseSpan | None:
        """The tokens of the tail that are not folded: what a query of the newest token reads dense, after the sinks."""
        if self.tail is None:
            return None
        start = self.window.sinks + self.keys.count * self.page_size
        return DenseSpan(self.tail, start, first=start - self.tail_start, tokens=self.length - start)

    def append_by_step(self, key: Tensor, value: Tensor) -> bool:
        """Hold one more token if `step` takes it; else nothing has changed."""
        if self.step is None:
            return False
        try:
            joined = self.step.append(key, value, self.length)
            self.length += joined
        except BaseException:  # an interrupt: nobody knows whether it was written
            self.step = None
            self.unwrite()
            raise
        return joined

    def joins_left(self) -> int:
        """How many tokens a `step` may append, one by one, that do no more than join those held."""
        if self.awaits_queries or self.sides == 1 or not self.only_joins(1):
            return 0
        if self.tail is None:
            return -(self.length - self.window.sinks) % self.page_size
        room = self.tail_start + self.tail[0].shape[2] - self.length
        return next((n for n in range(room) if not self.only_joins(n + 1)), room)

    def token_folder(self) -> TokenFolder | None:
        """What folds single tokens into pages; None if no kernel does."""
        keys, values = self.keys.storage, self.values.storage
        if keys is None or values is None or keys.code.device.type != "cpu":
            return None
        others = None if values is keys else values
        known = _TOKEN_FOLDERS.get(keys)
        if known is not None and known[0] is self.formats and known[1] is others:
            folder = known[2]
            if folder is None or not folder.has_moved():
                return folder
        streams = []
        for fmt, pages in ((self.formats.keys, keys), (self.formats.values, values))[: self.sides]:
            how = fmt.token_code()
            if how is not None and pages.scale is not None:
                streams.append(TokenPages(how, fmt.lanes, pages.code, pages.scale))
        folder = TokenFolder(streams) if len(streams) == self.sides else None
        _TOKEN_FOLDERS[keys] = self.formats, others, folder
        return folder

    def prepare(self, key: Tensor, value: Tensor) -> "Pending":
        """Fold what new tokens make ripe, changing nothing yet.

        Parameters
        ----------
        key, value
            (batch, kv_heads, n, dim), finite, n ≥ 1.

        Raises
        ------
        ValueError
            If a scale leaves float16's range.
        """
        if not looked_at_once(key):
            self.look()
        into_sinks = min(max(self.window.sinks - self.length, 0), key.shape[2])
        n = key.shape[2] - into_sinks
        new = DenseSpan((key, value), self.length + into_sinks, into_sinks, n)
        if self.formats.folds_by_token:
            pages = None
            if n:
                slot = new.start - self.window.sinks
                pages = self._fold(self.formats, new.key, new.value, slot)
            return Pending(key, value, into_sinks, n, pages, dense=None)

        tail = self.tail_span()
        dense = new
        if tail is not None:
            dense = DenseSpan.of(torch.cat((tail.key, new.key), 2), torch.cat((tail.value, new.value), 2), tail.start)
        pages = None if self.formats.awaits_fit else self._fold_ripe(dense, self.formats)
        return Pending(key, value, into_sinks, n, pages, dense)

    def _fold_ripe(self, dense: DenseSpan, formats: FormatPair) -> list[Pages] | None:
        """The pages of `dense` that are ripe and not folded yet, folded."""
        ripe = self.full_pages(dense.stop, self.window.recent) - self.keys.count
        if ripe <= 0:
            return None
        own = slice(self.folded_stop - dense.start, self.folded_stop - dense.start + ripe * self.page_size)
        return self._fold(formats, dense.key[:, :, own], dense.value[:, :, own], self.folded_stop - self.window.sinks)

    def commit(self, pending: "Pending") -> DenseSpan | None:
        """Store prepared tokens.

        Returns
        -------
        DenseSpan or None
            All tokens after the sinks that the new tokens' queries may read dense: those that were not
            folded yet, and the new ones. None if the formats fold by token.
        """
        self.step, self.dtypes = None, (pending.key.dtype, pending.value.dtype)
        self._keep_sinks(pending.key, pending.value, pending.into_sinks)
        folded_stop, dense = self.folded_stop, pending.dense
        if dense is None:
            if pending.pages is not None:
                page = max(self.length - self.window.sinks, 0) // self.page_size
                for store, folded in zip(self.stores, pending.pages, strict=True):
                    store.merge(folded, page)
        else:
            if pending.pages is not None:
                for store, folded in zip(self.stores, pending.pages, strict=True):
                    store.append(folded)
            self._keep_tail(dense, pending.after_sinks)
            dense = dense.after(folded_stop - dense.start)
        self.length += pending.key.shape[2]
        return dense

    def observe(self, query: Tensor | None, n: int, allot: Allot | None = None) -> None:
        """Let a format that awaits statistics see the queries of the newest tokens.

        With the last of the first `fit_tokens` it is fitted, and what is ripe folds.

        Parameters
        ----------
        query
            (batch, heads, n, key_dim), rotated by position as the keys are; None if nobody knows them, which
            counts all channels as read alike.
        n
            How many tokens were appended last.
        allot
            Gives formats that await bits theirs.
        """
        if self.tail is None or not self.awaits_queries:
            return
        first = self.length - n
        own = slice(max(self.window.sinks - first, 0), max(self.fit_tokens - first, 0))
        key = self.tail[0]
        if query is None:
            seen_now = max(min(own.stop, n) - own.start, 0)
            energy = torch.ones(*key.shape[:2], seen_now, key.shape[-1], dtype=torch.bfloat16, device=key.device)
        else:
            energy = query[:, :, own].float().square().unflatten(1, (self.kv_heads, -1)).mean(2).bfloat16()
            if self.unfitted.awaits_bits:
                some = query[:, :, looked_at(first, self.window.sinks, self.fit_tokens)]
                some = some.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
                self.queries = some if self.queries is None else torch.cat((self.queries, some), 2)
        seen = energy if self.query_energy is None else torch.cat((self.query_energy, energy), 2)
        if self.length < self.fit_tokens:
            self.query_energy = seen
            return
        if self.formats.awaits_fit:
            tail = self.tail_span()
            assert tail is not None
            sinks, after = self.sink_span(), self.fit_tokens - tail.start
            key, value = tail.key[:, :, :after], tail.value[:, :, :after]
            if sinks is not None:
                key, value = torch.cat((sinks.key, key), 2), torch.cat((sinks.value, value), 2)
            formats = self._fitted(key, value, seen, self.queries, allot)
            pages = self._fold_ripe(tail, formats)
            # Nothing below fails.
            self.set_formats(formats)
            if pages is not None:
                for store, folded in zip(self.stores, pages, strict=True):
                    store.append(folded)
            self._keep_tail(tail, 0)
        self.query_energy = seen
        self._forget_queries()

    def _fitted(
        self, key: Tensor, value: Tensor, energy: Tensor, queries: Tensor | None, allot: Allot | None
    ) -> FormatPair:
        """Formats by the first `fit_tokens` tokens, dense, and by the energies and queries that are held of them."""
        formats = self.formats
        if formats.awaits_bits:
            assert allot is not None
            formats = allot(queries, key, value)
        fitted = []
        for fmt, x, read in ((formats.keys, key, energy), (formats.values, value, energy[:, :, :0])):
            about = KeyStatistics.of(x[:, :, self.window.sinks :], read, self.page_size)
            fitted.append(fmt.fitted(about) if fmt.awaits_fit else fmt)
        return formats.with_formats(*fitted)

    def _forget_queries(self) -> None:
        """Let go of queries once no crop that leaves no trace can go back behind the fit."""
        if self.length >= self.fit_tokens + self.window.undo:
            self.query_energy = self.queries = None

    def set_formats(self, formats: FormatPair) -> None:
        """Fold and read by these from now on; they must read what is held as it was folded."""
        self.step = None
        self.formats = formats
        self.keys.form, self.values.form = formats.keys.form, formats.values.form

    def _fold(self, formats: FormatPair, key: Tensor, value: Tensor, slot: int) -> list[Pages]:
        """Pages for each of `stores` that hold tokens from slot `slot` of the stream on, and nothing elsewhere."""
        pages = []
        sides = ((formats.keys, key), (formats.values, value))
        for fmt, x in sides[: self.sides]:
            pages.append(fmt.fold_from(x, slot % self.page_size, self.window.sinks + slot + self.evicted))
            if looked_at_once(key) or key.shape[2] > 1:
                require_finite(pages[-1])
        return pages

    def look(self) -> None:
        """Raise if sinks or pages that became full since the last look hold a NaN or an infinity."""
        after = self.length - self.window.sinks
        if self.sinks is not None and after >= 0 and self._looked < 0:
            if not all(finite(x) for x in self.sinks):
                raise ValueError("one of the first tokens is NaN or infinite: the model's own computation broke")
            self._looked = 0
        full = after // self.page_size
        if self.formats.folds_by_token and full > max(self._looked, 0):
            for store in self.stores:
                require_finite(store.pages(max(self._looked, 0), full))
            self._looked = full

    def _forget_looks(self, length: int) -> None:
        """What lies after the first `length` slots is looked at anew when it comes again."""
        self._looked = min(self._looked, max(length - self.window.sinks, -1) // self.page_size)

    def _keep_sinks(self, key: Tensor, value: Tensor, n: int) -> None:
        if not n:
            return
        stop = self.length + n
        if self.sinks is None or stop > self.sinks[0].shape[2]:
            wider = self.room(key, value, min(tail_capacity(stop), self.window.sinks))
            for new, old in zip(wider[: self.sides], self.sinks or (), strict=False):
                new[:, :, : self.length] = old[:, :, : self.length]
            self.sinks = wider
        for kept, new in zip(self.sinks, (key, value), strict=True):
            kept[:, :, self.length : stop] = new[:, :, :n]

    def _keep_tail(self, dense: DenseSpan, new: int) -> None:
        """Keep what is young enough of `dense`, whose last `new` tokens are not in the tail yet."""
        start = self._start_of_tail(dense.stop)
        held = dense.stop - start
        if not new and start == self.tail_start:
            return
        stays = self.tail is not None and start == self.tail_start and held <= self.tail[0].shape[2]
        if not stays:  # new storage, so that a `RowsState` still finds the old tail as it was
            self.tail = self.room(dense.key, dense.value, tail_capacity(held))
        assert self.tail is not None
        first = held - new if stays else 0
        for kept, source in zip(self.tail, (dense.key, dense.value), strict=True):
            kept[:, :, first:held] = source[:, :, start + first - dense.start :]
        self.tail_start = start

    def _widen_tail(self, held: int, tokens: int) -> None:
        """Make room for `tokens` tokens in the tail, of which `held` are held: in new storage, as `_keep_tail` does."""
        assert self.tail is not None
        self.step = None
        wider = self.room(*self.tail, tail_capacity(tokens))
        for new, old in zip(wider[: self.sides], self.tail, strict=False):
            new[:, :, :held] = old[:, :, :held]
        self.tail = wider

    def _start_of_tail(self, length: int) -> int:
        """Where the tail starts once `length` tokens are held: what folded too long ago to be undone leaves it."""
        dropped = min(self.full_pages(length, self.window.recent + self.window.undo), self.keys.count)
        return max(self.window.sinks + dropped * self.page_size, self.tail_start)

    # Going back

    def state(self) -> "RowsState":
        """What `restore` needs to forget all later tokens, without copies."""
        return RowsState(
            self.length, self.keys.count, self.sinks, self.tail, self.tail_start, self.formats, self.query_energy,
            self.queries,
        )  # fmt: skip

    def restore(self, state: "RowsState") -> None:
        """Be as when `state` was taken; only appends may have happened since."""
        self.step = None  # before there are other pages, as it holds these
        if self.formats.folds_by_token:
            self._forget_looks(state.length)
            self._crop_tokens(max(state.length - self.window.sinks, 0))  # what was written and never held, too
        else:
            self._forget_looks(state.length)
            for store in self.stores:
                store.truncate(state.pages)
        self.length, self.sinks, self.tail, self.tail_start = state.length, state.sinks, state.tail, state.tail_start
        self.set_formats(state.formats)
        self.query_energy, self.queries = state.query_energy, state.queries

    # Evicting

    def evictable(self, recent: int) -> int:
        """Folded slots, after the sinks, that may be evicted: in whole pages, none among the newest `recent` tokens."""
        if self.awaits_queries:
            return 0
        stop = min(self.folded_stop, self.length - recent)
        if not self.formats.folds_by_token:
            stop = min(stop, self.tail_start)
        return max(stop - self.window.sinks, 0) // self.page_size * self.page_size

    def folded_positions(self, slots: int) -> Tensor:
        """Positions of the first `slots` folded tokens: int64, (batch, kv_heads, slots)."""
        assert self.keys.storage is not None
        first = self.window.sinks + self.evicted
        later = torch.arange(first, first + slots, device=self.keys.storage.code.device)
        later = later.expand(self.batch, self.kv_heads, -1)
        if self.positions is None:
            return later
        known = self.positions[..., :slots].long()
        return torch.cat((known, later[..., known.shape[-1] :]), -1)

    def slot_positions(self) -> Tensor:
        """Positions of all that is held: int64, (batch, kv_heads, length)."""
        assert self.positions is not None
        held = self.positions
        sinks, after = (
            torch.arange(*ends, device=held.device).expand(*held.shape[:2], -1)
            for ends in ((0, self.window.sinks), (self.whole_from, self.seen))
        )
        return torch.cat((sinks, held.long(), after), -1)

    @property
    def whole_from(self) -> int:
        """Position from which on every token is held."""
        return 0 if self.positions is None else self.window.sinks + self.positions.shape[-1] + self.evicted

    @in_no_mode
    def evict(self, keep: Tensor, by_page: bool) -> None:
        """Forget folded tokens for good.

        Parameters
        ----------
        keep
            For the first `evictable` slots, bool, (batch, kv_heads, slots), or (batch, kv_heads, pages) if `by_page`;
            True equally often for each head, and for whole pages of tokens unless the formats fold by token.
        by_page
            Whether whole pages go. Otherwise tokens go; those that stay keep their codes where pages have neither
            centres nor channel scales; else all pages from the first that loses one are folded once more.
        """
        after = self._sharing(copied=True)
        after._evict(keep, by_page)
        vars(self).update(vars(after))  # in one piece: an interrupt comes before it or after

    def _evict(self, keep: Tensor, by_page: bool) -> None:
        size, pages = self.page_size, keep.shape[-1] if by_page else keep.shape[-1] // self.page_size
        positions = self.folded_positions(pages * size)
        folded = self.folded_stop - self.window.sinks
        if by_page:
            index = fill_holes(keep, after=self.keys.count - pages)
            for store in self.stores:
                move_pages(store, index)
            within = torch.arange(size, device=index.device)
            moved = (index[..., : int(keep[0, 0].sum())].unsqueeze(-1) * size + within).flatten(2)
        elif any(store.describes_pages for store in self.stores):
            moved = in_order(keep)
            left = torch.arange(moved.shape[-1] // size, device=keep.device)
            rest = torch.arange(pages, self.keys.count, device=keep.device)
            by_slot = torch.cat(
                (moved, torch.arange(pages * size, folded, device=keep.device).expand(*keep.shape[:2], -1)), -1
            )
            for store, fmt in zip(self.stores, (self.formats.keys, self.formats.values), strict=False):
                if store.describes_pages:
                    fold_again(store, fmt, moved)
                    move_pages(store, torch.cat((left, rest)).expand(*keep.shape[:2], -1))
                else:
                    move_tokens(store, by_slot)
        else:
            index = fill_holes(keep, after=folded - pages * size)
            for store in self.stores:
                move_tokens(store, index)
            moved = index[..., : int(keep[0, 0].sum())]
        gone = pages * size - moved.shape[-1]
        left = positions.gather(-1, moved).int()
        known = self.positions  # may tell of more slots than these
        self.positions = left if known is None else torch.cat((left, known[..., pages * size :]), -1)
        self.length -= gone
        self.evicted += gone
        if not self.formats.folds_by_token:
            self.tail_start -= gone
        if self._looked > 0:
            self._looked = max(self._looked * size - gone, 0) // size

    # Shrinking and rearranging

    def crop(self, length: int) -> int:
        """Forget all but the first `length` slots, of which at least those of `positions` are left.

        Returns
        -------
        int
            How many kept tokens go on from folded values although a cache that never held more than
            `length` tokens would hold them dense; 0 if the crop leaves no trace.
        """
        if length >= self.length:
            return 0
        self.step = None
        self._forget_looks(length)
        if self.formats.folds_by_token:
            self._crop_tokens(max(length - self.window.sinks, 0))
            self.length = length
            return 0
        sinks, size = self.window.sinks, self.page_size
        ripe = self.full_pages(length, self.window.recent)
        if length < self.tail_start:
            whole = max(length - sinks, 0) // size
            if length > sinks + whole * size:
                self._reopen(whole, length - sinks - whole * size)
            self.tail_start = sinks + whole * size
            lost = max(length - sinks, 0) - ripe * size
        else:
            whole = max(ripe, (self.tail_start - sinks) // size)
            lost = (whole - ripe) * size
        for store in self.stores:
            store.truncate(min(whole, store.count))
        if length <= sinks:  # what comes now is another prompt
            self.set_formats(self.unfitted)
            self.query_energy = self.queries = None
        if self.query_energy is not None:  # not fitted for good
            self.query_energy = self.query_energy[:, :, : max(length - sinks, 0)]
            if self.queries is not None:
                self.queries = self.queries[:, :, : count_looked_at(length, sinks)]
            if length < self.fit_tokens:
                self.set_formats(self.unfitted)
        self.length = length
        return max(lost, 0)

    def _crop_tokens(self, kept: int) -> None:
        """Truncate pages to `kept` tokens, clearing the slots that become free."""
        whole, part = divmod(kept, self.page_size)
        for store in self.stores:
            store.truncate(-(-kept // self.page_size))
            if part:
                store.form.clear(store.pages(whole, whole + 1), part)

    def _reopen(self, page: int, tokens: int) -> None:
        """Make the first `tokens` tokens of `page` the tail."""
        key, value = (
            store.form.unfold(store.pages(page, page + 1))[:, :, :tokens] for store in (self.keys, self.values)
        )
        assert self.tail is not None  # a folded page was dense before
        self.tail = self.room(*self.tail, tail_capacity(tokens))
        for kept, source in zip(self.tail, (key, value), strict=True):
            kept[:, :, :tokens] = source.to(kept.dtype)

    def selected(self, rows: Tensor) -> "FoldedRows":
        """The batch rows `rows`, in that order, repeats allowed; these stay as they are."""
        other = self._sharing()
        for store in other.stores:
            store.select(rows)
        other._map_dense(lambda t: t.index_select(0, rows.to(t.device)))
        if other.positions is not None:
            other.positions = other.positions.index_select(0, rows.to(other.positions.device))
        formats = other.formats
        other.set_formats(formats.with_formats(formats.keys.select(rows), formats.values.select(rows)))
        return other

    def _sharing(self, copied: bool = False) -> "FoldedRows":
        """Rows of the same tensors, whose stores are their own; and their pages, too, if `copied`."""
        other = copy.copy(self)
        other.keys = self.keys.sharing(copied)
        if isinstance(self.values, StoreView):
            other.values = StoreView(other.keys, self.values.form)
        else:
            other.values = self.values.sharing(copied)
        return other

    def _map_dense(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.sinks is not None:
            self.sinks = self._beside(fn(self.sinks[0]), partial(fn, self.sinks[1]))
        if self.tail is not None:
            self.tail = self._beside(fn(self.tail[0]), partial(fn, self.tail[1]))
        if self.query_energy is not None:
            self.query_energy = fn(self.query_energy)
        if self.queries is not None:
            self.queries = fn(self.queries)

    def _beside(self, key: Tensor, value: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Dense keys, and their values: what `value` makes, or a view of the keys."""
        return key, key[..., : self.value_dim] if self.formats.shares_pages else value()

    def room(self, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Storage for `tokens` tokens shaped as these."""
        return self._beside(_room(key, tokens), partial(_room, value, tokens))

    # Reading everything

    def pages(self) -> tuple[Pages | None, Pages | None]:
        """Storage of key and value pages, unused capacity included."""
        return self.keys.storage, self.values.storage

    def unfold(self) -> tuple[Tensor, Tensor]:
        """All keys and values as attention reads them: (batch, kv_heads, length, dim), float32."""
        tail = self.tail_span()
        if tail is not None:
            tail = tail.after(max(self.folded_stop - tail.start, 0))
        spans = [span for span in (self.sink_span(), self._folded_span(), tail) if span is not None]
        return (
            torch.cat([span.key.float() for span in spans], 2),
            torch.cat([span.value.float() for span in spans], 2),
        )

    def _folded_span(self) -> DenseSpan | None:
        if not self.keys.count:
            return None
        held = self.folded_stop - self.window.sinks
        key, value = (store.form.unfold(store.pages())[:, :, :held] for store in (self.keys, self.values))
        return DenseSpan.of(key, value, self.window.sinks)


def looked_at_once(x: Tensor) -> bool:
    """Whether each token on a tensor's device is looked at for NaN and infinities as it comes.

    Where to look means to wait for the device, what comes token by token is looked at a page at a time; until then
    attention over it gives NaN.
    """
    return x.is_cpu


def tail_capacity(tokens: int) -> int:
    """Tokens that a tail has room for when it must hold `tokens`."""
    return -(-tokens // TAIL_STEP) * TAIL_STEP


def _room(like: Tensor, tokens: int) -> Tensor:
    """Storage for `tokens` tokens shaped as `like`."""
    batch, heads, _, dim = like.shape
    return like.new_zeros(batch, heads, tokens, dim)
