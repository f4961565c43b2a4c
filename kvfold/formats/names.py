"""Formats by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvfold.formats.affine import GROUPS, Affine
from kvfold.formats.amx3 import AMX3
from kvfold.formats.base import Format, check_page_size
from kvfold.formats.centred import Centred
from kvfold.formats.channelwise import Channelwise
from kvfold.formats.corrected import Corrected
from kvfold.formats.float16 import Float16
from kvfold.formats.ggml import Ggml
from kvfold.formats.hadamard import Hadamard
from kvfold.formats.kvarn import KVarN
from kvfold.formats.oscar import Oscar
from kvfold.formats.outliers import SPLITS, Outliers
from kvfold.formats.polar4 import Polar4
from kvfold.formats.rules import block_of
from kvfold.formats.tbq import TBQ
from kvfold.formats.tbqx3 import TBQX3
from kvfold.formats.tq import TQ
from kvfold.formats.turboquant import TurboQuant
from kvfold.formats.uniform import Uniform
from kvfold.quant.packing import Lanes
from kvfold.quant.residuals import RESIDUALS

DEFAULT = "kvfold-4"

FAMILIES: dict[str, tuple[type[Format], type[Format]]] = {
    "kvfold": (Channelwise, Hadamard),
    "turboquant": (TurboQuant, TurboQuant),
    "hadamard": (Hadamard, Hadamard),
    "centred": (Centred, Centred),
    "kvarn": (KVarN, KVarN),
    "oscar": (Oscar, Oscar),
}
"""Formats that take 1 to 8 bits, for keys and for values: kvfold-4, turboquant-3, …"""

BLOCKS: dict[str, Callable[..., Format]] = {
    "float16": Float16,
    "f16": Float16,
    "q8_0": lambda **shape: Ggml(bits=8, **shape),
    "q4_0": lambda **shape: Ggml(bits=4, **shape),
    "tq3": lambda **shape: TQ(bits=3, **shape),
    "tq4": lambda **shape: TQ(bits=4, **shape),
    "polar4": lambda **shape: Polar4(bits=4, **shape),
    "polar4-u8": lambda **shape: Polar4(bits=8, **shape),
    "tbq3": lambda **shape: TBQ(bits=3, **shape),
    "tbq4": lambda **shape: TBQ(bits=4, **shape),
    "tbqp3": lambda **shape: TBQ(bits=3, signs=True, **shape),
    "tbqp4": lambda **shape: TBQ(bits=4, signs=True, **shape),
    "amx3": AMX3,
    "tbqx3": TBQX3,
}
"""Formats whose blocks exist elsewhere, and float16. `kvfold.formats.rules` says which a head dimension gets."""

PRESETS = {"near-lossless": "kvfold-4", "compact": "kvfold-3", "smallest": "kvfold-2"}
"""Formats by what they are for."""

PAIRS = {
    "bold": "turboquant-3+qjl:affine-4g128",
    "safe": "turboquant-4:affine-4g128",
    "safe-lowbit": "q8_0:uniform-4",
    "balanced": "uniform-4:uniform-4",
    "experimental-max": "uniform-3r:uniform-3r",
    "safe-lowbit-lloyd": "q8_0:turboquant-4",
    "balanced-lloyd": "turboquant-4:turboquant-4",
    "experimental-max-lloyd": "turboquant-4+qjl:turboquant-4+qjl",
}
"""Pairs by the names that their systems give them (sanctum-mlx and SKaiNET); "-lloyd": with Lloyd–Max levels."""

FORMATS = (
    "kvfold-4", "kvfold-3", "kvfold-2", "centred-4", "kvarn-4", "oscar-4", "hadamard-4", "turboquant-8",
    "turboquant-4", "turboquant-3", "turboquant-2", "float16",
)  # fmt: skip
"""The formats to try first. `GRAMMAR` describes all names; `PRESETS` has further names for some."""

GRAMMAR = "FAMILY-BITS[+RESIDUAL][@PAGE_SIZE]"
"""kvfold-4, turboquant-3+qjl (one of the 3 bits for signs of the remainder), kvfold-4@128 (pages of 128 tokens)."""

OTHERS = ("affine-BITS[gGROUP]", "uniform-BITS[r]", *(f"turboquant-{split}" for split in SPLITS))
"""Names beside the grammar's: affine-4g32 (groups of 32), uniform-3r (with a residual), turboquant-2.5."""

NO_RESIDUAL = ("kvfold", "kvarn", "oscar")
"""Families that take no residual: their channels have scales of their own in each page, or their tokens offsets."""

_NUMBER = "(0|[1-9][0-9]{0,8})"
"""A number has one spelling: ASCII digits, no leading zeros, and few enough to fit 32 bits."""
_FAMILY = re.compile(rf"([a-z]+)-{_NUMBER}(?:\+([a-z]+))?")
_AFFINE = re.compile(rf"affine-{_NUMBER}(?:g{_NUMBER})?")
_UNIFORM = re.compile(rf"uniform-{_NUMBER}(r?)")
_NUMBERED = re.compile(r"((?:tbq|tbqp|amx|tbqx)[0-9])_([0-4])")


@dataclass(frozen=True)
class Name:
    """A name, taken apart."""

    build: Callable[..., Format]
    """Makes the format, given head_dim, lanes and perhaps page_size."""
    page_size: int | None = None
    block: str | None = None
    """The name in `BLOCKS`, if it is a block format's."""
    suffix: str | None = None
    """The number behind that name, if there is one: "2" in "tbq3_2"."""


@lru_cache(maxsize=None, typed=True)  # 64.0 is no head_dim, though it equals 64
def get_format(name: str, head_dim: int, *, lanes: Lanes = "tokens") -> Format:
    """The format `name` for vectors of `head_dim` coordinates; cached, so all callers share it and its tables.

    Parameters
    ----------
    name
        One of `FORMATS`, `PRESETS` or `BLOCKS`, or any other name of the forms in `GRAMMAR` and `OTHERS`. No pair.
    head_dim
        D, a multiple of 8 from 8 to 1,024.
    lanes
        "tokens" to fold keys (default), "channels" to fold values; a family may fold the two in different ways.
        Fit kvfold's keys first (`Format.fitted`): otherwise their channels keep the order they come in.

    Raises
    ------
    ValueError
        If no format has that name, or it cannot take that `head_dim`.
    """
    if ":" in PAIRS.get(name, name):
        raise ValueError(f"name = {name!r} is a pair of formats: get_format takes one, get_formats takes pairs")
    parsed = parse(name)
    shape: dict[str, Any] = {"head_dim": head_dim, "lanes": lanes}
    if parsed.page_size is not None:
        shape["page_size"] = parsed.page_size
    build = parsed.build
    if parsed.block is not None:
        block = block_of(parsed.block, parsed.suffix, head_dim, lanes)
        build = BLOCKS[block.name]
        if block.double:
            shape["double"] = True
    return build(**shape)


def check_names(names: str) -> tuple[str, str]:
    """Names of the key format and the value format, from one name for both or from "keys:values".

    Raises ValueError if a name is unknown, or the two have pages of different sizes.
    """
    if not isinstance(names, str):
        raise ValueError(f"format = {names!r}: give a name, or keys:values")
    parts = PAIRS.get(names, names).split(":")
    if len(parts) > 2:
        raise ValueError(f"format = {names!r}: write one name for both, or keys:values")
    if len({parse(part).page_size for part in parts}) > 1:
        raise ValueError(f"format = {names!r}: keys and values share pages, so both name the same page size, or none")
    return parts[0], parts[-1]


def parse(name: str) -> Name:
    """Take a name apart; raise if it is no format's."""
    whole = PRESETS.get(name, name)
    stem, at, size = whole.partition("@")
    page_size = None
    if at:
        if not re.fullmatch(_NUMBER, size):
            raise _unknown(name)
        page_size = int(size)
        check_page_size(f"format = {name!r}: page size", page_size)
    if stem.startswith("turboquant-") and stem.removeprefix("turboquant-") in SPLITS:
        split = stem.removeprefix("turboquant-")
        return Name(lambda **shape: Outliers.of(split, **shape), page_size)
    if match := _AFFINE.fullmatch(stem):
        group = int(match[2] or max(GROUPS))
        bits = _bits(name, match[1], Affine)
        return Name(lambda **shape: Affine(bits=bits, group=group, **shape), page_size)
    if match := _UNIFORM.fullmatch(stem):
        residual, bits = match[2] == "r", _bits(name, match[1], Uniform)
        return Name(lambda **shape: Uniform(bits=bits, residual=residual, **shape), page_size)
    if (match := _FAMILY.fullmatch(stem)) and match[1] in FAMILIES:
        return Name(_of_family(name, match[1], int(match[2]), match[3]), page_size)
    block, suffix = match.groups() if (match := _NUMBERED.fullmatch(stem)) else (stem, None)
    if block in BLOCKS:
        return Name(BLOCKS[block], page_size, block, suffix)
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"format = {name!r} is not known: choose one of {', '.join((*PRESETS, *FORMATS))}, "
        f"any {GRAMMAR}, {', '.join(OTHERS)}, a block format ({', '.join(BLOCKS)}), a pair ({', '.join(PAIRS)}), or "
        "keys:values"
    )


def _bits(name: str, digits: str, family: type[Format]) -> int:
    fewest, most = family.bit_range
    if not fewest <= int(digits) <= most:
        raise ValueError(f"format = {name!r}: bits go from {fewest} to {most}")
    return int(digits)


def _of_family(name: str, family: str, bits: int, residual: str | None) -> Callable[..., Format]:
    if not 1 + (residual is not None) <= bits <= 8:
        least = "2 (a residual takes one of them)" if residual is not None else "1"
        raise ValueError(f"format = {name!r}: bits go from {least} to 8")
    if residual is not None and residual not in RESIDUALS:
        raise ValueError(f"format = {name!r}: the residual is one of {', '.join(RESIDUALS)}")
    if residual is not None and family in NO_RESIDUAL:
        others = ", ".join(name for name in FAMILIES if name not in NO_RESIDUAL)
        raise ValueError(f"format = {name!r}: residuals go with {others}")

    def build(lanes: Lanes = "tokens", **shape: Any) -> Format:
        role = FAMILIES[family][lanes == "channels"]
        if residual is None:
            return role(bits=bits, lanes=lanes, **shape)
        return Corrected.of(role(bits=bits - 1, lanes=lanes, **shape), residual)

    return build
