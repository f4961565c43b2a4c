"""How far rounding moves what a model says: where two engines part, they must have been that near to a tie.

float32's sums round otherwise with other kernels, threads and companions, and a number at the boundary between two
codes falls to either. What that does to a model is measured on the model itself, in transformers, by a disturbance of
its embeddings in the seventh digit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

import kvfold
from kvfold.attention import attend_dense
from kvfold.attention.naive import attend_sequence
from kvfold.cache.calibration import Observed
from kvfold.formats import FormatPair, get_formats

LIKELIEST = 20
DISTURBANCES = 2
NAME = "formula"


@contextmanager
def by_formula(model: PreTrainedModel, format: str | None, calibration: Path | None = None) -> Iterator[None]:
    """Let a model in transformers attend as the engine should (`naive.attend_sequence`); without a format, dense.

    Formats are fitted to the calibration, or to the first text that is read.
    """
    measured = {} if calibration is None else kvfold.Calibration.load(calibration).layers
    fitted: dict[int, FormatPair] = {}

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float,
        softcap: float | None = None, sliding_window: int | None = None, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        options = {"scaling": scaling, "softcap": softcap}
        if format is None or sliding_window:
            after = torch.arange(key.shape[2])[-query.shape[2] :, None] - torch.arange(key.shape[2])
            seen = (after >= 0) & (after < (sliding_window or key.shape[2]))
            return attend_dense(query, key, value, mask=seen, **options).transpose(1, 2), None
        layer = int(module.layer_idx)
        if layer not in fitted:
            pair = get_formats(format, key.shape[-1], value.shape[-1]).at(layer, None)
            if pair.awaits_fit or pair.needs_calibration:
                observed = Observed()
                observed.add(query, key, value)
                pair = pair.calibrated(measured.get(layer) or observed.statistics())
            fitted[layer] = pair
        return attend_sequence(query, key, value, fitted[layer], **options).transpose(1, 2).to(query.dtype), None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def log_probabilities(model: PreTrainedModel, ids: list[int], noise: torch.Generator | None = None) -> Tensor:
    """Of each next token of a text, (T, vocab); with noise, after embeddings that differ by rounding."""
    embeddings = model.get_input_embeddings()(torch.tensor([ids]))
    if noise is not None:
        embeddings = embeddings * (1 + 1e-7 * torch.randn(embeddings.shape, generator=noise))
    return model(inputs_embeds=embeddings, use_cache=False).logits[0].log_softmax(-1)


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


def disturbed(model: PreTrainedModel, texts: Sequence[list[int]], plain: Sequence[Tensor]) -> Iterator[Disturbed]:
    """The model reads texts again, with embeddings that differ by rounding from those of `plain`, each time others."""
    for seed in range(DISTURBANCES):
        noise, said, moved = torch.Generator().manual_seed(seed), [], 0.0
        for ids, rows in zip(texts, plain, strict=True):
            again = log_probabilities(model, ids, noise)
            said.append(likeliest(again))
            moved = max(moved, _moved(rows, again))
        yield Disturbed(said, moved)


def tie(readings: Sequence[Disturbed]) -> float:
    """Leads that are smaller may change hands: twice as far as a disturbance of the embeddings alone moves them."""
    return 2 * max(reading.moved for reading in readings)


def tie_of(folder: Path, texts: Sequence[list[int]], format: str | None, beside: str | None) -> float:
    """Of engines over a folder's model with caches of these formats; one, if they are the same."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with by_formula(model, beside):
        plain = [log_probabilities(model, ids) for ids in texts]
    with by_formula(model, format):
        return tie(list(disturbed(model, texts, plain)))
