"""Which model filled a cache."""

import hashlib
import logging
import weakref
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from kvfold.integrations.weights import plain_parts, saved_tensors

logger = logging.getLogger("kvfold")

SAMPLE = 64
"""How many elements of each parameter go into a fingerprint, at most."""


def fingerprint(model: nn.Module) -> dict[str, str] | None:
    """A fingerprint of a model's weights: a SHA-256 of a few elements of each tensor, and their dtype.

    The same weights in another dtype, or quantised, are other weights: they make other keys and values. None if weights
    are offloaded.
    """
    digest = hashlib.sha256()
    dtype = None
    for name, weight in saved_tensors(model):
        if weight.is_meta:
            return None
        for part in plain_parts(weight.detach()):
            flat = part.flatten()
            sample = flat[:: -(-flat.numel() // SAMPLE) or 1].cpu().contiguous()
            digest.update(f"{name} {tuple(part.shape)} {part.dtype} ".encode())
            digest.update(sample.view(torch.uint8).numpy().data)
        dtype = dtype or (weight.dtype if weight.is_floating_point() else None)
    return {"weights": digest.hexdigest(), "dtype": str(dtype).removeprefix("torch.")}


def check_kind(mine: PreTrainedConfig, theirs: PreTrainedConfig) -> None:
    """Raise ValueError if a cache for the config `mine` is plainly not one for a model with the config `theirs`."""
    if (mine.model_type, mine.num_hidden_layers) != (theirs.model_type, theirs.num_hidden_layers):
        raise ValueError(
            f"this cache was made for a {mine.model_type} config with {mine.num_hidden_layers} layers, the model "
            f"is a {theirs.model_type} with {theirs.num_hidden_layers}: make one with FoldedCache(model.config)"
        )


class Origin:
    """The model that filled a cache: a weak reference to it, or its fingerprint from a file.

    A model that goes on with a loaded cache must have that fingerprint.
    """

    def __init__(self, saved: dict[str, str] | None = None) -> None:
        self.saved = saved
        self._model: weakref.ref[nn.Module] | None = None

    def is_model(self, model: nn.Module) -> bool:
        """Whether `model` was the last that `see` saw."""
        return self._model is not None and self._model() is model

    def see(self, model: nn.Module) -> None:
        """Remember that `model` fills the cache; raises ValueError if its fingerprint is not the saved one."""
        own = None if self.saved is None else fingerprint(model)
        if self.saved is not None and own is None:
            logger.warning("weights are offloaded: nobody can tell whether this model filled the loaded cache")
        elif self.saved != own and self.saved is not None and own is not None:
            if self.saved["dtype"] != own["dtype"]:
                raise ValueError(
                    f"this cache was saved by a model with {self.saved['dtype']} weights, this one's are "
                    f"{own['dtype']}: load the model with dtype=torch.{self.saved['dtype']}, or fill a new cache"
                )
            raise ValueError(
                "this cache was saved by another model: its weights had the fingerprint "
                f"{self.saved['weights'][:12]}…, this one's have {own['weights'][:12]}…: load the model that filled "
                "it, or fill a new cache"
            )
        self._model = weakref.ref(model)

    def fingerprint(self) -> dict[str, str] | None:
        """The fingerprint of the model that filled the cache.

        If none was seen, or the model is gone: the fingerprint from the file, None without a file. Also None if weights
        are offloaded.
        """
        model = None if self._model is None else self._model()
        return self.saved if model is None else fingerprint(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Origin":
        copy = Origin(self.saved)
        copy._model = self._model
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {"saved": self.fingerprint(), "_model": None}  # another process has another model
