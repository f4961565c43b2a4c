"""Attention over folded rows on a CPU."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.attention.cpu.sides import INSTRUCTION_SETS, given_span, known_rows, side_of
from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore
from kvfold.formats import Format
from kvfold.kernels.cpu import module
from kvfold.kernels.ops import DTYPES
from kvfold.quant.packing import TILE

if TYPE_CHECKING:
    from kvfold.kernels.cpu import _cpu


def why_not(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
    """Why this kernel does not take a call; None if it does."""
    if not query.is_cpu:
        return f"the CPU kernel takes queries in a CPU's memory, these are on {query.device}"
    if query.dtype not in DTYPES:
        return f"the CPU kernel takes no queries of {query.dtype}"
    if mask is not None and mask.dtype != torch.bool:
        return f"the CPU kernel takes masks of bool, and this is one of {mask.dtype}"
    for form in (rows.keys.form, rows.values.form):
        if form.only_reference is not None:
            return form.only_reference
        if not form.groups_are_tiles:
            return f"the CPU kernel takes scales for groups of {TILE} channels, these are of {form.groups}"
    return None


def attend_rows(
    query: Tensor,
    rows: FoldedRows,
    dense: DenseSpan | None,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    instruction_set: str = INSTRUCTION_SETS[0],
) -> Tensor:
    """`kvfold.attention.reference.attend_rows` by a kernel, in the query's dtype; sums are float32.

    Parameters
    ----------
    instruction_set
        One of `INSTRUCTION_SETS`.
    """
    n = query.shape[2] if query.ndim == 4 else 0
    if mask is not None or sink_logits is not None or not 0 < n <= rows.length:
        _check(query, rows, mask, sink_logits)
    masked = None
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        by_row, by_head, by_query = (0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3))
        masked = mask.data_ptr(), by_row, by_head, by_query, mask.shape[-1]
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    until, after = rows.reach(n, dense, causal=mask is None)
    kernel, pages, reach = known_rows(rows, instruction_set), rows.keys.count, until + after
    rest = masked, softcap or 0.0, 0 if sink_logits is None else sink_logits.data_ptr(), torch.get_num_threads()
    sinks, given = given_span(rows.sink_span()), given_span(dense if dense is not None and dense.tokens else None)
    out = torch.empty_like(query) if n == 1 and rows.key_dim == rows.value_dim else _room(query, rows)
    whole = kernel.attend(query, out, scaling, pages, reach, sinks, given, *rest)
    if whole is None:
        _check(query, rows, mask, sink_logits)
        query, out = query.resolve_neg().contiguous(), _room(query, rows)  # it cannot read some tensor in place
        whole = kernel.attend(query, out, scaling, pages, reach, sinks, given, *rest)
        if whole is None:  # not only the query
            whole = kernel.attend(query, out, scaling, pages, reach, _copied(sinks), _copied(given), *rest)
        assert whole is not None
    if not whole:
        raise ValueError(
            "query holds a NaN or an infinity, or grows to one when scaled: attention over it means nothing"
        )
    return out


def reads_as(format: Format, instruction_set: str = INSTRUCTION_SETS[0]) -> str:
    """How pages of a format are multiplied: "integers" or "floats" by the kernel, or by the "reference" alone."""
    if format.form.only_reference is not None:
        return "reference"
    store = PageStore(format.form).with_pages(format.fold(torch.zeros(1, 1, format.page_size, format.head_dim)))
    return "integers" if module.in_integers(instruction_set, side_of(store)) else "floats"


def _check(query: Tensor, rows: FoldedRows, mask: Tensor | None, sink_logits: Tensor | None) -> None:
    """Raise unless the shapes are those that the kernel relies on."""
    batch, heads, n, key_dim = query.shape
    fits_heads = heads and not heads % rows.kv_heads
    if batch != rows.batch or not n or not fits_heads or n > rows.length or key_dim != rows.key_dim:
        raise ValueError(
            f"query has shape {tuple(query.shape)}: give ({rows.batch}, heads, n, {rows.key_dim}) with heads a "
            f"multiple of the cache's {rows.kv_heads} KV heads, and n from 1 to its {rows.length} tokens"
        )
    if mask is not None and (
        mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
        or mask.shape[2] not in (1, n)
    ):
        raise ValueError(f"mask has shape {tuple(mask.shape)}: give (batch or 1, heads or 1, n or 1, tokens)")
    if sink_logits is not None and tuple(sink_logits.shape) != (heads,):
        raise ValueError(f"sink_logits has shape {tuple(sink_logits.shape)}: give one for each of the {heads} heads")


def _room(query: Tensor, rows: FoldedRows) -> Tensor:
    """Storage for the output, (batch, heads, n, value_dim), with heads side by side as models need them next."""
    shape = (*query.shape[:3], rows.value_dim)
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)


def _copied(span: "_cpu.GivenSpan | None") -> "_cpu.GivenSpan | None":
    """A span in storage that the kernel takes."""
    if span is None:
        return None
    *storage, first, start, tokens = span
    key, value = (x[:, :, first : first + tokens].float().resolve_neg().contiguous() for x in storage)
    return key, value, 0, start, tokens
