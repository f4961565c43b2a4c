"""Attention of an engine's step over pages in its pool, on a GPU."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attention.triton.launch import NO_MASK, QUERIES, by_token, launch
from kvfold.attention.triton.sides import pooled
from kvfold.attention.triton.spans import Dense, Ints, Sequences, Span, sent
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.plan import EngineStep
from kvfold.kernels.triton import on_its_device


@on_its_device
@torch.no_grad()
def attend_pool(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: PagedLayer,
    step: EngineStep,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    queries: int = QUERIES,
) -> Tensor:
    """`kvfold.attention.reference.attend_pool` by kernels, in float32; precision as in `attend_rows`.

    Pages that become full are folded straight into the pool, and unfinished pages are kept.

    Parameters
    ----------
    queries
        Most new tokens that are attended at a time.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    here = _on_device(step, layer, query.device, queries)
    layer.keep_firsts(here.begins, key, value)
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
    """Some new tokens of a step, and what they read. `units`: of each page's first head, (sequences, pages)."""

    tokens: slice
    sequences: Sequences
    units: Tensor
    tail: Span
    new: Span
    dense_first: Span


@dataclass(frozen=True, eq=False)
class _PoolStep:
    """A step as kernels know it: the same to all layers whose pools are alike."""

    parts: list[_PoolPart]
    folded: Tensor  # units of the pages that become full: int64
    begins: Tensor  # `EngineStep.begins`
    left: Tensor  # `EngineStep.left`


_STEPS: WeakKeyDictionary[EngineStep, dict[tuple[object, ...], _PoolStep]] = WeakKeyDictionary()


def _on_device(step: EngineStep, layer: PagedLayer, device: torch.device, queries: int) -> _PoolStep:
    """A step on a device, sent once for all layers whose pools are alike."""
    size, pool = layer.formats.keys.page_size, layer.pool
    steps, key = _STEPS.setdefault(step, {}), (device, size, queries, *pool.geometry)
    if key not in steps:
        units = pool.units(step.block_table)
        parts = [
            _pool_part(step, range(first, min(first + queries, step.tokens)), size, units, device)
            for first in range(0, step.tokens, queries)
        ]
        numbers = pool.units_of(step.folded.numpy()), step.begins(), step.left(size)
        steps[key] = _PoolStep(parts, *(torch.from_numpy(x).to(device) for x in numbers))
    return steps[key]


def _pool_part(step: EngineStep, part: range, size: int, units: NDArray[np.int64], device: torch.device) -> _PoolPart:
    """The new tokens `part` of a step."""
    chosen, tokens, lasts, ints = [], list[int](), list[int](), Ints()
    for i, (first, count, length, *_) in enumerate(step.rows.tolist()):
        if first < part.stop and first + count > part.start:
            chosen.append(i)
            own = range(max(first, part.start), min(first + count, part.stop))
            tokens += [length - count + t - first for t in own]
            lasts.append(tokens[-1])
    rows = step.rows[chosen].tolist()
    before = [length - new for _, new, length, *_ in rows]
    begins = [max(row[0], part.start) for row in rows]
    counts = [min(row[0] + row[1], part.stop) - begin for row, begin in zip(rows, begins, strict=True)]
    pages = [last // size for last in lasts]  # before the page of the last new token
    first, count = ints.add(begin - part.start for begin in begins), ints.add(counts)
    held = ints.add(pages)
    start, stop = ints.add(t // size * size for t in tokens), ints.add(t + 1 for t in tokens)
    tail = [ints.add(max(row[3], 0) for row in rows), ints.add(b % size for b in before),
            ints.add(b // size * size for b in before), start, stop]  # fmt: skip
    new = [ints.add(row[0] for row in rows), ints.add(row[1] for row in rows), ints.add(before), start, stop]
    zero, skipped = ints.add([0] * max(len(rows), len(tokens))), ints.add(row[7] >= 0 for row in rows)
    dense_first = [ints.add(max(row[7], 0) for row in rows), skipped, zero, zero, start]
    numbers = sent(tuple(ints.numbers), device)
    return _PoolPart(
        slice(part.start, part.stop),
        Sequences(numbers[first], numbers[count], numbers[held], numbers[start], max(counts), max(pages),
                  fewest=min(counts), skipped=numbers[skipped]),
        torch.from_numpy(units[chosen]).int().to(device),
        *(Span(*map(numbers.__getitem__, span)) for span in (tail, new, dense_first)),
    )  # fmt: skip


def _attend_some_of_pool(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: PagedLayer, part: _PoolPart, *, scaling: float,
    softcap: float | None, sink_logits: Tensor | None,
) -> None:  # fmt: skip
    """Attention of some new tokens of a step, into `out`."""
    kv_heads, exact, layout = layer.pool.kv_heads, query.dtype == torch.float32, layer.pool.layout
    keys, values = layer.formats.keys, layer.formats.values
    tails, firsts = (layer.tail_keys, layer.tail_values), (layer.first_keys, layer.first_values)
    strides = [(x.stride(0), x.stride(1), x.stride(0)) for x in (key, value)]
    dense = [Dense(part.tail, *tails, *(x.stride()[:3] for x in tails)), Dense(part.new, key, value, *strides)]
    dense.append(Dense(part.dense_first, *firsts, *((*x.stride()[:2], 0) for x in firsts)))
    q = (query[part.tokens].float() * scaling).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)[None]
    sides = None
    if part.sequences.most_pages:
        sides = (pooled(keys.form, layer, layout.keys, exact), pooled(values.form, layer, layout.values, exact))
    rotated, plain = launch(
        by_token(q), by_token(keys.form.rotated_query(q)), part.sequences, sides,
        (part.units, part.units.shape[1]), dense, kv_heads=kv_heads, value_dim=values.head_dim,
        code_dim=values.form.code_dim, softcap=softcap, sink_logits=sink_logits, position=0, mask=NO_MASK, exact=exact,
    )  # fmt: skip
    by_head = rotated.view(1, len(plain), kv_heads, -1, rotated.shape[-1]).permute(0, 2, 3, 1, 4)
    unrotated = values.form.transform.invert(by_head)[0].permute(2, 0, 1, 3).flatten(1, 2)
    out[part.tokens] = unrotated + plain.view(unrotated.shape)
