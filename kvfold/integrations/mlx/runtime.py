"""A model of mlx-lm, for the evaluation."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import cache as theirs
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport
from kvfold.formats import FormatPair
from kvfold.integrations.mlx.attach import attach, detach
from kvfold.integrations.mlx.cache import cache_report, make_prompt_cache
from kvfold.integrations.mlx.layer import FoldedKVCache
from kvfold.integrations.mlx.models import load_mlx_model, model_folder
from kvfold.kernels.mlx.arrays import to_torch


class MlxRuntime:
    """`kvfold.evaluate.runtime.Runtime` of a model of mlx-lm.

    The config is as transformers has it; the tokenizer is mlx-lm's, if text is to be made.
    """

    packages: tuple[str, ...] = ("mlx", "mlx-lm")

    def __init__(self, model: Any, config: PreTrainedConfig, tokenizer: Any = None) -> None:
        self.model, self.config, self.tokenizer = model, config, tokenizer
        kinds = [x.dtype for _, x in tree_flatten(model.parameters()) if mx.issubdtype(x.dtype, mx.floating)]
        self.dtype = str(max(kinds, key=kinds.count)).removeprefix("mlx.core.")

    @classmethod
    def load(
        cls, name: str | os.PathLike[str], dtype: torch.dtype | None = None
    ) -> tuple["MlxRuntime", PreTrainedTokenizerBase]:
        """The model that `load_mlx_model` gives, and transformers' tokenizer."""
        folder = model_folder(name)
        model, tokenizer = load_mlx_model(folder, dtype)
        return cls(model, AutoConfig.from_pretrained(folder), tokenizer), AutoTokenizer.from_pretrained(folder)

    def __call__(self, ids: Tensor, *, past_key_values: Any, use_cache: bool = True) -> Any:
        logits = self.model(mx.array(ids.numpy()), cache=past_key_values)
        mx.eval(logits, [layer.state for layer in past_key_values])
        return SimpleNamespace(logits=to_torch(logits))

    def attach(self) -> None:
        attach()

    def detach(self) -> None:
        detach()

    def dense_cache(self) -> list[Any]:
        return list(theirs.make_prompt_cache(self.model))

    def folded_cache(self, policy: Policy, calibration: Calibration | None = None) -> list[Any]:
        return make_prompt_cache(self.model, policy=policy, calibration=calibration)

    def report(self, cache: list[Any]) -> CacheReport:
        return cache_report(cache)

    def compared(self, dense: list[Any], folded: list[Any]) -> Iterator[tuple[FormatPair, Tensor, Tensor] | None]:
        for own, layer in zip(dense, folded, strict=True):
            if isinstance(layer, FoldedKVCache):
                keys, values = own.keys_and_values()
                yield layer.layer.rows.formats, to_torch(keys), to_torch(values)
            else:
                yield None
