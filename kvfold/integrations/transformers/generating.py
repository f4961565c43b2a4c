"""Folded caches that transformers' own `generate` makes, so that nobody has to pass one."""

import os
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GENERATION_MODES_MAPPING

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.eviction import Eviction
from kvfold.integrations.transformers.attach import attach
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calls import cache_name

_made_by_default: Callable[[PreTrainedModel], FoldedCache] | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    format: str | None = None,
    policy: Policy | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    eviction: Eviction | None = None,
    inputs_tensor: Tensor | None = None,
    **model_inputs: Any,
) -> Any:
    """Decoding with a folded cache, for `model.generate(..., custom_generate=kvfold.generate, format="kvfold-4")`.

    `generate` calls this once it has prepared the inputs. The model is attached, and the cache is a new `FoldedCache`;
    all else is as without `custom_generate`: greedy, sampled, beams, prompt lookup. With `return_dict_in_generate=True`
    the cache is in the result.

    transformers hands no `streamer` and no `assistant_model` to such a function. With these, pass a `FoldedCache` as
    the cache, or call `make_default`.

    Parameters
    ----------
    model, input_ids, generation_config, inputs_tensor, model_inputs
        What `generate` passes.
    format, policy, calibration, eviction
        As for `FoldedCache`.

    Returns
    -------
    Tensor or ModelOutput
        What `generate` returns.

    Raises
    ------
    ValueError
        If `generate` has a cache already, or is told to use none or one of its own kinds; or as `FoldedCache` does.
    """
    make = partial(_cache, format=format, policy=policy, calibration=calibration, eviction=eviction)
    if not _replace_cache(model, model_inputs, make):
        raise ValueError(
            "custom_generate = kvfold.generate makes the cache itself: leave out cache, past_key_values, "
            "cache_implementation and use_cache=False"
        )
    mode = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
    decode = getattr(type(model), mode, None)
    if decode is None:
        raise ValueError(f"this generation needs code of its own ({mode}): pass that as custom_generate, and a cache")
    if mode == "_assisted_decoding":
        model_inputs["inputs_tensor"] = inputs_tensor
    return decode(model, input_ids, generation_config=generation_config, **model_inputs)


def make_default(
    format: str | None,
    *,
    policy: Policy | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> None:
    """From now on, let every `generate` of transformers that is given no cache take a folded one.

    Models are attached when they first generate. Pipelines, chat programs and whatever else calls `generate` follow.
    A cache that is passed, `cache_implementation`, and `use_cache=False` are respected as ever; assistant models keep
    dense caches. What calls a model's `forward` by itself is not affected.

    Parameters
    ----------
    format
        As for `FoldedCache`; None, without a policy, makes dense caches the default again.
    policy, calibration
        As for `FoldedCache`.

    Raises
    ------
    ValueError
        On an unknown format, or both a format and a policy.
    FileNotFoundError
        If there is no such calibration file.
    """
    global _made_by_default
    if format is None and policy is None:
        if calibration is not None:
            raise ValueError("calibration is given, but no format: name one, or leave it out")
        _made_by_default = None
        return
    chosen = Policy.of(format, policy)
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    _made_by_default = partial(_cache, policy=chosen, calibration=calibration)
    _listen()


def _cache(model: PreTrainedModel, **options: Any) -> FoldedCache:
    """A cache of `model`, which is attached."""
    cache = FoldedCache(model.config, **options)
    attach(model)
    return cache


def _replace_cache(
    model: PreTrainedModel, model_inputs: dict[str, Any], make: Callable[[PreTrainedModel], FoldedCache]
) -> bool:
    """Put a folded cache in the place of the one that `generate` has made; whether it had made one.

    Releases of transformers before `_is_user_defined` do not tell an empty DynamicCache that was given from their own.
    """
    name = cache_name(type(model).forward)
    made: Any = None if name is None else model_inputs.get(name)
    if type(made) is not DynamicCache or made.offloading or made.get_seq_length():
        return False
    if getattr(made, "_is_user_defined", False):
        return False
    model_inputs[str(name)] = make(model)
    return True


@cache
def _listen() -> None:
    """Let `generate` ask for the default once it has made a cache."""
    prepare = GenerationMixin._prepare_cache_for_generation

    @wraps(prepare)
    def prepare_folded(
        self: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        given = model_kwargs.get(str(cache_name(type(self).forward)))
        done = prepare(self, generation_config, model_kwargs, *args, **named)
        if given is None and (make := _made_by_default) is not None and not generation_config.is_assistant:
            _replace_cache(self, model_kwargs, make)
        return done

    GenerationMixin._prepare_cache_for_generation = prepare_folded
