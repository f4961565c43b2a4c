"""Perplexity of a folded cache, and how far its predictions are from those of a dense one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Fidelity:
    """Teacher-forced figures of one cache.

    Attributes
    ----------
    tokens
        Predicted tokens.
    ppl
        exp of the mean negative log-likelihood.
    kl_mean, kl_p99
        Mean and 99th percentile over tokens of KL(dense ‖ folded), in nats.
    top1
        Share of tokens where both predict the same next token.
    seconds
        Time of the model's forward passes.
    """

    tokens: int
    ppl: float
    kl_mean: float
    kl_p99: float
    top1: float
    seconds: float


@dataclass
class FidelityMeter:
    """Collects `Fidelity` token by token."""

    nll: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, logits: Tensor, dense_logits: Tensor, targets: Tensor) -> None:
        """Count tokens.

        Parameters
        ----------
        logits, dense_logits
            (tokens, vocabulary), of the cache in question and of the dense one.
        targets
            The tokens that followed, int64, (tokens,).
        """
        if dense_logits.isnan().any() or (dense_logits == torch.inf).any():
            raise ValueError(
                "the model's own predictions hold a NaN or an infinity, with a dense cache: its weights are damaged, "
                "or its dtype has too small a range; there is nothing to compare with"
            )
        log_q, log_p = logits.float().log_softmax(-1), dense_logits.float().log_softmax(-1)
        self.nll.append(cross_entropy(log_q, targets, reduction="none"))
        self.kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
        self.same.append(log_q.argmax(-1) == log_p.argmax(-1))

    def result(self) -> Fidelity:
        """Figures over all tokens so far."""
        nll, kl, same = torch.cat(self.nll), torch.cat(self.kl), torch.cat(self.same)
        return Fidelity(
            tokens=len(nll),
            ppl=exp(nll.double().mean().item()),
            kl_mean=kl.double().mean().item(),
            kl_p99=kl.double().quantile(0.99).item(),
            top1=same.double().mean().item(),
            seconds=self.seconds,
        )


@torch.no_grad()
def read_in_lockstep(
    model: Callable[..., Any],
    ids: Tensor,
    dense: Cache,
    folded: Mapping[str, Cache],
    meters: Mapping[str, FidelityMeter],
    *,
    chunk: int = 256,
    progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Let the model read a text once with each cache, comparing the predictions as it goes.

    A folded cache reads the same values at any chunk size, so this is what decoding token by token would read. The last
    token comes alone, so that caches then hold what they hold when decoding. No chunk's logits are kept.

    Parameters
    ----------
    model
        An attached model, or anything that can be called like one.
    ids
        Tokens, (1, T).
    dense
        The cache to compare with.
    folded
        Caches by name.
    meters
        Where to count, by the same names, and "dense".
    chunk
        Tokens of one forward pass.
    progress
        Called with the number of tokens read after each forward pass; they add up to
        T·(1 + number of folded caches).
    """
    starts = [*range(0, ids.shape[1] - 1, chunk), ids.shape[1] - 1]
    for start, stop in pairwise([*starts, ids.shape[1]]):
        part, targets = ids[:, start:stop], ids[0, start + 1 : stop + 1]
        reference: Tensor | None = None
        for name, cache in {"dense": dense, **folded}.items():
            begin = perf_counter()
            logits = model(part, past_key_values=cache, use_cache=True).logits[0, : len(targets)]
            meters[name].seconds += perf_counter() - begin
            reference = logits if reference is None else reference
            if len(targets):
                meters[name].add(logits, reference, targets)
            progress(part.shape[1])
