"""TurboQuant as published: rotate, quantise every coordinate of the unit vector, keep the norm."""

from dataclasses import dataclass

from kvfold.formats.rotated import Rotated


@dataclass(frozen=True)
class TurboQuant(Rotated):
    """Algorithm 1 ("mse"): y = Π·x/‖x‖, idx = argmin |y − c|, x̂ = ‖x‖·Πᵀ·c[idx].

    Π is a Haar rotation, c the Lloyd–Max levels of a sphere's coordinate in `head_dim` dimensions.
    No centre, and no dense window: each token folds on arrival.
    """

    summary = "TurboQuant as published: Lloyd–Max codes, Haar rotation, stored norm"
    source = "arXiv 2504.19874, Algorithm 1"
    rotation = "haar"
    rule = "raw"
    on_grid = False
