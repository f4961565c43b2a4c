"""When tokens fold, and what a query reads folded: whole numbers only.

Rows hold slots, which count from 0. The first `sinks` slots stay dense. After them lie pages of P tokens: page n takes
slots sinks + n·P to sinks + (n+1)·P. A page is ripe, and folds, once `recent` tokens follow it. Its dense copy is
dropped by the next pass, so that the newest one can be undone, up to `undo` tokens of it.

What a query reads does not depend on how the tokens came. A query at position t reads a page folded if the page was
ripe when t was the newest token, and dense otherwise. So a whole prefill, a chunked prefill and single steps agree.

Formats that are fitted to a prompt go by statistics of its first `fit_tokens` tokens. Nothing folds before those have
come; the query that completes them is the first that reads folded pages.
"""

from dataclasses import dataclass

from kvfold.formats import FormatPair, Window


@dataclass(frozen=True)
class Crop:
    """What a crop leaves of rows."""

    pages: int  # folded pages that are kept
    tail_start: int  # slot of the tail's first token
    reopened: int  # tokens of the page after the kept ones that become dense again; 0 for none
    lost: int  # kept tokens that continue with folded values, although rows that never held more would hold them dense


@dataclass(frozen=True)
class Schedule:
    """When tokens in one pair of formats fold."""

    window: Window  # which tokens stay dense around the pages
    page_size: int  # P, tokens a page
    fit_tokens: int  # tokens that must have come before the first page folds; 0 if formats are not fitted to a prompt
    # Whether each token folds by itself as it comes. Then there is no tail, and the last page may be part full.
    by_token: bool

    @classmethod
    def of(cls, formats: FormatPair) -> "Schedule":
        """The schedule of formats that are not fitted yet."""
        return cls(formats.window, formats.keys.page_size, formats.fit_tokens, formats.folds_by_token)

    def ripe(self, length: int, evicted: int = 0) -> int:
        """Pages that at least `recent` tokens follow, in rows of `length` slots whose heads forgot `evicted` tokens."""
        if length + evicted < self.fit_tokens:
            return 0
        return max(length - self.window.sinks - self.window.recent, 0) // self.page_size

    def pages(self, length: int) -> int:
        """Pages held by rows that grew to `length` slots."""
        if self.by_token:
            return -(-max(length - self.window.sinks, 0) // self.page_size)
        return self.ripe(length)

    def page_start(self, page: int) -> int:
        """The first slot of a page."""
        return self.window.sinks + page * self.page_size

    def folded_stop(self, length: int, pages: int) -> int:
        """The slot after the last folded token, of rows that hold `pages` pages."""
        stop = self.page_start(pages)
        return min(length, stop) if self.by_token else stop

    def not_undone(self, length: int, newest: int) -> int:
        """Slots that stay if as much of the newest pass, of `newest` tokens, is cropped as leaves no trace."""
        return length - min(newest, self.window.undo)

    def tail_start(self, length: int, evicted: int, pages: int, newest: int) -> int:
        """The first slot that the dense tail must hold, after a pass of `newest` tokens.

        Pages that were ripe before those tokens that can be undone leave it.
        """
        return self.page_start(min(self.ripe(self.not_undone(length, newest), evicted), pages))

    def only_joins(
        self, n: int, length: int, evicted: int, pages: int, tail_start: int, awaits_fit: bool,
        newest: int | None = None,
    ) -> bool:  # fmt: skip
        """Whether `n` new tokens only extend what is held: no page folds, and nothing leaves the tail.

        The last pass of them has `newest` tokens; None: they come in one pass. If tokens fold one by one, a single
        token extends a page with a free slot.
        """
        after = length - self.window.sinks
        if self.by_token:
            return n == 1 and 0 < after < pages * self.page_size
        if after < 0 or (not awaits_fit and self.ripe(length + n, evicted) > pages):
            return False
        return self.tail_start(length + n, evicted, pages, newest or n) <= tail_start

    def reads(self, n: int, length: int, evicted: int, dense_start: int, causal: bool) -> tuple[list[int], list[int]]:
        """For each of the newest `n` tokens as a query: the slots at which it stops reading folded, and stops reading.

        Sinks aside, a query reads the slots below both numbers folded, and the slots from the first number to before
        the second dense. Heads forgot `evicted` tokens. Slots from `dense_start` on can be read dense; all queries read
        earlier ones folded. If `causal`, a query reads nothing after itself; else a mask decides alone.
        """
        held = range(length - n + 1, length + 1)  # slots held when each of them was the newest
        stop = list(held) if causal else [length] * n
        if self.by_token:
            return [length] * n, stop
        # `page_start(ripe(slots))`, written out, as prompts are long.
        sinks, size, waits = self.window.sinks, self.page_size, self.fit_tokens - evicted
        young = sinks + self.window.recent
        starts = (sinks + max(slots - young, 0) // size * size if slots >= waits else sinks for slots in held)
        return [max(start, dense_start) for start in starts], stop

    def crop(self, length: int, evicted: int, pages: int, tail_start: int) -> Crop:
        """What is left when all but the first `length` slots go."""
        if self.by_token:
            return Crop(self.pages(length), tail_start, 0, 0)
        after, ripe = max(length - self.window.sinks, 0), self.ripe(length, evicted)
        if length < tail_start:  # into tokens that are only held folded
            whole = after // self.page_size
            tail_start = self.page_start(whole)
            reopened, lost = max(length - tail_start, 0), after - ripe * self.page_size
        else:
            whole = max(ripe, (tail_start - self.window.sinks) // self.page_size)
            reopened, lost = 0, (whole - ripe) * self.page_size
        return Crop(min(whole, pages), tail_start, reopened, max(lost, 0))

    def evictable(self, length: int, pages: int, tail_start: int, recent: int) -> int:
        """Folded slots after the sinks that may be evicted: whole pages, none among the newest `recent` tokens."""
        stop = min(self.folded_stop(length, pages), length - recent)
        if not self.by_token:
            stop = min(stop, tail_start)
        return max(stop - self.window.sinks, 0) // self.page_size * self.page_size
