"""Attention over a layer's cache, by the backend that fits."""

import logging
from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kvfold.attention import cpu, triton
from kvfold.attention.backend import FASTEST, backend_of
from kvfold.attention.windows import ending_mask, sliding_mask
from kvfold.cache.batch import Appended
from kvfold.cache.rows import FoldedRows
from kvfold.formats import FormatPair
from kvfold.kernels.modes import in_no_mode

logger = logging.getLogger("kvfold")


def attend(
    query: Tensor,
    new: Appended,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of the tokens just appended over everything that their layer holds.

    For inference: no gradients flow through it.

    Parameters
    ----------
    query
        (batch, heads, n, key_dim) for the n columns of `new`, or for the newest of them; heads a multiple
        of kv_heads, query head h reading KV head h // (heads / kv_heads).
    new
        What `LayerCache.append` returned for these tokens.
    scaling
        Factor on the scores, usually key_dim**-0.5.
    mask
        None for causal attention, within the window if the layer has one. Otherwise (batch or 1, heads or 1, n,
        columns): bool, True where a query may attend; or floating point, added to the scores. It then decides alone,
        causality included. In a layer with a sliding window, the columns may be the last ones only; none before them is
        read.
    softcap
        If given, scores become softcap·tanh(score / softcap), before the mask.
    sink_logits
        If given, one logit a head, (heads,), that takes part in the softmax and has no value
        (attention sinks of gpt-oss).
    backend
        One of `kvfold.attention.BACKENDS`; None for the fastest that takes this call. If that is the reference for lack
        of a kernel, the log says so once.

    Returns
    -------
    Tensor
        (batch, heads, n, value_dim) in the query's dtype; 0 for queries that are padding or that the
        mask bars from every key.

    Raises
    ------
    ValueError
        If there is no such backend, or it does not take this call; or on a query of another shape. With the "cpu"
        backend, also on a mask or `sink_logits` of another shape, and on a query with a NaN or an infinity; with the
        others, attention over such a query gives NaN.
    """
    if is_dynamo_compiling():  # graphs hold no cache that grows
        return _attend_outside_graphs(
            query, new, scaling=scaling, mask=mask, softcap=softcap, sink_logits=sink_logits, backend=backend
        )
    if backend is not None:
        backend_of(backend)  # raises if there is none
    if mask is None and new.layer.config.sliding:
        mask = sliding_mask(new, query.device)
    if new.is_step and mask is None and sink_logits is None:
        rows = new.layer.groups[0].rows
        if rows.step is not None and rows.step.backend == (backend or FASTEST.get(query.device.type)):
            answer = torch.empty_like(query)
            if rows.step.attend(query, answer, rows.length, scaling, softcap or 0.0, torch.get_num_threads()):
                return answer
    return _attend(query, new, scaling, mask, softcap, sink_logits, backend)


@in_no_mode
def _attend(
    query: Tensor,
    new: Appended,
    scaling: float,
    mask: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    backend: str | None,
) -> Tensor:
    """`attend` without the fast path. Formats first see the queries, which may change the cache; then backends read."""
    if query.requires_grad:
        query = query.detach()
    if query.ndim == 4 and 0 < query.shape[2] < new.columns:  # a model that computes its last predictions only
        new.layer.observe(None, new)
        new = new.newest(query.shape[2])
    new.layer.observe(query, new, scaling)
    out = None
    for group, dense in zip(new.layer.groups, new.dense, strict=True):
        skip = max(group.padding - new.first_column, 0)
        own_mask = None
        if mask is not None:
            own_mask = mask if mask.shape[0] == 1 else mask.index_select(0, group.batch_rows)
            own_mask = own_mask[:, :, skip:]
            if new.layer.config.sliding:  # what a window leaves behind, all heads forget alike
                own_mask = ending_mask(own_mask, group.rows.length)
            else:
                own_mask = own_mask[..., group.padding : new.first_column + new.columns]
                own_mask = _of_slots(own_mask, group.rows, query.shape[1])
        chosen = backend or _fastest(query, group.rows, mask)
        run = backend_of(chosen)
        if backend is not None and (why := run.why_not(query, group.rows, mask)) is not None:
            raise ValueError(f"backend = {backend!r}, but {why}: choose 'reference', or None")
        own_query = group.own(query, new.first_column)
        if new.layer.config.sharpen:
            counts = torch.arange(group.rows.length - own_query.shape[2], group.rows.length, device=query.device) + 1
            if new.layer.config.sliding:
                counts = counts.clamp(max=new.layer.config.sliding)
            factor = group.rows.formats.keys.sharpness(counts)
            assert factor is not None
            wide = torch.promote_types(own_query.dtype, torch.float32)  # 16 bits would round the factor away
            own_query = own_query.to(wide) * factor.to(wide).unsqueeze(-1)
        result = run.attend_rows(
            own_query, group.rows, dense, scaling=scaling, mask=own_mask, softcap=softcap, sink_logits=sink_logits
        )
        if new.layer.takes_steps and group.rows.step is None:
            group.rows.step = run.step_of(group.rows)
        if result.shape[0] == query.shape[0] and not skip:  # all rows in one group
            return result if result.dtype == query.dtype else result.to(query.dtype)
        if out is None:
            out = query.new_zeros(*query.shape[:3], new.layer.value_dim)
        out[group.batch_rows, :, skip:] = result.to(out.dtype)
    return query.new_zeros(*query.shape[:3], new.layer.value_dim) if out is None else out


_attend_outside_graphs = torch.compiler.disable(attend)


def _of_slots(mask: Tensor, rows: FoldedRows, heads: int) -> Tensor:
    """A mask over positions, (…, positions), as one over held slots, (batch, heads, n, length)."""
    if rows.positions is None:
        return mask
    slots = rows.slot_positions().repeat_interleave(heads // rows.kv_heads, 1).unsqueeze(2)
    shape = (slots.shape[0], heads, mask.shape[2], -1)
    return mask.expand(shape).gather(-1, slots.expand(shape))


def path_of(formats: FormatPair, device: str) -> str:
    """In words: what reads a layer of these formats on a device ("cpu", "cuda", …)."""
    if device != "cpu":
        why: str | None = "there is no kernel for it yet"
        if FASTEST.get(device) == "triton":
            why = triton.why_not_pages(formats.keys.form, formats.values.form)
        return "Triton" if why is None else f"reference in torch: {why}"
    keys, values = cpu.reads_as(formats.keys), cpu.reads_as(formats.values)
    if "reference" in (keys, values):
        return f"reference in torch: {formats.keys.form.only_reference or formats.values.form.only_reference}"
    sides = f"in {keys}" if keys == values else f"keys in {keys}, values in {values}"
    return f"C++, {cpu.INSTRUCTION_SETS[0]}, {sides}"


def _fastest(query: Tensor, rows: FoldedRows, mask: Tensor | None) -> str:
    """The backend for a call. float64 queries go to the reference, which alone computes in float64."""
    backend = FASTEST.get(query.device.type)
    why: str | None = f"there is no kernel for {query.device.type} yet"
    if backend is not None:
        why = backend_of(backend).why_not(query, rows, mask)
        if why is None:
            return backend
    if query.dtype != torch.float64:
        warn_once("attention runs in the reference implementation, which is slow: %s", why)
    return "reference"


@cache
def warn_once(message: str, why: str) -> None:
    logger.warning(message, why)
