"""Attention over folded rows on a CPU, in C++ (kvfold/kernels/cpu/attend_impl.h)."""

from array import array
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvfold.cache.rows import DenseSpan, FoldedRows
from kvfold.cache.store import PageStore, StoreView
from kvfold.formats import Format
from kvfold.formats.page import FirstChannels, PageForm, Pages
from kvfold.kernels.cpu import module
from kvfold.kernels.ops import DTYPES
from kvfold.quant.packing import TILE
from kvfold.quant.transforms import AnyTransform, ChannelOrder, Hadamard, OrderedMatrix

INSTRUCTION_SETS: list[str] = module.instruction_sets()
"""What this machine runs, best first."""

INTEGER_SETS = ("avx512vbmi", "avx512vnni")
"""Those that multiply codes as integers, where they fit (kvfold/kernels/cpu/integer.h)."""


def unsupported(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str | None:
    """Why this kernel does not take a call; None if it does."""
    if query.device.type != "cpu":
        return f"the CPU kernel takes queries in a CPU's memory, these are on {query.device}"
    if query.dtype not in DTYPES:
        return f"the CPU kernel takes no queries of {query.dtype}"
    if mask is not None and mask.dtype != torch.bool:
        return f"the CPU kernel takes masks of bool, and this is one of {mask.dtype}"
    for form in (rows.keys.form, rows.values.form):
        if form.only_reference is not None:
            return form.only_reference
        if any(width % TILE for width in form.groups):
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
    """`kvfold.attention.reference.attend_rows` in float32, by a kernel.

    Parameters
    ----------
    instruction_set
        One of `INSTRUCTION_SETS`.
    """
    batch, heads, n, key_dim = query.shape
    kv_heads, value_dim = rows.kv_heads, rows.value_dim
    _check(query, rows, mask, sink_logits)
    query = query if query.stride(-1) == 1 else query.contiguous()
    until, after = rows.reach(n, dense, causal=mask is None)
    views = array("q", (*until, *after, *map(min, until, after)))
    folded_until = views.buffer_info()[0]  # then where all ends, and the lesser of both
    stop, folded_stop = folded_until + n * views.itemsize, folded_until + 2 * n * views.itemsize

    task = module.Attention(
        instruction_set, batch, kv_heads, heads // kv_heads, n, key_dim, value_dim, torch.get_num_threads()
    )
    by_row, by_head, by_token, _ = query.stride()
    task.set_query(query.data_ptr(), DTYPES[query.dtype], by_row, by_head, by_token, scaling)
    keys, values = _side(rows.keys), _side(rows.values)  # the kernel reads them until it returns
    of_keys, of_values = rotation(rows.keys.form.transform), rotation(rows.values.form.transform)
    task.set_pages(rows.keys.count, keys, values, of_keys, of_values, rows.window.sinks, folded_stop)
    held = []  # tensors whose addresses the kernel has
    for span, start in ((rows.sink_span(), 0), (dense, folded_until)):
        if span is None or span.start == span.stop:
            continue
        key, value = span.key, span.value
        if key.dtype != value.dtype or key.dtype not in DTYPES or key.stride(-1) != 1 or value.stride(-1) != 1:
            key, value = key.float().contiguous(), value.float().contiguous()
        held += [key, value]
        key_row, key_head, key_token, _ = key.stride()
        value_row, value_head, value_token, _ = value.stride()
        task.add_span(
            key.data_ptr(), value.data_ptr(), key_row, key_head, key_token, value_row, value_head, value_token,
            DTYPES[key.dtype], span.start, key.shape[2], start, stop,
        )  # fmt: skip
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        by_row, by_head, by_query = (0 if mask.shape[dim] == 1 else mask.stride(dim) for dim in range(3))
        task.set_mask(mask.data_ptr(), by_row, by_head, by_query, mask.shape[-1])
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    out = torch.empty(batch, heads, n, value_dim)
    if not task.attend(softcap or 0.0, 0 if sink_logits is None else sink_logits.data_ptr(), out.data_ptr()):
        raise ValueError(
            "query holds a NaN or an infinity, or grows to one when scaled: attention over it means nothing"
        )
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


_SIDES: WeakKeyDictionary[Pages, dict[type, tuple[tuple[int, ...], module.Side]]] = WeakKeyDictionary()
_ROTATIONS: WeakKeyDictionary[AnyTransform, tuple[tuple[int, ...], module.Rotation]] = WeakKeyDictionary()


def _side(store: PageStore | StoreView) -> module.Side:
    """A store's pages as the kernel knows them, made anew when memory has moved (`share_memory_` moves it)."""
    form, pages = store.form, store.storage
    if pages is None:
        return bare_side(form, (0, 0, 0))
    scale, offset, centre, channel_scale = pages.scale, pages.offset, pages.centre, pages.channel_scale
    plain = pages.plain if form.plain_dim else None
    parts = (form.lut, pages.code, scale, offset, centre, channel_scale, plain)
    at = tuple(0 if part is None else part.data_ptr() for part in parts)
    of_forms = _SIDES.setdefault(pages, {})  # values may be a view of the same pages
    known = of_forms.get(type(form))
    if known is not None and known[0] == at:
        return known[1]
    code = pages.code
    side = bare_side(form, (at[1], code.stride(0) * code.itemsize, code.stride(1) * code.itemsize))
    if scale is not None:
        groups = [g for g, width in enumerate(form.groups) for _ in range(width // TILE)]
        side.set_scale(
            at[2], DTYPES[scale.dtype], form.signed_scale, at[3], scale.stride(0), scale.stride(1), scale.shape[-1],
            bytes(groups),
        )  # fmt: skip
    either = centre if centre is not None else channel_scale
    if either is not None:
        side.set_centre(at[4], at[5], either.stride(0), either.stride(1), either.shape[-1])
    if plain is not None:
        side.set_plain(at[6], plain.stride(0), plain.stride(1), plain.shape[-1])
    of_forms[type(form)] = at, side
    return side


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


def rotation(transform: AnyTransform) -> module.Rotation:
    """A transform as the kernel knows it, made anew when memory has moved."""
    at = tuple(tensor.data_ptr() for tensor in transform.tensors())
    known = _ROTATIONS.get(transform)
    if known is not None and known[0] == at:
        return known[1]
    if isinstance(transform, ChannelOrder):
        found = module.Rotation.order(*_order(transform))
    elif isinstance(transform, OrderedMatrix):
        found = module.Rotation.ordered_matrix(*_order(transform.order), transform.matrix.data_ptr())
    elif isinstance(transform, Hadamard):
        mix = 0 if transform.mix is None else transform.mix.data_ptr()
        found = module.Rotation.hadamard(transform.signs.shape[0], transform.signs.data_ptr(), mix)
    else:
        code_dim, dim = transform.matrix.shape
        inverse = 0 if transform.general_inverse is None else transform.general_inverse.data_ptr()
        found = module.Rotation.matrix(dim, code_dim, transform.matrix.data_ptr(), inverse)
    _ROTATIONS[transform] = at, found
    return found


def _order(order: ChannelOrder) -> tuple[int, int, int, int]:
    """Length, address and strides from row to row and head to head."""
    by_row, by_head = (0, 0, *order.order.stride()[:-1])[-2:]
    return order.order.shape[-1], order.order.data_ptr(), by_row, by_head
