"""The fold kernel against its truth in torch."""

import pytest
import torch
from torch import Tensor

from kvfold.attention.cpu import INSTRUCTION_SETS
from kvfold.formats.rotated import Rotated
from kvfold.kernels import ops
from kvfold.quant import packing, rotated, scales
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.transforms import Matrix, orthogonal

P = 32


def _fold(
    x: Tensor, how: RotatedCode, lanes: str, slot: int = 0, isa: str = INSTRUCTION_SETS[0]
) -> tuple[Tensor, Tensor, Tensor]:
    rotation, mix = ops.parts_of(how.transform)
    return ops.fold_rotated_on_cpu(x, rotation, mix, how.levels, how.rule, how.centred, lanes, P, slot, isa)


def _levels(bits: int) -> Tensor:
    return torch.linspace(-0.4, 0.4, 2**bits)


by_instruction_set = pytest.mark.parametrize("isa", INSTRUCTION_SETS)


@by_instruction_set
@pytest.mark.parametrize("kind", ["haar", "hadamard"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128, 256, 512, 1024])
@pytest.mark.parametrize("lanes", ["tokens", "channels"])
def test_codes_and_scales(head_dim: int, kind: str, lanes: str, isa: str) -> None:
    """Up to rounding: a code may differ where a coordinate lies between two levels to the last digits."""
    x = torch.randn(2, 3, 2 * P, head_dim, generator=torch.Generator().manual_seed(head_dim))
    for bits, rule, centred in ((4, "eden", False), (3, "matched", True), (2, "raw", False), (1, "least_squares", True),
                                (8, "raw", True), (5, "eden", False)):  # fmt: skip
        how = RotatedCode(orthogonal(kind, head_dim), _levels(bits), rule, centred)
        packed, scale, centre = _fold(x, how, lanes, isa=isa)
        code, expected_scale, expected_centre = rotated.encode(x.unflatten(2, (-1, P)), how)
        got = packing.unpack(packed, P, head_dim, [bits] * (packing.padded(head_dim) // 16), lanes)
        assert (got != code).float().mean() < 2e-4 * bits
        assert (got.int() - code.int()).abs().max() <= 1
        # Another code is another token's scale: each is held to that of its own codes.
        y = how.transform.apply(x.unflatten(2, (-1, P)))
        y = y - expected_centre.float().unsqueeze(-2) if expected_centre is not None else y
        own_scale = scales.SCALE_RULES[rule](y, how.levels[got.long()]).half()
        same = (got == code).all(-1)
        torch.testing.assert_close(own_scale[same], expected_scale[same], rtol=0, atol=0)
        torch.testing.assert_close(scale, own_scale, rtol=2e-3, atol=1e-3)
        assert (scale != expected_scale).float().mean() < 0.02
        if centred:
            torch.testing.assert_close(centre, expected_centre, rtol=1e-3, atol=1e-6)


@by_instruction_set
def test_any_stride_and_dtype(isa: str) -> None:
    """Views are read as they are."""
    how = RotatedCode(orthogonal("hadamard", 64), _levels(4), "eden")
    x = torch.randn(2, 50, 3, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        view = x.to(dtype).transpose(1, 2)[:, :, 3 : 3 + P]
        for got, expected in zip(
            _fold(view, how, "tokens", isa=isa),
            _fold(view.float().contiguous(), how, "tokens", isa=isa),
            strict=True,
        ):
            assert torch.equal(got, expected)
    for lead in ((), (5,), (2, 1, 3)):
        many = torch.randn(*lead, P, 64)
        code, scale, _ = _fold(many, how, "channels", isa=isa)
        assert scale.shape == (*lead, 1, P)
        together, _, _ = _fold(many.reshape(1, -1, P, 64), how, "channels", isa=isa)
        assert torch.equal(code.flatten(), together.flatten())


@by_instruction_set
@pytest.mark.parametrize("slot", [0, 5, 31])
def test_slots_without_a_token_are_empty(slot: int, isa: str) -> None:
    how = RotatedCode(orthogonal("haar", 64), _levels(3), "raw")
    x = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(slot)) + 3
    packed, scale, _ = _fold(x, how, "channels", slot, isa)
    code = packing.unpack(packed, P, 64, [3] * 4, "channels").flatten(2, 3)
    scale = scale.flatten(2)
    assert code.shape[2] == -(-(slot + 40) // P) * P
    own = slice(slot, slot + 40)
    expected, expected_scale, _ = rotated.encode(x, how)
    assert (code[:, :, own] != expected).float().mean() < 1e-3
    torch.testing.assert_close(scale[:, :, own], expected_scale, rtol=2e-3, atol=0)
    code[:, :, own] = scale[:, :, own] = 0
    assert not code.any()
    assert not scale.any()


@by_instruction_set
@pytest.mark.parametrize("rule", scales.SCALE_RULES)
def test_zero_vectors(rule: str, isa: str) -> None:
    how = RotatedCode(orthogonal("hadamard", 64), _levels(4), rule)
    _, scale, _ = _fold(torch.zeros(1, 1, P, 64), how, "tokens", isa=isa)
    assert not scale.any()


@pytest.mark.parametrize("centred", [False, True])
def test_the_body_for_other_devices(centred: bool) -> None:
    """What runs where there is no kernel folds the same pages."""
    how = RotatedCode(orthogonal("hadamard", 64), _levels(4), "eden", centred)
    x = torch.randn(2, 3, 2 * P, 64, generator=torch.Generator().manual_seed(0))
    for slot in (0,) if centred else (0, 7):
        arguments = (x, *ops.parts_of(how.transform), how.levels, how.rule, centred, "tokens", P, slot)
        for got, expected in zip(ops.fold_rotated._init_fn(*arguments), _fold(x, how, "tokens", slot), strict=True):
            assert got.shape == expected.shape
            assert (got != expected).sum() <= 0.01 * got.numel()


@pytest.mark.parametrize("centred", [False, True])
def test_fake_tensors(centred: bool) -> None:
    how = RotatedCode(Matrix(orthogonal("haar", 64).matrix), _levels(4), "eden", centred)
    x = torch.randn(2, 3, 2 * P, 64)
    torch.library.opcheck(
        ops.fold_rotated, (x, *ops.parts_of(how.transform), how.levels, "eden", centred, "tokens", P, 0)
    )


def test_bad_shapes_are_refused() -> None:
    how = RotatedCode(orthogonal("haar", 64), torch.zeros(5), "raw")
    with pytest.raises(ValueError, match="levels must be 2 to 256"):
        _fold(torch.zeros(1, 1, P, 64), how, "tokens")
    with pytest.raises(ValueError, match="pages with a centre must be whole"):
        _fold(torch.zeros(1, 1, P + 1, 64), RotatedCode(orthogonal("haar", 64), _levels(2), "raw", True), "tokens")
    for kind in ("haar", "hadamard"):
        how = RotatedCode(orthogonal(kind, 64), _levels(2), "raw")
        with pytest.raises(ValueError, match="x has vectors of 128 coordinates, the rotation takes 64"):
            _fold(torch.zeros(1, 1, P, 128), how, "tokens")
    assert _fold(torch.zeros(0, 2, P, 64), how, "tokens")[0].shape == (0, 2, 1, P * 16)


def test_all_families_that_rotate_fold_by_it() -> None:
    assert {cls.__name__ for cls in Rotated.__subclasses__()} == {"TurboQuant", "Hadamard", "Centred"}
