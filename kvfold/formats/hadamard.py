"""TurboQuant with a Hadamard rotation and EDEN's scale: how kvfold folds values."""

from dataclasses import dataclass

from kvfold.formats.rotated import Rotated


@dataclass(frozen=True)
class Hadamard(Rotated):
    """x̂ = s·Rᵀ·c with s = ‖x‖²/⟨Rx, c⟩, so that inner products with x̂ are unbiased over random rotations.

    Attention adds many values up. Their errors average out, but a common shrinkage does not. At 2 bits this scale
    leaves a quarter less divergence than the least-squares one, whose x̂ are closer to x, but shorter.
    """

    summary = "Lloyd–Max codes after a Hadamard rotation, unbiased scales"
    source = "arXiv 2504.19874 with the scale of EDEN (arXiv 2604.18555)"
    rotation = "hadamard"
    rule = "eden"
