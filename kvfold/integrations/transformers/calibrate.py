"""Measure the statistics that formats are fitted to, on a text."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.calibration import Calibration
from kvfold.cache.layer import Appended, LayerCache
from kvfold.formats import KeyStatistics
from kvfold.integrations.transformers.attach import attach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.layer import FoldedLayer

PAGE_SIZE = 64
"""Keys count as they differ within a page of this size."""
SINKS = 16
"""The first tokens are outliers, and stay dense: they do not count."""


class ObservedLayer(LayerCache):
    """A layer that folds nothing away (float16) and adds up what queries and keys are like."""

    def __init__(self, index: int) -> None:
        super().__init__("float16", index)
        self.energy: Tensor | float = 0.0  # Σ q², (kv_heads, head_dim)
        self.queries = 0
        self.variance: Tensor | float = 0.0  # Σ over pages of the variance within
        self.pages = 0
        self._key: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, padding: Sequence[int] | None = None) -> Appended:
        self._key = key
        return super().append(key, value, padding)

    def observe(self, query: Tensor | None, new: Appended) -> None:
        assert self._key is not None
        if query is None or new.observed:
            return
        new.observed = True
        first = SINKS if new.first_column == 0 else 0
        energy = query[0, :, first:].float().square().unflatten(0, (self._key.shape[1], -1))
        self.energy = self.energy + energy.mean(1).sum(1)
        self.queries += energy.shape[2]
        keys = self._key[0, :, first:]
        pages = keys.shape[1] // PAGE_SIZE
        if pages:
            self.variance = self.variance + pages * KeyStatistics.of(keys, energy[:, 0], PAGE_SIZE).key_variance
            self.pages += pages


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    passages: Sequence[Tensor],
    *,
    chunk: int = 512,
    about: dict[str, str] | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Calibration:
    """Statistics of a model's layers over passages of a text.

    Parameters
    ----------
    model
        A model; it is attached.
    passages
        Tokens, (1, T) each; those of less than 80 are left out.
    chunk
        Tokens of one forward pass, at least 128. Keys count by whole pages of a chunk.
    about
        What to write beside them.
    progress
        Called with numbers of tokens read.

    Raises
    ------
    ValueError
        If there is no passage of 80 tokens, or the model cannot be attached, or no layer of it folds.
    """
    if chunk < 2 * PAGE_SIZE:
        raise ValueError(f"chunk = {chunk}: give at least {2 * PAGE_SIZE} tokens")
    passages = [ids for ids in passages if ids.shape[1] >= SINKS + PAGE_SIZE]
    if not passages:
        raise ValueError(f"passages: give at least one of {SINKS + PAGE_SIZE} tokens or more")
    if not attach(model):
        raise ValueError(
            f"{type(model).__name__} has its own attention code, so nobody sees its queries: leave the calibration "
            "out, and keys alone decide"
        )
    seen: dict[int, list[ObservedLayer]] = {}
    for ids in passages:
        cache = FoldedCache(model.config, "float16")
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, FoldedLayer):
                layer.folded = ObservedLayer(i)
                seen.setdefault(i, []).append(layer.folded)
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            progress(part.shape[1])
    if not seen:
        raise ValueError("no layer of this model folds, so there is nothing to calibrate")
    layers = {}
    for index, parts in seen.items():
        energy = sum((part.energy for part in parts), 0.0) / max(sum(part.queries for part in parts), 1)
        variance = sum((part.variance for part in parts), 0.0) / max(sum(part.pages for part in parts), 1)
        if isinstance(energy, Tensor) and isinstance(variance, Tensor):  # else nobody attended through this layer
            layers[index] = KeyStatistics(energy, variance)
    tokens = sum(ids.shape[1] for ids in passages)
    return Calibration(layers, {"model_type": cache.text_config.model_type, "tokens": str(tokens), **(about or {})})
