"""Attention over folded rows on a CPU, in C++ (kvfold/kernels/cpu/attend_impl.h)."""

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING
from weakref import finalize

import torch
from torch import Tensor

from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore, StoreView
from kvfold.formats import Format
from kvfold.formats.page import FirstChannels, PageForm, Pages
from kvfold.kernels.cpu import module
from kvfold.kernels.ops import DTYPES
from kvfold.kernels.rotations import rotation
from kvfold.quant.packing import TILE

if TYPE_CHECKING:
    from kvfold.kernels.cpu import _cpu

INSTRUCTION_SETS: list[str] = module.instruction_sets()
"""What this machine runs, best first."""

INTEGER_SETS = ("avx512vbmi", "avx512vnni")
"""Those that multiply codes as integers, where they fit (kvfold/kernels/cpu/integer.h)."""


def unsupported(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
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
    """`kvfold.attention.reference.attend_rows` by a kernel, in the query's dtype; sums have float32.

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
    kernel, pages, reach = _kernel(rows, instruction_set), rows.keys.count, until + after
    rest = masked, softcap or 0.0, 0 if sink_logits is None else sink_logits.data_ptr(), torch.get_num_threads()
    sinks, given = _given(rows.sink_span()), _given(dense if dense is not None and dense.tokens else None)
    out = torch.empty_like(query) if n == 1 and rows.key_dim == rows.value_dim else _room(query, rows)
    whole = kernel.attend(query, out, scaling, pages, reach, sinks, given, *rest)
    if whole is None:
        _check(query, rows, mask, sink_logits)
        query, out = query.resolve_neg().contiguous(), _room(query, rows)  # it does not take a tensor as it lies
        whole = kernel.attend(query, out, scaling, pages, reach, sinks, given, *rest)
        if whole is None:  # that is not the query alone
            whole = kernel.attend(query, out, scaling, pages, reach, _copied(sinks), _copied(given), *rest)
        assert whole is not None
    if not whole:
        raise ValueError(
            "query holds a NaN or an infinity, or grows to one when scaled: attention over it means nothing"
        )
    if rows.step is None and rows.key_dim == rows.value_dim and (left := rows.joins_left()):
        rows.step = _step(rows, kernel, left)
    return out


def reads_as(format: Format, instruction_set: str = INSTRUCTION_SETS[0]) -> str:
    """How pages of a format are multiplied: "integers" or "floats" by the kernel, or by the "reference" alone."""
    if format.form.only_reference is not None:
        return "reference"
    store = PageStore(format.form)
    store.append(format.fold(torch.zeros(1, 1, format.page_size, format.head_dim)))
    return "integers" if module.in_integers(instruction_set, _side(store)) else "floats"


def _check(query: Tensor, rows: FoldedRows, mask: Tensor | None, sink_logits: Tensor | None) -> None:
    """Raise unless the shapes are those that the kernel will go by."""
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


def _step(rows: FoldedRows, kernel: module.Rows, left: int) -> module.Step | None:
    """What appends as many as `left` tokens to rows one by one, and attends with the query of each."""
    folds: list[tuple[int, module.TokenSide]] = []
    read: list[Tensor | module.TokenSide] = [*(rows.sinks or ())]
    if rows.tail is not None:
        dense = {x.dtype for x in (*rows.tail, *(rows.sinks or ()))}
        if len(dense) > 1 or not dense <= DTYPES.keys():
            return None
        read += rows.tail
    else:
        folder = rows.token_folder()
        if folder is None or rows.dtypes is None or not set(rows.dtypes) <= DTYPES.keys():
            return None
        folds = [(DTYPES[dtype], side) for dtype, side in zip(rows.dtypes, folder.sides, strict=True)]
        read += (*folder.tensors, *folder.sides)
    sinks, tail = _given(rows.sink_span()), _given(rows.dense_span())
    return module.Step(kernel, rows.length, rows.length + left, rows.keys.count, sinks, tail, folds, read)


def _given(span: DenseSpan | None) -> "_cpu.GivenSpan | None":
    """A span as the kernel takes it."""
    return None if span is None else (*span.storage, span.first, span.start, span.tokens)


def _room(query: Tensor, rows: FoldedRows) -> Tensor:
    """Room for what attention gives, (batch, heads, n, value_dim), with heads side by side as models want them next."""
    shape = (*query.shape[:3], rows.value_dim)
    return torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)


def _copied(span: "_cpu.GivenSpan | None") -> "_cpu.GivenSpan | None":
    """A span in storage that the kernel takes."""
    if span is None:
        return None
    *storage, first, start, tokens = span
    key, value = (x[:, :, first : first + tokens].float().resolve_neg().contiguous() for x in storage)
    return key, value, 0, start, tokens


@dataclass(eq=False)
class _Known:
    """Rows as the kernel knows them, as long as they are made of `parts` and none of their tensors moved."""

    parts: tuple[object, ...]
    kernel: module.Rows


# By the `id` of their folded keys, or by their own while there are none, and dropped with these: so no memory outlives
# the pages that it belongs to. A WeakKeyDictionary would take longer to ask than all that is asked of it.
_KNOWN: dict[int, _Known] = {}


def _kernel(rows: FoldedRows, instruction_set: str) -> module.Rows:
    """Rows as the kernel knows them, made anew when they have others or memory has moved (`share_memory_` moves it)."""
    keys, values, pages = rows.keys.form, rows.values.form, rows.keys.storage
    owner: Pages | FoldedRows = pages or rows
    others = None if rows.values.storage is pages else rows.values.storage
    parts = (instruction_set, keys, values, others)
    known = _KNOWN.get(id(owner))
    if known is None or not all(map(is_, parts, known.parts)) or known.kernel.moved():
        tables = (tensor for form in (keys, values) for tensor in (form.lut, *form.transform.tensors()))
        folded = (tensor for side in rows.pages() if side is not None for _, tensor in side.tensors())
        kernel = module.Rows(
            instruction_set, _side(rows.keys), _side(rows.values), rotation(keys.transform), rotation(values.transform),
            0 if pages is None else pages.code.shape[0], rows.kv_heads, rows.key_dim, rows.value_dim,
            rows.window.sinks, (*tables, *folded),
        )  # fmt: skip
        if known is None:
            finalize(owner, _KNOWN.pop, id(owner), None).atexit = False
        known = _KNOWN[id(owner)] = _Known(parts, kernel)
    return known.kernel


def _side(store: PageStore | StoreView) -> module.Side:
    """A store's pages as the kernel knows them."""
    form, pages = store.form, store.storage
    if pages is None:
        return bare_side(form, (0, 0, 0))
    code, scale, plain = pages.code, pages.scale, pages.plain
    side = bare_side(form, (code.data_ptr(), code.stride(0) * code.itemsize, code.stride(1) * code.itemsize))
    if scale is not None:
        groups = [g for g, width in enumerate(form.groups) for _ in range(width // TILE)]
        side.set_scale(
            scale.data_ptr(), DTYPES[scale.dtype], form.signed_scale, _address(pages.offset), scale.stride(0),
            scale.stride(1), scale.shape[-1], bytes(groups),
        )  # fmt: skip
    either = pages.centre if pages.centre is not None else pages.channel_scale
    if either is not None:
        side.set_centre(
            _address(pages.centre), _address(pages.channel_scale), either.stride(0), either.stride(1), either.shape[-1]
        )
    if form.plain_dim:
        assert plain is not None
        side.set_plain(plain.data_ptr(), plain.stride(0), plain.stride(1), plain.shape[-1])
    return side


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def bare_side(form: PageForm, code: tuple[int, int, int]) -> module.Side:
    """Codes at an address, with strides from row to row and head to head, as the kernel knows them."""
    whole = form.whole if isinstance(form, FirstChannels) else form
    side = module.Side(
        *code, form.page_size, whole.code_dim, bytes(form.bits), form.lanes == "tokens", form.lut.data_ptr(),
        form.lut.shape[-1], form.unit_levels,
    )  # fmt: skip
    if whole is not form:
        side.set_first_channels(form.code_dim)
    return side
