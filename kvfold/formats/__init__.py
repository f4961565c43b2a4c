"""Formats by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from kvfold.formats.base import Format, Window
from kvfold.formats.centred import Centred
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.formats.turboquant import TurboQuant
from kvfold.quant.packing import Lanes

__all__ = [
    "FORMATS",
    "Format",
    "FormatPair",
    "PageForm",
    "Pages",
    "TokenCodes",
    "Window",
    "get_format",
    "get_formats",
]

DEFAULT = "kvfold-4"

FORMATS: dict[str, tuple[Callable[..., Format], int]] = {
    "kvfold-4": (Centred, 4),
    "turboquant-8": (TurboQuant, 8),
    "turboquant-4": (TurboQuant, 4),
    "turboquant-3": (TurboQuant, 3),
    "turboquant-2": (TurboQuant, 2),
}
"""Every format: its class and its bits."""


@dataclass(frozen=True)
class FormatPair:
    """The format of a layer's keys and that of its values.

    A token is dense or folded as a whole, so the pair has one window: the wider of the two.
    """

    keys: Format
    values: Format

    @property
    def window(self) -> Window:
        k, v = self.keys.window, self.values.window
        return Window(max(k.sinks, v.sinks), max(k.recent, v.recent), max(k.undo, v.undo))

    @property
    def folds_by_token(self) -> bool:
        return self.keys.folds_by_token and self.values.folds_by_token


@cache
def get_format(name: str, head_dim: int, *, lanes: Lanes = "tokens") -> Format:
    """The format `name` for vectors of `head_dim` coordinates; all who ask share one object and its tables.

    Parameters
    ----------
    name
        One of `FORMATS`.
    head_dim
        D, a multiple of 8 from 8 to 1,024.
    lanes
        "tokens" to fold keys (default), "channels" to fold values.

    Raises
    ------
    ValueError
        If no format has that name, or it cannot take that `head_dim`.
    """
    check_names(name)
    if ":" in name:
        raise ValueError(f"name = {name!r} is a pair of formats: get_format takes one, get_formats takes pairs")
    build, bits = FORMATS[name]
    return build(head_dim=head_dim, bits=bits, lanes=lanes)


def get_formats(names: str, key_dim: int, value_dim: int) -> FormatPair:
    """Formats of keys and values from "both" or "keys:values", such as "kvfold-4:turboquant-3"."""
    keys, values = check_names(names)
    return FormatPair(
        get_format(keys, key_dim, lanes="tokens"),
        get_format(values, value_dim, lanes="channels"),
    )


def check_names(names: str) -> tuple[str, str]:
    """Names of the key and the value format in "both" or "keys:values"; raise if one is unknown."""
    parts = names.split(":")
    if len(parts) > 2:
        raise ValueError(f"format = {names!r}: write one name for both, or keys:values")
    for part in parts:
        if part not in FORMATS:
            raise ValueError(f"format = {part!r} is not known: choose one of {', '.join(FORMATS)}, or keys:values")
    return parts[0], parts[-1]
