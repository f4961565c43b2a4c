"""The interface to engines that run a model with caches, as the evaluation needs it."""

from collections.abc import Iterator
from typing import Any, Protocol, cast

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport
from kvfold.formats import FormatPair
from kvfold.integrations.transformers.runtime import TransformersRuntime

Compared = tuple[FormatPair, Tensor, Tensor]
"""A folded layer's formats, as fitted, and the dense cache's keys and values, (batch, kv_heads, tokens, dim)."""


class Runtime(Protocol):
    """A model on an engine, with its config, the name of its weights' dtype, and the packages that figures depend on.

    Calling it with tokens, (1, T), and `past_key_values` gives an object with `logits`, (1, T, vocabulary).
    """

    config: PreTrainedConfig
    dtype: str
    packages: tuple[str, ...]

    def __call__(self, ids: Tensor, *, past_key_values: Any, use_cache: bool = True) -> Any: ...

    def attach(self) -> None:
        """Let the model read folded caches."""

    def detach(self) -> None:
        """Undo `attach`."""

    def dense_cache(self) -> Any:
        """An empty cache of the engine's own."""

    def folded_cache(self, policy: Policy, calibration: Calibration | None = None) -> Any:
        """An empty folded cache."""

    def report(self, cache: Any) -> CacheReport:
        """What a cache of `folded_cache` holds."""

    def compared(self, dense: Any, folded: Any) -> Iterator[Compared | None]:
        """For each layer, inputs of the codec's error after both caches have read the same; None for a dense layer."""


def runtime_of(model: PreTrainedModel | Runtime) -> Runtime:
    """A model of transformers as a runtime; a runtime as it is."""
    if isinstance(model, PreTrainedModel):
        return TransformersRuntime(model)
    return cast(Runtime, model)
