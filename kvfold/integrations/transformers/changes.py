"""Changes between forward passes that all layers of a cache make, or none."""

from collections.abc import Callable, Sequence
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.undo import undo_of_change


def change_all(layers: Sequence[Any], change: Callable[[Any], None]) -> None:
    """Change one layer after the other; an interrupt comes through once all have changed.

    `change` must not raise for a layer.
    """
    changed, undo = 0, (-1, lambda: None)

    def change_the_rest() -> None:
        nonlocal changed, undo
        while changed < len(layers):
            undo = changed, undo_of_change(layers[changed])
            change(layers[changed])
            changed += 1

    try:
        change_the_rest()
    except BaseException:
        if undo[0] == changed:
            undo[1]()
        change_the_rest()
        raise


def crop_all(layers: Sequence[Any], remove: int) -> None:
    """Forget the newest `remove` columns.

    Layers of transformers may refuse, so they are cropped first, and undone if one does. Folded layers refuse before
    anything changes; once they are cropped, an interrupt comes through when all have been.
    """
    folded = [layer for layer in layers if isinstance(layer, FoldedLayer)]
    others = [layer for layer in layers if not isinstance(layer, FoldedLayer)]
    keep = [layer.length_after(-remove) for layer in folded]
    for layer, length in zip(folded, keep, strict=True):
        layer.folded.check_crop(length)

    def crop_folded() -> None:
        for layer, length in zip(folded, keep, strict=True):
            layer.crop_to(length)

    undos, decided = [undo_of_change(layer) for layer in others], False
    try:
        for layer in others:
            layer.crop(-remove)
        decided = True
        crop_folded()
    except BaseException:
        if decided:  # cropping again to the same length changes nothing
            crop_folded()
        else:
            for undo in undos:
                undo()
        raise


def batch_of(layers: Sequence[Any]) -> int:
    """Rows of the batch; 0 before the first token."""
    keys = [getattr(layer, "keys", None) for layer in layers]
    dense = [x.shape[0] for x in keys if isinstance(x, Tensor)]
    folded = [layer.folded.batch for layer in layers if isinstance(layer, FoldedLayer)]
    return max([*dense, *folded], default=0)


def rows_of(indices: Tensor, name: str, batch: int, least: int) -> Tensor:
    """Numbers of the rows that `indices` select, from 0 on: numbers from `least` to `batch` - 1, or a bool mask.

    Raises IndexError, which calls the argument `name`, if there is no such row.
    """
    try:
        indices = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        raise IndexError(f"{name} = {short(indices)}: give numbers of rows, (rows,)") from None
    if indices.dtype == torch.bool and tuple(indices.shape) == (batch,):
        return indices.nonzero().flatten()
    if indices.ndim != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
        shape = tuple(indices.shape)
        raise IndexError(f"{name} is {indices.dtype} of the shape {shape}: give numbers of rows, (rows,)")
    if batch and any(not least <= row < batch for row in indices.tolist()):
        raise IndexError(f"{name} = {indices.tolist()}: the cache holds rows {least} to {batch - 1}")
    return indices.long() % max(batch, 1)


def check_layers_have(layers: Sequence[Any], method: str) -> None:
    """Raise NotImplementedError, before anything changes, if a layer of transformers lacks a method."""
    for i, layer in enumerate(layers):
        if not hasattr(layer, method):
            raise NotImplementedError(f"layer {i} is a {type(layer).__name__}, which has no {method}")
