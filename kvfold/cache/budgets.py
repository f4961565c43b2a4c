"""Bits of each layer's keys and values, by what folding them costs the model.

Layers differ more than formats do: in SmolLM2 the same two bits for a layer's keys cost a hundred times as much KL in
one layer as in another (docs/quality.md). Folding one side of one layer with b bits costs about a·4^−b, the error's
power, and small costs add up. So of a fixed sum of bits each goes to where it takes away most: reverse water-filling
(Cover and Thomas, Elements of Information Theory, 10.3.3), with whole bits.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from kvfold.cache.calibration import Calibration, Loss
from kvfold.cache.policy import Policy
from kvfold.formats import PRESETS, check_names

REACH = 1
"""How many bits more or less than the format's a side may get. One takes most of the gain, and keeps a measurement on
one kind of text from deciding too much on others."""

_FAMILY = re.compile(r"kvfold-(\d)(@\d+)?")


class Side(NamedTuple):
    """A layer's keys (0) or values (1)."""

    layer: int
    number: int


class Item(NamedTuple):
    """One side: the bits that its format's name has, and what it costs."""

    bits: int
    loss: Loss


def spread(items: Mapping[Side, Item]) -> dict[Side, int]:
    """Bits of each side, within `REACH` of its own and from 1 to 8, with no larger sum over all numbers held.

    Costs fall by three quarters with each bit, so taking the best step first is best in the end when all sides hold
    as many numbers.
    """
    bits = {side: max(1, item.bits - REACH) for side, item in items.items()}
    left = sum((item.bits - bits[side]) * item.loss.channels for side, item in items.items())

    def gain(side: Side) -> tuple[float, int]:
        """What one bit more takes away; of equals the side that is furthest below its own bits."""
        base, loss = items[side]
        return max(loss.kl, 0.0) * 4.0 ** -bits[side] / loss.channels, base - bits[side]

    while True:
        able = [
            side for side, item in items.items()
            if bits[side] < min(8, item.bits + REACH) and item.loss.channels <= left
        ]  # fmt: skip
        if not able:
            return bits
        best = max(able, key=gain)
        bits[best] += 1
        left -= items[best].loss.channels


def budgeted(policy: Policy, calibration: Calibration | None, num_layers: int) -> Policy:
    """The policy with the bits of its kvfold formats where layers ask for them.

    Parameters
    ----------
    policy
        Layers that it names an exception for keep that; sides in other formats than kvfold's keep theirs.
    calibration
        With `losses`; without them, or without a calibration, the policy stays as it is.
    num_layers
        Of the model.
    """
    if calibration is None or not calibration.losses:
        return policy
    named = {index % num_layers for index, _ in policy.exceptions if -num_layers <= index < num_layers}
    pairs: dict[int, tuple[str, str]] = {}
    items, suffix = {}, {}
    for layer, losses in calibration.losses.items():
        format = policy.format_of(layer, num_layers)
        if format is None or layer in named:
            continue
        pairs[layer] = check_names(format)
        for number, loss in enumerate(losses):
            name = pairs[layer][number]
            if match := _FAMILY.fullmatch(PRESETS.get(name, name)):
                side = Side(layer, number)
                items[side], suffix[side] = Item(int(match[1]), loss), match[2] or ""
    for side, bits in spread(items).items():
        keys, values = pairs[side.layer]
        name = f"kvfold-{bits}{suffix[side]}"
        one = len(calibration.losses[side.layer]) == 1 and keys == values  # a latent is both
        pairs[side.layer] = (name, name) if one else (name, values) if side.number == 0 else (keys, name)
    own = sorted({side.layer for side in items})
    exceptions = [(layer, ":".join(dict.fromkeys(pairs[layer]))) for layer in own]
    return replace(policy, exceptions=(*policy.exceptions, *exceptions))
