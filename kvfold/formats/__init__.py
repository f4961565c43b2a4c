"""Formats by name."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvfold.formats.base import Format, Window
from kvfold.formats.centred import Centred
from kvfold.formats.channelwise import Channelwise
from kvfold.formats.corrected import Corrected
from kvfold.formats.float16 import Float16
from kvfold.formats.hadamard import Hadamard
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.formats.statistics import FEWEST_FITTED, FIT_TOKENS, KeyStatistics
from kvfold.formats.turboquant import TurboQuant
from kvfold.quant.packing import TILE, Lanes
from kvfold.quant.residuals import RESIDUALS

__all__ = [
    "FAMILIES",
    "FIT_TOKENS",
    "FORMATS",
    "GRAMMAR",
    "NO_RESIDUAL",
    "PRESETS",
    "Format",
    "FormatPair",
    "KeyStatistics",
    "PageForm",
    "Pages",
    "TokenCodes",
    "Window",
    "get_format",
    "get_formats",
]

DEFAULT = "kvfold-4"

FAMILIES: dict[str, tuple[type[Format], type[Format]]] = {
    "kvfold": (Channelwise, Hadamard),
    "turboquant": (TurboQuant, TurboQuant),
    "hadamard": (Hadamard, Hadamard),
    "centred": (Centred, Centred),
}
"""Formats that take 1 to 8 bits, for keys and for values: kvfold-4, turboquant-3, …"""

PRESETS = {"near-lossless": "kvfold-4", "compact": "kvfold-3", "smallest": "kvfold-2"}
"""Formats by what they are for."""

FORMATS = (
    "kvfold-4", "kvfold-3", "kvfold-2", "centred-4", "hadamard-4", "turboquant-8", "turboquant-4", "turboquant-3",
    "turboquant-2", "float16",
)  # fmt: skip
"""The names to choose from first; `GRAMMAR` has them all, and `PRESETS` more names for some."""

GRAMMAR = "FAMILY-BITS[+RESIDUAL][@PAGE_SIZE]"
"""kvfold-4, turboquant-3+qjl (one of the 3 bits for signs of the remainder), kvfold-4@128 (pages of 128 tokens)."""

NO_RESIDUAL = ("kvfold",)
"""Families whose keys no residual fits: their channels have scales of their own, and bits by importance."""

_NAME = re.compile(r"(?:([a-z]+)-(\d+)(?:\+([a-z]+))?|float16)(?:@(\d+))?")


@dataclass(frozen=True)
class FormatPair:
    """The format of a layer's keys and that of its values.

    A token is dense or folded as a whole, so the pair has one window: the wider of the two.
    """

    keys: Format
    values: Format
    own_window: Window | None = None
    """A window in the place of the formats' own; tokens then fold by whole pages."""

    @property
    def awaits_fit(self) -> bool:
        """Whether the keys' format must see statistics before it folds."""
        return self.keys.awaits_fit

    @property
    def fit_tokens(self) -> int:
        """Tokens of a sequence that come before its first fold, for the statistics; 0 if none are awaited."""
        return max(FIT_TOKENS, self.window.sinks + FEWEST_FITTED) if self.awaits_fit else 0

    @property
    def window(self) -> Window:
        if self.own_window is not None:
            return self.own_window
        k, v = self.keys.window, self.values.window
        return Window(max(k.sinks, v.sinks), max(k.recent, v.recent), max(k.undo, v.undo))

    @property
    def folds_by_token(self) -> bool:
        return self.own_window is None and self.keys.folds_by_token and self.values.folds_by_token


@cache
def get_format(name: str, head_dim: int, *, lanes: Lanes = "tokens") -> Format:
    """The format `name` for vectors of `head_dim` coordinates; all who ask share one object and its tables.

    Parameters
    ----------
    name
        One of `FORMATS` or `PRESETS`, or any other of `GRAMMAR`.
    head_dim
        D, a multiple of 8 from 8 to 1,024.
    lanes
        "tokens" to fold keys (default), "channels" to fold values; a family may fold the two in different ways.
        kvfold's keys want `Format.fitted` first: without it, channels are taken in the order they come.

    Raises
    ------
    ValueError
        If no format has that name, or it cannot take that `head_dim`.
    """
    if ":" in name:
        raise ValueError(f"name = {name!r} is a pair of formats: get_format takes one, get_formats takes pairs")
    family, bits, residual, page_size = _parse(name)
    shape: dict[str, Any] = {"head_dim": head_dim, "lanes": lanes}
    if page_size is not None:
        shape["page_size"] = page_size
    if family is None:
        return Float16(**shape)
    role = FAMILIES[family][lanes == "channels"]
    if residual is None:
        return role(bits=bits, **shape)
    return Corrected.of(role(bits=bits - 1, **shape), residual)


def get_formats(names: str, key_dim: int, value_dim: int, window: Window | None = None) -> FormatPair:
    """Formats of keys and values from "both" or "keys:values", such as "kvfold-4:turboquant-3"."""
    keys, values = check_names(names)
    return FormatPair(
        get_format(keys, key_dim, lanes="tokens"), get_format(values, value_dim, lanes="channels"), window
    )


def check_names(names: str) -> tuple[str, str]:
    """Names of the key and the value format in "both" or "keys:values"; raise if one is unknown."""
    parts = names.split(":")
    if len(parts) > 2:
        raise ValueError(f"format = {names!r}: write one name for both, or keys:values")
    pages = {_parse(part)[3] for part in parts}
    if len(pages) > 1:
        raise ValueError(f"format = {names!r}: keys and values share pages, so both name the same page size, or none")
    return parts[0], parts[-1]


def _parse(name: str) -> tuple[str | None, int, str | None, int | None]:
    """Family (None for float16), bits, residual and page size of a format's name."""
    match = _NAME.fullmatch(PRESETS.get(name, name))
    if match is None or (match[1] is not None and match[1] not in FAMILIES):
        raise ValueError(
            f"format = {name!r} is not known: choose one of {', '.join((*PRESETS, *FORMATS))}, "
            f"any {GRAMMAR}, or keys:values"
        )
    family, bits, residual = match[1], int(match[2] or 16), match[3]
    if family is not None and not 1 + (residual is not None) <= bits <= 8:
        least = "2 (a residual takes one of them)" if residual is not None else "1"
        raise ValueError(f"format = {name!r}: bits go from {least} to 8")
    if residual is not None and residual not in RESIDUALS:
        raise ValueError(f"format = {name!r}: the residual is one of {', '.join(RESIDUALS)}")
    if residual is not None and family in NO_RESIDUAL:
        others = ", ".join(name for name in FAMILIES if name not in NO_RESIDUAL)
        raise ValueError(f"format = {name!r}: residuals go with {others}")
    page_size = None if match[4] is None else int(match[4])
    if page_size is not None and (page_size < TILE or page_size % TILE):
        raise ValueError(f"format = {name!r}: a page is a multiple of {TILE} tokens")
    return family, bits, residual, page_size
