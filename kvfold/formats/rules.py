"""Which block a name gets for a head dimension and a role, by the rules of the TBQ fork of llama.cpp.

Each change is logged once.
"""

import logging
from functools import cache
from typing import NamedTuple

from kvfold.formats.ggml import GROUP
from kvfold.quant.packing import Lanes

logger = logging.getLogger("kvfold")

SUFFIXES = {256: ("0",), 512: ("0",), 128: ("1",), 64: ("2", "3"), 576: ("4",)}
"""Numbers of the TBQ blocks of each head dimension."""

KEYS_ONLY = {"tbqp3": "tbq3", "tbqp4": "tbq4", "amx3": "tbq3", "tbqx3": "tbq3"}
"""Formats whose extra bits only serve scores of keys, and for each the format that values get in its place."""


class Block(NamedTuple):
    """A block format's name, and whether it goes through two transforms."""

    name: str
    double: bool = False


def block_of(name: str, suffix: str | None, head_dim: int, lanes: Lanes) -> Block:
    """The block format that keys (lanes "tokens") or values of `head_dim` coordinates get for a name.

    - A head dimension that TBQ has no block for gets q8_0, or float16 if it is no multiple of 32.
    - Values take no residual and no polar part: TBQP and AMX3 become TBQ.
    - A number that belongs to another head dimension ("tbq3_0" at 128) is put right.
    - 3-bit keys of 64 get the signs, and all keys with signs of 64 go through two transforms.
    - Values of 512 are TBQ or float16.
    - AMX3 and TBQX3 are for 128; elsewhere tbq3 stands in.
    """
    kind = "values" if lanes == "channels" else "keys"
    asked = name if suffix is None else f"{name}_{suffix}"
    if not name.startswith(("tbq", "amx")):
        if name in ("q8_0", "q4_0") and head_dim % GROUP:
            return Block(log_stand_in(asked, "float16", f"its blocks are of {GROUP}, and head_dim is {head_dim}"))
        if kind == "values" and head_dim == 512 and name in ("q8_0", "q4_0"):
            return Block(log_stand_in(asked, "float16", "values of 512 are TBQ or float16"))
        return Block(name)
    if head_dim not in SUFFIXES or (kind == "values" and head_dim == 576):
        stand_in = "q8_0" if head_dim % GROUP == 0 else "float16"
        return Block(log_stand_in(asked, stand_in, f"it has no block for {kind} of {head_dim}"))
    why = []
    if kind == "values" and name in KEYS_ONLY:
        name = KEYS_ONLY[name]
        why.append("what it adds is for scores of keys, not for values")
    if name in ("amx3", "tbqx3") and head_dim != 128:
        why.append(f"its blocks are of 128, and head_dim is {head_dim}")
        name = "tbq3"
    if suffix is not None and suffix not in SUFFIXES[head_dim]:
        why.append(f"that is no block of head_dim {head_dim}")
        suffix = None
    if head_dim == 64 and kind == "keys" and suffix is None and name == "tbq3":
        why.append("3-bit keys of 64 need the signs")
        name = "tbqp3"
    double = head_dim == 64 and (suffix == "3" or (suffix is None and kind == "keys" and name in ("tbqp3", "tbqp4")))
    if why:
        log_stand_in(asked, f"{name}_{SUFFIXES[head_dim][double]}", "; ".join(why))
    return Block(name, double)


@cache
def log_stand_in(name: str, becomes: str, why: str) -> str:
    """`becomes`; the first time, the change is logged."""
    logger.warning("format %s becomes %s: %s", name, becomes, why)
    return becomes
