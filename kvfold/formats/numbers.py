"""Checks of the numbers that users give, so that nothing is computed with an impossible one."""

from numbers import Integral, Real
from reprlib import repr as short
from typing import Any

LARGEST = 2**31 - 1
"""The most tokens, rows, heads or channels: products of two stay within 64 bits."""

MOST_OF_A_MODEL = 2**16
"""No model has more layers or heads."""


def whole(name: str, value: Any, least: int = 0, most: int = LARGEST, what: str = "a whole number") -> int:
    """`value`, a whole number within bounds, or ValueError; `what` describes such a number in the message."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise ValueError(f"{name} = {short(value)}: give {what} from {least} to {most}")
    return int(value)


def real(name: str, value: Any, least: float, most: float) -> float:
    """`value`, a finite number within bounds, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{name} = {short(value)}: give a number from {least:g} to {most:g}")
    return float(value)


def truth(name: str, value: Any) -> bool:
    """`value`, which must be True or False, or ValueError: any other would count as one of them."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {short(value)}: give True or False")
    return value


def whole_field(instance: Any, name: str, least: int = 0, most: int = LARGEST) -> None:
    """Let a field of a frozen dataclass, a whole number of any type, be an int; raises as `whole`."""
    object.__setattr__(instance, name, whole(name, getattr(instance, name), least, most))
