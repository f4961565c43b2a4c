"""A prompt cache of mlx-lm whose full-attention layers are folded."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import torch
from mlx.utils import tree_flatten
from mlx_lm.models import cache as theirs

from kvfold.cache.calibration import Calibration
from kvfold.cache.config import layer_configs
from kvfold.cache.mlx import ArrayLayer, held_array_bytes
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport, LayerReport, walk_tensors
from kvfold.cache.shape import LayerShape
from kvfold.cache.sketch import check_same, sketch
from kvfold.integrations.mlx.attach import attach
from kvfold.integrations.mlx.layer import FoldedKVCache
from kvfold.integrations.mlx.passes import Passes
from kvfold.integrations.mlx.planned import planned_shapes

logger = logging.getLogger("kvfold")


def make_prompt_cache(
    model: Any,
    format: str | None = None,
    *,
    policy: Policy | None = None,
    dense_dtype: torch.dtype | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
) -> list[Any]:
    """A prompt cache for a model of mlx-lm, to be passed to its `generate` as `prompt_cache`.

    Full-attention layers fold; layers with a sliding window or a state are mlx-lm's own, dense, in the model's dtype.
    Attention of all of mlx-lm's models reads folded caches from then on (`kvfold.integrations.mlx.attach`). Whether
    this model's does is checked by a pass that MLX plans but never computes.

    Parameters
    ----------
    model
        A model of mlx-lm.
    format, policy, dense_dtype, calibration
        As `kvfold.FoldedCache` takes them.

    Raises
    ------
    ValueError
        On an unknown format, one that cannot take the model's head dimension, a policy that folds windows, another
        model's calibration, or a model that computes with cached keys and values itself, as those with latent attention
        do.

    Examples
    --------
    >>> model, tokenizer = mlx_lm.load("some/folder")
    >>> cache = make_prompt_cache(model, "kvfold-4")
    >>> mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)
    """
    policy = Policy.of(format, policy)
    if policy.sliding:
        raise ValueError("policy: sliding = True, but windows fold in torch only: leave it out, and they stay dense")
    layers = theirs.make_prompt_cache(model)
    measured = Calibration.of(calibration, None, len(model.layers))
    if measured is not None and measured.sketch:
        check_same(measured.sketch, sketch(tree_flatten(model.parameters()), _part))
    growing = [index for index, layer in enumerate(layers) if type(layer) is theirs.KVCache]
    attach(model)
    planned = planned_shapes(model, [i for i in growing if policy.format_of(i, len(layers)) is not None])
    shapes = [LayerShape("full", *planned[i][1:]) if i in planned else LayerShape("none") for i in range(len(layers))]
    configs = layer_configs(shapes, policy, measured, dense_dtype=dense_dtype, frequencies=_frequencies)
    passes = Passes()
    for index, config in configs.items():
        layers[index] = FoldedKVCache(ArrayLayer(config), passes)
    wanted = any(policy.format_of(i, len(layers)) is not None for i in range(len(layers)))
    if wanted and not any(isinstance(layer, FoldedKVCache) for layer in layers):
        logger.warning(
            "no layer of this model folds (its caches are %s), so this cache is dense: windows, states and lists of "
            "caches do not fold",
            ", ".join(sorted({type(layer).__name__ for layer in layers})),
        )
    return layers


def _part(weight: mx.array, where: tuple[slice, ...]) -> torch.Tensor | None:
    """A part of a weight; None of one that is quantised."""
    return torch.tensor(weight[where].astype(mx.float32)) if mx.issubdtype(weight.dtype, mx.floating) else None


def _frequencies(index: int, format: str) -> None:
    raise ValueError(f"format = {format!r} turns RoPE back, which kvfold does in torch only: take tbq3")


def cache_report(cache: Sequence[Any]) -> CacheReport:
    """What a prompt cache holds, layer by layer, walked array by array, tables included."""
    rows, tables = [], []
    for index, each in enumerate(cache):
        if isinstance(each, FoldedKVCache):
            tables.append(each.layer.tables())
            rows.append(each.layer.report(each.nbytes))
        else:  # its arrays have room for more tokens, as those of a dense cache would
            values = sum(x.size for x in walk_tensors(each, mx.array) if mx.issubdtype(x.dtype, mx.floating))
            rows.append(LayerReport(index, "dense", getattr(each, "offset", 0), 0, values, values, each.nbytes))
    shared = held_array_bytes(tables)
    held_bytes, values = sum(row.held_bytes for row in rows), sum(row.values for row in rows)
    return CacheReport(tuple(rows), shared, shared + held_bytes, values)
