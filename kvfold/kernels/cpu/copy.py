"""Copies of numbers into the dense storage of a cache."""

from collections.abc import Sequence

from torch import Tensor

from kvfold.kernels.cpu import module as cpu
from kvfold.kernels.ops import INSTRUCTION_SET
from kvfold.quant.finite import finite


def copy_finite(
    sources: Sequence[Tensor], targets: Sequence[Tensor], first: int = 0, instruction_set: str = INSTRUCTION_SET
) -> bool:
    """Copy tokens into targets from token `first` on, in the targets' dtypes; returns whether all copies are finite.

    Sources and targets are floating point, (batch, heads, tokens, dim); targets may have more tokens. On a CPU,
    `instruction_set` is one of `kvfold.attention.cpu.INSTRUCTION_SETS`. Raises ValueError on shapes that do not fit.
    """
    pairs = list(zip(sources, targets, strict=True))
    whole = cpu.copy(instruction_set, pairs, first)
    if whole is not None:
        return whole
    rooms = []  # of tensors that the kernel does not take as they are
    for source, target in pairs:
        batch, heads, n, dim = source.shape
        if target.shape != (batch, heads, target.shape[2], dim) or first > target.shape[2] - n:
            raise ValueError(f"{tuple(source.shape)} from {first} on do not fit into target, {tuple(target.shape)}")
        rooms.append(target[:, :, first : first + n])
    for (source, _), room in zip(pairs, rooms, strict=True):
        room.copy_(source)
    return all(map(finite, rooms))
