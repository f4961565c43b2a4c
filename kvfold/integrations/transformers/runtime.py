"""A model of transformers, for the evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport
from kvfold.formats import FormatPair
from kvfold.integrations.transformers.attach import attach, detach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.layer import FoldedLayer


class TransformersRuntime:
    """`kvfold.evaluate.runtime.Runtime` of a model of transformers."""

    packages: tuple[str, ...] = ("torch", "transformers")

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: Mapping[str, Any] = model.config.to_dict()
        self.dtype = str(model.dtype).removeprefix("torch.")

    def __call__(self, ids: Tensor, *, past_key_values: Any, use_cache: bool = True) -> Any:
        return self.model(ids, **cache_argument(self.model, past_key_values), use_cache=use_cache)

    def attach(self) -> None:
        attach(self.model)

    def detach(self) -> None:
        detach(self.model)

    def dense_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def folded_cache(self, policy: Policy, calibration: Calibration | None = None) -> FoldedCache:
        return FoldedCache(self.model.config, policy=policy, calibration=calibration)

    def report(self, cache: FoldedCache) -> CacheReport:
        return cache.report()

    def compared(self, dense: DynamicCache, folded: FoldedCache) -> Iterator[tuple[FormatPair, Tensor, Tensor] | None]:
        for own, layer in zip(dense.layers, folded.layers, strict=True):
            if not isinstance(layer, FoldedLayer):
                yield None
                continue
            pair, keys, values = layer.folded.groups[0].rows.formats, own.keys, own.values
            assert keys is not None
            assert values is not None
            yield pair, torch.cat((keys, values), -1) if pair.shares_pages else keys, values
