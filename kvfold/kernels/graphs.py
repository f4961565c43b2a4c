"""What compiled models leave their graphs for."""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which compiled code calls outside its graph: a graph cannot hold a cache that grows.

    `torch.compiler.disable` takes its toll of every call, compiled or not; here only compiled code pays it.
    """
    outside, compiling = torch.compiler.disable(function), torch.compiler.is_dynamo_compiling

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (outside if compiling() else function)(*args, **kwargs)

    own = cast(FunctionType, call)
    own.__code__ = own.__code__.replace(co_name=function.__name__)  # own code: recompilations are counted by it
    return call
