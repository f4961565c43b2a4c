"""Which scale to store with a vector's codes.

A folded vector reads as x̂ = s·c, with c the levels that its codes name. The codes are chosen for the
unit vector; the scale s is then free, and each rule below optimises something else. At d = 128 and 4 bits, d times the
variance of ⟨y, x̂⟩, for a random unit vector y, is .0094 with raw, .0092 with least_squares and .0093 with eden.
"""

from collections.abc import Callable

from torch import Tensor


def raw(x: Tensor, c: Tensor) -> Tensor:
    """s = ‖x‖: the paper's rule (arXiv 2504.19874, Algorithm 1)."""
    return _norm(x)


def matched(x: Tensor, c: Tensor) -> Tensor:
    """s = ‖x‖/‖c‖: x̂ gets exactly the norm of x ("norm correction")."""
    return _ratio(_norm(x), _norm(c))


def least_squares(x: Tensor, c: Tensor) -> Tensor:
    """s = ⟨x, c⟩/‖c‖²: the smallest ‖x − x̂‖."""
    return _ratio((x * c).sum(-1), c.square().sum(-1))


def eden(x: Tensor, c: Tensor) -> Tensor:
    """s = ‖x‖²/⟨x, c⟩: unbiased inner products over random rotations (EDEN; arXiv 2604.18555)."""
    return _ratio(x.square().sum(-1), (x * c).sum(-1))


SCALE_RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    rule.__name__: rule for rule in (raw, matched, least_squares, eden)
}
"""Rules by name: (x, c), each (…, D), to s (…); the zero vector gets s = 0."""


def _norm(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator / denominator).where((numerator != 0) & (denominator != 0), 0)
