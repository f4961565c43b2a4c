"""When a policy acts on a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvfold.cache.layer import LayerCache
from kvfold.cache.rows import FoldedRows
from kvfold.eviction.policy import Candidates, Eviction


@dataclass
class Plan:
    """Tokens that are to go from a cache of so many `columns`."""

    columns: int
    # Rows, the tokens that they keep, and how many their heads had forgotten before.
    rows: list[tuple[FoldedRows, Tensor, int]] = field(default_factory=list)


class Evictor:
    """A policy at work in one cache; it counts in `triggers` how often tokens were evicted."""

    def __init__(self, policy: Eviction) -> None:
        self.policy = policy
        self.clear()

    def clear(self) -> None:
        """Begin with an empty cache."""
        self.triggers = 0
        self._acted_at = 0

    def due(self, layers: Sequence[LayerCache]) -> Plan | None:
        """What is to be evicted after this forward pass; None if it is not time. Layers stay as they are."""
        columns = _columns(layers)
        self._acted_at = min(self._acted_at, columns)  # it may have been cropped
        if self.policy.interval is not None and columns - self._acted_at < self.policy.interval:
            return None
        return self.plan(layers, self.policy.slack or 0)

    def plan(self, layers: Sequence[LayerCache], slack: int = 0) -> Plan:
        """What layers hold beyond their budgets, if it is more than `slack`. Layers stay as they are."""
        policy, chosen = self.policy, Plan(_columns(layers))
        layers = [layer for layer in layers if layer.groups]
        for number in range(len(layers[0].groups) if layers else 0):
            over: list[tuple[FoldedRows, Candidates]] = []
            for layer in layers:
                group = layer.groups[number]
                slots = group.rows.evictable(policy.recent)
                if slots and group.rows.length > policy.budget_of(layer.index) + slack:
                    queries = layer.newest_queries
                    own = None if queries is None else queries.index_select(0, group.batch_rows)
                    over.append((group.rows, Candidates(layer.index, group.rows, slots, own)))
            if not over:
                continue
            for rows, _ in over:
                rows.check_finite()  # before anything goes
            kept = zip(over, policy.keep([candidates for _, candidates in over]), strict=True)
            chosen.rows += [(rows, keep, rows.evicted) for (rows, _), keep in kept if keep is not None]
        return chosen

    def act(self, plan: Plan) -> None:
        """Evict what `plan` says; an interrupt comes through when all of it has gone."""
        self._acted_at = plan.columns
        self.triggers += bool(plan.rows)
        try:
            self._evict(plan)
        except BaseException:  # or layers would hold different tokens
            self._evict(plan)
            raise

    def _evict(self, plan: Plan) -> None:
        for rows, keep, evicted in plan.rows:
            if rows.evicted == evicted:  # not yet
                rows.evict(keep, self.policy.unit == "page")


def _columns(layers: Sequence[LayerCache]) -> int:
    return max((layer.columns for layer in layers), default=0)
