"""Attention over folded rows and pools on GPUs, in Triton (kvfold/kernels/triton/attend.py)."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from importlib.util import find_spec
from itertools import groupby
from operator import or_
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.cache.paged import PagedLayer, Part, Step
from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore, StoreView
from kvfold.formats.page import PageForm
from kvfold.kernels.triton import on_its_device
from kvfold.quant.packing import TILE
from kvfold.quant.tables import on

if TYPE_CHECKING:
    from kvfold.kernels.triton.codes import Shape

DEVICES = ("cuda", "xpu", "cpu")
"""By torch's names: "cuda" is NVIDIA's and AMD's, "xpu" Intel's. On a CPU they run in Triton's interpreter, to be
tested."""
QUERIES = 2_048
"""Most new tokens of all sequences that are attended at a time: their float32 states take memory."""
NO_MASK: dict[str, Any] = {"mask": None, "mask_sequence": 0, "mask_head": 0, "mask_query": 0, "mask_columns": 0}
WAVES = 4
"""Programs for each multiprocessor that a short list of rows is split into."""
MULTIPROCESSORS_OF_A_CPU = 2
"""As many as the interpreter is said to have, so that contexts are split there too."""


def unsupported(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
    """Why these kernels do not take a call; None if they do."""
    if find_spec("triton") is None:
        return "the GPU kernels want Triton: install kvfold[gpu]"
    if query.device.type not in DEVICES:
        return f"the GPU kernels run on {' and '.join(DEVICES)} so far, the queries are on {query.device}"
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the GPU kernels run on a CPU in Triton's interpreter alone, with TRITON_INTERPRET=1"
    if query.dtype == torch.float64:
        return "the GPU kernels compute in float32, and the queries are float64"
    if mask is not None and mask.dtype != torch.bool:
        return f"the GPU kernels take masks of bool, and this is one of {mask.dtype}"
    return why_not(rows.keys.form, rows.values.form)


def why_not(*forms: PageForm) -> str | None:
    """Why these kernels do not read pages of some form; None if they do."""
    for form in forms:
        if form.only_reference is not None:
            return form.only_reference
        if any(width % TILE for width in form.groups):
            return f"the GPU kernels take scales for groups of {TILE} channels, these are of {form.groups}"
    return None


@dataclass(frozen=True, eq=False)
class _Side:
    """Keys or values of pages: their parts by name (None if absent), and what kernels are compiled for."""

    parts: dict[str, Tensor | None]
    shape: "Shape"

    def arguments(self, prefix: str, without: str) -> dict[str, Any]:
        return {f"{prefix}_{name}": part for name, part in self.parts.items() if name != without}


@dataclass(frozen=True, eq=False)
class _Sequences:
    """Sequences whose new tokens are in one list.

    Attributes
    ----------
    first, count, pages
        int32, of each sequence: its first new token, how many it has, and pages.
    stop
        How many folded tokens each new token reads: int32, (tokens).
    most, most_pages
        The most new tokens, and pages, of a sequence.
    """

    first: Tensor
    count: Tensor
    pages: Tensor
    stop: Tensor
    most: int
    most_pages: int


@dataclass(frozen=True, eq=False)
class _Span:
    """Which dense tokens each sequence reads, all int32.

    Attributes
    ----------
    place, held, position
        Of each sequence: where its tokens begin, in steps of the tensor; how many they are; position of the first.
    start, stop
        Positions that bound what each new token reads: (tokens).
    """

    place: Tensor
    held: Tensor
    position: Tensor
    start: Tensor
    stop: Tensor


@dataclass(frozen=True, eq=False)
class _Dense:
    """Dense tokens; strides are in elements, from place to place, head to head and token to token."""

    span: _Span
    key: Tensor
    value: Tensor
    key_strides: Sequence[int]
    value_strides: Sequence[int]


@on_its_device
@torch.no_grad()
def attend_rows(
    query: Tensor,
    rows: FoldedRows,
    dense: DenseSpan | None,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`kvfold.attention.reference.attend_rows` by kernels, in the query's dtype.

    Queries, probabilities and what they are multiplied with are float16 numbers to the tensor cores, unless `query`
    is float32. A query with a NaN or an infinity gets NaN: to see it would mean to wait for the GPU.
    """
    batch, heads, n, _ = query.shape
    until, stop = rows.reach(n, dense, causal=mask is None)
    out = query.new_empty(batch, heads, n, rows.value_dim)
    step = max(QUERIES // batch, 1)
    for first in range(0, n, step):
        part = slice(first, first + step)
        if mask is not None and mask.shape[2] > 1:
            own_mask: Tensor | None = mask[:, :, part]
        else:
            own_mask = mask
        out[:, :, part] = _attend_some(
            query[:, :, part], rows, dense, until[part], stop[part], scaling=scaling, mask=own_mask, softcap=softcap,
            sink_logits=sink_logits,
        )  # fmt: skip
    return out


def _attend_some(
    query: Tensor, rows: FoldedRows, dense: DenseSpan | None, until: list[int], after: list[int], *,
    scaling: float, mask: Tensor | None, softcap: float | None, sink_logits: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of queries that read up to `until` folded, and up to `after` at all."""
    batch, _, n, _ = query.shape
    kv_heads, device, exact = rows.kv_heads, query.device, query.dtype == torch.float32
    q = query.float().unflatten(1, (kv_heads, -1)) * scaling
    sinks, count = rows.window.sinks, rows.keys.count
    stop = [max(min(pair) - sinks, 0) for pair in zip(until, after, strict=True)]
    spans = [span for span in (rows.sink_span(), dense) if span is not None and span.start < span.stop]
    ints = _Ints(device)
    first, counts = ints.add(range(0, batch * n, n)), ints.add([n] * batch)
    pages, stops = ints.add([count] * batch), ints.add(stop * batch)
    starts, afters = ints.add(until * batch), ints.add(after * batch)
    nothing = ints.add([0] * batch * n)
    places = ints.add(range(batch))
    placed = [(ints.add([span.key.shape[2]] * batch), ints.add([span.start] * batch)) for span in spans]
    ints.send()
    given = []
    for span, (held, position) in zip(spans, placed, strict=True):
        key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (span.key, span.value))
        own = _Span(ints[places], ints[held], ints[position], ints[starts if span is dense else nothing], ints[afters])
        given.append(_Dense(own, key, value, key.stride()[:3], value.stride()[:3]))
    sequences = _Sequences(ints[first], ints[counts], ints[pages], ints[stops], n, count)
    sides = None
    if count:
        sides = _stored(rows.keys, exact), _stored(rows.values, exact)
        assert rows.keys.storage is not None
    masked = NO_MASK
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        by = [0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3)]
        masked = dict(zip(NO_MASK, (mask.view(torch.uint8), *by, mask.shape[-1]), strict=True))
    width = 0 if rows.keys.storage is None else rows.keys.storage.code.shape[2]
    rotated, plain = _attend(
        _by_token(q), _by_token(rows.keys.form.rotated_query(q)), sequences, sides, (None, width), given,
        kv_heads=kv_heads, value_dim=rows.value_dim, code_dim=rows.values.form.code_dim, softcap=softcap,
        sink_logits=sink_logits, mask=masked, position=sinks, exact=exact,
    )  # fmt: skip
    rotated, plain = (x.view(batch, n, kv_heads, -1, x.shape[-1]).permute(0, 2, 3, 1, 4) for x in (rotated, plain))
    return (rows.values.form.transform.invert(rotated) + plain).flatten(1, 2)


@on_its_device
@torch.no_grad()
def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: PagedLayer,
    step: Step,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """`kvfold.attention.paged.PagedAttention` by kernels, in float32; precision as in `attend_rows`.

    What becomes full is folded straight into the pool, and unfinished pages are kept.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    here = _on_device(step, layer, query.device)
    layer.fold_in_place(step, here.folded, key, value)
    out = query.new_empty(*query.shape[:2], layer.formats.values.head_dim, dtype=torch.float32)
    for part in here.parts:
        _attend_some_of_pool(
            out, query, key, value, layer, part, scaling=scaling, softcap=softcap, sink_logits=sink_logits
        )
    layer.keep_tails(here.left, key, value)
    return out


@dataclass(frozen=True, eq=False)
class _PoolPart:
    """Some new tokens of a step, and what they read; units: the first head's of each page, (sequences, pages)."""

    tokens: slice
    sequences: _Sequences
    units: Tensor
    tail: _Span
    new: _Span


@dataclass(frozen=True, eq=False)
class _PoolStep:
    """A step as kernels know it: the same to all layers whose pools are alike.

    Attributes
    ----------
    folded
        Units of the pages that become full: int64.
    left
        `Step.left`.
    """

    parts: list[_PoolPart]
    folded: Tensor
    left: Tensor


_STEPS: WeakKeyDictionary[Step, dict[tuple[object, ...], _PoolStep]] = WeakKeyDictionary()


def _on_device(step: Step, layer: PagedLayer, device: torch.device) -> _PoolStep:
    """A step sent to a device, once for all layers with such a pool."""
    size, pool = layer.formats.keys.page_size, layer.pool
    steps, key = _STEPS.setdefault(step, {}), (device, size, *pool.geometry)
    if key not in steps:
        units = pool.units(step.block_table)
        parts = [
            _pool_part(step, range(first, min(first + QUERIES, step.tokens)), size, units, device)
            for first in range(0, step.tokens, QUERIES)
        ]
        folded, left = (torch.from_numpy(x).to(device) for x in (pool.units_of(step.folded.numpy()), step.left(size)))
        steps[key] = _PoolStep(parts, folded, left)
    return steps[key]


def _pool_part(step: Step, part: range, size: int, units: NDArray[np.int64], device: torch.device) -> _PoolPart:
    """The new tokens `part` of a step."""
    chosen, tokens, ints = [], list[int](), _Ints(device)
    for i, (first, count, length, *_) in enumerate(step.rows.tolist()):
        if first < part.stop and first + count > part.start:
            chosen.append(i)
            own = range(max(first, part.start), min(first + count, part.stop))
            tokens += [length - count + t - first for t in own]
    rows = step.rows[chosen].tolist()
    before = [length - new for _, new, length, *_ in rows]
    begins = [max(row[0], part.start) for row in rows]
    counts = [min(row[0] + row[1], part.stop) - begin for row, begin in zip(rows, begins, strict=True)]
    pages = [(length - 1) // size for _, _, length, *_ in rows]
    first, count = ints.add(begin - part.start for begin in begins), ints.add(counts)
    held = ints.add(pages)
    start, stop = ints.add(t // size * size for t in tokens), ints.add(t + 1 for t in tokens)
    tail = [ints.add(max(row[3], 0) for row in rows), ints.add(b % size for b in before),
            ints.add(b // size * size for b in before), start, stop]  # fmt: skip
    new = [ints.add(row[0] for row in rows), ints.add(row[1] for row in rows), ints.add(before), start, stop]
    ints.send()
    return _PoolPart(
        slice(part.start, part.stop),
        _Sequences(ints[first], ints[count], ints[held], ints[start], max(counts), max(pages)),
        torch.from_numpy(units[chosen]).int().to(device), _Span(*map(ints.__getitem__, tail)),
        _Span(*map(ints.__getitem__, new)),
    )  # fmt: skip


def _attend_some_of_pool(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: PagedLayer, part: _PoolPart, *, scaling: float,
    softcap: float | None, sink_logits: Tensor | None,
) -> None:  # fmt: skip
    """Attention of some new tokens of a step, into `out`."""
    kv_heads, exact, layout = layer.pool.kv_heads, query.dtype == torch.float32, layer.pool.layout
    keys, values, tails = layer.formats.keys, layer.formats.values, (layer.tail_keys, layer.tail_values)
    by_token = [(x.stride(0), x.stride(1), x.stride(0)) for x in (key, value)]
    dense = [
        _Dense(part.tail, *tails, *(x.stride()[:3] for x in tails)),
        _Dense(part.new, key, value, *by_token),
    ]
    q = (query[part.tokens].float() * scaling).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)[None]
    rotated, plain = _attend(
        _by_token(q), _by_token(keys.form.rotated_query(q)), part.sequences,
        (_pooled(keys.form, layer, layout.keys, exact), _pooled(values.form, layer, layout.values, exact)),
        (part.units, part.units.shape[1]), dense, kv_heads=kv_heads, value_dim=values.head_dim,
        code_dim=values.form.code_dim, softcap=softcap, sink_logits=sink_logits, position=0, mask=NO_MASK, exact=exact,
    )  # fmt: skip
    by_head = rotated.view(1, len(plain), kv_heads, -1, rotated.shape[-1]).permute(0, 2, 3, 1, 4)
    unrotated = values.form.transform.invert(by_head)[0].permute(2, 0, 1, 3).flatten(1, 2)
    out[part.tokens] = unrotated + plain.view(unrotated.shape)


class _Ints:
    """Whole numbers that go to the device together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._numbers = device, list[int]()

    def add(self, numbers: Iterable[int]) -> slice:
        self._numbers += [0] * (-len(self._numbers) % 4)  # kernels are compiled anew for addresses of other alignment
        start = len(self._numbers)
        self._numbers.extend(numbers)
        return slice(start, len(self._numbers))

    def send(self) -> None:
        self._sent = _sent(tuple(self._numbers), self.device)

    def __getitem__(self, part: slice) -> Tensor:
        return self._sent[part]


@lru_cache(maxsize=8)
def _sent(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Once for all layers that are equally long: each copy would wait for the GPU."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _by_token(q: Tensor) -> Tensor:
    """(batch, kv_heads, repeat, n, dim) → (batch · n, heads, dim)."""
    return q.permute(0, 3, 1, 2, 4).reshape(q.shape[0] * q.shape[3], -1, q.shape[4]).contiguous()


def _attend(
    query: Tensor, rotated_query: Tensor, of: _Sequences, sides: tuple[_Side, _Side] | None,
    units: tuple[Tensor | None, int], spans: Sequence[_Dense], *,
    kv_heads: int, value_dim: int, code_dim: int, softcap: float | None, sink_logits: Tensor | None,
    mask: dict[str, Any], position: int, exact: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What pages give, (tokens, heads, code_dim), and what dense tokens give, (tokens, heads, value_dim).

    `query` and `rotated_query`: q and q̃, scaled, float32, (tokens, heads, ·).
    """
    from triton import next_power_of_2

    from kvfold.kernels.triton import attend

    tokens, heads, key_dim = query.shape
    sequences, repeat, rows = len(of.first), heads // kv_heads, tokens * heads
    widest = next_power_of_2(max(key_dim, value_dim, code_dim))
    block_rows = min(max(next_power_of_2(repeat * of.most), 16), max(8192 // widest, 16), 64)
    row_blocks = -(-repeat * of.most // block_rows)
    splits = 0 if sides is None else _splits(row_blocks * sequences * kv_heads, of.most_pages, query.device)
    parts = splits + len(spans)
    maxima, totals = (query.new_empty(parts, rows) for _ in range(2))
    rotated = query.new_empty(max(splits, 1), rows, code_dim)
    plain = query.new_empty(max(len(spans), 1), rows, value_dim)
    common: dict[str, Any] = {
        "first": of.first, "count": of.count, "softcap": softcap or 0.0, "SOFTCAP": bool(softcap),
        "HEADS": heads, "REPEAT": repeat, "ROWS": block_rows, "EXACT": exact,
        "num_warps": 4 if block_rows == TILE else 8, "num_stages": 1,  # by benchmarks/compile_kernels.py
    }  # fmt: skip
    if sides is not None:
        keys, values = sides
        k, v = (max(next_power_of_2(side.shape.code_dim), TILE) for side in sides)
        wide = exact or keys.shape.groups > 1 or values.shape.groups > 1  # numbers in float32
        block = _block(keys.shape.page_size, max(k, v), 4096 if wide else 8192)
        attend.attend_pages[row_blocks, sequences * kv_heads, splits](
            rotated_query, maxima, totals, rotated, pages=of.pages, table=units[0], width=units[1], stop=of.stop,
            position=position, **mask,
            **keys.arguments("k", without="bits"), **values.arguments("v", without="plain"), TOKENS=tokens,
            KEYS=keys.shape, VALUES=values.shape, BLOCK=block, K=k, V=v,
            PLAIN=max(next_power_of_2(keys.shape.plain_dim), TILE), **common,
        )  # fmt: skip
    k, v = (max(next_power_of_2(dim), TILE) for dim in (key_dim, value_dim))
    for i, dense in enumerate(spans):
        span = dense.span
        attend.attend_dense[row_blocks, sequences * kv_heads](
            query, maxima[splits + i], totals[splits + i], plain[i], place=span.place, held=span.held,
            position=span.position, start=span.start, stop=span.stop, **mask,
            **_named("key", dense.key, dense.key_strides), **_named("value", dense.value, dense.value_strides),
            KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK=_block(64, max(k, v), 4096), K=k, V=v, **common,
        )  # fmt: skip
    rotated_out, plain_out = query.new_empty(tokens, heads, code_dim), query.new_empty(tokens, heads, value_dim)
    attend.combine[(rows,)](
        maxima, totals, rotated, plain, None if sink_logits is None else sink_logits.float().contiguous(), rotated_out,
        plain_out, rows, parts, splits, HEADS=heads, CODE_DIM=code_dim, VALUE_DIM=value_dim,
        C=next_power_of_2(code_dim), V=next_power_of_2(value_dim),
    )  # fmt: skip
    return rotated_out, plain_out


def _named(name: str, x: Tensor, strides: Sequence[int]) -> dict[str, Any]:
    return {name: x} | dict(zip((f"{name}_place", f"{name}_head", f"{name}_token"), strides, strict=True))


def _splits(programs: int, pages: int, device: torch.device) -> int:
    """How many parts a context is read in: as many as keep the GPU busy, of four pages or more."""
    wanted = -(-WAVES * _multiprocessors(device) // programs)
    return max(min(wanted, pages // 4), 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return MULTIPROCESSORS_OF_A_CPU
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", None) or properties.gpu_subslice_count)


def _block(page_size: int, channels: int, numbers: int) -> int:
    """Tokens that are read at a time, so many numbers: a power of two that divides a page."""
    return min(page_size & -page_size, max(numbers // channels, TILE), 64)


def _shape(form: PageForm, groups: int, centre_dim: int, strides: dict[str, int]) -> "Shape":
    from kvfold.kernels.triton.codes import Shape

    bits = form.bits
    return Shape(
        page_size=form.page_size, code_dim=form.code_dim, tiles=len(bits), all_bits=sum(bits), runs=_runs(form),
        planes=reduce(or_, bits, 0), even=bits[0] if len(set(form.kinds)) == 1 else 0,
        token_lanes=form.lanes == "tokens", levels=form.lut.shape[-1], groups=groups, centre_dim=centre_dim,
        plain_dim=form.plain_dim, unit_levels=form.unit_levels,
        code=strides["code"], scale=strides.get("scale", 0), offset=strides.get("offset", 0),
        centre=strides.get("centre", strides.get("channel_scale", 0)), plain=strides.get("plain", 0),
    )  # fmt: skip


def _runs(form: PageForm) -> tuple[tuple[int, int, int, int], ...]:
    """Groups with equal bits and levels, in powers of two: the first, how many, their bits, the sum of bits before."""
    runs, first = [], 0
    for kind, group in groupby(form.kinds):
        left = len(list(group))
        while left:
            count = 1 << (left.bit_length() - 1)
            runs.append((first, count, form.bits[kind], sum(form.bits[:first])))
            first, left = first + count, left - count
    return tuple(runs)


PARTS = ("code", "scale", "offset", "centre", "channel_scale", "plain")


def _side(
    form: PageForm, parts: dict[str, Tensor], last: dict[str, int], strides: dict[str, int], exact: bool
) -> _Side:
    """`last`: the last dimension of each part's shape."""
    from kvfold.kernels.triton.fold import bits_table

    device = parts["code"].device
    groups = last.get("scale", last.get("offset", 1))
    shape = _shape(form, groups, last.get("centre", last.get("channel_scale", 0)), strides)
    found: dict[str, Tensor | None] = {name: parts.get(name) for name in PARTS}
    if not form.plain_dim:
        found["plain"] = None
    if form.bits:  # in words
        found["code"], shape = parts["code"].reshape(-1).view(torch.int32), replace(shape, code=shape.code // 4)
    found["lut"] = on(device, form.lut, None if exact else torch.float16) if form.bits else None
    found["bits"] = None if shape.even or not form.bits else bits_table(form.bits, device)
    found["groups"] = None if groups == 1 else _groups_table(form.groups, device)
    return _Side(found, shape)


def _stored(store: PageStore | StoreView, exact: bool) -> _Side:
    pages = store.storage
    assert pages is not None
    parts = {name: part for name, part in pages.tensors() if name in PARTS}
    assert all(part.is_contiguous() for part in parts.values())
    strides = {name: part.shape[3:].numel() for name, part in parts.items()}
    return _side(store.form, parts, {name: part.shape[-1] for name, part in parts.items()}, strides, exact)


def _pooled(form: PageForm, layer: PagedLayer, parts: Sequence[Part], exact: bool) -> _Side:
    """One side of a pool: each part is the pool itself, from where the first page's part is."""
    whole = {part.name: layer.pool.elements(part) for part in parts}
    views, strides = ({name: x for name, (x, _) in whole.items()}, {name: by for name, (_, by) in whole.items()})
    return _side(form, views, {part.name: part.shape[-1] for part in parts if part.shape}, strides, exact)


@cache
def _groups_table(groups: tuple[int, ...], device: torch.device) -> Tensor:
    """The scale group of each 16 channels: int32."""
    of = [g for g, width in enumerate(groups) for _ in range(width // TILE)]
    return torch.tensor(of, dtype=torch.int32, device=device)
