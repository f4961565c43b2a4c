"""Measure the statistics that formats are fitted to, on a text."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.calibration import PAGE_SIZE, SINKS, Calibration, Observed
from kvfold.cache.layer import Appended, LayerCache
from kvfold.integrations.transformers.attach import attach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.layer import FoldedLayer


class ObservedLayer(LayerCache):
    """A layer that folds nothing away (float16) and adds up what queries and keys are like."""

    def __init__(self, index: int, observed: Observed) -> None:
        super().__init__("float16", index)
        self.observed = observed
        self._key: Tensor | None = None

    def append(self, key: Tensor, value: Tensor, padding: Sequence[int] | None = None) -> Appended:
        self._key = key
        return super().append(key, value, padding)

    def observe(self, query: Tensor | None, new: Appended) -> None:
        assert self._key is not None
        if query is None or new.observed:
            return
        new.observed = True
        self.observed.add(query, self._key, begins=new.first_column == 0)


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
    seen: dict[int, Observed] = {}
    for ids in passages:
        cache = FoldedCache(model.config, "float16")
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, FoldedLayer):
                layer.folded = ObservedLayer(i, seen.setdefault(i, Observed()))
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            progress(part.shape[1])
    if not seen:
        raise ValueError("no layer of this model folds, so there is nothing to calibrate")
    # Through some layers nobody attends.
    layers = {index: observed.statistics() for index, observed in seen.items() if observed.enough}
    tokens = sum(ids.shape[1] for ids in passages)
    return Calibration(layers, {"model_type": cache.text_config.model_type, "tokens": str(tokens), **(about or {})})
