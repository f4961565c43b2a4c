"""A layer's folded cache in MLX arrays: the same pages as in tensors, byte for byte, folded at the same moments.

`Schedule` says what is where and when it folds, as for tensors. Arrays are computed lazily, and never change in place.
So a token joins the dense tail without a wait for the device. Only folding waits: once in 64 tokens, or at each token
of formats that fold token by token. The format itself folds pages, on the CPU, whose memory an Apple GPU shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvfold.cache.batch import Appended, HeldLayer, RowGroup
from kvfold.cache.files.contents import Contents
from kvfold.cache.files.layer import layer_from_saved, layer_to_saved
from kvfold.cache.fit import Allot
from kvfold.cache.held import HeldRows
from kvfold.cache.report import held_bytes, walk_tensors
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PAGE_DIM, PageStore
from kvfold.cache.tail import DenseTokens
from kvfold.formats import FormatPair
from kvfold.formats.base import require_finite
from kvfold.formats.page import Pages
from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.arrays import DTYPES, copies_of, table, to_mlx, to_torch
from kvfold.quant.finite import finite

FLOATING = {mx.float32, mx.float16, mx.bfloat16}
ARRAY_DTYPES = {own: dtype for dtype, own in DTYPES.items()}


class ArrayStore(PageStore):
    """`PageStore` in arrays (batch, kv_heads, capacity, …); pages to add are given as tensors."""

    def with_pages(self, pages: Pages) -> "ArrayStore":
        added = pages.code.shape[PAGE_DIM]
        room = self._reserved(self.count + added, like=pages)
        for name, tensor in pages.tensors():
            getattr(room.pages, name)[:, :, self.count : self.count + added] = to_mlx(tensor)
        return replace(self, count=self.count + added, room=room)

    def with_tokens(self, pages: Pages, first: int) -> "ArrayStore":
        if first == self.count:
            return self.with_pages(pages)
        held = as_tensors(self.pages(first, first + pages.code.shape[PAGE_DIM]))
        own = held.code.shape[PAGE_DIM]

        def joined(name: str, new: torch.Tensor) -> torch.Tensor:
            old, part = getattr(held, name), new[:, :, :own]
            both = part + old if part.is_floating_point() else part | old
            return torch.cat((both, new[:, :, own:]), PAGE_DIM)

        return replace(self, count=first).with_pages(pages.map_named(joined))

    def without_slots(self, page: int, slot: int) -> "ArrayStore":
        last = as_tensors(self.pages(page, page + 1))
        self.form.clear(last, slot)
        return replace(self, count=page).with_pages(last)

    def _copied_part(self, part: mx.array) -> mx.array:
        return mx.contiguous(part)

    def _grown(self, held: mx.array | None, template: torch.Tensor, capacity: int) -> mx.array:
        before = [] if held is None else [held[:, :, : self.count]]
        room = (*template.shape[:2], capacity - (self.count if before else 0), *template.shape[3:])
        return mx.concatenate([*before, mx.zeros(room, ARRAY_DTYPES[template.dtype])], PAGE_DIM)


def as_tensors(pages: Pages) -> Pages:
    """Pages in arrays as pages in tensors."""
    return pages.map(to_torch)


class ArrayRows(HeldRows):
    """`HeldRows` in MLX arrays, without spare capacity in `dense`."""

    def __init__(self, formats: FormatPair, kv_heads: int, dtype: torch.dtype = torch.float16) -> None:
        if formats.shares_pages:
            raise ValueError("values that are a view of keys are not held in MLX arrays")
        sides, sinks = (formats.keys, formats.values), formats.window.sinks
        super().__init__(formats, kv_heads, tuple(ArrayStore(side.form, sinks) for side in sides))
        self.dtype = dtype  # of dense tokens; a torch dtype, as MLX's cannot be copied
        self._checked_sinks = False

    @classmethod
    def of(cls, rows: HeldRows, dtype: torch.dtype) -> "ArrayRows":
        """A copy of rows of tensors."""
        own = cls(rows.fit.formats, rows.kv_heads, dtype)
        sinks, tail = (
            None if span is None else (to_mlx(span.key), to_mlx(span.value))
            for span in (rows.sink_span(), rows.tail_span())
        )
        stores = own.read_as(rows.formats)
        own._become(
            formats=rows.formats, length=rows.length, fit=rows.fit.map(to_mlx),
            dense=DenseTokens(rows.dense.tail_start, sinks, tail),
            stores=tuple(
                store.with_pages(held.pages()) if held.count else store
                for store, held in zip(stores, rows.stores, strict=True)
            ),
        )  # fmt: skip
        return own

    def append(self, key: mx.array, value: mx.array) -> DenseSpan | None:
        """Add tokens, (batch, kv_heads, n, dim), n ≥ 1; returns what `FoldedRows.append` does, in arrays.

        Raises ValueError if tokens that fold hold a NaN or an infinity, or a scale leaves float16's range.
        """
        n = key.shape[2]
        into_sinks = min(max(self.window.sinks - self.length, 0), n)
        length, start, sinks = self.length + n, self.length + into_sinks, self.dense.sinks
        if into_sinks:
            sinks = _joined(sinks, key[:, :, :into_sinks], value[:, :, :into_sinks])
        key, value = key[:, :, into_sinks:], value[:, :, into_sinks:]
        dense = replace(self.dense, sinks=sinks)
        if self.schedule.by_token:
            stores = self._with_tokens(key, value, start, partial(self._fold, dense))
            self._become(stores=stores, dense=dense, length=length)
            return None
        unread = self.folded_stop
        if key.shape[2]:
            dense = replace(dense, tail=_joined(dense.tail, key, value))
        tail = dense.tail_span(length)
        if tail is None:
            self._become(dense=dense, length=length)
            return DenseSpan.of(key, value, length)  # empty: all tokens are sinks
        stores = self.stores
        if not self.formats.awaits_fit:
            stores = self._with_ripe_pages(tail, self.formats, partial(self._fold, dense))
        self._become(stores=stores, dense=self._without_folded(dense, tail, stores[0].count, n), length=length)
        return tail.after(max(unread - tail.start, 0))

    def _without_folded(self, dense: DenseTokens, tail: DenseSpan, pages: int, newest: int) -> DenseTokens:
        """Dense tokens without those that folded before what can be undone of the newest pass."""
        start = max(self.schedule.tail_start(tail.stop, 0, pages, newest), tail.start)
        dropped = start - tail.start
        if not dropped:
            return dense
        left = mx.contiguous(tail.key[:, :, dropped:]), mx.contiguous(tail.value[:, :, dropped:])
        return replace(dense, tail=left, tail_start=start)

    def _fold(self, dense: DenseTokens, formats: FormatPair, key: mx.array, value: mx.array, slot: int) -> list[Pages]:
        """`kvfold.cache.held.Fold`, with the sinks of `dense` checked once."""
        tensors, first = (to_torch(key), to_torch(value)), self.window.sinks + slot
        checked = [("tokens from", first, x) for x in tensors]
        if dense.sinks is not None and not self._checked_sinks:
            checked += [("the first tokens, from", 0, to_torch(x)) for x in dense.sinks]
        for name, position, x in checked:
            if not finite(x):
                raise ValueError(
                    f"{name} position {position} hold a NaN or an infinity: the model's own computation broke before "
                    f"the cache, or a number is too large for {x.dtype}; then pass dense_dtype=torch.float32"
                )
        self._checked_sinks = True
        pages = []
        for fmt, x in zip((formats.keys, formats.values), tensors, strict=True):
            pages.append(fmt.fold_from(x, slot % self.page_size, first))
            require_finite(pages[-1])
        return pages

    def observe(self, query: mx.array, n: int, allot: Allot | None = None) -> None:
        """As `FoldedRows.observe`; statistics are computed when the format is fitted."""
        if self.dense.tail is None or not self.awaits_queries:
            return
        first, some = self.length - n, None
        own = query[:, :, self.fit.counted(first)]
        shared = (own.shape[0], self.kv_heads, own.shape[1] // self.kv_heads, *own.shape[2:])
        energy = mx.square(own.astype(mx.float32)).reshape(shared).mean(2).astype(mx.bfloat16)
        if self.fit.awaits_bits:
            some = query[:, :, self.fit.sampled(first)].astype(mx.bfloat16)
        fit = self.fit.with_more(energy, some, mx.concatenate)
        if self.length < self.schedule.fit_tokens or not self.formats.awaits_fit:
            self._become(fit=fit.kept(self.length, n))
            return
        tail = self.tail_span()
        assert tail is not None
        energies, queries = to_torch(fit.energy), None if fit.queries is None else to_torch(fit.queries)
        if not energies.isfinite().all():
            raise ValueError("query holds a NaN or an infinity: attention over it means nothing")
        key, value = (to_torch(x[:, :, : self.schedule.fit_tokens - tail.start]) for x in (tail.key, tail.value))
        sinks = self.dense.sinks
        if sinks is not None:
            key, value = (torch.cat((to_torch(s), x), 2) for s, x in zip(sinks, (key, value), strict=True))
        formats = fit.fitted(key, value, energies, queries, allot)
        stores = self._with_ripe_pages(tail, formats, partial(self._fold, self.dense))
        dense = self._without_folded(self.dense, tail, stores[0].count, n)
        self._become(fit=fit.kept(self.length, n), formats=formats, stores=stores, dense=dense)

    def crop(self, length: int) -> int:
        """Forget all but the first `length` tokens; returns what `FoldedRows.crop` does."""
        if length >= self.length:
            return 0
        left = self.schedule.crop(length, 0, self.keys.count, self.dense.tail_start)
        stores = tuple(store.first(left.pages) for store in self.stores)
        if self.schedule.by_token:
            stores = self._cleared(stores, length)
        tail = self.dense.tail
        if left.reopened:
            page = (left.tail_start - self.window.sinks) // self.page_size
            dense = [
                store.form.unfold(as_tensors(store.pages(page, page + 1)))[:, :, : left.reopened]
                for store in self.stores
            ]
            tail = tuple(to_mlx(x).astype(ARRAY_DTYPES[self.dtype]) for x in dense)
        sinks = _first(self.dense.sinks, min(length, self.window.sinks))
        tail = _first(tail, length - left.tail_start)
        self._become(
            dense=DenseTokens(left.tail_start, sinks, tail),
            _checked_sinks=self._checked_sinks and length >= self.window.sinks,
            **self._cropped(length, stores),
        )
        return left.lost


def _first(held: tuple[mx.array, mx.array] | None, tokens: int) -> tuple[mx.array, mx.array] | None:
    """The first `tokens` dense tokens."""
    if held is None or tokens <= 0:
        return None
    return mx.contiguous(held[0][:, :, :tokens]), mx.contiguous(held[1][:, :, :tokens])


def _joined(held: tuple[mx.array, mx.array] | None, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
    if held is None:
        return mx.contiguous(key), mx.contiguous(value)
    return mx.concatenate((held[0], key), 2), mx.concatenate((held[1], value), 2)


class ArrayLayer(HeldLayer):
    """`HeldLayer` in MLX arrays, for batches without padding."""

    groups: list[RowGroup[ArrayRows]]

    @classmethod
    def of(cls, layer: HeldLayer) -> "ArrayLayer":
        """A copy of a layer of tensors.

        Raises ValueError if it has what MLX caches lack: padding, evicted tokens, values that are a view of keys, or
        sharpening.
        """
        rows = [(group.batch_rows.tolist(), group.padding, group.rows.evicted) for group in layer.groups]
        if rows not in ([], [(list(range(layer.batch)), 0, 0)]):
            raise ValueError("the cache has padding, rows in another order or evicted tokens, as no MLX cache has")
        if layer.config.values_of_keys or layer.config.sharpen:
            raise ValueError("the cache shares values with keys or sharpens scores, which MLX caches do not")
        own = cls(layer.config)
        own.columns, own._formats, own._like = layer.columns, layer._formats, layer._like
        if layer.dtype is not None:
            own.groups = [RowGroup(g.batch_rows, 0, ArrayRows.of(g.rows, layer.dtype)) for g in layer.groups]
        return own

    @property
    def rows(self) -> ArrayRows:
        """All rows of the batch; there must be some."""
        return self.groups[0].rows

    def append(self, key: mx.array, value: mx.array, padding: Sequence[int] | None = None) -> Appended:
        """Add columns, float32, float16 or bfloat16, to every row, as `LayerCache.append`; there is no `padding`.

        Raises ValueError on a shape or dtype that differs from what the cache holds; and on a NaN or infinity, when its
        page folds. Until then attention over it gives NaN.
        """
        if padding is not None:
            raise ValueError(f"padding = {padding}: MLX caches hold rows of one length, without padding")
        self._check_arrays(key, value)
        dtype = self._stored(key)
        key, value = (x.astype(ARRAY_DTYPES[dtype]) for x in (key, value))
        batch, kv_heads, n, key_dim = key.shape
        if self._like is None:
            like = (torch.empty(batch, kv_heads, 0, dim, dtype=dtype) for dim in (key_dim, value.shape[-1]))
            formats = self.begin(*like)
            self.groups = [RowGroup(torch.arange(batch), 0, ArrayRows(formats, kv_heads, dtype))]
        try:
            dense = self.rows.append(key, value)
        except ValueError as error:
            raise ValueError(f"layer {self.index}: {error}") from None
        first_column, self.columns = self.columns, self.columns + n
        return Appended(self, first_column, n, [dense])

    def _stored(self, x: mx.array) -> torch.dtype:
        return self.config.stored_dtype(DTYPES[x.dtype])

    def _check_arrays(self, key: mx.array, value: mx.array) -> None:
        where = f"layer {self.index}"
        if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3] or not key.shape[2]:
            raise ValueError(
                f"{where}: key {key.shape} and value {value.shape} must both have the shape (batch, kv_heads, tokens, "
                "dim), with equal batch, heads and tokens, and at least one token"
            )
        if not {key.dtype, value.dtype} <= FLOATING:
            raise TypeError(f"{where}: key is {key.dtype} and value is {value.dtype}; both must be floating point")
        if self._like is None:
            return
        for name, new, held in (("key", key, self._like[0]), ("value", value, self._like[1])):
            if (*new.shape[:2], new.shape[3]) != (*held.shape[:2], held.shape[3]):
                raise ValueError(
                    f"{where}: {name} has {new.shape[0]} rows of {new.shape[1]} heads of {new.shape[3]}, the cache "
                    f"holds {held.shape[0]} of {held.shape[1]} heads of {held.shape[3]}: was it filled by another "
                    "model?"
                )
            if self._stored(new) != held.dtype:
                raise ValueError(f"{where}: {name} is {new.dtype}, the cache keeps its dense tokens as {held.dtype}")

    def observe(self, query: mx.array, new: Appended, scaling: float | None = None) -> None:
        """As `HeldLayer.observe`."""
        if new.observed:
            return
        new.observed = True
        try:
            self.rows.observe(query, new.columns, partial(self._allot, 0, scaling))
        except ValueError as error:
            raise ValueError(f"layer {self.index}: {error}") from None

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """What `layer_to_saved` returns, with arrays in place of tensors; computes nothing."""
        saved = layer_to_saved(self)
        arrays = {name: x if isinstance(x, mx.array) else table(x) for name, x in saved.tensors.items()}
        return saved.data, arrays

    @classmethod
    def from_arrays(cls, data: dict[str, Any], arrays: Mapping[str, mx.array], index: int) -> "ArrayLayer":
        """The layer that `to_arrays` described; raises ValueError if its parts do not fit together."""
        tensors = {name: to_torch(array).clone() for name, array in arrays.items()}
        return cls.of(layer_from_saved(Contents(data, tensors), index))


def held_array_bytes(*objects: object) -> int:
    """`held_bytes` of objects that may also hold MLX arrays, plus those arrays and copies of tables in arrays."""
    tables = (tensor for obj in objects for tensor in walk_tensors(obj))
    arrays = [array for obj in objects for array in walk_tensors(obj, mx.array)] + copies_of(tables)
    return held_bytes(*objects) + sum({id(array): array.nbytes for array in arrays}.values())
