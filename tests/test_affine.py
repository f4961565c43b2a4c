"""The kernel that folds pages with a centre and scale for each channel, against its truth."""

import pytest
import torch
from torch import Tensor

from kvfold.formats.page import level_table
from kvfold.kernels import ops
from kvfold.kernels.cpu import module
from kvfold.quant.affine import candidates, closest_affine, encode
from kvfold.quant.codebooks import even_flat_levels, flat_levels
from kvfold.quant.packing import Lanes, unpack
from kvfold.quant.transforms import ChannelOrder

STEPS = 8


def _tables(channels: int) -> tuple[Tensor, list[int]]:
    bits = [(6, 7, 3, 5, 1, 8, 4, 2)[group % 8] for group in range(-(-channels // 16))]
    return level_table({b: even_flat_levels(b) if b == 7 else flat_levels(b) for b in set(bits)}, tuple(bits)), bits


def _vectors(channels: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two rows of three heads."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, tokens, channels, generator=generator) + torch.randn(channels, generator=generator)
    x[0, 1] *= 1e-6  # scales as small as float16 goes
    x[1, 2, :, 5] = 0.25  # a scale of 0
    x[1, 0, 3, 2] = 40  # an outlier
    return x.to(dtype)


def _loss(pages: Tensor, code: Tensor, centre: Tensor, scale: Tensor, lut: Tensor) -> Tensor:
    levels = lut[torch.arange(pages.shape[-1]) // 16, code.long()]
    error = pages - centre.float().unsqueeze(-2) - scale.float().unsqueeze(-2) * levels
    return error.double().square().square().sum(-2)


@pytest.mark.parametrize("isa", module.instruction_sets())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("channels", "page_size", "lanes"),
    [(64, 64, "tokens"), (128, 16, "channels"), (40, 32, "tokens"), (96, 128, "tokens")],
)
def test_same_pages_as_the_truth(channels: int, page_size: int, lanes: Lanes, dtype: torch.dtype, isa: str) -> None:
    lut, bits = _tables(channels)
    x = _vectors(channels, 3 * page_size, dtype)
    order = torch.rand(2, 3, channels, generator=torch.Generator().manual_seed(1)).argsort(-1).to(torch.int16)
    packed, centre, scale = ops.fold_channelwise_on_cpu(x, order, lut, bits, STEPS, lanes, page_size, isa)
    pages = ChannelOrder(order).apply(x.float().unflatten(-2, (-1, page_size)))
    true_code, true_centre, true_scale = encode(pages, lut, bits, STEPS)
    code = unpack(packed, page_size, channels, bits, lanes)
    # Rounding may decide between candidates that are alike, and codes on an edge.
    assert ((centre == true_centre) & (scale == true_scale)).float().mean() > 0.98
    assert (code == true_code).float().mean() > 0.99
    torch.testing.assert_close(
        _loss(pages, code, centre, scale, lut), _loss(pages, true_code, true_centre, true_scale, lut), atol=0, rtol=2e-3
    )


def test_the_best_candidate_is_taken() -> None:
    lut, bits = _tables(64)
    pages = _vectors(64, 64).flatten(0, 1)
    packed, centre, scale = ops.fold_channelwise(pages, None, lut, bits, STEPS, "tokens", 64)
    code = unpack(packed, 64, 64, bits, "tokens")
    best = _loss(pages.unsqueeze(1), code, centre, scale, lut).squeeze(1)
    for centre, scale in zip(*(each.unbind(1) for each in candidates(pages, lut, bits, STEPS)), strict=True):
        code, _ = closest_affine(pages, centre.float().unsqueeze(1), scale.float().unsqueeze(1), lut, bits)
        assert (best <= _loss(pages, code, centre, scale, lut) * (1 + 2e-3) + 1e-9).all()


def test_an_operator_for_torch() -> None:
    lut, bits = _tables(64)
    order = torch.arange(63, -1, -1, dtype=torch.int16).expand(3, 64).contiguous()
    torch.library.opcheck(
        torch.ops.kvfold.fold_channelwise.default, (_vectors(64, 32), order, lut, bits, STEPS, "tokens", 16)
    )


def test_vectors_that_lie_apart_in_memory() -> None:
    lut, bits = _tables(64)
    x = _vectors(64, 32)
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (apart, x.double()):
        for one, two in zip(
            *(ops.fold_channelwise(v, None, lut, bits, STEPS, "tokens", 16) for v in (x, other)), strict=True
        ):
            assert torch.equal(one, two)


def test_wrong_shapes_are_refused() -> None:
    lut, bits = _tables(64)
    with pytest.raises(ValueError, match="bits and lut must have one entry"):
        ops.fold_channelwise(_vectors(64, 16), None, lut, bits[:-1], STEPS, "tokens", 16)
    with pytest.raises(ValueError, match="page_size = 24: give whole pages of 16"):
        ops.fold_channelwise(_vectors(64, 24), None, lut, bits, STEPS, "tokens", 24)
    with pytest.raises(ValueError, match="whole pages"):
        ops.fold_channelwise(_vectors(64, 40), None, lut, bits, STEPS, "tokens", 16)
    with pytest.raises(ValueError, match=r"order is torch.int16 of \(1,\)"):
        ops.fold_channelwise(_vectors(64, 16), torch.zeros(1, dtype=torch.int16), lut, bits, STEPS, "tokens", 16)
    with pytest.raises(ValueError, match=r"order is torch.int16 of \(4, 64\): give int16 of \(2, 3, 64\)"):
        ops.fold_channelwise(_vectors(64, 16), torch.zeros(4, 64, dtype=torch.int16), lut, bits, STEPS, "tokens", 16)
