"""Numbers into the dense storage of a cache."""

from torch import Tensor

from kvfold.kernels.cpu import module as cpu
from kvfold.kernels.ops import INSTRUCTION_SET
from kvfold.quant.finite import finite


def copy_finite(source: Tensor, target: Tensor, first: int = 0, instruction_set: str = INSTRUCTION_SET) -> bool:
    """Copy tokens to `target` from its place `first` on, rounded to its dtype, and tell whether all is finite there.

    Parameters
    ----------
    source, target
        Floating point, (batch, heads, tokens, dim); `target` may have more tokens.
    instruction_set
        For a CPU: one of `kvfold.attention.cpu.INSTRUCTION_SETS`.

    Raises
    ------
    ValueError
        On shapes that do not fit.
    """
    batch, heads, n, dim = source.shape
    if target.shape != (batch, heads, target.shape[2], dim) or not 0 <= first <= target.shape[2] - n:
        raise ValueError(f"{tuple(source.shape)} from {first} on do not fit into target, {tuple(target.shape)}")
    at, to = cpu.numbers_at(source), cpu.numbers_at(target, first)
    if at is None or to is None:
        room = target[:, :, first : first + n]
        room.copy_(source)
        return finite(room)
    return cpu.copy(instruction_set, at, to, batch, heads, n, dim)
