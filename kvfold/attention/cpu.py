"""Attention over folded rows on a CPU, in C++ (kvfold/kernels/cpu/attend_impl.h)."""

import torch
from torch import Tensor

from kvfold.cache.rows import DenseSpan, FoldedRows
from kvfold.cache.store import PageStore
from kvfold.formats.page import PageForm
from kvfold.kernels.cpu import module
from kvfold.quant.packing import TILE

INSTRUCTION_SETS: list[str] = module.instruction_sets()
"""What this machine runs, best first."""

INTEGER_SETS = ("avx512vbmi", "avx512vnni")
"""Those that multiply codes as integers, where they fit (kvfold/kernels/cpu/integer.h)."""

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def unsupported(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
    """Why this kernel does not take a call; None if it does."""
    if query.device.type != "cpu":
        return f"the queries are on {query.device}, and there is no kernel for it yet"
    if query.dtype not in _DTYPES:
        return f"the CPU kernel takes no queries of {query.dtype}"
    if mask is not None and mask.dtype != torch.bool:
        return f"the CPU kernel takes masks of bool, and this is one of {mask.dtype}"
    for store in (rows.keys, rows.values):
        scale = None if store.storage is None else store.storage.scale
        groups = 1 if scale is None else scale.shape[-1]
        if groups > 1 and (store.form.code_dim // groups) % TILE:
            return f"the CPU kernel takes scales for groups of {TILE} channels, these are {groups} groups"
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
    """`kvfold.attention.reference.attend_rows` in float32, by a kernel.

    Parameters
    ----------
    instruction_set
        One of `INSTRUCTION_SETS`.
    """
    batch, heads, n, key_dim = query.shape
    kv_heads, value_dim = rows.kv_heads, rows.value_dim
    _check(query, rows, mask)
    q = (query.float() * scaling).contiguous()
    rotated_q = rows.keys.form.transform.apply_to_query(q.unflatten(1, (kv_heads, -1))).contiguous()
    if not bool(rotated_q.isfinite().all()):
        raise ValueError("query holds a NaN or an infinity: attention over it means nothing")
    t = torch.arange(rows.length - n, rows.length, device=query.device)
    folded_until = rows.folded_until(t, dense.start if dense is not None else rows.length)
    after = t + 1 if mask is None else torch.full_like(t, rows.length)  # a mask decides alone
    folded_stop = torch.minimum(folded_until, after)

    task = module.Attention(
        instruction_set, batch, kv_heads, heads // kv_heads, n, key_dim, value_dim, torch.get_num_threads()
    )
    keys, values = _side(rows.keys), _side(rows.values)
    task.set_pages(rows.keys.count, keys, values, rows.window.sinks, folded_stop.data_ptr())
    held = []  # tensors whose addresses the kernel has
    for span, start in ((rows.sink_span(), None), (dense, folded_until)):
        if span is None or span.start == span.stop:
            continue
        key, value = span.key, span.value
        if key.dtype != value.dtype or key.dtype not in _DTYPES or key.stride(-1) != 1 or value.stride(-1) != 1:
            key, value = key.float().contiguous(), value.float().contiguous()
        held += [key, value]
        task.add_span(
            key.data_ptr(), value.data_ptr(), key.stride(0), key.stride(1), key.stride(2),
            value.stride(0), value.stride(1), value.stride(2), _DTYPES[key.dtype], span.start, key.shape[2],
            0 if start is None else start.data_ptr(), after.data_ptr(),
        )  # fmt: skip
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        by_row, by_head, by_query = (0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3))
        task.set_mask(mask.data_ptr(), by_row, by_head, by_query, mask.shape[-1])
    rotated = query.new_empty(batch, heads, n, rows.values.form.code_dim, dtype=torch.float32)
    plain = query.new_empty(batch, heads, n, value_dim, dtype=torch.float32)
    maximum, total = query.new_empty(2, batch, heads, n, 1, dtype=torch.float32)
    task.attend(
        rotated_q.data_ptr(), q.data_ptr(), softcap or 0.0, rotated.data_ptr(), plain.data_ptr(), maximum.data_ptr(),
        total.data_ptr(),
    )  # fmt: skip
    if sink_logits is not None:
        total += torch.exp(sink_logits.float().view(1, heads, 1, 1) - maximum)
    out = rows.values.form.transform.invert(rotated).add_(plain).div_(total)
    return out if bool((total > 0).all()) else out.where(total > 0, 0)


def _check(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> None:
    """Raise unless the shapes are those that the kernel will go by."""
    batch, heads, n, _ = query.shape
    if not batch or not n or heads % rows.kv_heads or heads < rows.kv_heads or n > rows.length:
        raise ValueError(
            f"query has shape {tuple(query.shape)}: give (batch, heads, n, key_dim) with heads a multiple of the "
            f"cache's {rows.kv_heads} KV heads, and n from 1 to its {rows.length} tokens"
        )
    if mask is not None:
        fits = (mask.shape[0] in (1, batch), mask.shape[1] in (1, heads), mask.shape[2] in (1, n))
        if mask.ndim != 4 or not all(fits):
            raise ValueError(f"mask has shape {tuple(mask.shape)}: give (batch or 1, heads or 1, n or 1, tokens)")


def _side(store: PageStore) -> module.Side:
    form: PageForm = store.form
    pages = store.storage
    code, lut = (0, 0, 0), form.lut
    if pages is not None:
        code = (
            pages.code.data_ptr(),
            pages.code.stride(0) * pages.code.itemsize,
            pages.code.stride(1) * pages.code.itemsize,
        )
    side = module.Side(
        *code, form.page_size, form.code_dim, bytes(form.bits), form.lanes == "tokens", lut.data_ptr(), lut.shape[-1]
    )
    if pages is None:
        return side
    scale, offset = pages.scale, pages.offset
    if scale is not None:
        side.set_scale(
            scale.data_ptr(), 0 if offset is None else offset.data_ptr(), scale.stride(0), scale.stride(1),
            scale.shape[-1],
        )  # fmt: skip
    centre, channel_scale = pages.centre, pages.channel_scale
    either = centre if centre is not None else channel_scale
    if either is not None:
        side.set_centre(
            0 if centre is None else centre.data_ptr(), 0 if channel_scale is None else channel_scale.data_ptr(),
            either.stride(0), either.stride(1), either.shape[-1],
        )  # fmt: skip
    return side
