"""Kernels as torch operators: traced by torch.compile, chosen by the device of their tensors.

On a CPU each runs in C++; on other devices the torch truth in `kvfold.quant` runs.
"""

import torch
from torch import Tensor

from kvfold.kernels.cpu import module as cpu
from kvfold.quant import affine, packing
from kvfold.quant.packing import Lanes

INSTRUCTION_SET: str = cpu.instruction_sets()[0]


@torch.library.custom_op("kvfold::pack", mutates_args=())
def pack(codes: Tensor, bits: list[int], lanes: str) -> Tensor:
    """`kvfold.quant.packing.pack` on the device of `codes`."""
    return packing.pack(codes, bits, _lanes(lanes))


@pack.register_kernel("cpu")
def _(codes: Tensor, bits: list[int], lanes: str) -> Tensor:
    packed = _packed_like(codes, bits)
    cpu.pack(_flat_pages(codes), packed, bytes(bits), _lanes(lanes) == "tokens")
    return packed


@pack.register_fake
def _packed_like(codes: Tensor, bits: list[int], lanes: str = "tokens") -> Tensor:
    return codes.new_empty((*codes.shape[:-2], packing.code_bytes(codes.shape[-2], bits)))


@torch.library.custom_op("kvfold::unpack", mutates_args=())
def unpack(packed: Tensor, page_size: int, head_dim: int, bits: list[int], lanes: str) -> Tensor:
    """`kvfold.quant.packing.unpack` on the device of `packed`."""
    return packing.unpack(packed, page_size, head_dim, bits, _lanes(lanes))


@unpack.register_kernel("cpu")
def _(packed: Tensor, page_size: int, head_dim: int, bits: list[int], lanes: str) -> Tensor:
    codes = _unpacked_like(packed, page_size, head_dim, bits, lanes)
    cpu.unpack(packed.contiguous(), _flat_pages(codes), bytes(bits), _lanes(lanes) == "tokens")
    return codes


@unpack.register_fake
def _unpacked_like(packed: Tensor, page_size: int, head_dim: int, bits: list[int], lanes: str) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], page_size, head_dim))


@torch.library.custom_op("kvfold::unpack_levels", mutates_args=())
def unpack_levels(packed: Tensor, lut: Tensor, page_size: int, head_dim: int, bits: list[int], lanes: str) -> Tensor:
    """`kvfold.quant.packing.unpack_levels` on the device of `packed`."""
    return packing.unpack_levels(packed, lut, page_size, head_dim, bits, _lanes(lanes))


@unpack_levels.register_kernel("cpu")
def _(packed: Tensor, lut: Tensor, page_size: int, head_dim: int, bits: list[int], lanes: str) -> Tensor:
    levels = _levels_like(packed, lut, page_size, head_dim, bits, lanes)
    cpu.unpack_levels(packed.contiguous(), lut, _flat_pages(levels), bytes(bits), _lanes(lanes) == "tokens")
    return levels


@unpack_levels.register_fake
def _levels_like(packed: Tensor, lut: Tensor, page_size: int, head_dim: int, bits: list[int], lanes: str) -> Tensor:
    return lut.new_empty((*packed.shape[:-1], page_size, head_dim))


@torch.library.custom_op("kvfold::closest_affine", mutates_args=())
def closest_affine(y: Tensor, centre: Tensor, scale: Tensor, lut: Tensor, bits: list[int]) -> tuple[Tensor, Tensor]:
    """`kvfold.quant.affine.closest_affine` on the device of `y`."""
    return affine.closest_affine(y, centre, scale, lut, bits)


@closest_affine.register_kernel("cpu")
def _(y: Tensor, centre: Tensor, scale: Tensor, lut: Tensor, bits: list[int]) -> tuple[Tensor, Tensor]:
    code, chosen = _affine_like(y, centre, scale, lut, bits)
    y, centre, scale, lut = (x.contiguous() for x in (y, centre, scale, lut))
    cpu.closest_affine(INSTRUCTION_SET, y, centre, scale, lut, bytes(bits), code, chosen, torch.get_num_threads())
    return code, chosen


@closest_affine.register_fake
def _affine_like(y: Tensor, centre: Tensor, scale: Tensor, lut: Tensor, bits: list[int]) -> tuple[Tensor, Tensor]:
    code = y.new_empty(y.shape, dtype=torch.uint8)
    return code, code.new_empty(y.shape[0], y.shape[2])


def _flat_pages(codes: Tensor) -> Tensor:
    """(…, P, D) as (pages, P, D), contiguous; a view if it can be one."""
    return codes.contiguous().view(-1, *codes.shape[-2:])


def _lanes(lanes: str) -> Lanes:
    if lanes not in ("tokens", "channels"):
        raise ValueError(f"lanes = {lanes!r}: choose 'tokens' (keys) or 'channels' (values)")
    return lanes  # type: ignore[return-value]
