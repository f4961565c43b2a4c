"""When a policy acts on a cache."""

from collections.abc import Sequence

from torch import Tensor

from kvfold.cache.layer import LayerCache
from kvfold.cache.rows import FoldedRows
from kvfold.eviction.policy import Candidates, Eviction


class Evictor:
    """A policy at work in one cache; it counts in `triggers` how often tokens were evicted."""

    def __init__(self, policy: Eviction) -> None:
        self.policy = policy
        self.clear()

    def clear(self) -> None:
        """Begin with an empty cache."""
        self.triggers = 0
        self._acted_at = 0

    def after(self, layers: Sequence[LayerCache]) -> None:
        """Act if it is time: called after each forward pass."""
        policy = self.policy
        columns = max((layer.columns for layer in layers), default=0)
        self._acted_at = min(self._acted_at, columns)  # it may have been cropped
        if policy.interval is not None:
            if columns - self._acted_at < policy.interval:
                return
            self._acted_at = columns
        self.act(layers, policy.slack or 0)

    def act(self, layers: Sequence[LayerCache], slack: int = 0) -> None:
        """Evict what layers hold beyond their budgets, if it is more than `slack`."""
        policy, acted = self.policy, False
        layers = [layer for layer in layers if layer.groups]
        for number in range(len(layers[0].groups) if layers else 0):
            over = []
            for layer in layers:
                group = layer.groups[number]
                slots = group.rows.evictable(policy.recent)
                if slots and group.rows.length > policy.budget_of(layer.index) + slack:
                    queries = layer.newest_queries
                    own = None if queries is None else queries.index_select(0, group.batch_rows)
                    over.append(Candidates(layer.index, group.rows, slots, own))
            if not over:
                continue
            for candidates in over:
                candidates.rows.check_finite()  # before anything goes
            chosen = [(each.rows, keep, each.rows.evicted) for each, keep in zip(over, policy.keep(over), strict=True)]
            try:
                acted |= self._evict(chosen)
            except BaseException:  # an interrupt: finish in all layers, or they would hold different tokens
                self._evict(chosen)
                raise
        self.triggers += acted

    def _evict(self, chosen: Sequence[tuple[FoldedRows, Tensor | None, int]]) -> bool:
        """Evict all but the chosen tokens of rows that have not evicted since; returns whether any were to evict."""
        for rows, keep, evicted in chosen:
            if keep is not None and rows.evicted == evicted:
                rows.evict(keep, self.policy.unit == "page")
        return any(keep is not None for _, keep, _ in chosen)
