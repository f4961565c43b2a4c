"""The four rules for the scale that is stored with a vector's codes."""

import pytest
import torch

from kvfold.quant.codebooks import sphere_levels
from kvfold.quant.nearest import nearest_level
from kvfold.quant.scales import SCALE_RULES

D = 128


def _unit_vectors(n: int) -> torch.Tensor:
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0))
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("rule", "bits", "variance"),
    [
        ("raw", 2, 0.115), ("raw", 3, 0.0334), ("raw", 4, 0.0094),
        ("least_squares", 2, 0.114), ("least_squares", 3, 0.0330), ("least_squares", 4, 0.0092),
        ("eden", 2, 0.130), ("eden", 3, 0.0342), ("eden", 4, 0.0093),
    ],
)  # fmt: skip
def test_variance_of_inner_products(rule: str, bits: int, variance: float) -> None:
    """d·variance of ⟨y, x̂⟩ for random unit y is d·E‖x − x̂‖²/d: the known figure of each rule."""
    x = _unit_vectors(20_000)
    _, c = nearest_level(x, torch.tensor(sphere_levels(bits, D)))
    s = SCALE_RULES[rule](x, c)
    error = (s.unsqueeze(-1) * c - x).square().sum(-1).mean().item()
    assert error == pytest.approx(variance, rel=0.03)


def test_what_each_rule_promises() -> None:
    x = _unit_vectors(1000) * 3.7
    _, c = nearest_level(x / 3.7, torch.tensor(sphere_levels(3, D)))
    folded = {name: rule(x, c).unsqueeze(-1) * c for name, rule in SCALE_RULES.items()}
    torch.testing.assert_close(SCALE_RULES["raw"](x, c), x.norm(dim=-1))
    torch.testing.assert_close(folded["matched"].norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close((folded["least_squares"] * x).sum(-1), folded["least_squares"].square().sum(-1))
    torch.testing.assert_close((folded["eden"] * x).sum(-1), x.square().sum(-1))
    best = (folded["least_squares"] - x).square().sum(-1)
    for name in SCALE_RULES:
        assert (best <= (folded[name] - x).square().sum(-1) + 1e-5).all()


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_zero_vector_gets_scale_zero(rule: str) -> None:
    _, c = nearest_level(torch.zeros(1, D), torch.tensor(sphere_levels(4, D)))
    assert SCALE_RULES[rule](torch.zeros(1, D), c).item() == 0
