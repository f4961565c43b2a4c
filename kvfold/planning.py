"""Memory projections: what a model's cache takes, folded or dense, before anything runs.

Works on a model's `config.json` as a plain dict; nothing is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Literal

from kvfold.cache.budgets import prompt_budgets
from kvfold.cache.policy import Policy
from kvfold.cache.prompt_costs import count_looked_at
from kvfold.cache.rows import tail_capacity
from kvfold.formats import FormatPair, get_formats

DENSE_DTYPES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
"""Bytes of a value, by the names under which `plan` takes dense caches."""


FOLDED = ("full", "latent")
"""Kinds of layers that fold."""


@dataclass(frozen=True)
class HeadDim:
    """A head dimension and why it is believed.

    Attributes
    ----------
    value
        Coordinates of a key of one head.
    evidence
        The step that decided, then what the other steps say.
    """

    value: int
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class LayerShape:
    """What one layer's cache holds for each token.

    Attributes
    ----------
    kind
        "full": every token, folds. "sliding": the newest `window` - 1 tokens, dense. "latent": one latent
        and its rotary part a token (multi-head latent attention), folds. "none": nothing that grows.
    kv_heads, key_dim, value_dim
        Shape of a token's keys and values; for "latent", the latent's and the rotary part's.
    window
        Width of a sliding window; 0 for the other kinds.
    heads
        Query heads; 0 if nobody knows.
    """

    kind: Literal["full", "sliding", "latent", "none"]
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    heads: int = 0

    @property
    def values_per_token(self) -> int:
        """Numbers a token."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class PlanRow:
    """One format's projection.

    Attributes
    ----------
    format
        A format, keys:values, or a dense dtype.
    bytes_per_token
        What one more token takes in a long sequence, page metadata included.
    held_bytes
        What one sequence of the asked context takes, everything counted.
    longest_context
        Tokens of one sequence that fit into the memory.
    users
        Sequences of the asked context that fit.
    """

    format: str
    bytes_per_token: float
    held_bytes: int
    longest_context: int
    users: int


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: itself, or a nested text config."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def resolve_head_dim(config: Mapping[str, Any]) -> HeadDim:
    """Head dimension by a cascade of five steps, cross-checked.

    Explicit key length, MLA key length, sliding-window key length, value length, hidden size over
    heads: the first that is told decides, and what the others say is kept as evidence.

    Raises
    ------
    ValueError
        If no step tells.
    """
    config = text_config(config)
    mla = None
    if config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"):
        mla = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    steps = {
        "head_dim": config.get("head_dim"),
        "qk_nope_head_dim + qk_rope_head_dim": mla,
        "swa_head_dim": config.get("swa_head_dim"),
        "v_head_dim": config.get("v_head_dim"),
        "hidden_size / num_attention_heads": hidden // heads if hidden and heads and hidden % heads == 0 else None,
    }
    told = {name: value for name, value in steps.items() if value}
    if not told:
        raise ValueError(f"config tells no head dimension: it has none of {', '.join(steps)}")
    decided = next(iter(told))
    evidence = [f"{decided} = {told[decided]}"]
    for name, value in told.items():
        if name != decided:
            evidence.append(f"{name} = {value} {'agrees' if value == told[decided] else 'differs'}")
    return HeadDim(int(told[decided]), tuple(evidence))


def model_layers(config: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """Shapes of all layers of a model.

    Parameters
    ----------
    config
        A `config.json` of transformers as a dict; a nested text config is found.

    Raises
    ------
    ValueError
        If it lacks the number of layers or heads, or a head dimension.
    """
    config = text_config(config)
    layers = config.get("num_hidden_layers")
    heads = config.get("num_attention_heads")
    if not layers or not heads:
        raise ValueError("config needs num_hidden_layers and num_attention_heads: is it a language model's?")
    if config.get("kv_lora_rank"):
        latent = LayerShape("latent", 1, int(config["kv_lora_rank"]), int(config.get("qk_rope_head_dim") or 0))
        return (latent,) * layers
    dim = resolve_head_dim(config).value
    kv_heads = int(config.get("num_key_value_heads") or heads)
    full = LayerShape("full", kv_heads, dim, int(config.get("v_head_dim") or dim), heads=int(heads))
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    sliding = LayerShape("sliding", kv_heads, full.key_dim, full.value_dim, int(window))
    kinds = config.get("layer_types")
    if kinds is None:
        pattern = config.get("sliding_window_pattern")
        if not window or config.get("use_sliding_window") is False:
            kinds = ["full_attention"] * layers
        elif isinstance(pattern, int):  # every pattern-th layer sees everything
            kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
        else:
            kinds = ["sliding_attention"] * layers
    shapes = {"full_attention": full, "sliding_attention": sliding, "chunked_attention": sliding}
    return tuple(shapes.get(kind, LayerShape("none")) for kind in kinds)


def held_bytes(layers: Sequence[LayerShape], format: str, tokens: int, dense_bytes: float = 2.0) -> int:
    """Bytes of one sequence's cache of `tokens` tokens, everything counted.

    Parameters
    ----------
    layers
        From `model_layers`.
    format
        A format, keys:values, or one of `DENSE_DTYPES`.
    tokens
        Length of the sequence.
    dense_bytes
        Bytes of a value that stays dense beside folded ones.
    """
    dense_only = DENSE_DTYPES.get(format)
    total, tables = 0.0, {}
    full = [index for index, layer in enumerate(layers) if layer.kind == "full"]
    budgets = prompt_budgets(Policy(format), None, len(layers), full) if dense_only is None else None
    for index, layer in enumerate(layers):
        itemsize = dense_bytes if dense_only is None else dense_only
        if layer.kind in FOLDED and dense_only is None:
            pair = _formats_of(layer, format).at(index, None)
            pair = replace(pair, awaits_bits=budgets is not None and index in budgets.formats)
            total += layer.kv_heads * _folded_bytes(pair, tokens, itemsize) + 8  # and the row's index
            if pair.awaits_fit:
                total += _fit_bytes(pair, tokens, layer)
            for form in (pair.keys.form, pair.values.form):
                for tensor in (form.lut, *form.transform.tensors()):
                    tables[id(tensor)] = tensor.nbytes
        else:
            held = min(tokens, layer.window - 1) if layer.kind == "sliding" else tokens
            total += held * layer.values_per_token * itemsize
    return ceil(total) + sum(tables.values())


def _formats_of(layer: LayerShape, format: str) -> FormatPair:
    """The formats of a layer that folds."""
    if layer.kind == "full":
        return get_formats(format, layer.key_dim, layer.value_dim)
    return get_formats(format, layer.key_dim + layer.value_dim, layer.key_dim, values_of_keys=True)


def bytes_per_token(layers: Sequence[LayerShape], format: str, dense_bytes: float = 2.0) -> float:
    """Bytes that one more token takes in a long sequence: no windows, no tables."""
    total = 0.0
    for layer in layers:
        if layer.kind in FOLDED and format not in DENSE_DTYPES:
            pair = _formats_of(layer, format)
            total += layer.kv_heads * (pair.keys.bytes_per_vector + pair.values.bytes_per_vector)
        elif layer.kind != "sliding":
            total += layer.values_per_token * DENSE_DTYPES.get(format, dense_bytes)
    return total


def plan(layers: Sequence[LayerShape], formats: Sequence[str], memory: int, context: int) -> list[PlanRow]:
    """Project each format into `memory` bytes, for sequences of `context` tokens."""
    if context < 1:
        raise ValueError(f"context = {context}: give a number of tokens, 1 or more")
    rows = []
    for format in formats:
        held = held_bytes(layers, format, context)
        rows.append(
            PlanRow(
                format=format,
                bytes_per_token=bytes_per_token(layers, format),
                held_bytes=held,
                longest_context=_longest(layers, format, memory),
                users=memory // held if held else 0,
            )
        )
    return rows


def _folded_bytes(pair: FormatPair, tokens: int, dense_bytes: float) -> float:
    """One KV head's folded pages and dense windows."""
    window, size = pair.window, pair.keys.page_size
    if pair.folds_by_token:
        pages, dense = ceil(max(tokens - window.sinks, 0) / size), min(tokens, window.sinks)
    else:
        after_sinks = max(tokens - window.sinks, 0)
        fitted, for_good = tokens >= pair.fit_tokens, tokens - window.undo >= pair.fit_tokens
        pages = max(after_sinks - window.recent, 0) // size if fitted else 0
        left = max(after_sinks - window.recent - window.undo, 0) // size if for_good else 0
        dense = window.sinks + tail_capacity(after_sinks - left * size)
    page = size * (pair.keys.bytes_per_vector + pair.values.bytes_per_vector)
    return pages * page + dense * pair.dense_channels * dense_bytes


def _fit_bytes(pair: FormatPair, tokens: int, layer: LayerShape) -> int:
    """A layer's orders of channels, and what is held of queries to find them, and bits, by."""
    window, channels = pair.window, pair.keys.head_dim
    ordered = [fmt.head_dim for fmt in (pair.keys, pair.values) if fmt.awaits_fit]
    order = layer.kv_heads * sum(ordered) if tokens >= pair.fit_tokens else 0
    if tokens >= pair.fit_tokens + window.undo:
        return 2 * order
    first = min(tokens, pair.fit_tokens)
    energies = layer.kv_heads * max(first - window.sinks, 0)
    queries = layer.heads * count_looked_at(first, window.sinks) if pair.awaits_bits else 0
    return 2 * (order + channels * (energies + queries))


def _longest(layers: Sequence[LayerShape], format: str, memory: int) -> int:
    """The most tokens of one sequence that `memory` holds, found by bisection; 0 if none."""
    if held_bytes(layers, format, 1) > memory:
        return 0
    low, high = 1, 2
    while held_bytes(layers, format, high) <= memory:
        low, high = high, 2 * high
        if high > 2**40:  # nothing grows: sliding windows only
            return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held_bytes(layers, format, middle) <= memory else (low, middle)
    return low
