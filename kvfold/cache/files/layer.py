"""A layer's cache as the contents of a file, and back."""

from dataclasses import replace
from math import isfinite

import torch

from kvfold.cache.batch import HeldLayer, RowGroup
from kvfold.cache.budgets import PromptBudgets, bits_in, choice, with_bits
from kvfold.cache.calibration import ENERGY, NAMES, OPTIONAL, ROTATIONS
from kvfold.cache.config import LayerConfig
from kvfold.cache.files.contents import FLOATS, Contents, dtype_name
from kvfold.cache.files.rows import rows_from_saved, rows_to_saved
from kvfold.cache.layer import LayerCache
from kvfold.formats import KeyStatistics, Window
from kvfold.formats.base import PAGE_WINDOW

OLDER_WINDOW = Window(sinks=16, recent=47, undo=24)
"""In the place of `PAGE_WINDOW`, in files that do not tell what stays dense."""

LARGEST_SAVED = 2**20
"""A file that has more rows or heads is refused before memory is allocated for it."""


def layer_to_saved(layer: HeldLayer) -> Contents:
    """What a layer holds, without unused capacity, and all that it needs to continue."""
    config, shape, dtype = layer.config, layer.shape, layer.dtype
    window, statistics = config.window or layer.window, config.statistics
    saved = Contents(
        {
            "format": config.format,
            "budgets": config.budgets is not None,
            "dense_dtype": None if config.dense_dtype is None else dtype_name(config.dense_dtype),
            "window": None if window is None else [window.sinks, window.recent, window.undo],
            "calibrated": statistics is not None,
            "frequencies": None if config.frequencies is None else list(config.frequencies),
            "values_of_keys": config.values_of_keys,
            "sharpen": config.sharpen,
            "shape": None if shape is None else list(shape),
            "dtype": None if dtype is None else dtype_name(dtype),
            "columns": layer.columns,
            "groups": len(layer.groups),
        }
    )
    if config.sliding:  # files of layers without a window do not have it
        saved.data["sliding"] = config.sliding
    if statistics is not None:
        known = {name: getattr(statistics, name) for name in (*NAMES, *OPTIONAL)}
        saved.tensors = {name: tensor for name, tensor in known.items() if tensor is not None}
    for number, group in enumerate(layer.groups):
        part = rows_to_saved(group.rows)
        part.data |= {"batch_rows": group.batch_rows.tolist(), "padding": group.padding}
        part.data["bits"] = None if group.bits is None else [group.bits[n] for n in bits_in(config.format)]
        saved.put(f"group{number}", part)
    return saved


def layer_from_saved(saved: Contents, index: int = 0) -> LayerCache:
    """The layer that `layer_to_saved` described, on the CPU; takes everything out of `saved`.

    Raises ValueError if its parts do not fit together, or a format or calibration has another shape.
    """
    layer = LayerCache(_config_from_saved(saved, index))
    layer.columns = saved.number("columns")
    groups = saved.number("groups")
    if saved.lacks("shape"):
        if layer.columns or groups or not saved.lacks("dtype"):
            raise ValueError(f"{saved.where}shape is missing")
    else:
        _fill(layer, saved, groups)
    saved.done()
    return layer


def _config_from_saved(saved: Contents, index: int) -> LayerConfig:
    format = saved.take("format", str)
    dense_dtype = None if saved.lacks("dense_dtype") else saved.dtype("dense_dtype")
    window = None if saved.lacks("window") else Window(*saved.numbers("window", 3))
    statistics = frequencies = None
    if saved.take("calibrated", bool):
        variance = saved.tensor("key_variance", FLOATS.values(), (None, None))
        like = FLOATS.values(), tuple(variance.shape)
        energy = saved.tensor(ENERGY, *like) if ENERGY in saved.tensors else None
        rotations = []
        for name in ROTATIONS:
            shape = (variance.shape[0], None, None)
            rotations.append(saved.tensor(name, FLOATS.values(), shape) if name in saved.tensors else None)
        statistics = KeyStatistics(saved.tensor("query_energy", *like), variance, energy, *rotations)
    if not saved.lacks("frequencies"):
        frequencies = tuple(saved.take("frequencies", list))
        if any(type(f) is not float or not isfinite(f) for f in frequencies):
            raise ValueError(f"{saved.where}frequencies are no finite numbers")
    return LayerConfig(
        format, index, dense_dtype, window, statistics, frequencies,
        values_of_keys=saved.take("values_of_keys", bool),
        sharpen=saved.take("sharpen", bool),
        sliding=saved.number("sliding", 1) if "sliding" in saved.data else 0,
        budgets=PromptBudgets({index: format}) if saved.take("budgets", bool) else None,
    )  # fmt: skip


def _fill(layer: LayerCache, saved: Contents, groups: int) -> None:
    """Take the rows of all groups out of `saved`."""
    config = layer.config
    batch, kv_heads, key_dim, value_dim = saved.numbers("shape", 4, 1, LARGEST_SAVED)
    if groups and kv_heads > max(
        (each.shape[1] for each in saved.tensors.values() if each.ndim > 2 and each.numel()), default=0
    ):
        raise ValueError(f"{saved.where}shape is of {kv_heads} heads, and no tensor is")
    dtype = saved.dtype("dtype")
    if config.stored_dtype(dtype) != dtype:
        raise ValueError(f"{saved.where}dtype is {dtype}, which dense_dtype = {config.dense_dtype} does not make")
    key, value = (torch.empty(batch, kv_heads, 0, dim, dtype=dtype) for dim in (key_dim, value_dim))
    if config.window is None and config.formats_of(key_dim, value_dim).window == PAGE_WINDOW:
        layer.config = config = replace(config, window=OLDER_WINDOW)
    formats = layer.begin(key, value)
    taken: set[int] = set()
    for number in range(groups):
        part = saved.part(f"group{number}")
        own = part.numbers("batch_rows", most=batch - 1)
        padding = part.number("padding", most=layer.columns - 1)
        if not own or len({*own} - taken) < len(own):
            raise ValueError(f"{part.where}batch_rows name no row, or one twice")
        taken.update(own)
        like, folds = (key[: len(own)], value[: len(own)]), formats
        if not part.lacks("bits"):
            folds = config.formats_named(_names_of(config, part), key_dim, value_dim)
        rows = rows_from_saved(part, formats, folds, like, layer.columns - padding)
        if config.sliding and padding + rows.evicted > layer.window_start(layer.columns):
            raise ValueError(f"{part.where}evicted is {rows.evicted}, of tokens in a window of {config.sliding}")
        layer.groups.append(RowGroup(torch.tensor(own), padding, rows))


def _names_of(config: LayerConfig, saved: Contents) -> str:
    """Names of the formats that rows fold with, by the bits that are taken out of `saved`."""
    asked = bits_in(config.format)
    bits = dict(zip(asked, saved.numbers("bits", len(asked), 1, 8), strict=True))
    if config.budgets is None or any(bits[number] not in choice(own) for number, own in asked.items()):
        raise ValueError(f"{saved.where}bits are {[*bits.values()]}, which no tokens give {config.format!r}")
    return with_bits(config.format, bits)
