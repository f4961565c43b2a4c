"""Kernels as torch operators: traced by torch.compile, chosen by the device of their tensors.

On a CPU all run in C++. On a GPU those that fold run in Triton. Otherwise the torch reference in `kvfold.quant` runs.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.kernels.arguments import check_channelwise, check_dim, heads_of, order_of_heads
from kvfold.kernels.cpu import module as cpu
from kvfold.quant import affine, packing, rotated
from kvfold.quant.packing import Lanes
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.scales import SCALE_RULES
from kvfold.quant.transforms import ChannelOrder, Hadamard, Matrix, Transform

INSTRUCTION_SET: str = cpu.instruction_sets()[0]

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Dtypes that kernels read, each with its number in C++."""


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


@torch.library.custom_op("kvfold::fold_channelwise", mutates_args=())
def fold_channelwise(
    x: Tensor, order: Tensor | None, lut: Tensor, bits: list[int], steps: int, lanes: str, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Whole pages of tokens (…, T, D): packed codes (…, N, bytes), and centres and scales (…, N, D).

    Channels are put into the order `order` (None: unchanged), then coded by `kvfold.quant.affine.encode` and packed by
    `kvfold.quant.packing.pack`.
    """
    check_channelwise(x, order, lut, bits, steps, page_size)
    pages = x.float().unflatten(-2, (-1, page_size))
    if order is not None:
        pages = ChannelOrder(order).apply(pages)
    code, centre, scale = affine.encode(pages, lut, bits, steps)
    return packing.pack(code, bits, _lanes(lanes)), centre, scale


@fold_channelwise.register_kernel("cpu")
def fold_channelwise_on_cpu(
    x: Tensor, order: Tensor | None, lut: Tensor, bits: list[int], steps: int, lanes: str, page_size: int,
    instruction_set: str = INSTRUCTION_SET,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`fold_channelwise` in C++, by one of `kvfold.attention.cpu.INSTRUCTION_SETS`."""
    code, centre, scale = _channelwise_like(x, order, lut, bits, steps, lanes, page_size)
    flat = heads_of(x if x.dtype in DTYPES else x.float())
    by_row, by_head, by_token, _ = flat.stride()
    order, order_row, order_head = order_of_heads(order, flat)
    shape = (*flat.shape[:2], flat.shape[2] // page_size, flat.shape[3])
    cpu.fold_channelwise(
        instruction_set, flat.data_ptr(), DTYPES[flat.dtype], by_row, by_head, by_token, page_size,
        0 if order is None else order.data_ptr(), order_row, order_head, lut.contiguous(), bytes(bits), steps,
        _lanes(lanes) == "tokens", code.view(-1), centre.view(torch.uint16).view(shape),
        scale.view(torch.uint16).view(shape), torch.get_num_threads(),
    )  # fmt: skip
    return code, centre, scale


@fold_channelwise.register_fake
def _channelwise_like(
    x: Tensor, order: Tensor | None, lut: Tensor, bits: list[int], steps: int, lanes: str, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_channelwise(x, order, lut, bits, steps, page_size)
    lead = (*x.shape[:-2], x.shape[-2] // page_size)
    centre = x.new_empty((*lead, x.shape[-1]), dtype=torch.float16)
    code = x.new_empty((*lead, packing.code_bytes(page_size, bits)), dtype=torch.uint8)
    return code, centre, torch.empty_like(centre)


@torch.library.custom_op("kvfold::fold_rotated", mutates_args=())
def fold_rotated(
    x: Tensor, rotation: Tensor, mix: Tensor | None, levels: Tensor, rule: str, centred: bool, lanes: str,
    page_size: int, slot: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Tokens (…, T, D) as pages: packed codes (…, N, bytes), scales (…, N, P), and centres (…, N, D) or nothing.

    Coded by `kvfold.quant.rotated.encode`, packed by `kvfold.quant.packing.pack`. Tokens begin at `slot` of the first
    page; slots without a token have code 0 and scale 0. `rotation` and `mix` are `parts_of` a transform.
    """
    check_dim(x, rotation.shape[-1])
    how = RotatedCode(of_parts(rotation, mix), levels.to(x.device), rule, centred)
    after = -(slot + x.shape[-2]) % page_size
    if centred:
        code, scale, centre = rotated.encode(x.float().unflatten(-2, (-1, page_size)), how)
    else:
        code, scale, centre = rotated.encode(x.float(), how)
        code = pad(code, (0, 0, slot, after)).unflatten(-2, (-1, page_size))
        scale = pad(scale, (slot, after)).unflatten(-1, (-1, page_size))
    bits = [how.bits] * (packing.padded(code.shape[-1]) // packing.TILE)
    return packing.pack(code, bits, _lanes(lanes)), scale, scale.new_empty(0) if centre is None else centre


@fold_rotated.register_kernel("cpu")
def fold_rotated_on_cpu(
    x: Tensor, rotation: Tensor, mix: Tensor | None, levels: Tensor, rule: str, centred: bool, lanes: str,
    page_size: int, slot: int, instruction_set: str = INSTRUCTION_SET,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`fold_rotated` in C++, by one of `kvfold.attention.cpu.INSTRUCTION_SETS`."""
    check_dim(x, rotation.shape[-1])
    code, scale, centre = _folded_like(x, rotation, mix, levels, rule, centred, lanes, page_size, slot)
    tokens = x.shape[-2]
    flat = heads_of(x if x.dtype in DTYPES else x.float())
    shape = (*flat.shape[:2], code.shape[-2], page_size)
    cpu.fold(
        instruction_set, flat.data_ptr(), DTYPES[flat.dtype], flat.stride(0), flat.stride(1), flat.stride(2), tokens,
        slot, _rotation(rotation, mix), levels.contiguous(), list(SCALE_RULES).index(rule),
        _lanes(lanes) == "tokens", code.view(-1), scale.view(torch.uint16).view(shape),
        centre.view(torch.uint16) if centred else None, torch.get_num_threads(),
    )  # fmt: skip
    return code, scale, centre


@fold_rotated.register_fake
def _folded_like(
    x: Tensor, rotation: Tensor, mix: Tensor | None, levels: Tensor, rule: str, centred: bool, lanes: str,
    page_size: int, slot: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    pages, code_dim = -(-(slot + x.shape[-2]) // page_size), rotation.shape[0]
    bits = [(levels.shape[0] - 1).bit_length()] * (packing.padded(code_dim) // packing.TILE)
    lead = (*x.shape[:-2], pages)
    code = x.new_empty((*lead, packing.code_bytes(page_size, bits)), dtype=torch.uint8)
    scale = x.new_empty((*lead, page_size), dtype=torch.float16)
    return code, scale, x.new_empty((*lead, code_dim) if centred else 0, dtype=torch.float16)


def parts_of(transform: Transform) -> tuple[Tensor, Tensor | None]:
    """A transform as an operator takes it: R, or the signs of a Hadamard transform and its Q."""
    return (transform.signs, transform.mix) if isinstance(transform, Hadamard) else (transform.matrix, None)


def of_parts(rotation: Tensor, mix: Tensor | None) -> Transform:
    """The transform whose `parts_of` these are."""
    return Hadamard(rotation, mix) if rotation.ndim == 1 else Matrix(rotation)


def _rotation(rotation: Tensor, mix: Tensor | None) -> cpu.Rotation:
    if rotation.ndim == 1:
        return cpu.Rotation.hadamard(len(rotation), rotation.data_ptr(), 0 if mix is None else mix.data_ptr())
    return cpu.Rotation.matrix(rotation.shape[1], rotation.shape[0], rotation.data_ptr(), 0)


def _flat_pages(codes: Tensor) -> Tensor:
    """(…, P, D) as (pages, P, D), contiguous; a view if it can be one."""
    return codes.contiguous().view(-1, *codes.shape[-2:])


def _lanes(lanes: str) -> Lanes:
    if lanes not in ("tokens", "channels"):
        raise ValueError(f"lanes = {lanes!r}: choose 'tokens' (keys) or 'channels' (values)")
    return lanes  # type: ignore[return-value]


if find_spec("triton") is not None:
    GPUS = ("cuda", "xpu")  # "cuda" is AMD's name too

    @pack.register_kernel(GPUS)
    def _(codes: Tensor, bits: list[int], lanes: str) -> Tensor:
        from kvfold.kernels.triton import fold

        return fold.pack(codes, bits, _lanes(lanes))

    @fold_channelwise.register_kernel(GPUS)
    def _(
        x: Tensor, order: Tensor | None, lut: Tensor, bits: list[int], steps: int, lanes: str, page_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        from kvfold.kernels.triton import fold

        return fold.fold_channelwise(x, order, lut, bits, steps, _lanes(lanes), page_size)

    @fold_rotated.register_kernel(GPUS)
    def _(
        x: Tensor, rotation: Tensor, mix: Tensor | None, levels: Tensor, rule: str, centred: bool, lanes: str,
        page_size: int, slot: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from kvfold.kernels.triton import fold

        how = RotatedCode(of_parts(rotation, mix), levels, rule, centred)
        return fold.fold_rotated(x, how, _lanes(lanes), page_size, slot)
