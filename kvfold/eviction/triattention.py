"""TriAttention (arXiv 2604.04921): evicts keys that the model's average queries are expected to ignore."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from kvfold.eviction.policy import Candidates, Eviction, normalised
from kvfold.eviction.tria import QueryStatistics
from kvfold.formats.amx3 import AMX3
from kvfold.formats.numbers import real, truth
from kvfold.quant import polar
from kvfold.quant.importance import expected_queries, pair_scores


@dataclass(frozen=True)
class TriAttention(Eviction):
    """Scores of keys by a trigonometric series of their distance (`kvfold.quant.importance` has the formula).

    Scores of each query head are normalised to mean 0 and deviation 1 over the tokens; a KV head takes the highest of
    its query heads. Keys are scored some pages at a time, from codes; "amx3" has them before RoPE.

    Attributes
    ----------
    statistics
        Of the model's queries: `kvfold.measure_queries`, or `QueryStatistics.load` of any TRIA file, such as `kvfold
        calibrate --eviction` writes.
    layer_budgets
        Whether a layer's budget is multiplied by its scale in the file; for the mode "per_layer_per_head".
    frequencies, turned_by
        RoPE's ω_f, and the factor that it multiplies keys by; `FoldedCache` fills them in from the model's config.
    """

    statistics: QueryStatistics
    _: KW_ONLY
    layer_budgets: bool = False
    frequencies: tuple[float, ...] = ()
    turned_by: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.statistics, QueryStatistics):
            raise ValueError(f"statistics = {self.statistics!r}: give kvfold.QueryStatistics.load(path)")
        if not isinstance(self.frequencies, tuple | list):
            raise ValueError(f"frequencies = {self.frequencies!r}: give a number for each pair of channels")
        for name, number in (("turned_by", self.turned_by), *(("frequencies", each) for each in self.frequencies)):
            real(name, number, -1e30, 1e30)
        truth("layer_budgets", self.layer_budgets)
        if self.layer_budgets and not self.statistics.budget_scales:
            raise ValueError("layer_budgets = True, but the file is of version 1 and has no budget scales")
        if self.layer_budgets and self.mode != "per_layer_per_head":
            raise ValueError(
                f"layer_budgets = True and mode = {self.mode!r}, which lets all layers keep the same tokens: give "
                "mode='per_layer_per_head'"
            )
        for layer in range(len(self.statistics.budget_scales) if self.layer_budgets else 0):
            self._check_budget(f"layer {layer}'s budget", self.budget_of(layer))

    def budget_of(self, layer: int) -> int:
        return max(1, int(self.budget * self.statistics.budget_scales[layer])) if self.layer_budgets else self.budget

    def scores(self, candidates: Candidates) -> Tensor:
        return normalised(self.raw_scores(candidates)).amax(2)

    def raw_scores(self, candidates: Candidates) -> Tensor:
        """The series of each query head: float32, (batch, kv_heads, heads / kv_heads, slots)."""
        rows, fmt = candidates.rows, candidates.rows.formats.keys
        mean, magnitude = self.statistics.of_layer(candidates.layer)
        positions = candidates.positions
        device = positions.device
        omega = torch.tensor(self.frequencies, dtype=torch.float64, device=device)
        direction, spread = expected_queries(
            mean.to(device), magnitude.to(device), candidates.now, omega, self.turned_by
        )
        direction, spread = (x.unflatten(0, (rows.kv_heads, -1)) for x in (direction, spread))
        parts = []
        for slots, pages in candidates.blocks():
            if isinstance(fmt, AMX3):
                pairs = fmt.before_rope(pages)
                keys = polar.from_pairs(polar.turn(pairs, positions[..., slots], self.frequencies))
            else:
                keys = fmt.unfold(pages)
            parts.append(pair_scores(keys, direction, spread))
        return torch.cat(parts, -1)
