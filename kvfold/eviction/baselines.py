"""Policies to compare with."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvfold.attention.reference import page_scores
from kvfold.eviction.policy import Candidates, Eviction
from kvfold.formats.numbers import real, whole_field


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Eviction):
    """Keeps the first tokens and the newest, and evicts those between (arXiv 2309.17453)."""

    def scores(self, candidates: Candidates) -> Tensor:
        return candidates.positions.float()


@dataclass(frozen=True, kw_only=True)
class SnapKV(Eviction):
    """Keeps tokens that the newest queries attend to, and their neighbours (after arXiv 2404.14469).

    The original chooses once, after the prompt; this one at every trigger.

    Attributes
    ----------
    window
        How many of the newest queries count.
    kernel
        Over how many neighbours their attention is averaged, an odd number.
    scaling
        The model's factor on scores; None: key_dim**-0.5.
    """

    window: int = 32
    kernel: int = 7
    scaling: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "kernel"):
            whole_field(self, name, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel = {self.kernel}: give an odd number of neighbours")
        if self.scaling is not None:
            real("scaling", self.scaling, 1e-6, 1e6)
        if self.recent < self.window:
            raise ValueError(f"recent = {self.recent}: the newest {self.window} tokens, whose queries count, must stay")

    @property
    def asks_queries(self) -> int:  # type: ignore[override]
        return self.window

    def scores(self, candidates: Candidates) -> Tensor:
        if candidates.queries is None:
            raise ValueError(
                f"layer {candidates.layer}: no queries were seen, by which SnapKV chooses: let an attached model "
                "attend through all layers, or take another policy"
            )
        rows = candidates.rows
        form = rows.keys.form
        scaling = rows.key_dim**-0.5 if self.scaling is None else self.scaling
        query = candidates.queries[:, :, -self.window :].float().unflatten(1, (rows.kv_heads, -1)) * scaling
        rotated = form.rotated_query(query)
        logits = torch.cat([page_scores(rotated, pages, form) for _, pages in candidates.blocks()], -1)
        seen = logits.softmax(-1).mean((2, 3))  # (batch, kv_heads, slots)
        order = candidates.positions.argsort(-1)
        pooled = avg_pool1d(seen.gather(-1, order), self.kernel, 1, self.kernel // 2)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)
