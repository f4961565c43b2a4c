"""How far rounding moves what a model says: where two engines part, they must have been that near to a tie.

float32's sums round otherwise with other kernels, threads and companions, and a number at the boundary between two
codes falls to either. What that does to a model is measured on the model itself, in transformers, by a disturbance of
its embeddings in the seventh digit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold.cache.policy import Policy
from kvfold.cache.pool.layout import WINDOW

LIKELIEST = 20
DISTURBANCES = 2


def cache(model: PreTrainedModel, format: str | None, calibration: Path | None = None) -> kvfold.FoldedCache | None:
    """What the engine keeps, in transformers; without a format nothing, as attention is dense."""
    if format is None:
        return None
    policy = Policy(format, window=WINDOW)
    return kvfold.FoldedCache(model.config, policy=policy, calibration=calibration, dense_dtype=torch.float32)


def log_probabilities(
    model: PreTrainedModel, ids: list[int], own: kvfold.FoldedCache | None, noise: torch.Generator | None = None
) -> Tensor:
    """Of each next token of a text, (T, vocab); with noise, after embeddings that differ by rounding."""
    embeddings = model.get_input_embeddings()(torch.tensor([ids]))
    if noise is not None:
        embeddings = embeddings * (1 + 1e-7 * torch.randn(embeddings.shape, generator=noise))
    return model(inputs_embeds=embeddings, past_key_values=own).logits[0].log_softmax(-1)


def likeliest(rows: Tensor) -> list[dict[int, float]]:
    """What an engine would say of these log-probabilities."""
    best = rows.topk(LIKELIEST)
    return [
        dict(zip(ids, at, strict=True)) for ids, at in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Disturbed:
    """What a disturbed model said.

    Attributes
    ----------
    likeliest
        The likeliest tokens at each token of each text.
    moved
        The furthest that the lead of the likeliest token over the next one moved, in nats.
    """

    likeliest: list[list[dict[int, float]]]
    moved: float


def _moved(one: Tensor, other: Tensor) -> float:
    best = one.topk(2).indices
    lead, led = (x.gather(-1, best).diff(dim=-1) for x in (one, other))
    return (lead - led).abs().max().item()


def disturbed(
    model: PreTrainedModel,
    texts: Sequence[list[int]],
    plain: Sequence[Tensor],
    format: str | None,
    calibration: Path | None = None,
) -> Iterator[Disturbed]:
    """The model reads texts again, with embeddings that differ by rounding from those of `plain`, each time others."""
    for seed in range(DISTURBANCES):
        noise, said, moved = torch.Generator().manual_seed(seed), [], 0.0
        for ids, rows in zip(texts, plain, strict=True):
            again = log_probabilities(model, ids, cache(model, format, calibration), noise)
            said.append(likeliest(again))
            moved = max(moved, _moved(rows, again))
        yield Disturbed(said, moved)


def tie(readings: Sequence[Disturbed]) -> float:
    """Leads that are smaller may change hands: twice as far as a disturbance of the embeddings alone moves them."""
    return 2 * max(reading.moved for reading in readings)


def tie_of(folder: Path, texts: Sequence[list[int]], format: str | None, beside: str | None) -> float:
    """Of engines over a folder's model with caches of these formats; one, if they are the same."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert kvfold.attach(model)
    plain = [log_probabilities(model, ids, cache(model, beside)) for ids in texts]
    return tie(list(disturbed(model, texts, plain, format)))
