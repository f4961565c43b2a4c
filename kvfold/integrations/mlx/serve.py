"""mlx-lm's own server, whose prompt caches are folded."""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server

from kvfold.cache.calibration import Calibration
from kvfold.cache.mlx import ARRAY_DTYPES
from kvfold.cache.policy import Policy
from kvfold.integrations.mlx.batch import BATCHES
from kvfold.integrations.mlx.cache import make_prompt_cache
from kvfold.integrations.mlx.layer import FoldedKVCache
from kvfold.integrations.mlx.models import load_mlx_folder, model_folder

REFUSED = ("--kv-bits", "--kv-group-size", "--quantized-kv-start")
"""Options of mlx-lm's server for a quantised cache of its own."""


class SoundPrompts(server.LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's store of prompts, without those whose numbers broke: who begins alike would get the same."""

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], **options: Any) -> None:
        """Keep a prompt's cache, if it is sound."""
        if not any(isinstance(layer, FoldedKVCache) and layer.passes.broken for layer in prompt_cache):
            super().insert_cache(model, tokens, prompt_cache, **options)


def serve(
    name: str, policy: Policy, calibration: Calibration | None, dtype: torch.dtype | None, rest: Sequence[str]
) -> None:
    """Run mlx-lm's server in this process, with `rest` of its command line.

    Clients may call the model by `name`; other names are mlx-lm's to load.

    Raises
    ------
    ValueError
        If `rest` names a model or another form of the cache, or mlx-lm is too old.
    FileNotFoundError, OSError
        If there is no such model.
    """
    if not BATCHES:
        raise ValueError(
            f"mlx-lm {version('mlx-lm')} puts dense caches in the place of those that it is given: pip install "
            "'mlx-lm>=0.32'"
        )
    given = {word.partition("=")[0] for word in rest}
    if "--model" in given:
        raise ValueError("--model: kvfold serve takes the model as its first argument; leave --model out")
    for option in REFUSED:
        if option in given:
            raise ValueError(f"{option}: this cache is folded already; leave it out, or choose another --format")
    folder = str(model_folder(name, dtype))

    class Provider(server.ModelProvider):  # type: ignore[misc]
        """Models by mlx-lm, of which this one has its name."""

        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            for known in (self._model_map, self._adapter_map, self._draft_model_map):
                known[name] = known["default_model"]

    own: list[Any] = []  # the model of this name, once it is loaded

    def load(path: str, adapter_path: str | None = None, **options: Any) -> Any:
        model, *others = load_mlx_folder(str(model_folder(path)), adapter_path=adapter_path, **options)
        if dtype is not None:
            model.set_dtype(ARRAY_DTYPES[dtype])
        if path == folder:
            own[:] = [model]
        return model, *others

    def folded(model: Any, max_kv_size: int | None = None) -> list[Any]:
        measured = calibration if any(model is each for each in own) else None  # it is of no draft or other model
        return make_prompt_cache(model, policy=policy, calibration=measured)

    server.ModelProvider, server.load, server.LRUPromptCache = Provider, load, SoundPrompts
    for module in (server, import_module("mlx_lm.generate")):
        setattr(module, "make_prompt_cache", folded)  # noqa: B010  # mypy knows no such name in any module
    os.makedirs(HF_HUB_CACHE, exist_ok=True)  # its list of models looks there, and fails if it is not there
    for end in ("SIGTERM", "SIGHUP"):  # its thread that generates ends with Ctrl-C only
        if hasattr(signal, end):
            signal.signal(getattr(signal, end), signal.default_int_handler)
    sys.argv = ["mlx_lm.server", "--model", folder, *rest]
    server.main()
