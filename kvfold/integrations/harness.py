"""The evaluation harness (lm-eval) with a model that reads a folded cache.

The harness's own class for transformers scores a text in one pass that keeps no cache. Whatever is attached to such a
model, its scores are those of a dense cache. `FoldedLM` gives every pass a cache of its own, and counts what it folded.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.integrations.models import load_model
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.prompt import plain_settings

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ImportError(f"lm-eval is missing (pip install 'kvfold[harness]'): {error}") from error

__all__ = ["DENSE", "OPTIONS", "FoldedLM", "TaskManager", "simple_evaluate"]

DENSE = "dense"
OPTIONS = frozenset(
    {"batch_size", "max_batch_size", "max_length", "add_bos_token", "prefix_token_id", "truncation", "softmax_dtype",
     "mixed_precision_dtype", "logits_cache", "think_end_token", "enable_thinking", "chat_template_args"}
)  # fmt: skip
"""Those of lm-eval's class that it does not ignore of a model that is loaded already."""


@register_model("kvfold")
class FoldedLM(HFLM):  # type: ignore[misc]
    """A model for `lm_eval.simple_evaluate`, or for its `model="kvfold"` once this module is imported.

    Texts whose likelihood is asked for are read one by one, whatever the batch size: padding behind a text would be
    folded, too, and a format is fitted to a text's own first tokens. Texts that are generated share a cache in batches
    of `batch_size`, as in `generate`.

    Parameters
    ----------
    pretrained
        As `kvfold.load_model` takes it, or a loaded model, which needs `tokenizer`.
    format
        As for `FoldedCache`; "dense" for a dense cache, read the same way.
    policy, calibration
        As for `FoldedCache`; `calibration` may be a file.
    dtype
        Of the weights: "float32", "bfloat16", "float16", a torch.dtype, or "auto" for the checkpoint's.
    device
        Where the model computes; None: where it is.
    options
        Those of lm-eval's `HFLM` that are in `OPTIONS`: `batch_size`, `max_length`, `add_bos_token`, ….

    Raises
    ------
    ValueError
        If `pretrained` is a loaded model without `tokenizer`; on another option, or an unknown dtype; if "dense" comes
        with a policy or a calibration; or as `FoldedCache` raises.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        format: str | None = None,
        *,
        policy: Policy | None = None,
        calibration: Calibration | str | os.PathLike[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: str | torch.dtype | None = "auto",
        device: str | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - OPTIONS):
            raise ValueError(
                f"{unknown[0]} = {options[unknown[0]]!r} is no option of kvfold's model for lm-eval, which takes "
                f"{', '.join(sorted(OPTIONS))}; load the model as you want it, and give it with its tokenizer"
            )
        if format == DENSE and (policy is not None or calibration is not None):
            raise ValueError("format = 'dense', with a policy or a calibration: a dense cache has no use for them")
        self.policy = None if format == DENSE else Policy.of(format, policy)
        self.calibration = (
            calibration
            if calibration is None or isinstance(calibration, Calibration)
            else Calibration.load(calibration)
        )
        if isinstance(pretrained, str):
            pretrained, own = load_model(pretrained, _dtype(dtype))
            tokenizer = tokenizer or own
        elif tokenizer is None:
            raise ValueError("pretrained is a loaded model: give its tokenizer, too")
        if device is not None:
            pretrained.to(device)
        with _quiet("lm_eval.models.huggingface"):  # it warns of every model that is loaded already
            super().__init__(pretrained, tokenizer=tokenizer, **options)
        if self.policy is not None:
            attach(pretrained)
        self._cache()  # raises now if they do not fit
        self._read, self._folded = 0, 0.0

    @property
    def folded_share(self) -> float:
        """Of all tokens that were read, the share that lay folded at the end of their pass; 0 before the first.

        With 0, no text was long enough for the format to fold anything, and the scores are those of a dense cache.
        """
        return self._folded / self._read if self._read else 0.0

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: the model, and the cache that it was read with."""
        name = DENSE if self.policy is None else str(self.policy.format)
        return super().get_model_info() | {
            "kv_cache": name, "calibrated": self.calibration is not None, "folded_share": self.folded_share,
        }  # fmt: skip

    def _cache(self) -> DynamicCache | FoldedCache:
        if self.policy is None:
            return DynamicCache(config=self.model.config)
        return FoldedCache(self.model.config, policy=self.policy, calibration=self.calibration)

    def _count(self, cache: DynamicCache | FoldedCache, tokens: int) -> None:
        self._read += tokens
        dense = cache.report().dense_share if isinstance(cache, FoldedCache) else 1.0
        self._folded += 0.0 if isnan(dense) else tokens * (1 - dense)  # NaN: no layer of this model folds

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits of texts, (batch, tokens, vocabulary)."""
        if attn_mask is not None or labels is not None:
            raise ValueError("kvfold's harness is for decoders: this model has an encoder")
        cache = self._cache()
        with torch.no_grad(), torch.autocast(
            self.device.type, self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        ):  # fmt: skip
            logits: Tensor = self.model(inps, use_cache=True, **cache_argument(self.model, cache)).logits
        self._count(cache, inps.numel())
        return logits

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        """As lm-eval's, one text at a time."""
        own = self.batch_size
        self.batch_size_per_gpu = 1
        try:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs=1)
        finally:
            self.batch_size_per_gpu = own

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        cache = self._cache()
        options = plain_settings(self.model) | options | cache_argument(self.model, cache)
        options.pop("use_cache", None)  # which lm-eval sets itself
        out: Tensor = super()._model_generate(context, max_length, stop, **options)
        read = options["attention_mask"].sum() + (out[:, context.shape[1] :] != self.tokenizer.pad_token_id).sum()
        self._count(cache, int(read))
        return out


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Let a logger say errors only."""
    own = logging.getLogger(name)
    before = own.level
    own.setLevel(logging.ERROR)
    try:
        yield
    finally:
        own.setLevel(before)


def _dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(name, torch.dtype | None):
        return name
    found = getattr(torch, name, None)
    if name != "auto" and not isinstance(found, torch.dtype):
        raise ValueError(f"dtype = {name!r}: choose auto, float32, bfloat16 or float16")
    return found
