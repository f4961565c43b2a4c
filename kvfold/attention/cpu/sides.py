"""Pages and dense tokens as the kernel knows them: addresses, strides and tables."""

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING
from weakref import finalize

from torch import Tensor

from kvfold.attention.tables import group_of_tiles
from kvfold.cache.rows import FoldedRows
from kvfold.cache.spans import DenseSpan
from kvfold.cache.store import PageStore
from kvfold.formats.page import FirstChannels, PageForm, Pages
from kvfold.kernels.cpu import module
from kvfold.kernels.cpu.rotations import rotation
from kvfold.kernels.ops import DTYPES

if TYPE_CHECKING:
    from kvfold.kernels.cpu import _cpu

INSTRUCTION_SETS: list[str] = module.instruction_sets()
"""Those that this machine runs, best first."""

INTEGER_SETS = ("avx512vbmi", "avx512vnni")
"""Those that multiply codes as integers, where they fit (kvfold/kernels/cpu/integer.h)."""


def given_span(span: DenseSpan | None) -> "_cpu.GivenSpan | None":
    """A span as the kernel takes it."""
    return None if span is None else (*span.storage, span.offset, span.start, span.tokens)


@dataclass(eq=False)
class _Known:
    """Rows as the kernel knows them, valid while they consist of `parts` and none of their tensors moved."""

    parts: tuple[object, ...]
    kernel: module.Rows


# Keyed by the `id` of the folded keys, or of the rows while nothing is folded. An entry goes with that object, so none
# outlives its pages. A WeakKeyDictionary lookup would dominate `known_rows`.
_KNOWN: dict[int, _Known] = {}


def known_rows(rows: FoldedRows, instruction_set: str) -> module.Rows:
    """Rows as the kernel knows them, made anew if their parts changed or memory moved (as by `share_memory_`)."""
    keys, values, pages = rows.keys.form, rows.values.form, rows.keys.storage
    owner: Pages | FoldedRows = pages or rows
    others = None if rows.values.storage is pages else rows.values.storage
    parts = (instruction_set, keys, values, others)
    known = _KNOWN.get(id(owner))
    if known is None or not all(map(is_, parts, known.parts)) or known.kernel.moved():
        tables = (tensor for form in (keys, values) for tensor in (form.lut, *form.transform.tensors()))
        folded = (tensor for side in rows.pages() if side is not None for _, tensor in side.tensors())
        kernel = module.Rows(
            instruction_set, side_of(rows.keys), side_of(rows.values), rotation(keys.transform),
            rotation(values.transform), 0 if pages is None else pages.code.shape[0], rows.kv_heads, rows.key_dim,
            rows.value_dim, rows.window.sinks, (*tables, *folded),
        )  # fmt: skip
        if known is None:
            finalize(owner, _KNOWN.pop, id(owner), None).atexit = False
        known = _KNOWN[id(owner)] = _Known(parts, kernel)
    return known.kernel


def side_of(store: PageStore) -> module.Side:
    """A store's pages as the kernel knows them."""
    form, pages = store.form, store.storage
    if pages is None:
        return bare_side(form, (0, 0, 0))
    code, scale, plain = pages.code, pages.scale, pages.plain
    side = bare_side(form, (code.data_ptr(), code.stride(0) * code.itemsize, code.stride(1) * code.itemsize))
    if scale is not None:
        side.set_scale(
            scale.data_ptr(), DTYPES[scale.dtype], form.signed_scale, _address(pages.offset), scale.stride(0),
            scale.stride(1), scale.shape[-1], bytes(group_of_tiles(form.groups)),
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
        form.lut.shape[-1], form.unit_levels, form.scaled_shifts,
    )  # fmt: skip
    if whole is not form:
        side.set_first_channels(form.code_dim)
    return side
