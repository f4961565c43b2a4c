"""Folding one token into pages that have room for it, for formats that fold token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.kernels.cpu import module as cpu
from kvfold.kernels.cpu.rotations import rotation
from kvfold.kernels.ops import DTYPES, INSTRUCTION_SET
from kvfold.quant.packing import Lanes
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.scales import SCALE_RULES


@dataclass(frozen=True, eq=False)
class TokenPages:
    """Pages of one stream, and how its tokens become codes."""

    how: RotatedCode  # without a centre
    lanes: Lanes  # as `kvfold.quant.packing` has them
    # Pages in a CPU's memory: uint8, (batch, heads, pages, bytes), and float16, (batch, heads, pages, P, 1).
    code: Tensor
    scale: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All that the kernel reads or writes."""
        return (self.code, self.scale, self.how.levels, *self.how.transform.tensors())


class TokenFolder:
    """Folds single tokens of every head, as `kvfold.kernels.ops.fold_rotated` would, into free slots of pages.

    Tokens go to `streams`: keys and values, or one stream for both.
    """

    def __init__(self, streams: Sequence[TokenPages], instruction_set: str = INSTRUCTION_SET) -> None:
        self._instruction_set = instruction_set
        self.tensors = [tensor for stream in streams for tensor in stream.tensors()]  # read or written
        self._addresses = cpu.Addresses(self.tensors)
        self._room = min(s.code.shape[2] for s in streams), min(s.scale.shape[3] for s in streams)
        self._batch, self._heads = streams[0].code.shape[:2]
        self.sides = [_side(stream) for stream in streams]  # as the kernel knows them

    def has_moved(self) -> bool:
        """Whether a tensor's memory has moved, as by `share_memory_`; then this folder must not be used any more."""
        return self._addresses.moved()

    def fold(self, x: Sequence[Tensor], dtypes: Sequence[torch.dtype], page: int, slot: int) -> bool:
        """Fold a token into a free slot of a page, whose codes and scales are 0.

        Each stream has a token, floating point, (batch, heads, 1, dim), and the dtype that its numbers are rounded to
        before they are folded. Returns whether that was done. If not, nothing has changed: a number or a scale is not
        finite, or the kernel does not read a dtype. Raises ValueError on tokens of another shape, or a page or slot
        that does not exist.
        """
        pages, slots = self._room
        if not (0 <= page < pages and 0 <= slot < slots):
            raise ValueError(f"page = {page}, slot = {slot}: there are {pages} pages of {slots} tokens")
        given = []
        for own, dtype, side in zip(x, dtypes, self.sides, strict=True):
            number = DTYPES.get(dtype)
            if number is None:
                return False
            given.append((own, number, side))
        return cpu.fold_token(self._instruction_set, given, self._batch, self._heads, page, slot)


def _side(pages: TokenPages) -> cpu.TokenSide:
    code, scale, how = pages.code, pages.scale, pages.how
    return cpu.TokenSide(
        rotation(how.transform), how.levels.data_ptr(), how.bits, list(SCALE_RULES).index(how.rule),
        pages.lanes == "tokens", scale.shape[3], code.data_ptr(), code.stride(0), code.stride(1), scale.data_ptr(),
        scale.stride(0), scale.stride(1),
    )  # fmt: skip
