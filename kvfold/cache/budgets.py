"""Bits of each layer's keys and values, by what folding them costs the model.

Layers differ more than formats do: in SmolLM2, two bits for keys cost a hundred times as much KL in one layer as in
another (docs/quality.md). A side is the keys, or the values, of one layer. Folding it with b bits costs about a·4^−b,
the error's power, and small costs add up. So each bit of a fixed total goes to the side where it lowers the cost most:
reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3), with whole bits.

Costs come from a calibration, which knows them all before the first token (`budgeted`), or from the prompt, layer
after layer as it is read (`PromptBudgets`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from kvfold.cache.calibration import Calibration, Loss
from kvfold.cache.policy import Policy
from kvfold.formats import PRESETS, check_names

REACH = 1
"""How many bits a side may get above or below its format's. One brings most of the gain, and limits how much a
measurement on one kind of text decides for others."""

MOST = 5
"""Most bits that a side is raised to. CPU kernels multiply codes of formats up to `kvfold-5` as integers; others take
several times as long (docs/performance.md). A side whose format's name has this many bits, or more, keeps them."""

NOISE = 0.15
"""The variance of ln(cost) over a model's sides that says nothing about losses: (1 − the slope of ln(loss) on ln(cost))
· the whole variance. SmolLM2 has .2 to .6, by the text, and Gemma 3 270M −.2 to 1.2
(benchmarks/quality/prompt_budgets.py). Less is better by KL: on a German text, kvfold-3 in SmolLM2 has .0068 with .15
and with 0, and .0116 with .3."""

FEWEST = 6
"""Fewest folding layers whose costs are believed at all: fewer do not tell how much of their differences is chance.
Three, in Gemma 3 270M, lost by it, and SmolLM2's thirty gain."""

ALIKE = 8
"""How many layers without real differences are taken for granted beside those seen. So a few layers whose costs differ
by chance do not decide."""

_FAMILY = re.compile(r"kvfold-([1-8])(@[0-9]+)?")


class Stream(NamedTuple):
    """A layer's keys (0) or values (1)."""

    layer: int
    number: int


class Item(NamedTuple):
    """One side: the bits in its format's name, and what folding it costs."""

    bits: int
    loss: Loss


class Share(NamedTuple):
    """What one layer got: costs of its sides in kvfold's family, if known; their bits; bits left over.

    `left` is, summed over sides: (bits of its format − bits that it got) · (numbers that a token has in it).
    """

    costs: tuple[float, ...]
    bits: dict[int, int]
    left: int


def spread(items: Mapping[Stream, Item], spare: int = 0) -> dict[Stream, int]:
    """Bits of each side, within its `choice`, without raising the total over all numbers held.

    Each bit lowers a cost by three quarters, so taking the best step first is optimal if all sides hold equally many
    numbers. `spare` counts bits left over elsewhere, in the total's unit: bits times numbers of a token.
    """
    bits = {side: choice(item.bits)[0] for side, item in items.items()}
    left = spare + sum((item.bits - bits[side]) * item.loss.channels for side, item in items.items())

    def step(place: int, side: Stream) -> tuple[float, int, int, Stream]:
        """Heap entry: largest gain of one more bit first; of equals, the side furthest below its format's bits."""
        base, loss = items[side]
        return -max(loss.kl, 0.0) * 4.0 ** -bits[side] / loss.channels, bits[side] - base, place, side

    steps = [step(place, side) for place, side in enumerate(items)]
    heapify(steps)
    while steps:
        *_, place, side = heappop(steps)
        channels = items[side].loss.channels
        if bits[side] < choice(items[side].bits)[-1] and channels <= left:
            bits[side] += 1
            left -= channels
            heappush(steps, step(place, side))
    return bits


def choice(bits: int) -> range:
    """Bits that a side may get if its format's name has `bits`: within `REACH` of them, from 1 to `MOST`."""
    return range(bits, bits + 1) if bits >= MOST else range(max(1, bits - REACH), min(MOST, bits + REACH) + 1)


def bits_in(names: str) -> dict[int, int]:
    """Bits in the format names of keys (0) and values (1), of kvfold's family only: others have no neighbours."""
    found = enumerate(_FAMILY.fullmatch(PRESETS.get(name, name)) for name in check_names(names))
    return {number: int(match[1]) for number, match in found if match}


def with_bits(names: str, bits: Mapping[int, int]) -> str:
    """`names`, one name or "keys:values", with these bits in the place of those that `bits_in` finds."""
    pair = [PRESETS.get(name, name) for name in check_names(names)]
    for number, own in bits.items():
        pair[number] = f"kvfold-{own}" + pair[number][len("kvfold-0") :]
    return ":".join(dict.fromkeys(pair))


def budgeted(policy: Policy, calibration: Calibration | None, num_layers: int) -> Policy:
    """The policy, with bits of its kvfold formats moved to the layers that need them, by a calibration's losses.

    Layers with an exception keep it; sides in formats of other families than kvfold's keep theirs. Without losses, or
    without a calibration, the policy stays as it is.
    """
    if calibration is None or not policy.budgets:
        return policy
    names, items = {}, {}
    for layer, losses in calibration.losses.items():
        format = policy.format_of(layer, num_layers)
        if format is None or policy.is_exception(layer, num_layers):
            continue
        names[layer] = format
        for number, loss in enumerate(losses):
            if number in (asked := bits_in(format)):
                items[Stream(layer, number)] = Item(asked[number], loss)
    by_layer: dict[int, dict[int, int]] = {}
    for side, bits in spread(items).items():
        by_layer.setdefault(side.layer, {})[side.number] = bits
    exceptions = []
    for layer, own in by_layer.items():
        keys, values = check_names(names[layer])
        if len(calibration.losses[layer]) == 1 and keys == values:  # a latent is both
            own[1] = own[0]
        exceptions.append((layer, with_bits(names[layer], own)))
    return replace(policy, exceptions=(*policy.exceptions, *exceptions)) if exceptions else policy


def shrunk(costs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Costs of layers' sides, with their differences cut to the part that is to be believed.

    The logarithm of a cost is that of the loss, up to a factor common to all sides, plus noise. If layers' losses vary
    with τ², costs vary with τ² + `NOISE`, and the best linear guess of a loss keeps β = τ²/(τ² + `NOISE`) of its cost's
    distance from the mean, in logarithms (empirical Bayes: Efron and Morris, JASA 68, 1973). Sides of one layer err
    alike, so layers are counted, and not sides. Costs of 0 say that there is nothing to lose, and stay.
    """
    logs = [[log(cost) for cost in layer if cost > 0] for layer in costs]
    sides = [x for layer in logs for x in layer]
    if not sides:
        return [list(layer) for layer in costs]
    mean, layers = fmean(sides), sum(map(bool, logs))
    squares = layers * fmean((x - mean) ** 2 for x in sides)
    variance = (squares + ALIKE * NOISE) / (layers - 1 + ALIKE)
    beta = max(0.0, 1 - NOISE / variance)
    return [[exp(mean + beta * (log(cost) - mean)) if cost > 0 else 0.0 for cost in layer] for layer in costs]


class PromptBudgets:
    """Bits of a cache's layers by the costs that a sequence's first tokens show, decided layer after layer.

    Once a layer has read the first tokens, its costs and those of the layers before it are known, and believed as far
    as `shrunk` says. Later layers are assumed to be alike: their costs are quantiles of the known ones. The bits left
    over are spread among this layer and the later ones, and this layer keeps its share for good. So the total is kept,
    or about kept where layers differ in KV heads. Sides of other families than kvfold's keep theirs.
    """

    def __init__(self, formats: Mapping[int, str]) -> None:
        self.formats: dict[int, str] = {}  # of the layers that take part, by index
        # What layers got last, by the sequences' padding, then by layer index. One forward pass decides all layers in
        # order, so the entries before a layer always come from the same pass.
        self.shares: dict[int, dict[int, Share]] = {}
        self.join(formats)

    def join(self, formats: Mapping[int, str]) -> None:
        """Let these layers take part, too."""
        self.formats = dict(sorted((self.formats | dict(formats)).items()))
        self._asked = {Stream(i, n): bits for i, names in self.formats.items() for n, bits in bits_in(names).items()}

    def decide(self, layer: int, padding: int, costs: Sequence[float] | None, channels: Sequence[int]) -> str:
        """Names of the formats of a layer with the bits that it gets.

        `costs` are those of folding its keys, and its values, in a unit and at a number of bits common to all sides.
        None: not known, so it gets the bits of its format. `channels` counts the numbers that a token has in each: KV
        heads times coordinates.
        """
        shares = self.shares.setdefault(padding, {})
        own = {side: asked for side, asked in self._asked.items() if side.layer == layer}
        bits = own
        if costs is not None:
            before = {index: share for index, share in shares.items() if index < layer}
            seen = [share.costs for share in before.values() if share.costs]
            by_layer = shrunk([*seen, [costs[side.number] for side in own]])
            known = sorted(cost for sides in by_layer for cost in sides)
            to_come = [side for side in self._asked if side.layer > layer]
            expected = dict(zip(own, by_layer[-1], strict=True))
            for i, side in enumerate(to_come):
                expected[side] = known[(2 * i + 1) * len(known) // (2 * len(to_come))]
            items = {
                side: Item(self._asked[side], Loss(cost, channels[side.number])) for side, cost in expected.items()
            }
            bits = spread(items, sum(share.left for share in before.values()))
        left = sum((asked - bits[side]) * channels[side.number] for side, asked in own.items())
        kept = () if costs is None else tuple(costs[side.number] for side in own)
        shares[layer] = Share(kept, {side.number: bits[side] for side in own}, left)
        return with_bits(self.formats[layer], shares[layer].bits)


def prompt_budgets(
    policy: Policy, calibration: Calibration | None, num_layers: int, folding: Iterable[int]
) -> PromptBudgets | None:
    """Budgets of those `folding` layers that have no exception in the policy; None if no layer takes part.

    With a calibration none does: layers are fitted before the first token. Nor do layers whose keys are of another
    family than kvfold's: most of those fold token by token, from the first on. Nor do fewer than `FEWEST` layers. Nor
    is there anything to decide where no bit can move between sides, as in kvfold-1, and in kvfold-5 and above.
    """
    if not policy.budgets or calibration is not None:
        return None
    formats = {}
    for layer in folding:
        names = policy.format_of(layer, num_layers)
        if names is None or policy.is_exception(layer, num_layers):
            continue
        if 0 in bits_in(names):
            formats[layer] = names
    asked = {bits for names in formats.values() for bits in bits_in(names).values()}
    decides = len(formats) >= FEWEST and any(choice(bits)[0] < bits for bits in asked)
    return PromptBudgets(formats) if decides else None
