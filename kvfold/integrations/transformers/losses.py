"""What folding each layer costs a model, measured on a text."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.cache.calibration import LOSS_BITS, Calibration, Loss
from kvfold.cache.policy import Policy
from kvfold.formats import get_format
from kvfold.integrations.transformers.attach import attach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calibrate import check_passages
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.latent import LatentLayer
from kvfold.integrations.transformers.layer import FoldedLayer

TAIL = 128
"""How many last tokens of a passage read the tokens before them folded; their predictions count."""
FEWEST = 4 * TAIL
"""Tokens of the shortest passage that counts."""
WINDOW = get_format("kvfold-4", 64).window
"""What kvfold's formats leave dense. Without it, values in float16 or 2 bits would fold at once, even the newest."""


@torch.no_grad()
def measure_losses(
    model: PreTrainedModel,
    passages: Sequence[Tensor],
    calibration: Calibration,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """A calibration with losses: KL(dense ‖ folded) with one layer's keys, or values, in 2 bits and all else dense.

    From the losses `FoldedCache` chooses the bits of each layer's keys and values, with the mean that the format names.
    Measuring takes two short forward passes a layer and passage: 60 · 128 tokens for each passage with SmolLM2.

    Parameters
    ----------
    model
        The model that `calibration` is of; it is attached.
    passages
        Tokens, (1, T) each; those of less than 512 are left out. The last 128 of each count.
    calibration
        What `calibrate` gave.
    progress
        Called with the number of passes done and that of all.

    Raises
    ------
    ValueError
        If there is no passage of 512 tokens, or the model cannot be attached, or is not the calibration's.
    """
    check_passages(passages)
    passages = [ids for ids in passages if ids.shape[1] >= FEWEST]
    if not passages:
        raise ValueError(f"passages: give at least one of {FEWEST} tokens or more to measure losses on")
    cache_argument(model, None)  # raises if the model takes no cache
    if not attach(model):
        raise ValueError(f"{type(model).__name__} has its own attention code, which reads no folded cache")
    statistics = replace(calibration, losses={})
    sides = list(_sides(model, statistics))
    kl: dict[tuple[int, int], float] = {}
    channels: dict[tuple[int, int], int] = {}
    done, total = 0, len(sides) * len(passages)
    for ids in passages:
        before, tail = ids[:, :-TAIL], ids[:, -TAIL:]
        dense = FoldedCache(model.config, policy=Policy("dense"))
        model(before, **cache_argument(model, dense), use_cache=True, logits_to_keep=1)
        log_p = _log_p(model, tail, deepcopy(dense))
        for layer, number, format in sides:
            held = dense.layers[layer]
            assert isinstance(held, DynamicLayer)
            one = Policy("dense", exceptions=((layer, format),), window=WINDOW)
            cache = FoldedCache(model.config, policy=one, calibration=statistics)
            for i, other in enumerate(dense.layers):
                if i != layer:
                    cache.layers[i] = deepcopy(other)
            cache.forward_pass.reads_folded = True  # nothing needs it unfolded
            cache.update(held.keys, held.values, layer)
            cache.end_pass(broken=False)
            log_q = _log_p(model, tail, cache)
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
            if not isfinite(divergence):
                raise ValueError(
                    f"layer {layer}: the model's predictions hold a NaN or an infinity, so losses cannot be "
                    "measured; calibrate without them (--no-budgets)"
                )
            kl[layer, number] = kl.get((layer, number), 0.0) + divergence / len(passages)
            x = (held.keys, held.values)[number]
            channels[layer, number] = x.shape[1] * x.shape[3]
            done += 1
            progress(done, total)
    losses: dict[int, tuple[Loss, ...]] = {}
    for side, divergence in sorted(kl.items()):
        losses[side[0]] = (*losses.get(side[0], ()), Loss(divergence, channels[side]))
    return replace(calibration, losses=losses)


def _sides(model: PreTrainedModel, statistics: Calibration) -> Iterator[tuple[int, int, str]]:
    """Layer, 0 for keys or 1 for values, and the format that folds that side alone; latents are one side."""
    folded, kept = f"kvfold-{LOSS_BITS}", "float16"
    layers = FoldedCache(model.config, folded, calibration=statistics).layers
    for layer in sorted(statistics.layers):
        if isinstance(layers[layer], LatentLayer):
            yield layer, 0, folded
        elif isinstance(layers[layer], FoldedLayer):
            yield layer, 0, f"{folded}:{kept}"
            yield layer, 1, f"{kept}:{folded}"


def _log_p(model: PreTrainedModel, tail: Tensor, cache: FoldedCache) -> Tensor:
    logits = model(tail, **cache_argument(model, cache), use_cache=True).logits
    return logits[0].float().log_softmax(-1)
