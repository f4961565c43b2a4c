"""Named ways to fold vectors into pages."""

from kvfold.formats.base import Format, Window
from kvfold.formats.block import BlockFormat
from kvfold.formats.names import (
    BLOCKS,
    DEFAULT,
    FAMILIES,
    FORMATS,
    GRAMMAR,
    NO_RESIDUAL,
    PAIRS,
    PRESETS,
    check_names,
    get_format,
)  # fmt: skip
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.formats.pair import FormatPair, get_formats
from kvfold.formats.statistics import FEWEST_FITTED, FIT_TOKENS, KeyStatistics

__all__ = [
    "BLOCKS",
    "DEFAULT",
    "FAMILIES",
    "FEWEST_FITTED",
    "FIT_TOKENS",
    "FORMATS",
    "GRAMMAR",
    "NO_RESIDUAL",
    "PAIRS",
    "PRESETS",
    "BlockFormat",
    "Format",
    "FormatPair",
    "KeyStatistics",
    "PageForm",
    "Pages",
    "TokenCodes",
    "Window",
    "check_names",
    "get_format",
    "get_formats",
]
