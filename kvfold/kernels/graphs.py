"""Functions that compiled models call outside their graphs."""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which compiled code calls outside its graph: a graph cannot hold a cache that grows.

    `torch.compiler.disable` slows every call, compiled or not; here only compiled code pays for it.
    """
    outside, compiling = torch.compiler.disable(function), torch.compiler.is_dynamo_compiling

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (outside if compiling() else function)(*args, **kwargs)

    own = cast(FunctionType, call)
    own.__code__ = own.__code__.replace(co_name=function.__name__)  # torch counts recompilations by code object
    return call
