"""Dense numbers into a cache's storage: the CPU kernel against torch."""

import pytest
import torch

from kvfold.attention.cpu import INSTRUCTION_SETS
from kvfold.kernels.cpu.copy import copy_finite

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("from_dtype", DTYPES)
@pytest.mark.parametrize("to_dtype", [*DTYPES, torch.float64])
def test_rounds_as_torch_does(from_dtype: torch.dtype, to_dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for batch, heads, tokens, dim in ((1, 3, 1, 64), (2, 2, 5, 40), (1, 1, 0, 16), (3, 1, 2, 7)):
        x = torch.randn(batch, tokens, heads, dim, generator=generator).to(from_dtype).transpose(1, 2)
        x *= torch.logspace(-9, 4, dim).to(from_dtype)  # down to float16's subnormal numbers, and below them
        target = torch.full((batch, heads, tokens + 4, dim), 7.0, dtype=to_dtype)
        expected = target.clone()
        expected[:, :, 3 : 3 + tokens] = x
        assert copy_finite([x], [target], 3, isa)
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    every_other = torch.randn(1, 2, 3, 128, generator=generator).to(from_dtype)[..., ::2]
    target = torch.empty(1, 2, 3, 64, dtype=to_dtype)
    assert copy_finite([every_other], [target], instruction_set=isa)
    assert torch.equal(target, every_other.to(to_dtype))


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("to_dtype", DTYPES)
def test_says_what_is_not_finite_there(to_dtype: torch.dtype, isa: str) -> None:
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf"), 3.4e38):
        for channel in (0, 21, 39):
            x = torch.ones(2, 2, 3, 40)
            x[1, 0, 2, channel] = bad
            target = torch.zeros(2, 2, 3, 40, dtype=to_dtype)
            assert copy_finite([x], [target], instruction_set=isa) == bool(x.to(to_dtype).isfinite().all())
            torch.testing.assert_close(target, x.to(to_dtype), equal_nan=True, rtol=0, atol=0)
