"""Attention of an engine's step over pages in its pool, on a CPU."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvfold.attention.cpu.sides import INSTRUCTION_SETS, bare_side
from kvfold.attention.tables import group_of_tiles
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import Part
from kvfold.cache.pool.plan import EngineStep
from kvfold.formats import Format
from kvfold.kernels.cpu import module
from kvfold.kernels.cpu.rotations import rotation
from kvfold.kernels.ops import DTYPES


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
    instruction_set: str = INSTRUCTION_SETS[0],
) -> Tensor:
    """`kvfold.attention.reference.attend_pool` by a kernel, which also keeps unfinished pages.

    Parameters
    ----------
    sink_logits
        float32 and contiguous.
    instruction_set
        One of `INSTRUCTION_SETS`.
    """
    sound = layer.fold(step, key, value)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty(step.tokens, query.shape[1], layer.formats.values.head_dim)
    if sound is not step:
        out.fill_(torch.nan)
    kernel = _known_layer(layer, query.shape[1], scaling, softcap, sink_logits, instruction_set)
    broken = _known_step(sound, layer).attend(
        kernel, *_rows(query), *_rows(key), *_rows(value), out.data_ptr(), torch.get_num_threads()
    )
    layer.give_up(sound, broken)
    return out


def _rows(x: Tensor) -> tuple[int, int, int]:
    """Address of (tokens, heads, dim), and strides from token to token and head to head."""
    return x.data_ptr(), x.stride(0), x.stride(1)


# Each kernel beside the logits whose address it holds, which keeps them alive.
_LAYERS: WeakKeyDictionary[PagedLayer, dict[tuple[object, ...], tuple[module.PagedLayer, Tensor | None]]] = (
    WeakKeyDictionary()
)


def _known_layer(
    layer: PagedLayer, heads: int, scaling: float, softcap: float | None, sink_logits: Tensor | None, isa: str
) -> module.PagedLayer:
    """A layer as the kernel knows it, made once."""
    known = _LAYERS.setdefault(layer, {})
    asked = (heads, scaling, softcap, id(sink_logits), isa)
    if asked not in known:
        keys, values, layout = layer.formats.keys, layer.formats.values, layer.pool.layout
        kernel = module.PagedLayer(
            isa, _side(keys, layer, layout.keys), _side(values, layer, layout.values), rotation(keys.form.transform),
            rotation(values.form.transform), layer.pool.kv_heads, heads // layer.pool.kv_heads, keys.head_dim,
            values.head_dim, scaling, softcap or 0.0, 0 if sink_logits is None else sink_logits.data_ptr(),
            DTYPES[layer.tail_keys.dtype], layer.tail_keys.data_ptr(), layer.tail_values.data_ptr(),
            layer.first_keys.data_ptr(), layer.first_values.data_ptr(),
        )  # fmt: skip
        known[asked] = kernel, sink_logits
    return known[asked][0]


_STEPS: WeakKeyDictionary[EngineStep, dict[tuple[int, ...], module.PagedStep]] = WeakKeyDictionary()


def _known_step(step: EngineStep, layer: PagedLayer) -> module.PagedStep:
    """A step as the kernel knows it, made once for all layers whose pools are alike."""
    size = layer.formats.keys.page_size
    steps, key = _STEPS.setdefault(step, {}), (size, *layer.pool.geometry)
    if key not in steps:
        steps[key] = module.paged_step(step.rows, layer.pool.page_at(step.block_table), size)
    return steps[key]


def _side(fmt: Format, layer: PagedLayer, parts: tuple[Part, ...]) -> module.Side:
    """One side of a pool's pages as the kernel knows it."""
    form, base, head = fmt.form, layer.pool.pages.data_ptr(), layer.pool.page_bytes
    at = {part.name: base + part.offset for part in parts}
    shape = {part.name: part.shape for part in parts}
    side = bare_side(form, (at["code"], 0, head))
    scale = next((part for part in parts if part.name == "scale"), None)
    if scale is not None or "offset" in at:
        dtype = torch.float16 if scale is None else scale.dtype
        side.set_scale(
            at.get("scale", 0), DTYPES[dtype], form.signed_scale, at.get("offset", 0), 0, head // dtype.itemsize,
            shape["offset" if scale is None else "scale"][-1], bytes(group_of_tiles(form.groups)),
        )  # fmt: skip
    if "centre" in at or "channel_scale" in at:
        dim = shape["centre" if "centre" in at else "channel_scale"][-1]
        side.set_centre(at.get("centre", 0), at.get("channel_scale", 0), 0, head // 2, dim)
    if form.plain_dim:
        side.set_plain(at["plain"], 0, head // 2, form.plain_dim)
    return side
