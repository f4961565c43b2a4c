"""A layer's folded cache in MLX arrays: the same pages, byte for byte, and the same moments of folding.

What is where, and when it folds, is `FoldedRows`' own. Here is what arrays ask for in the place of tensors: they are
computed when somebody looks, and nothing changes them in place. So a token joins the dense tail without anybody waiting
for it; the device is waited for when a page folds, once in 64 tokens (formats that fold token by token wait at each).
Pages are folded by the format itself, on the CPU, whose memory an Apple GPU shares.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kvfold.cache.layer import Appended, LayerCache, RowGroup
from kvfold.cache.prompt_costs import looked_at
from kvfold.cache.report import held_bytes, walk_tensors
from kvfold.cache.rows import Allot, FoldedRows
from kvfold.cache.saved import Contents
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore
from kvfold.formats import FormatPair
from kvfold.formats.page import Pages
from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.arrays import DTYPES, copies_of, table, to_mlx, to_torch
from kvfold.quant.finite import finite

FLOATING = {mx.float32, mx.float16, mx.bfloat16}
ARRAY_DTYPES = {own: dtype for dtype, own in DTYPES.items()}


class ArrayStore(PageStore):
    """Pages of one stream, in arrays (batch, kv_heads, capacity, …) that grow ahead of need."""

    def append(self, pages: Pages) -> None:
        """Add whole pages, given as tensors, after the last."""
        added = pages.code.shape[2]
        self._reserve(self.count + added, like=pages)
        self.put(pages, self.count)
        self.count += added

    def merge(self, pages: Pages, first: int) -> None:
        """As `PageStore.merge`, of tensors."""
        if first < self.count:
            held = as_tensors(self.pages(first, first + pages.code.shape[2]))
            own = held.code.shape[2]

            def joined(name: str, new: torch.Tensor) -> torch.Tensor:
                old, part = getattr(held, name), new[:, :, :own]
                both = part + old if part.is_floating_point() else part | old
                return torch.cat((both, new[:, :, own:]), 2)

            pages = pages.map_named(joined)
            self.count = first
        self.append(pages)

    def put(self, pages: Pages, first: int) -> None:
        """Write pages, given as tensors, into the places from `first` on."""
        assert self.storage is not None
        for name, tensor in pages.tensors():
            getattr(self.storage, name)[:, :, first : first + tensor.shape[2]] = to_mlx(tensor)

    def _copied(self, part: mx.array) -> mx.array:
        return mx.contiguous(part)

    def _reserve(self, count: int, like: Pages) -> None:
        if count <= self._capacity:
            return
        capacity = max(count, self._capacity + self._capacity // self.GROWTH)

        def grown(name: str, template: torch.Tensor) -> mx.array:
            held = [] if self.storage is None else [getattr(self.storage, name)[:, :, : self.count]]
            room = (*template.shape[:2], capacity - (self.count if held else 0), *template.shape[3:])
            return mx.concatenate([*held, mx.zeros(room, ARRAY_DTYPES[template.dtype])], 2)

        self.storage = like.map_named(grown)


def as_tensors(pages: Pages) -> Pages:
    """Pages in arrays as pages in tensors."""
    return pages.map(to_torch)


class ArrayRows(FoldedRows):
    """`FoldedRows` in MLX arrays.

    `sinks` and `tail` hold no more tokens than there are.

    Attributes
    ----------
    dtype
        Of what stays dense: torch's, as MLX's cannot be copied.
    """

    def __init__(self, formats: FormatPair, kv_heads: int, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(formats, kv_heads)
        self.dtype = dtype
        if formats.shares_pages:
            raise ValueError("values that are a view of keys are not held in MLX arrays")
        self.keys = ArrayStore(formats.keys.form, self.window.sinks)
        self.values: ArrayStore = ArrayStore(formats.values.form, self.window.sinks)

    @classmethod
    def of(cls, rows: FoldedRows, dtype: torch.dtype) -> "ArrayRows":
        """A copy of rows of tensors."""
        own = cls(rows.unfitted, rows.kv_heads, dtype)
        own.set_formats(rows.formats)
        own.length, own.tail_start = rows.length, rows.tail_start
        sinks, tail = rows.sink_span(), rows.tail_span()
        own.sinks = None if sinks is None else (to_mlx(sinks.key), to_mlx(sinks.value))
        own.tail = None if tail is None else (to_mlx(tail.key), to_mlx(tail.value))
        own.query_energy = None if rows.query_energy is None else to_mlx(rows.query_energy)
        own.queries = None if rows.queries is None else to_mlx(rows.queries)
        for store, held in zip(own.stores, rows.stores, strict=True):
            if held.count:
                store.append(held.pages())
        return own

    def append(self, key: mx.array, value: mx.array) -> DenseSpan | None:
        """Add tokens, (batch, kv_heads, n, dim), n ≥ 1.

        Returns
        -------
        DenseSpan or None
            As `FoldedRows.commit`, in arrays.

        Raises
        ------
        ValueError
            If what folds holds a NaN or an infinity, or a scale leaves float16's range.
        """
        into_sinks = min(max(self.window.sinks - self.length, 0), key.shape[2])
        if into_sinks:
            self.sinks = _joined(self.sinks, key[:, :, :into_sinks], value[:, :, :into_sinks])
        n = key.shape[2] - into_sinks
        self.length += into_sinks
        key, value = key[:, :, into_sinks:], value[:, :, into_sinks:]
        if self.formats.folds_by_token:
            if n:
                slot = self.length - self.window.sinks
                for store, pages in zip(self.stores, self._fold(self.formats, key, value, slot), strict=True):
                    store.merge(pages, slot // self.page_size)
                self.length += n
            return None
        unread = self.folded_stop
        if n:
            self.tail = _joined(self.tail, key, value)
            self.length += n
        tail = self.tail_span()
        if tail is None:
            return DenseSpan.of(key, value, self.length)  # of no token: all are sinks
        if not self.formats.awaits_fit:
            self._fold_into_stores(tail, self.formats)
        self._drop_folded(tail)
        return tail.after(max(unread - tail.start, 0))

    def _fold_into_stores(self, tail: DenseSpan, formats: FormatPair) -> None:
        """Fold what is ripe of the tail."""
        pages = self._fold_ripe(tail, formats)
        self.set_formats(formats)
        for store, folded in zip(self.stores, pages or (), strict=pages is not None):
            store.append(folded)

    def _drop_folded(self, tail: DenseSpan) -> None:
        """Let go of what folded too long ago to be undone."""
        self.tail_start = self._start_of_tail(self.length)
        dropped = self.tail_start - tail.start
        if dropped:
            self.tail = (mx.contiguous(tail.key[:, :, dropped:]), mx.contiguous(tail.value[:, :, dropped:]))

    def _fold(self, formats: FormatPair, key: mx.array, value: mx.array, slot: int) -> list[Pages]:
        tensors = to_torch(key), to_torch(value)
        first = self.window.sinks + slot
        looked_at = [("tokens from", first, x) for x in tensors]
        if self.sinks is not None and self._looked < 0:
            looked_at += [("the first tokens, from", 0, to_torch(x)) for x in self.sinks]
        for name, position, x in looked_at:
            if not finite(x):
                raise ValueError(
                    f"{name} position {position} hold a NaN or an infinity: the model's own computation broke before "
                    f"the cache, or a number is too large for {x.dtype}; then pass dense_dtype=torch.float32"
                )
        self._looked = 0
        return super()._fold(formats, *tensors, slot)

    def observe(self, query: mx.array, n: int, allot: Allot | None = None) -> None:
        """As `FoldedRows.observe`; statistics are computed when the format is fitted."""
        if self.tail is None or not self.awaits_queries:
            return
        first = self.length - n
        own = query[:, :, max(self.window.sinks - first, 0) : max(self.fit_tokens - first, 0)]
        shared = (own.shape[0], self.kv_heads, own.shape[1] // self.kv_heads, *own.shape[2:])
        energy = mx.square(own.astype(mx.float32)).reshape(shared)
        energy = energy.mean(2).astype(mx.bfloat16)
        seen = energy if self.query_energy is None else mx.concatenate((self.query_energy, energy), 2)
        if self.unfitted.awaits_bits:
            some = query[:, :, looked_at(first, self.window.sinks, self.fit_tokens)].astype(mx.bfloat16)
            self.queries = some if self.queries is None else mx.concatenate((self.queries, some), 2)
        if self.length >= self.fit_tokens and self.formats.awaits_fit:
            tail = self.tail_span()
            assert tail is not None
            energies, queries = to_torch(seen), None if self.queries is None else to_torch(self.queries)
            if not energies.isfinite().all():
                raise ValueError("query holds a NaN or an infinity: attention over it means nothing")
            key, value = (to_torch(x[:, :, : self.fit_tokens - tail.start]) for x in (tail.key, tail.value))
            if self.sinks is not None:
                key, value = (torch.cat((to_torch(s), x), 2) for s, x in zip(self.sinks, (key, value), strict=True))
            self._fold_into_stores(tail, self._fitted(key, value, energies, queries, allot))
            self._drop_folded(tail)
        self.query_energy = seen
        self._forget_queries()

    def crop(self, length: int) -> int:
        lost = super().crop(length)
        for name, held in (("sinks", min(self.length, self.window.sinks)), ("tail", self.length - self.tail_start)):
            if getattr(self, name) is not None:
                own = tuple(mx.contiguous(x[:, :, :held]) for x in getattr(self, name))
                setattr(self, name, own if held > 0 else None)
        return lost

    def _crop_tokens(self, kept: int) -> None:
        whole, part = divmod(kept, self.page_size)
        for store in self.stores:
            store.truncate(-(-kept // self.page_size))
            if part:
                assert isinstance(store, ArrayStore)
                last = as_tensors(store.pages(whole, whole + 1)).map(lambda t: t.clone())
                store.form.clear(last, part)
                store.put(last, whole)

    def _reopen(self, page: int, tokens: int) -> None:
        sides = []
        for store in (self.keys, self.values):
            dense = store.form.unfold(as_tensors(store.pages(page, page + 1)))[:, :, :tokens]
            sides.append(to_mlx(dense).astype(ARRAY_DTYPES[self.dtype]))
        self.tail = (sides[0], sides[1])


def _joined(held: tuple[mx.array, mx.array] | None, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array]:
    if held is None:
        return mx.contiguous(key), mx.contiguous(value)
    return mx.concatenate((held[0], key), 2), mx.concatenate((held[1], value), 2)


class ArrayLayer(LayerCache):
    """`LayerCache` in MLX arrays, for batches without padding."""

    @classmethod
    def of(cls, layer: LayerCache) -> "ArrayLayer":
        """A copy of a layer of tensors.

        Raises
        ------
        ValueError
            If it has what MLX caches have not: padding, evicted tokens, values that are a view of keys, or sharpening.
        """
        rows = [(group.batch_rows.tolist(), group.padding, group.rows.evicted) for group in layer.groups]
        if rows not in ([], [(list(range(layer.batch)), 0, 0)]):
            raise ValueError("the cache has padding, rows in another order or evicted tokens, as no MLX cache has")
        if layer.values_of_keys or layer.sharpen:
            raise ValueError("the cache shares values with keys or sharpens scores, which MLX caches do not")
        own = cls(layer.format, layer.index, layer.dense_dtype, layer.window, layer.statistics, layer.frequencies)
        own.budgets = layer.budgets
        own.columns, own._formats, own._like = layer.columns, layer._formats, layer._like
        if layer.groups:
            assert layer._like is not None
            dtype = layer._like[0].dtype
            own.groups = [RowGroup(g.batch_rows, 0, ArrayRows.of(g.rows, dtype)) for g in layer.groups]
        return own

    @property
    def rows(self) -> ArrayRows:
        """All rows of the batch; there must be some."""
        rows = self.groups[0].rows
        assert isinstance(rows, ArrayRows)
        return rows

    def append(self, key: mx.array, value: mx.array, padding: Sequence[int] | None = None) -> Appended:
        """Add columns to every row, as `LayerCache.append`.

        Parameters
        ----------
        key, value
            float32, float16 or bfloat16, (batch, kv_heads, n, dim).
        padding
            None.

        Raises
        ------
        ValueError
            On a shape or dtype that differs from what the cache holds; and on a NaN or infinity, when its page folds.
            Until then attention over it gives NaN.
        """
        if padding is not None:
            raise ValueError(f"padding = {padding}: MLX caches hold rows of one length, without padding")
        self._check_arrays(key, value)
        dtype = self._stored(key)
        key, value = (x.astype(ARRAY_DTYPES[dtype]) for x in (key, value))
        batch, kv_heads, n, key_dim = key.shape
        if self._like is None:
            like = torch.empty(batch, kv_heads, 0, key_dim, dtype=dtype)
            self._like = (like, like.new_empty(batch, kv_heads, 0, value.shape[-1]))
        if self._formats is None:
            self._formats = self._fitted(self.formats_of(key_dim, value.shape[-1]), self._like[0])
        if not self.groups:
            self.groups = [RowGroup(torch.arange(batch), 0, ArrayRows(self._formats, kv_heads, dtype))]
        try:
            dense = self.rows.append(key, value)
        except ValueError as error:
            raise ValueError(f"layer {self.index}: {error}") from None
        first_column, self.columns = self.columns, self.columns + n
        return Appended(self, first_column, n, [dense])

    def _stored(self, x: mx.array) -> torch.dtype:
        if self.dense_dtype is not None:
            return self.dense_dtype
        return DTYPES[x.dtype] if x.dtype.size == 2 else torch.float16

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
        """Show the queries of the tokens just appended to formats that go by them, as `LayerCache.observe`."""
        if new.observed:
            return
        new.observed = True
        try:
            self.rows.observe(query, new.columns, partial(self._allot, 0, scaling))
        except ValueError as error:
            raise ValueError(f"layer {self.index}: {error}") from None

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """What `to_saved` tells, with arrays in the place of tensors; nothing is computed for it."""
        saved = self.to_saved()
        arrays = {name: x if isinstance(x, mx.array) else table(x) for name, x in saved.tensors.items()}
        return saved.data, arrays

    @classmethod
    def from_arrays(cls, data: dict[str, Any], arrays: Mapping[str, mx.array], index: int) -> "ArrayLayer":
        """The layer that `to_arrays` told of; raises ValueError if its parts do not fit together."""
        tensors = {name: to_torch(array).clone() for name, array in arrays.items()}
        return cls.of(LayerCache.from_saved(Contents(data, tensors), index))


def held_array_bytes(*objects: object) -> int:
    """`held_bytes` of what may also hold MLX arrays, and of the arrays that tables were copied to."""
    tables = (tensor for obj in objects for tensor in walk_tensors(obj))
    arrays = [array for obj in objects for array in walk_tensors(obj, mx.array)] + copies_of(tables)
    return held_bytes(*objects) + sum({id(array): array.nbytes for array in arrays}.values())
