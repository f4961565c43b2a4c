"""Memory projections for caches, folded or dense, from the shapes of their layers, before anything runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kvfold.cache.config import layer_configs
from kvfold.cache.policy import Policy
from kvfold.cache.prompt_costs import count_sampled
from kvfold.cache.schedule import Schedule
from kvfold.cache.shape import KINDS, LayerShape
from kvfold.cache.store import expected_room
from kvfold.cache.tail import tail_capacity
from kvfold.formats import FormatPair

DENSE_DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
"""Bytes of a value in dense caches, by the names that `plan` takes for them."""

BESIDE_PAGES = 2.0
"""Bytes of a value that stays dense in a layer that folds: 16 bits, whatever the model computes in."""


@dataclass(frozen=True)
class PlanRow:
    """One format's projection."""

    format: str
    bytes_per_token: float
    """Of one more token in a long sequence, page metadata included."""
    held_bytes: int
    """Of one sequence of the given context, everything counted."""
    longest_context: int
    """Tokens of one sequence that fit into the memory."""
    users: int
    """Sequences of the given context that fit."""


def held_bytes(
    layers: Sequence[LayerShape], format: str, tokens: int, itemsize: float = 2.0, sliding: bool = False
) -> int:
    """Bytes of one sequence's cache of `tokens` tokens; all is counted except states whose size is fixed.

    `format` is a format, keys:values, or one of `DENSE_DTYPES`. `itemsize` is how many bytes a value has in the dtype
    that the model computes in, and so in layers that do not fold; windows beside layers that fold are held in 16 bits.
    `sliding` says whether windows fold, too (`kvfold.Policy`).
    Raises ValueError if a layer's shape is not known.
    """
    _check(layers)
    total, tables, pairs = 0.0, {}, _formats_of(layers, format, sliding)
    windows = min(itemsize, 2.0) if any(pairs) else itemsize
    for layer, pair in zip(layers, pairs, strict=True):
        if pair is not None:
            total += layer.kv_heads * _folded_bytes(pair, tokens, layer.window) + 8  # and the row's index
            if pair.awaits_fit:
                total += _fit_bytes(pair, tokens, layer)
            if pair.needs_calibration:
                total += _calibrated_bytes(pair, layer)
            for fmt in (pair.keys, pair.values):
                shared = () if fmt.needs_calibration else fmt.form.transform.tensors()
                for tensor in (fmt.form.lut, *shared):
                    tables[id(tensor)] = tensor.nbytes
        else:
            held = min(tokens, layer.window - 1) if layer.window else tokens
            total += held * layer.values_per_token * DENSE_DTYPES.get(format, windows if layer.window else itemsize)
    return ceil(total) + sum(tables.values())


def _formats_of(layers: Sequence[LayerShape], format: str, sliding: bool) -> list[FormatPair | None]:
    """The formats of each layer; None where it stays dense."""
    configs = {} if format in DENSE_DTYPES else layer_configs(layers, Policy(format, sliding=sliding), planned=True)
    return [configs[i].formats_of(*layer.folded_dims) if i in configs else None for i, layer in enumerate(layers)]


def bytes_per_token(layers: Sequence[LayerShape], format: str, itemsize: float = 2.0) -> float:
    """Bytes that one more token takes in a long sequence: no windows, no tables."""
    _check(layers)
    total = 0.0
    for layer, pair in zip(layers, _formats_of(layers, format, sliding=False), strict=True):
        if pair is not None:
            total += layer.kv_heads * (pair.keys.bytes_per_vector + pair.values.bytes_per_vector)
        elif layer.kind != "sliding":
            total += layer.values_per_token * DENSE_DTYPES.get(format, itemsize)
    return total


def plan(
    layers: Sequence[LayerShape],
    formats: Sequence[str],
    memory: int,
    context: int,
    itemsize: float = 2.0,
    sliding: bool = False,
) -> list[PlanRow]:
    """What fits into `memory` bytes with each format, for sequences of `context` tokens.

    `itemsize` and `sliding` are as in `held_bytes`.

    Raises ValueError if `context` is below 1, no layer grows with the text, or a layer's shape is not known.
    """
    if context < 1:
        raise ValueError(f"context = {context}: give a number of tokens, 1 or more")
    if all(layer.kind in ("sliding", "none") for layer in layers):
        kinds = Counter(f"windows of {layer.window}" if layer.window else "nothing that grows" for layer in layers)
        counted = ", ".join(f"{count} with {kind}" for kind, count in kinds.items())
        raise ValueError(
            f"layers = {counted}: none holds every token, so the cache stops growing whatever the format, and there is "
            "nothing to plan. If the model has layers that attend to everything, the file does not tell which: give a "
            "folder with its config.json, or --layers, --kv-heads and --head-dim for these layers"
        )
    rows = []
    for format in formats:
        held = held_bytes(layers, format, context, itemsize, sliding)
        longest = _longest(layers, format, memory, itemsize, sliding)
        rows.append(PlanRow(format, bytes_per_token(layers, format, itemsize), held, longest, memory // held))
    return rows


def _check(layers: Sequence[LayerShape]) -> None:
    """Raise ValueError unless all shapes are known."""
    for index, layer in enumerate(layers):
        if layer.kind not in KINDS:
            raise ValueError(f"layer {index} is a {layer.kind}: what it holds for each token is not known, so no plan")
        if layer.kind != "none" and not layer.is_known:
            raise ValueError(
                f"layer {index}: the config does not tell KV heads and head dimension: give --layers, --kv-heads and "
                "--head-dim"
            )


def _folded_bytes(pair: FormatPair, tokens: int, width: int) -> float:
    """One KV head's folded pages and dense tokens, after one that came alone; `width` is that of a sliding window."""
    schedule = Schedule.of(pair)
    pages, dense = schedule.pages(tokens), min(tail_capacity(tokens), pair.window.sinks)
    if not schedule.by_token:
        tail_start = schedule.tail_start(tokens, 0, pages, newest=1)
        dense += tail_capacity(max(tokens - tail_start, 0))
        if width:
            left = schedule.evictable(tokens, pages, tail_start, recent=width - 1 + pair.window.undo)
            pages -= left // schedule.page_size
    page = schedule.page_size * (pair.keys.bytes_per_vector + pair.values.bytes_per_vector)
    return (pages + expected_room(pages)) * page + dense * pair.dense_channels * BESIDE_PAGES


def _fit_bytes(pair: FormatPair, tokens: int, layer: LayerShape) -> int:
    """A layer's orders of channels, and what is kept of queries to decide these and bits."""
    window, channels = pair.window, pair.keys.head_dim
    ordered = [fmt.head_dim for fmt in (pair.keys, pair.values) if fmt.awaits_fit]
    order = layer.kv_heads * sum(ordered) if tokens >= pair.fit_tokens else 0
    if Schedule.of(pair).not_undone(tokens, newest=1) >= pair.fit_tokens:
        return 2 * order
    first = min(tokens, pair.fit_tokens)
    energies = layer.kv_heads * max(first - window.sinks, 0)
    queries = layer.heads * count_sampled(first, window.sinks) if pair.awaits_bits else 0
    return 2 * (order + channels * (energies + queries))


def _calibrated_bytes(pair: FormatPair, layer: LayerShape) -> int:
    """A calibration's statistics of a layer, with a matrix a head for each side that is rotated by them."""
    rotated = [fmt.head_dim for fmt in (pair.keys, pair.values) if fmt.needs_calibration]
    return 4 * layer.kv_heads * (3 * pair.keys.head_dim + sum(dim * dim for dim in rotated))


def _longest(layers: Sequence[LayerShape], format: str, memory: int, itemsize: float, sliding: bool) -> int:
    """The most tokens of one sequence that `memory` holds, found by bisection; 0 if none."""

    def fits(tokens: int) -> bool:
        return held_bytes(layers, format, tokens, itemsize, sliding) <= memory

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
