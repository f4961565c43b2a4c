"""What every policy has in common: when tokens go, how many, and which by their scores."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvfold.formats import FormatPair
from kvfold.formats.numbers import whole_field
from kvfold.formats.page import PageForm, Pages

Mode = Literal["union", "per_head", "per_layer_per_head"]
MODES = ("union", "per_head", "per_layer_per_head")
SPREAD = 2.0
"""A page's worth is the mean of its tokens' scores plus this many of their deviations (benchmarks/eviction.py)."""
PAGE_BLOCK = 16
"""Pages that are scored at a time."""


class HeldPages(Protocol):
    """Keys, in pages."""

    @property
    def form(self) -> PageForm: ...

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """Pages `start` to `stop`."""


class HeldTokens(Protocol):
    """What a policy asks of the tokens that one layer holds of some sequences: `FoldedRows`, or an engine's blocks."""

    @property
    def formats(self) -> FormatPair: ...
    @property
    def keys(self) -> HeldPages: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def page_size(self) -> int:
        """Tokens that go together."""

    @property
    def length(self) -> int:
        """Tokens that are held."""

    @property
    def seen(self) -> int:
        """Tokens that came."""

    def folded_positions(self, slots: int) -> Tensor:
        """Positions of the first `slots` folded tokens: int64, (batch, kv_heads, slots)."""


@dataclass(eq=False)
class Candidates:
    """The first `slots` folded tokens of one layer, which may go, of batch rows of one length."""

    layer: int
    rows: HeldTokens
    slots: int
    queries: Tensor | None = None
    """The newest ones, (batch, heads, tokens, key_dim), if the policy asked for them."""

    @property
    def positions(self) -> Tensor:
        """int64, (batch, kv_heads, slots)."""
        return self.rows.folded_positions(self.slots)

    @property
    def now(self) -> int:
        """Position of the newest token."""
        return self.rows.seen - 1

    def blocks(self) -> Iterator[tuple[slice, Pages]]:
        """Blocks of up to `PAGE_BLOCK` pages, each with its slots."""
        size = self.rows.page_size
        for first in range(0, self.slots // size, PAGE_BLOCK):
            stop = min(first + PAGE_BLOCK, self.slots // size)
            yield slice(first * size, stop * size), self.rows.keys.pages(first, stop)


@dataclass(frozen=True, kw_only=True)
class Eviction(ABC):
    """A policy: which tokens go, and when, by scores that subclasses give.

    Tokens go for good, and their memory with them. The sinks and the newest tokens always stay.

    Attributes
    ----------
    budget
        Tokens that a head keeps in a layer, dense ones included. Where whole pages go or fold, it may keep fewer, by
        less than a page: up to 63 with pages of 64 tokens.
    keep_first
        How many first tokens of a sequence stay whatever their scores; a prompt's length keeps the prompt. Formats keep
        some of them dense by themselves.
    recent
        How many of the newest tokens stay.
    interval
        Tokens go after every `interval` new ones, if there are more than `budget`.
    slack
        Instead of an interval: tokens go when there are more than `budget` + `slack`.
    mode
        Who chooses: "union", all heads of all layers together, by the highest score that any of them gives; "per_head",
        each head by the mean over all layers; "per_layer_per_head", each for itself.
    segments
        0: the highest scores stay (the paper's policy). Else the sequence between the first and the newest tokens is
        cut into so many parts, and each keeps an equal share.
    unit
        What goes: whole "page"s of the format, by the mean of their scores plus twice their deviation; or single
        "token"s. Whole pages keep neighbours together, which a model needs to repeat what it read, and nothing in them
        moves. If single tokens go and pages have centres or channel scales ("kvfold", "centred"), the page that loses
        tokens and those after it are folded again at each trigger.
    """

    budget: int
    keep_first: int = 4
    recent: int = 128
    interval: int | None = 128
    slack: int | None = None
    mode: Mode = "union"
    segments: int = 0
    unit: Literal["page", "token"] = "page"

    asks_queries = 0
    """How many of the newest queries `scores` wants to see."""

    def __post_init__(self) -> None:
        least = {"budget": 1, "keep_first": 0, "recent": 1, "segments": 0, "interval": 1, "slack": 0}
        for name, fewest in least.items():
            value = getattr(self, name)
            if value is not None or name not in ("interval", "slack"):
                whole_field(self, name, fewest)
        if (self.interval is None) == (self.slack is None):
            raise ValueError(
                f"interval = {self.interval} and slack = {self.slack}: give one of them, and None for the other"
            )
        if self.mode not in MODES:
            raise ValueError(f"mode = {self.mode!r}: choose one of {', '.join(MODES)}")
        if self.unit not in ("page", "token"):
            raise ValueError(f"unit = {self.unit!r}: choose 'page' or 'token'")
        self._check_budget("budget", self.budget)
        if self.segments > self.budget:
            raise ValueError(
                f"segments = {self.segments}: give no more than budget = {self.budget}, as each keeps tokens"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Eviction":
        return self  # nothing changes it, and copies of a cache share its tables

    def _check_budget(self, name: str, budget: int) -> None:
        """Raise unless a budget leaves a choice."""
        always = self.keep_first + self.recent + (2 * 64 if self.unit == "page" else 0)
        if budget <= always:
            pages = ", in whole pages" if self.unit == "page" else ""
            raise ValueError(
                f"{name} = {budget} holds no more than the first {self.keep_first} and the newest {self.recent} tokens "
                f"that always stay{pages}: give more than {always}, or less of those"
            )

    @abstractmethod
    def scores(self, candidates: Candidates) -> Tensor:
        """How much each is worth keeping: float32, (batch, kv_heads, slots)."""

    def budget_of(self, layer: int) -> int:
        """Tokens that heads of a layer keep."""
        return self.budget

    def keep(
        self, candidates: Sequence[Candidates], across: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor | None]:
        """What stays of the same rows, layer by layer: `FoldedRows.evict`'s `keep`, or None where nothing goes.

        In the mode "union", `across` takes the highest of several processes' scores, if heads are shared out to them.
        """
        units = [_Units.of(self, each, self.scores(each)) for each in candidates]
        if self.mode != "per_layer_per_head":
            _share(units, self.mode, across)
        return [each.keep(self) for each in units]


@dataclass(eq=False)
class _Units:
    """The units of one layer that can go: single tokens, or pages of `size` tokens.

    Each has a score and its first position, (batch, kv_heads, units).
    """

    candidates: Candidates
    scores: Tensor
    start: Tensor
    size: int

    @classmethod
    def of(cls, policy: Eviction, candidates: Candidates, scores: Tensor) -> "_Units":
        positions = candidates.positions
        if policy.unit == "token":
            return cls(candidates, scores, positions, 1)
        size = candidates.rows.page_size
        scores, positions = (x.unflatten(-1, (-1, size)) for x in (scores, positions))
        worth = scores.mean(-1) + SPREAD * scores.std(-1, correction=0)
        return cls(candidates, worth, positions.amin(-1), size)

    def keep(self, policy: Eviction) -> Tensor | None:
        """The units that stay, bool, (batch, kv_heads, units); None if all do."""
        rows, slots = self.candidates.rows, self.candidates.slots
        first, room = policy.keep_first, policy.budget_of(self.candidates.layer) - (rows.length - slots)
        step = 1 if rows.formats.folds_by_token and self.size == 1 else rows.page_size
        always = self.start < first
        most = int(always.sum(-1).max()) * self.size
        kept = max(room // step, -(-most // step)) * step // self.size
        if kept >= self.scores.shape[-1]:
            return None
        scores = self.scores
        if policy.segments:
            stop = self.candidates.now + 1 - policy.recent
            quota = (kept - most // self.size) // policy.segments
            scores = _by_segments(
                scores.masked_fill(always, -torch.inf), self.start, first, stop, policy.segments, quota
            )
        best = scores.masked_fill(always, torch.inf).topk(kept, -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _share(units: Sequence[_Units], mode: Mode, across: Callable[[Tensor], Tensor] | None) -> None:
    """Make scores agree: over layers for each head ("per_head"), or over all ("union")."""
    order = [each.start.argsort(-1) for each in units]
    ordered = [each.scores.gather(-1, own) for each, own in zip(units, order, strict=True)]
    places = [each.start.gather(-1, own) for each, own in zip(units, order, strict=True)]
    if any(place.shape != places[0].shape or not torch.equal(place, places[0]) for place in places):
        raise ValueError(
            f"mode = {mode!r} lets all layers keep the same tokens, but they hold different ones: give them formats "
            "alike and the same mode from the start"
        )
    together = torch.stack(ordered)
    if mode == "per_head":
        shared = together.mean(0)
    else:
        highest = together.amax((0, 2), keepdim=True)[0]
        shared = (highest if across is None else across(highest)).expand_as(ordered[0])
    for each, own in zip(units, order, strict=True):
        each.scores = torch.empty_like(each.scores).scatter_(-1, own, shared)


def _by_segments(scores: Tensor, start: Tensor, first: int, stop: int, segments: int, quota: int) -> Tensor:
    """Scores raised so that each of `segments` equal parts of first … stop keeps its best `quota` units.

    Places that are left go to the highest scores of all others.
    """
    part = ((start - first).clamp_min(0) * segments // max(stop - first, 1)).clamp_max(segments - 1)
    finite = scores.masked_fill(scores.isinf(), 0)
    lift, lifted = finite.amax() - finite.amin() + 1, scores.clone()
    for segment in range(segments):
        best = scores.masked_fill(part != segment, -torch.inf).topk(min(quota, scores.shape[-1]), -1)
        more = torch.where(best.values.isfinite(), lift, 0)
        lifted.scatter_add_(-1, best.indices, more)
    return lifted


def normalised(scores: Tensor) -> Tensor:
    """Scores with mean 0 and deviation 1 over the tokens."""
    deviation = scores.std(-1, correction=0, keepdim=True).clamp_min(1e-6)
    return (scores - scores.mean(-1, keepdim=True)) / deviation
