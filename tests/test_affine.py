"""The kernel that finds a channel's best centre and scale, against its truth."""

import pytest
import torch
from torch import Tensor

from kvfold.formats.page import level_table
from kvfold.kernels import ops
from kvfold.kernels.cpu import module
from kvfold.quant.affine import closest_affine
from kvfold.quant.codebooks import flat_levels


def _job(channels: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    bits = [(6, 4, 3, 2, 1, 8)[group % 6] for group in range(-(-channels // 16))]
    lut = level_table({b: flat_levels(b) for b in set(bits)}, tuple(bits))
    y = torch.randn(5, tokens, channels, generator=generator)
    centre = 0.3 * torch.randn(5, 7, channels, generator=generator)
    scale = torch.rand(5, 7, channels, generator=generator) + 0.3
    scale[0, 2, 3] = 0
    y[1] *= 1e-6  # scales as small as float16 goes
    centre[1] *= 1e-6
    scale[1] = (scale[1] * 1e-6).half().float()
    return y, centre, scale, lut, bits


def _loss(job: tuple[Tensor, Tensor, Tensor, Tensor, list[int]], code: Tensor, chosen: Tensor) -> Tensor:
    y, centre, scale, lut, _ = job
    index = chosen.long().unsqueeze(1)
    levels = lut[torch.arange(y.shape[-1]) // 16, code.long()]
    error = y - centre.take_along_dim(index, 1) - scale.take_along_dim(index, 1) * levels
    return error.double().square().square().sum(1)


@pytest.mark.parametrize("isa", module.instruction_sets())
@pytest.mark.parametrize(("channels", "tokens"), [(64, 64), (128, 16), (40, 32), (8, 1), (96, 128)])
def test_same_choice_as_the_truth(channels: int, tokens: int, isa: str) -> None:
    job = _job(channels, tokens)
    y, centre, scale, lut, bits = job
    code, chosen = torch.empty(y.shape, dtype=torch.uint8), torch.empty(5, channels, dtype=torch.uint8)
    module.closest_affine(isa, y, centre, scale, lut, bytes(bits), code, chosen, 2)
    expected = closest_affine(*job)
    # Rounding may decide between candidates that are alike, and codes on an edge.
    assert (chosen == expected[1]).float().mean() > 0.99
    assert (code == expected[0]).float().mean() > 0.99
    torch.testing.assert_close(_loss(job, code, chosen), _loss(job, *expected), atol=0, rtol=1e-4)


def test_the_best_candidate_is_taken() -> None:
    job = _job(64, 64)
    y, centre, scale, lut, bits = job
    code, chosen = ops.closest_affine(y, centre, scale, lut, bits)
    best = _loss(job, code, chosen)
    for k in range(centre.shape[1]):
        one = (y, centre[:, k : k + 1], scale[:, k : k + 1], lut, bits)
        alone = _loss(one, *ops.closest_affine(*one))
        assert (best <= alone * (1 + 1e-5) + 1e-9).all()


def test_an_operator_for_torch() -> None:
    torch.library.opcheck(torch.ops.kvfold.closest_affine.default, _job(64, 16))


def test_wrong_shapes_are_refused() -> None:
    y, centre, scale, lut, bits = _job(64, 16)
    with pytest.raises(ValueError, match="centre and scale must have the shape"):
        ops.closest_affine(y, centre[:, :, :48], scale, lut, bits)
    with pytest.raises(ValueError, match="bits and lut must have one entry"):
        ops.closest_affine(y, centre, scale, lut, bits[:-1])
