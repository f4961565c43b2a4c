"""How models of several releases of transformers are called."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel, past: Any) -> dict[str, Any]:
    """A cache as the keyword argument by which `model` and its `generate` take one.

    That is `cache` from transformers 5.24 on, and was `past_key_values` before.
    """
    return {_name(type(model).forward): past}


@cache
def _name(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
