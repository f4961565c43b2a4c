"""A few numbers of a model's weights, by which a calibration knows its model in every runtime and dtype.

transformers, mlx-lm and vLLM name and hold most weights alike. Some hold parts of them fused, quantised or packed for a
processor: such weights are left out, and two sketches are compared where both have something.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

W = TypeVar("W")

LAYER = re.compile(r".*?(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)")
EMBEDDINGS = "embeddings"
EMBEDDING = re.compile(r"(?:^|.*\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
KEYS = "k_proj.weight"
VECTOR, ROWS, COLUMNS, STEP = 32, 8, 8, 16
"""Most numbers of a vector, rows and columns of a matrix; and of every so many of the first tokens, one has a row."""
TOKENS = 512
"""Embeddings are of the first tokens only: a worker that shares the model with others may have no more of them."""
FAR = 0.05
"""How far weights may differ, in units of their length. A dtype of 16 bits moves them by .004, light training by less
than this."""
SHIFTS = (0.0, 1.0, -1.0)
"""Between weights of norms that are multiplied by as they are, and those that count from 1."""


def place(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[slice, ...]] | None:
    """The name of a weight in a sketch, and which of its numbers are taken; None if it is left out.

    Taken are vectors of decoder layers, mostly the weights of norms, projections that make keys, and embeddings.
    """
    if EMBEDDING.fullmatch(name) and len(shape) == 2:
        return EMBEDDINGS, (slice(0, TOKENS, STEP), _every(shape[1], COLUMNS))
    found = LAYER.fullmatch(name)
    if found is None:
        return None
    if len(shape) == 1:
        return f"{found[1]}.{found[2]}", (_every(shape[0], VECTOR),)
    if len(shape) == 2 and name.endswith(KEYS):
        return f"{found[1]}.{found[2]}", (_every(shape[0], ROWS), _every(shape[1], COLUMNS))
    return None


def _every(count: int, most: int) -> slice:
    return slice(None, None, -(-count // most) or 1)


def sketch(
    weights: Iterable[tuple[str, W]], read: Callable[[W, tuple[slice, ...]], Tensor | None]
) -> dict[str, Tensor]:
    """Numbers of weights by name, float32. `read` gives a part of one, or None if it holds no plain numbers.

    A name that several weights have, as in models with more than one tower, is left out if they differ.
    """
    found: dict[str, Tensor] = {}
    unclear = set()
    for name, weight in weights:
        if (where := place(name, tuple(weight.shape))) is None:  # type: ignore[attr-defined]
            continue
        part = read(weight, where[1])
        if part is None:
            continue
        part = part.float().cpu().contiguous()
        if where[0] in found and not _alike(found[where[0]], part):
            unclear.add(where[0])
        found[where[0]] = part
    return {name: part for name, part in found.items() if name not in unclear}


def check_same(measured: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a calibration's sketch is not that of the model that takes it, where both have a weight."""
    for name, part in measured.items():
        if name in own and not _alike(part, own[name]):
            raise ValueError(
                f"the calibration is of a model with other weights, {name} among them: calibrate this model (kvfold "
                "calibrate)"
            )


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether weights are the same up to rounding. Of embeddings, as many tokens count as both have."""
    if one.ndim == other.ndim == 2:
        one, other = one[: len(other)], other[: len(one)]
    shifts = SHIFTS if one.ndim == 1 else (0.0,)
    return one.shape == other.shape and any((one - other - shift).norm() <= FAR * one.norm() + 1e-6 for shift in shifts)
