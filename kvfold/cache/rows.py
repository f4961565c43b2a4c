"""Folded sequences of one length, in tensors: pages and dense tokens, as the schedule has them."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvfold.cache.compaction import keep_pages, keep_tokens
from kvfold.cache.fit import Allot
from kvfold.cache.held import HeldRows
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore
from kvfold.cache.tail import Sides
from kvfold.formats import FormatPair
from kvfold.formats.base import require_finite
from kvfold.formats.page import Pages
from kvfold.kernels.cpu.tokens import TokenFolder, TokenPages
from kvfold.kernels.modes import in_no_mode
from kvfold.quant.finite import finite

Dtypes = tuple[torch.dtype, torch.dtype]
"""Of keys and of values."""

# Keyed by folded keys, so that no entry outlives its pages.
_TOKEN_FOLDERS: WeakKeyDictionary[Pages, tuple[FormatPair, Pages | None, TokenFolder | None]] = WeakKeyDictionary()


class NotFinite(ValueError):
    """A key or value is NaN or infinite, or was rounded to an infinity."""


class FoldedRows(HeldRows):
    """`HeldRows` in tensors."""

    def __init__(self, formats: FormatPair, kv_heads: int) -> None:
        sides = (formats.keys,) if formats.shares_pages else (formats.keys, formats.values)
        super().__init__(formats, kv_heads, tuple(PageStore(side.form, formats.window.sinks) for side in sides))
        self.dtypes: Dtypes | None = None  # that the newest tokens were rounded to before they were stored
        self._checked = -1  # full pages that `check_finite` has passed; -1: not even the sinks

    # Growing

    def append(self, key: Tensor, value: Tensor, dtypes: Dtypes) -> DenseSpan | None:
        """Add tokens, (batch, kv_heads, n, dim), floating point, n ≥ 1, rounded to `dtypes` whether they fold or not.

        Returns all tokens after the sinks that the new tokens' queries may read dense: those that were not folded yet,
        and the new ones. None if the formats fold by token.

        Raises NotFinite on a NaN or an infinity, though single tokens are not checked on all devices (`checks_tokens`),
        and ValueError if a scale leaves float16's range, or as `check_finite`. A failure may leave traces, which
        `restore` removes.
        """
        if not checks_tokens(key):
            self.check_finite()
        if self._joined(key, value, dtypes):
            self._become(length=self.length + key.shape[2], dtypes=dtypes)
            return self.dense_span()
        key, value = (x.to(dtype) for x, dtype in zip((key, value), dtypes, strict=True))
        if len(self.stores) == 1:
            value = key[..., : self.value_dim]
        if (checks_tokens(key) or key.shape[2] > 1) and not (finite(key) and finite(value)):
            raise NotFinite("a key or value is NaN or infinite")
        sinks, n = self.window.sinks, key.shape[2]
        into_sinks = min(max(sinks - self.length, 0), n)
        dense = self.dense.with_sinks(key[:, :, :into_sinks], value[:, :, :into_sinks], self.length, sinks)
        new = DenseSpan((key, value), self.length + into_sinks, into_sinks, n - into_sinks)
        length = self.length + n
        if self.schedule.by_token:
            stores = self._with_tokens(new.key, new.value, new.start, self._fold)
            self._become(stores=stores, dense=dense, length=length, dtypes=dtypes)
            return None
        tail = self.tail_span()
        if tail is not None:
            new = DenseSpan.of(torch.cat((tail.key, new.key), 2), torch.cat((tail.value, new.value), 2), tail.start)
        stores = self.stores if self.formats.awaits_fit else self._with_ripe_pages(new, self.formats, self._fold)
        tail_start = self.schedule.tail_start(length, self.evicted, stores[0].count, n)
        dense = dense.with_tail(new, n - into_sinks, max(tail_start, dense.tail_start))
        unread = new.after(self.folded_stop - new.start)
        self._become(stores=stores, dense=dense, length=length, dtypes=dtypes)
        return unread

    def only_joins(self, n: int, newest: int | None = None) -> bool:
        """Whether `n` new tokens only extend what is held (`Schedule.only_joins`), and a kernel can do that."""
        if self.schedule.by_token and self.token_folder() is None:
            return False
        return self._extends(n, newest)

    def _extends(self, n: int, newest: int | None = None) -> bool:
        """Whether `n` new tokens do no more than extend what is held."""
        if not self.schedule.by_token and self.dense.tail is None:
            return False
        held = self.length, self.evicted, self.keys.count, self.dense.tail_start
        return self.schedule.only_joins(n, *held, self.formats.awaits_fit, newest)

    def _joined(self, key: Tensor, value: Tensor, dtypes: Dtypes) -> bool:
        """Write tokens behind those held if they only extend them; return whether it did. If not, none is added."""
        n = key.shape[2]
        if not self.only_joins(n):
            return False
        if not self.schedule.by_token:
            dense = self.dense.widened(self.length, n)
            if dense is not self.dense:
                self._become(dense=dense)
            return dense.write(key, value, self.length, checks=checks_tokens(key) or n > 1)
        folder, sides = self.token_folder(), len(self.stores)
        page, slot = divmod(self.length - self.window.sinks, self.page_size)
        return folder is not None and folder.fold((key, value)[:sides], dtypes[:sides], page, slot)

    def append_by_step(self, key: Tensor, value: Tensor) -> bool:
        """Append a token if `step` takes it, and return whether it did; else nothing has changed."""
        if self.step is None or not self.step.append(key, value, self.length):
            return False
        self.length += 1
        return True

    def steps_left(self) -> int:
        """How many tokens a `step` may append, one by one, until one does more than extend what is held."""
        if self.awaits_queries or len(self.stores) == 1 or not self.only_joins(1):
            return 0
        if self.schedule.by_token:
            return -(self.length - self.window.sinks) % self.page_size
        room = self.dense.room_left - self.length
        return next((n for n in range(room) if not self.only_joins(n + 1, newest=1)), room)

    def fold_ahead(self) -> bool:
        """Fold now what would fold when the next single token comes, and return whether that token then only joins.

        What its query reads is the same. False, too, while formats await queries. Raises ValueError as `append`.
        """
        if self.awaits_queries:
            return False
        if self._extends(1):
            return True
        self.check_finite()
        tail, length = self.tail_span(), self.length + 1
        if self.schedule.by_token:
            if self.keys.storage is not None and not (self.length - self.window.sinks) % self.page_size:
                self._become(stores=tuple(store.with_empty(1) for store in self.stores))
        elif tail is not None:
            stores = self._with_ripe_pages(tail, self.formats, self._fold, length)
            tail_start = self.schedule.tail_start(length, self.evicted, stores[0].count, 1)
            dense = self.dense.with_tail(tail, 0, max(tail_start, self.dense.tail_start))
            self._become(stores=stores, dense=dense)
        return self._extends(1)

    def empty_next(self) -> None:
        """Empty the slot of the next token, in place, if tokens fold by themselves; fold_ahead says that it has one."""
        if self.schedule.by_token:
            self._cleared(self.stores, self.length)

    def stay_in(self, tail: Sides | None, pages: int) -> None:
        """Keep the dense tail in `tail`, which has room, and have room for `pages` pages: new tokens move neither."""
        for store in self.stores:
            store.reserve(pages)
        if tail is not None and self.dense.tail is not tail:
            self._become(dense=self.dense.moved_into(tail, self.length))

    def token_folder(self) -> TokenFolder | None:
        """The kernel that folds single tokens into pages; None if there is none."""
        keys, values = self.pages()
        if keys is None or values is None or keys.code.device.type != "cpu":
            return None
        others = None if values is keys else values
        known = _TOKEN_FOLDERS.get(keys)
        if known is not None and known[0] is self.formats and known[1] is others:
            folder = known[2]
            if folder is None or not folder.has_moved():
                return folder
        streams = []
        sides = ((self.formats.keys, keys), (self.formats.values, values))
        for fmt, pages in sides[: len(self.stores)]:
            how = fmt.token_code(keys.code.device)
            if how is not None and pages.scale is not None:
                streams.append(TokenPages(how, fmt.lanes, pages.code, pages.scale))
        folder = TokenFolder(streams) if len(streams) == len(self.stores) else None
        _TOKEN_FOLDERS[keys] = self.formats, others, folder
        return folder

    def _fold(self, formats: FormatPair, key: Tensor, value: Tensor, slot: int) -> list[Pages]:
        """`kvfold.cache.held.Fold` for each of `stores`."""
        pages = []
        sides = ((formats.keys, key), (formats.values, value))
        for fmt, x in sides[: len(self.stores)]:
            pages.append(fmt.fold_from(x, slot % self.page_size, self.window.sinks + slot + self.evicted))
            if checks_tokens(key) or key.shape[2] > 1:
                require_finite(pages[-1])
        return pages

    def check_finite(self) -> None:
        """Raise ValueError if the sinks, or pages that became full since the last check, hold a NaN or an infinity."""
        after, checked = self.length - self.window.sinks, self._checked
        if self.dense.sinks is not None and after >= 0 and checked < 0:
            if not all(finite(x) for x in self.dense.sinks):
                raise ValueError("one of the first tokens is NaN or infinite: the model's own computation broke")
            checked = 0
        full = after // self.page_size
        if self.schedule.by_token and full > max(checked, 0):
            for store in self.stores:
                require_finite(store.pages(max(checked, 0), full))
            checked = full
        self._checked = checked

    # Fitting

    def observe(self, query: Tensor | None, n: int, allot: Allot | None = None) -> None:
        """Show a format that awaits statistics the queries of the newest `n` tokens, those appended last.

        Once the first `fit_tokens` tokens are complete, the format is fitted and ripe pages fold. `query` is (batch,
        heads, n, key_dim), rotated by position as the keys are; None if they are unknown: all channels then count
        alike. `allot` decides the bits of formats that await them.
        """
        if self.dense.tail is None or not self.awaits_queries:
            return
        first, some = self.length - n, None
        counted = self.fit.counted(first)
        if query is None:
            key, known = self.dense.tail[0], max(min(counted.stop, n) - counted.start, 0)
            energy = torch.ones(*key.shape[:2], known, key.shape[-1], dtype=torch.bfloat16, device=key.device)
        else:
            by_head = query[:, :, counted].float().square().unflatten(1, (self.kv_heads, -1))
            energy = by_head.mean(2).bfloat16()
            if self.fit.awaits_bits:
                some = query[:, :, self.fit.sampled(first)]
                some = some.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
        fit = self.fit.with_more(energy, some, torch.cat)
        if self.length < self.schedule.fit_tokens:
            self._become(fit=fit)
            return
        changes: dict[str, Any] = {}
        if self.formats.awaits_fit:
            tail = self.tail_span()
            assert tail is not None
            formats = fit.fitted(*self._first_tokens(tail), fit.energy, fit.queries, allot)
            stores = self._with_ripe_pages(tail, formats, self._fold)
            tail_start = self.schedule.tail_start(self.length, self.evicted, stores[0].count, n)
            dense = self.dense.with_tail(tail, 0, max(tail_start, self.dense.tail_start))
            changes = {"formats": formats, "stores": stores, "dense": dense}
        self._become(fit=fit.kept(self.length, n), **changes)

    def _first_tokens(self, tail: DenseSpan) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `fit_tokens` tokens, none of which has folded yet."""
        after, sinks = self.schedule.fit_tokens - tail.start, self.sink_span()
        key, value = tail.key[:, :, :after], tail.value[:, :, :after]
        if sinks is None:
            return key, value
        return torch.cat((sinks.key, key), 2), torch.cat((sinks.value, value), 2)

    # Evicting

    def evictable(self, recent: int) -> int:
        """Folded slots, after the sinks, that may be evicted: in whole pages, none among the newest `recent` tokens."""
        if self.awaits_queries:
            return 0
        return self.schedule.evictable(self.length, self.keys.count, self.dense.tail_start, recent)

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
        """Forget folded tokens for good: whole pages if `by_page`, else single ones, as `keep_tokens` has it.

        `keep` is of the first `evictable` slots, bool, (batch, kv_heads, slots), or (batch, kv_heads, pages) if
        `by_page`; True equally often for each head, and as often as fills whole pages unless the formats fold by token.
        """
        size = self.page_size
        slots = keep.shape[-1] * size if by_page else keep.shape[-1]
        if by_page:
            stores, kept = keep_pages(self.stores, keep)
        else:
            formats = (self.formats.keys, self.formats.values)[: len(self.stores)]
            stores, kept = keep_tokens(self.stores, formats, keep, self.folded_stop - self.window.sinks)
        gone = slots - kept.shape[-1]
        positions = self.folded_positions(slots).gather(-1, kept).int()
        if self.positions is not None:  # it may cover more slots than these
            positions = torch.cat((positions, self.positions[..., slots:]), -1)
        dense = self.dense if self.schedule.by_token else self.dense.moved(-gone)
        checked = self._checked if self._checked <= 0 else max(self._checked * size - gone, 0) // size
        self._become(
            stores=stores, dense=dense, positions=positions, length=self.length - gone, evicted=self.evicted + gone,
            _checked=checked,
        )  # fmt: skip

    # Shrinking and rearranging

    def crop(self, length: int) -> int:
        """Forget all but the first `length` slots; those that `positions` covers must stay.

        Returns how many kept tokens continue with folded values, although a cache that never held more than `length`
        tokens would hold them dense; 0 if the crop leaves no trace.
        """
        if length >= self.length:
            return 0
        left = self.schedule.crop(length, self.evicted, self.keys.count, self.dense.tail_start)
        stores, dense = tuple(store.first(left.pages) for store in self.stores), self.dense
        if self.schedule.by_token:
            stores = self._cleared(stores, length)
        elif left.reopened:
            page = (left.tail_start - self.window.sinks) // self.page_size
            key, value = (
                store.form.unfold(store.pages(page, page + 1))[:, :, : left.reopened]
                for store in (self.keys, self.values)
            )
            dense = dense.reopened(key, value, left.tail_start)
        else:
            dense = dense.moved(left.tail_start - dense.tail_start)
        checked = min(self._checked, max(length - self.window.sinks, -1) // self.page_size)
        self._become(dense=dense, _checked=checked, **self._cropped(length, stores))
        return left.lost

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if self.schedule.by_token:  # tokens and free pages came in place
            stores = tuple(store.first(self.schedule.pages(self.length)) for store in self.stores)
            self._become(stores=self._cleared(stores, self.length))

    def selected(self, rows: Tensor) -> "FoldedRows":
        """The batch rows `rows`, in that order, repeats allowed; `self` stays as it is."""

        def select(x: Tensor) -> Tensor:
            return x.index_select(0, rows.to(x.device))

        other, formats = copy.copy(self), self.formats
        formats = formats.with_formats(formats.keys.select(rows), formats.values.select(rows))
        other._become(
            formats=formats, dense=self.dense.map(select), fit=self.fit.map(select),
            stores=tuple(store.select(rows) for store in self.read_as(formats)),
            positions=None if self.positions is None else select(self.positions),
        )  # fmt: skip
        return other

    # Reading everything

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


def checks_tokens(x: Tensor) -> bool:
    """Whether each token on a tensor's device is checked for NaN and infinities as it comes.

    On other devices a check would wait for the device. There, single tokens are checked when their page fills
    (`check_finite`); until then attention over a NaN gives NaN.
    """
    return x.is_cpu
