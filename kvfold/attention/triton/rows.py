"""Attention over folded rows on a GPU."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from kvfold.attention.triton.launch import NO_MASK, QUERIES, by_token, launch
from kvfold.attention.triton.sides import stored
from kvfold.attention.triton.spans import Dense, Ints, Sequences, Span, sent
from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.formats.page import PageForm
from kvfold.kernels.triton import on_its_device
from kvfold.quant.packing import TILE

DEVICES = ("cuda", "xpu", "cpu")
"""By torch's names: "cuda" is NVIDIA's and AMD's, "xpu" Intel's. On a CPU the kernels run in Triton's interpreter,
for tests."""


def why_not(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
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
    return why_not_pages(rows.keys.form, rows.values.form)


def step_of(rows: FoldedRows) -> None:
    """None: single tokens have no fast path but in CUDA graphs (`kvfold.attention.triton.step`)."""


def why_not_pages(*forms: PageForm) -> str | None:
    """Why these kernels do not read pages of some form; None if they do."""
    for form in forms:
        if form.only_reference is not None:
            return form.only_reference
        if any(width % TILE for width in form.groups):
            return f"the GPU kernels take scales for groups of {TILE} channels, these are of {form.groups}"
    return None


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
    queries: int = QUERIES,
) -> Tensor:
    """`kvfold.attention.reference.attend_rows` by kernels, in the query's dtype.

    Tensor cores multiply queries with keys, and probabilities with values, in float16, unless `query` is float32. A
    query with a NaN or an infinity gets NaN: a check would wait for the GPU.

    Parameters
    ----------
    queries
        Most queries of all rows that are attended at a time.
    """
    batch, heads, n, _ = query.shape
    until, stop = rows.reach(n, dense, causal=mask is None)
    out = query.new_empty(batch, heads, n, rows.value_dim)
    step = max(queries // batch, 1)
    for first in range(0, n, step):
        part = slice(first, first + step)
        own_mask = mask[:, :, part] if mask is not None and mask.shape[2] > 1 else mask
        told = Told(rows, dense, until[part], stop[part])
        numbers = sent(tuple(told.numbers), query.device)
        out[:, :, part] = attend_told(query[:, :, part], rows, told, numbers, scaling, own_mask, softcap, sink_logits)
    return out


class Told:
    """What the kernels are told of rows and their newest tokens: whole numbers, and dense tokens.

    The numbers, and nothing else, change while tokens join storage that stays where it is.
    """

    def __init__(self, rows: FoldedRows, dense: DenseSpan | None, until: list[int], after: list[int]) -> None:
        n, batch, sinks, ints = len(until), rows.batch, rows.window.sinks, Ints()
        stop = [max(min(pair) - sinks, 0) for pair in zip(until, after, strict=True)]
        pages = min(rows.keys.count, -(-max(stop) // rows.page_size))  # that some query reads
        self.new, self.length = n, rows.length
        self.spans = [span for span in (rows.sink_span(), dense) if span is not None and span.start < span.stop]
        self.most_pages = rows.keys.capacity if n == 1 else pages  # graphs of single tokens go on reading more
        self._sequences = [ints.add(range(0, batch * n, n)), *map(ints.add, ([n] * batch, [pages] * batch))]
        self._sequences.append(ints.add(stop * batch))
        places, afters = ints.add(range(batch)), ints.add(after * batch)
        starts = {True: ints.add(until * batch), False: ints.add([0] * batch * n)}
        self._spans = [
            (places, ints.add([span.offset + span.tokens] * batch), ints.add([span.start - span.offset] * batch),
             starts[span is dense], afters) for span in self.spans
        ]  # fmt: skip
        self.numbers = ints.numbers

    def sequences(self, numbers: Tensor) -> Sequences:
        """`numbers` are those on the device."""
        first, count, pages, stop = (numbers[part] for part in self._sequences)
        return Sequences(first, count, pages, stop, self.new, self.most_pages, fewest=self.new)

    def dense(self, numbers: Tensor) -> list[Dense]:
        """The sinks and the other dense tokens that are read."""
        found = []
        for span, parts in zip(self.spans, self._spans, strict=True):
            key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in span.storage)
            own = Span(*(numbers[part] for part in parts))
            found.append(Dense(own, key, value, key.stride()[:3], value.stride()[:3]))
        return found


def attend_told(
    query: Tensor, rows: FoldedRows, told: Told, numbers: Tensor, scaling: float, mask: Tensor | None = None,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of queries that read what `told` says, with its `numbers` on their device: float32."""
    batch, _, n, _ = query.shape
    kv_heads, exact = rows.kv_heads, query.dtype == torch.float32
    q = query.float().unflatten(1, (kv_heads, -1)) * scaling
    sides = (stored(rows.keys, exact), stored(rows.values, exact)) if told.most_pages else None
    masked = NO_MASK
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        by = [0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3)]
        masked = dict(zip(NO_MASK, (mask.view(torch.uint8), *by, mask.shape[-1]), strict=True))
    rotated, plain = launch(
        by_token(q), by_token(rows.keys.form.rotated_query(q)), told.sequences(numbers), sides,
        (None, rows.keys.capacity), told.dense(numbers), kv_heads=kv_heads, value_dim=rows.value_dim,
        code_dim=rows.values.form.code_dim, softcap=softcap, sink_logits=sink_logits, mask=masked,
        position=rows.window.sinks, exact=exact,
    )  # fmt: skip
    rotated, plain = (x.view(batch, n, kv_heads, -1, x.shape[-1]).permute(0, 2, 3, 1, 4) for x in (rotated, plain))
    return (rows.values.form.transform.invert(rotated) + plain).flatten(1, 2)
