"""What rows hold, and what a query may read of it: the same for tensors and for MLX arrays."""

from collections.abc import Callable
from typing import Any

from kvfold.cache.fit import PromptFit
from kvfold.cache.schedule import Schedule
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore
from kvfold.cache.tail import DenseTokens
from kvfold.formats import FormatPair, Window
from kvfold.formats.page import Pages

Fold = Callable[[FormatPair, Any, Any, int], list[Pages]]
"""Folds keys and values in the formats given. The number is the first token's slot, counted from the end of the sinks.
Returns pages of tensors, keys' and values', or the keys' alone if they share pages; slots without a token are empty."""


class HeldRows:
    """Keys and values of one layer for batch rows that hold equally many tokens.

    Positions count a row's own tokens from 0. Held tokens lie in slots, which also count from 0 and have no gaps. Slot
    and position are equal until tokens are evicted. After that, `positions` has the positions of the oldest folded
    tokens, and all later tokens are at slot + `evicted`.
    """

    def __init__(self, formats: FormatPair, kv_heads: int, stores: tuple[PageStore, ...]) -> None:
        if formats.keys.page_size != formats.values.page_size:
            raise ValueError(
                f"keys have pages of {formats.keys.page_size} tokens, values of {formats.values.page_size}: "
                "a layer's formats must agree on page_size"
            )
        # `formats` say how pages are folded and read. `stores` are pages of keys and pages of values, or pages of keys
        # alone if values are a view of keys.
        self.formats, self.kv_heads, self.stores = formats, kv_heads, stores
        self.schedule = Schedule.of(formats)
        self.fit = PromptFit(formats, self.schedule)
        self.key_dim, self.value_dim = formats.keys.head_dim, formats.values.head_dim
        shared = formats.values.head_dim if formats.shares_pages else None
        self.dense = DenseTokens(self.schedule.window.sinks, shared_dim=shared)
        self.length = self.evicted = 0  # slots that each row holds, and tokens that each of its heads held and forgot
        # Positions of the first folded tokens, int32, (batch, kv_heads, tokens). The position of every later token is
        # its slot plus `evicted`. None if nothing was evicted.
        self.positions: Any = None
        # A fast path that appends a token and attends with its query, valid while nothing else here changes. Attention
        # makes it, and `_become` drops it.
        self.step: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "step": None}  # it points to these tensors, not to a copy's

    def _become(self, **changes: Any) -> None:
        """Change attributes all at once, so that an interrupt comes before or after."""
        vars(self).update(changes | {"step": None})

    def read_as(self, formats: FormatPair, stores: tuple[PageStore, ...] | None = None) -> tuple[PageStore, ...]:
        """`stores`, by default those held, in the forms of other formats."""
        forms = formats.keys.form, formats.values.form
        return tuple(store.read_as(form) for store, form in zip(stores or self.stores, forms, strict=False))

    # Pages and dense tokens

    @property
    def window(self) -> Window:
        """Which tokens stay dense around the pages."""
        return self.schedule.window

    @property
    def page_size(self) -> int:
        """P, tokens a page."""
        return self.schedule.page_size

    @property
    def keys(self) -> PageStore:
        """Folded keys; page n covers slots sinks + n·P to sinks + (n+1)·P."""
        return self.stores[0]

    @property
    def values(self) -> PageStore:
        """Folded values; they may be the keys' pages, read in another form."""
        return self.stores[1] if len(self.stores) > 1 else self.stores[0].read_as(self.formats.values.form)

    def pages(self) -> tuple[Pages | None, Pages | None]:
        """Storage of key and value pages, unused capacity included."""
        return self.stores[0].storage, self.stores[-1].storage

    @property
    def batch(self) -> int:
        """Batch rows; 0 before the first token."""
        held = self.dense.sinks or self.dense.tail
        if held is not None:
            return int(held[0].shape[0])
        return 0 if self.keys.storage is None else self.keys.storage.code.shape[0]

    @property
    def seen(self) -> int:
        """Tokens that came."""
        return self.length + self.evicted

    @property
    def folded_stop(self) -> int:
        """Slot after the last folded token."""
        return self.schedule.folded_stop(self.length, self.keys.count)

    @property
    def unfolded(self) -> int:
        """Tokens that are held dense alone: the sinks, and those whose page is not folded yet."""
        return min(self.length, self.window.sinks) + max(self.length - self.folded_stop, 0)

    @property
    def awaits_queries(self) -> bool:
        """Whether `observe` has a use for queries: until the format is fitted for good."""
        return self.formats.awaits_fit or self.fit.energy is not None

    # Growing and shrinking

    def _with_ripe_pages(
        self, dense: DenseSpan, formats: FormatPair, fold: Fold, length: int | None = None
    ) -> tuple[PageStore, ...]:
        """Stores with the pages of `dense` that are ripe in rows of `length` slots, and not folded yet.

        None: rows end where `dense` does.
        """
        stores, start = self.read_as(formats), self.folded_stop
        whole = (dense.stop - start) // self.page_size
        ripe = min(self.schedule.ripe(length or dense.stop, self.evicted) - self.keys.count, whole)
        if ripe <= 0:
            return stores
        own = slice(start - dense.start, start - dense.start + ripe * self.page_size)
        pages = fold(formats, dense.key[:, :, own], dense.value[:, :, own], start - self.window.sinks)
        return tuple(store.with_pages(folded) for store, folded in zip(stores, pages, strict=True))

    def _with_tokens(self, key: Any, value: Any, start: int, fold: Fold) -> tuple[PageStore, ...]:
        """Stores with tokens from slot `start` on, which fold as they come."""
        if not key.shape[2]:
            return self.stores
        slot = start - self.window.sinks
        pages, first = fold(self.formats, key, value, slot), slot // self.page_size
        return tuple(store.with_tokens(folded, first) for store, folded in zip(self.stores, pages, strict=True))

    def _cleared(self, stores: tuple[PageStore, ...], length: int) -> tuple[PageStore, ...]:
        """Stores with the slots of the last page emptied from `length` on: adding a token to a slot needs it empty."""
        page, part = divmod(max(length - self.window.sinks, 0), self.page_size)
        return tuple(store.without_slots(page, part) if page < store.count else store for store in stores)

    def _cropped(self, length: int, stores: tuple[PageStore, ...]) -> dict[str, Any]:
        """What to set, besides dense tokens, when rows keep the first `length` slots and, of their pages, `stores`."""
        formats = self.formats
        refits = self.fit.energy is not None and length < self.schedule.fit_tokens
        if refits or length <= self.window.sinks:  # the next tokens are another prompt
            formats = self.fit.formats
            stores = self.read_as(formats, stores)
        return {"length": length, "formats": formats, "stores": stores, "fit": self.fit.cropped(length)}

    # What a query reads

    def sink_span(self) -> DenseSpan | None:
        """The sinks held so far."""
        return self.dense.sink_span(min(self.length, self.window.sinks))

    def tail_span(self) -> DenseSpan | None:
        """The tail, including tokens that are also folded."""
        return self.dense.tail_span(self.length)

    def dense_span(self) -> DenseSpan | None:
        """The tokens of the tail that are not folded: what a query of the newest token reads dense, after the sinks."""
        if self.dense.tail is None:
            return None
        start, tail_start = self.schedule.page_start(self.keys.count), self.dense.tail_start
        return DenseSpan(self.dense.tail, start, offset=start - tail_start, tokens=self.length - start)

    def reach(self, n: int, dense: DenseSpan | None, causal: bool) -> tuple[list[int], list[int]]:
        """`Schedule.reads` of the newest `n` tokens, which may read the tokens `dense`, as `append` returned them."""
        dense_start = self.length if dense is None else dense.start
        return self.schedule.reads(n, self.length, self.evicted, dense_start, causal)

    # Going back

    def state(self) -> dict[str, Any]:
        """What `restore` needs to forget all later tokens, without copies."""
        return dict(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to `state`, and give back the room of later pages; since then there may only have been appends."""
        self._become(**state | {"stores": tuple(store.trimmed() for store in state["stores"])})
