"""When a policy acts on a cache."""

from collections.abc import Sequence

from kvfold.cache.layer import LayerCache
from kvfold.eviction.policy import Candidates, Eviction


class Evictor:
    """A policy at work in one cache.

    Attributes
    ----------
    policy
        What it goes by.
    triggers
        How often tokens went.
    """

    def __init__(self, policy: Eviction) -> None:
        self.policy = policy
        self.clear()

    def clear(self) -> None:
        """Begin with an empty cache."""
        self.triggers = 0
        self._columns = 0
        self._prompt = 0  # tokens that came before the first that came alone
        self._alone = False
        self._acted_at = 0

    def after(self, layers: Sequence[LayerCache]) -> None:
        """Act if it is time: called after each forward pass."""
        policy = self.policy
        columns = max((layer.columns for layer in layers), default=0)
        new, self._columns = columns - self._columns, columns
        self._acted_at = min(self._acted_at, columns)  # it may have been cropped
        if not self._alone:
            self._alone, self._prompt = new == 1, columns - (new if new == 1 else 0)
        if policy.keep_prompt and not self._alone:
            return
        if policy.interval is not None:
            if columns - self._acted_at < policy.interval:
                return
            self._acted_at = columns
        self.act(layers, policy.slack or 0)

    def act(self, layers: Sequence[LayerCache], slack: int = 0) -> None:
        """Let go what layers hold beyond their budgets, if it is more than `slack`."""
        policy, acted = self.policy, False
        for number in range(max((len(layer.groups) for layer in layers), default=0)):
            prompt = max(self._prompt - layers[0].groups[number].padding, 0) if policy.keep_prompt else 0
            over = []
            for layer in layers:
                group = layer.groups[number]
                slots = group.rows.evictable(policy.recent)
                if slots and group.rows.length > policy.budget_of(layer.index) + prompt + slack:
                    queries = layer.newest_queries
                    own = None if queries is None else queries.index_select(0, group.batch_rows)
                    over.append(Candidates(layer.index, group.rows, slots, own))
            if not over or (policy.asks_queries and any(each.queries is None for each in over)):
                continue
            for candidates, keep in zip(over, policy.keep(over, prompt), strict=True):
                if keep is not None:
                    candidates.rows.evict(keep, policy.unit == "page")
                    acted = True
        self.triggers += acted
