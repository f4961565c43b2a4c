"""Keys and values of pages as the kernels know them: their parts, and what is compiled for them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import groupby
from operator import or_
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvfold.attention.tables import group_of_tiles
from kvfold.attention.triton.target import tensor_cores
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import Part
from kvfold.cache.store import PageStore
from kvfold.formats.page import PageForm
from kvfold.kernels.gluon.numbers import BLOCK, MOST_VALUE_BITS, ROUNDED, Numbers, Run, runs_of
from kvfold.quant.packing import TILE
from kvfold.quant.tables import on

if TYPE_CHECKING:
    from kvfold.kernels.triton.codes import Shape


@dataclass(frozen=True, eq=False)
class Side:
    """Keys or values of pages: their parts by name (None if absent), and what kernels are compiled for."""

    parts: dict[str, Tensor | None]
    shape: "Shape"
    numbers: Numbers | None  # the same in whole numbers, where device and form fit

    def arguments(self, prefix: str, without: Collection[str]) -> dict[str, Any]:
        return {prefix + name: part for name, part in self.parts.items() if name not in without}


def _shape(form: PageForm, groups: int, centre_dim: int, strides: dict[str, int]) -> "Shape":
    from kvfold.kernels.triton.codes import Shape

    bits = form.bits
    return Shape(
        page_size=form.page_size, code_dim=form.code_dim, tiles=len(bits), all_bits=sum(bits), runs=_runs(form),
        planes=reduce(or_, bits, 0), even=bits[0] if len(set(form.kinds)) == 1 else 0,
        token_lanes=form.lanes == "tokens", levels=form.lut.shape[-1], groups=groups, centre_dim=centre_dim,
        plain_dim=form.plain_dim, unit_levels=form.unit_levels, scaled_shifts=form.scaled_shifts,
        code=strides["code"], scale=strides.get("scale", 0), offset=strides.get("offset", 0),
        centre=strides.get("centre", strides.get("channel_scale", 0)), plain=strides.get("plain", 0),
    )  # fmt: skip


def _runs(form: PageForm) -> tuple[tuple[int, int, int, int], ...]:
    """Runs of groups with equal bits and levels, of lengths 2^k: first group, length, bits, sum of bits before."""
    runs, first = [], 0
    for kind, group in groupby(form.kinds):
        left = len(list(group))
        while left:
            count = 1 << (left.bit_length() - 1)
            runs.append((first, count, form.bits[kind], sum(form.bits[:first])))
            first, left = first + count, left - count
    return tuple(runs)


PARTS = ("code", "scale", "offset", "centre", "channel_scale", "plain")


def _side(form: PageForm, parts: dict[str, Tensor], last: dict[str, int], strides: dict[str, int], exact: bool) -> Side:
    """`last`: the last dimension of each part's shape."""
    from kvfold.kernels.triton.fold import bits_table

    device = parts["code"].device
    groups = last.get("scale", last.get("offset", 1))
    shape = _shape(form, groups, last.get("centre", last.get("channel_scale", 0)), strides)
    found: dict[str, Tensor | None] = {name: parts.get(name) for name in PARTS}
    if not form.plain_dim:
        found["plain"] = None
    if form.bits:  # read in words of 32 bits
        found["code"], shape = parts["code"].reshape(-1).view(torch.int32), replace(shape, code=shape.code // 4)
    found["lut"] = on(device, form.lut, None if exact else torch.float16) if form.bits else None
    found["bits"] = None if shape.even or not form.bits else bits_table(form.bits, device)
    found["groups"] = None if groups == 1 else _groups_table(form.groups, device)
    found["tables"], numbers, codebook = None, None, None
    if tensor_cores(device) and not exact:
        codebook = _codebook(form, groups, shape.centre_dim, "offset" in parts)
    if codebook is not None:
        numbers, found["tables"] = _numbers(codebook[0], shape, found), on(device, codebook[1])
    return Side(found, shape, numbers)


def _numbers(runs: tuple[Run, ...], shape: "Shape", parts: dict[str, Tensor | None]) -> Numbers | None:
    """None also where the parts lie at addresses that loads of several numbers do not take."""
    places = [4 * shape.code, 2 * shape.centre, 2 * shape.plain]
    places += [x.data_ptr() for name in ("code", "centre", "channel_scale", "plain") if (x := parts[name]) is not None]
    vectors = not any(place % 16 for place in places)
    if any(place % 4 for place in places) or (shape.plain_dim and not vectors):
        return None
    return Numbers(
        page_size=shape.page_size, code_dim=shape.code_dim, all_bits=shape.all_bits, runs=runs,
        two_bytes=shape.scaled_shifts or any(run.bits > ROUNDED for run in runs), groups=shape.groups,
        centre_dim=shape.centre_dim, plain_dim=shape.plain_dim, token_lanes=shape.token_lanes,
        scaled_shifts=shape.scaled_shifts, vectors=vectors, code=shape.code, scale=shape.scale, offset=shape.offset,
        centre=shape.centre, plain=shape.plain,
    )  # fmt: skip


Codebook = tuple[tuple[Run, ...], Tensor]
_CODEBOOKS: WeakKeyDictionary[PageForm, dict[tuple[int, int, bool], Codebook | None]] = WeakKeyDictionary()


def _codebook(form: PageForm, groups: int, centre_dim: int, offsets: bool) -> Codebook | None:
    """A form's runs in whole numbers, and their tables; None if it does not fit."""
    known, key = _CODEBOOKS.setdefault(form, {}), (groups, centre_dim, offsets)
    if key not in known:
        known[key] = _new_codebook(form, *key)
    return known[key]


def _new_codebook(form: PageForm, groups: int, centre_dim: int, offsets: bool) -> Codebook | None:
    keys, tiles = form.lanes == "tokens", len(form.bits)
    if not form.bits or form.page_size % BLOCK or form.code_dim % TILE or centre_dim % TILE:
        return None
    if form.unit_levels or form.signed_scale or (not keys and max(form.bits) > MOST_VALUE_BITS):
        return None
    if form.plain_dim & (form.plain_dim - 1) or 0 < form.plain_dim < TILE:
        return None
    found = runs_of(
        form.lut, form.bits, form.kinds, [0] * tiles if groups == 1 else group_of_tiles(form.groups),
        centre_dim // TILE or tiles, fine=keys and (offsets or form.scaled_shifts),
    )  # fmt: skip
    return None if found is None else (found[0], torch.tensor(found[1], dtype=torch.int64).int())


def stored(store: PageStore, exact: bool) -> Side:
    pages = store.storage
    assert pages is not None
    parts = {name: part for name, part in pages.tensors() if name in PARTS}
    assert all(part.is_contiguous() for part in parts.values())
    strides = {name: part.shape[3:].numel() for name, part in parts.items()}
    return _side(store.form, parts, {name: part.shape[-1] for name, part in parts.items()}, strides, exact)


def pooled(form: PageForm, layer: PagedLayer, parts: Sequence[Part], exact: bool) -> Side:
    """One side of a pool: each part is a view of the pool, from that part of the first page on."""
    whole = {part.name: layer.pool.elements(part) for part in parts}
    views, strides = ({name: x for name, (x, _) in whole.items()}, {name: by for name, (_, by) in whole.items()})
    return _side(form, views, {part.name: part.shape[-1] for part in parts if part.shape}, strides, exact)


@cache
def _groups_table(groups: tuple[int, ...], device: torch.device) -> Tensor:
    """The scale group of each 16 channels: int32."""
    return torch.tensor(group_of_tiles(groups), dtype=torch.int32, device=device)
