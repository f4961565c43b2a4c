"""How models of several releases of transformers are called."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel, past: Any) -> dict[str, Any]:
    """A cache as the keyword argument by which `model` and its `generate` take one; ValueError if they take none.

    That is `cache` from transformers 5.24 on, and was `past_key_values` before.
    """
    name = cache_name(type(model).forward)
    if name is None:
        raise ValueError(
            f"{type(model).__name__} takes no cache of keys and values (its forward has neither cache nor "
            "past_key_values), so there is nothing to fold"
        )
    return {name: past}


@cache
def cache_name(forward: Callable[..., Any]) -> str | None:
    """The argument by which a `forward` takes a cache; None if it takes none."""
    parameters = inspect.signature(forward).parameters
    known = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if known is None and passes_on and not forward.__module__.startswith("transformers."):
        return "past_key_values"  # a wrapper of a model's forward
    return known
