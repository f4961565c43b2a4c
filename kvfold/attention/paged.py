"""Attention of an engine's step over pages in its pool.

A query at position t reads the pages before page t // P folded, and the tokens of its own page up to t dense: those
that were there before from the tails, the others from the step itself (`kvfold.cache.paged`).
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvfold.attention import cpu, reference, triton
from kvfold.cache.paged import PagedLayer, Part, Step
from kvfold.formats import Format
from kvfold.kernels.cpu import module
from kvfold.kernels.ops import DTYPES
from kvfold.kernels.rotations import rotation
from kvfold.quant.packing import TILE


class PagedAttention:
    """Attention of one layer over its pool.

    Parameters
    ----------
    layer
        Pool, tails and formats.
    heads
        Query heads, a multiple of the pool's KV heads.
    scaling, softcap, sink_logits
        As for `kvfold.attention.attend`.
    backend
        "cpu", "triton" or "reference"; None for the kernel of the layer's device.
    instruction_set
        One of `kvfold.attention.cpu.INSTRUCTION_SETS`.
    """

    def __init__(
        self,
        layer: PagedLayer,
        heads: int,
        *,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        backend: str | None = None,
        instruction_set: str = cpu.INSTRUCTION_SETS[0],
    ) -> None:
        kv_heads, keys, values = layer.pool.kv_heads, layer.formats.keys, layer.formats.values
        if heads % kv_heads:
            raise ValueError(f"heads = {heads}: give a multiple of the pool's {kv_heads} KV heads")
        self.layer, self.heads = layer, heads
        self.scaling, self.softcap = scaling, softcap
        self.sink_logits = None if sink_logits is None else sink_logits.detach().float().contiguous()
        self.backend = backend or ("cpu" if layer.pool.pages.device.type == "cpu" else "triton")
        if self.backend != "cpu":
            return
        self._kernel = module.PagedLayer(
            instruction_set, _side(keys, layer, layer.pool.layout.keys), _side(values, layer, layer.pool.layout.values),
            rotation(keys.form.transform), rotation(values.form.transform), kv_heads, heads // kv_heads,
            keys.head_dim, values.head_dim, scaling, softcap or 0.0,
            0 if self.sink_logits is None else self.sink_logits.data_ptr(), DTYPES[layer.tail_keys.dtype],
            layer.tail_keys.data_ptr(), layer.tail_values.data_ptr(),
        )  # fmt: skip

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, step: Step) -> Tensor:
        """Fold what the step completes, attend, and keep what it leaves of unfinished pages.

        Parameters
        ----------
        query
            New tokens of all sequences, (tokens, heads, key_dim), in the tails' dtype like keys and values.
        key, value
            (tokens, kv_heads, dim).
        step
            `kvfold.cache.paged.plan` of them.

        Returns
        -------
        Tensor
            (tokens, heads, value_dim), float32.

        Raises
        ------
        ValueError
            On another shape or dtype. Also, unless the backend is "triton", if a key or value of a page that becomes
            full is NaN or infinite, and by "cpu" if a query is. Otherwise attention over it gives NaN.
        """
        layer = self.layer
        kv_heads, dim = layer.pool.kv_heads, layer.formats.values.head_dim
        expected = ((self.heads, layer.formats.keys.head_dim), (kv_heads, layer.formats.keys.head_dim), (kv_heads, dim))
        for name, x, shape in zip(("query", "key", "value"), (query, key, value), expected, strict=True):
            if x.shape != (step.tokens, *shape) or x.dtype != layer.tail_keys.dtype:
                raise ValueError(
                    f"{name} is {x.dtype} of the shape {tuple(x.shape)}: give {layer.tail_keys.dtype} of "
                    f"{(step.tokens, *shape)}"
                )
        options: dict[str, Any] = {"scaling": self.scaling, "softcap": self.softcap, "sink_logits": self.sink_logits}
        if self.backend == "triton":
            return triton.attend_pages(query, key, value, layer, step, **options)
        layer.fold(step, key, value)
        if self.backend == "reference":
            out = reference.attend_pages(query, key, value, layer, step, **options)
            layer.keep_tails(torch.from_numpy(step.left(layer.formats.keys.page_size)), key, value)
            return out
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        out = torch.empty(step.tokens, self.heads, layer.formats.values.head_dim)
        whole = _paged_step(step, layer).attend(
            self._kernel, *_rows(query), *_rows(key), *_rows(value), out.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        if not whole:
            raise ValueError(
                "query holds a NaN or an infinity, or grows to one when scaled: attention over it means nothing"
            )
        return out


def _rows(x: Tensor) -> tuple[int, int, int]:
    """Address of (tokens, heads, dim), and strides from token to token and head to head."""
    return x.data_ptr(), x.stride(0), x.stride(1)


_STEPS: WeakKeyDictionary[Step, dict[tuple[int, ...], module.PagedStep]] = WeakKeyDictionary()


def _paged_step(step: Step, layer: PagedLayer) -> module.PagedStep:
    """A step as the kernel knows it: once for all layers with such a pool."""
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
    side = cpu.bare_side(form, (at["code"], 0, head))
    scale = next((part for part in parts if part.name == "scale"), None)
    if scale is not None or "offset" in at:
        groups = [g for g, width in enumerate(form.groups) for _ in range(width // TILE)]
        dtype = torch.float16 if scale is None else scale.dtype
        side.set_scale(
            at.get("scale", 0), DTYPES[dtype], form.signed_scale, at.get("offset", 0), 0, head // dtype.itemsize,
            shape["offset" if scale is None else "scale"][-1], bytes(groups),
        )  # fmt: skip
    if "centre" in at or "channel_scale" in at:
        dim = shape["centre" if "centre" in at else "channel_scale"][-1]
        side.set_centre(at.get("centre", 0), at.get("channel_scale", 0), 0, head // 2, dim)
    if form.plain_dim:
        side.set_plain(at["plain"], 0, head // 2, form.plain_dim)
    return side
