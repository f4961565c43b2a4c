"""Lloyd–Max codebooks against published and independently computed values."""

import numpy as np
import pytest
from scipy.integrate import quad

from kvfold.quant.codebooks import (
    distortion,
    even_flat_levels,
    flat_levels,
    gaussian,
    gaussian_levels,
    generalised_gaussian,
    lloyd_max,
    on_grid,
    sphere_coordinate,
    sphere_levels,
)

GAUSSIAN = {
    2: [0.45278, 1.51042],
    3: [0.24509, 0.75601, 1.34391, 2.15195],
    4: [0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259],
}
SPHERE = {
    (3, 64): [0.030469, 0.093832, 0.166168, 0.263914],
    (4, 64): [0.015919, 0.048090, 0.081312, 0.116487, 0.154926, 0.198856, 0.252914, 0.330796],
    (1, 128): [0.070662],
    (2, 128): [0.039992, 0.133042],
    (3, 128): [0.021604, 0.066586, 0.118140, 0.188397],
    (4, 128): [0.011302, 0.034152, 0.057772, 0.082828, 0.110288, 0.141805, 0.180836, 0.237664],
    (3, 256): [0.015297, 0.047167, 0.083765, 0.133854],
    (4, 256): [0.008008, 0.024201, 0.040949, 0.058732, 0.078249, 0.100698, 0.128588, 0.169410],
}
DISTORTION_128 = [0.360889, 0.116000, 0.033966, 0.009315, 0.002451]
DISTORTION_GAUSSIAN = [0.363380, 0.117482, 0.034548, 0.009501, 0.002505]


@pytest.mark.parametrize("bits", GAUSSIAN)
def test_gaussian_levels_are_the_published_ones(bits: int) -> None:
    np.testing.assert_allclose(gaussian_levels(bits)[2 ** (bits - 1) :], GAUSSIAN[bits], atol=6e-6)


@pytest.mark.parametrize(("bits", "d"), SPHERE)
def test_sphere_levels_are_the_published_ones(bits: int, d: int) -> None:
    np.testing.assert_allclose(sphere_levels(bits, d)[2 ** (bits - 1) :], SPHERE[bits, d], atol=6e-7)


@pytest.mark.parametrize("bits", range(1, 6))
def test_distortion(bits: int) -> None:
    assert 128 * distortion(sphere_coordinate(128), np.array(sphere_levels(bits, 128))) == pytest.approx(
        DISTORTION_128[bits - 1], abs=6e-7
    )
    assert distortion(gaussian(), np.array(gaussian_levels(bits))) == pytest.approx(
        DISTORTION_GAUSSIAN[bits - 1], abs=6e-7
    )


@pytest.mark.parametrize("d", [8, 64, 80, 512])
@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_centroids_of_their_cells(bits: int, d: int) -> None:
    """Both Lloyd–Max conditions, checked by numerical integration."""
    density, levels = sphere_coordinate(d), np.array(sphere_levels(bits, d))
    assert (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])
    edges = np.concatenate(([-1.0], 0.5 * (levels[1:] + levels[:-1]), [1.0]))
    for i in {0, len(levels) // 2, len(levels) - 1}:
        mass = quad(density.pdf, edges[i], edges[i + 1])[0]
        moment = quad(lambda x: x * density.pdf(x), edges[i], edges[i + 1])[0]
        assert moment / mass == pytest.approx(levels[i], rel=1e-6)


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits = {bits}"):
        lloyd_max(gaussian(), bits)


def test_too_few_dimensions() -> None:
    with pytest.raises(ValueError, match="d = 2"):
        sphere_coordinate(2)


def test_generalised_gaussian() -> None:
    """Shape 2 is the Gaussian; the moments of shape 3 are what numerical integration says."""
    np.testing.assert_allclose(lloyd_max(generalised_gaussian(2.0), 4), gaussian_levels(4), atol=1e-9)
    density = generalised_gaussian(3.0)
    for x in (-1.3, -0.2, 0.0, 0.7, 2.5):
        for order, moment in enumerate((density.cdf, density.first_moment, density.second_moment)):
            expected = quad(lambda t, order=order: t**order * density.pdf(t), -10, x)[0]
            assert moment(np.array(x)) == pytest.approx(expected, abs=1e-9)
    assert density.second_moment(np.array(np.inf)) == pytest.approx(1)


@pytest.mark.parametrize("bits", range(1, 7))
def test_levels_on_a_grid_of_eight_bits(bits: int) -> None:
    cost = {5: 0.02, 6: 0.07}.get(bits, 0.003)
    for density, levels in (
        (generalised_gaussian(3.0), flat_levels(bits)),
        (sphere_coordinate(64), sphere_levels(bits, 64)),
    ):
        rounded = np.array(on_grid(levels))
        steps = rounded / rounded[-1] * 127
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)
        assert distortion(density, rounded) < (1 + cost) * distortion(density, np.array(levels))
    assert on_grid(flat_levels(7)) == flat_levels(7)


@pytest.mark.parametrize("bits", [1, 4, 7])
def test_even_levels_are_the_best_of_their_kind(bits: int) -> None:
    density, levels = generalised_gaussian(3.0), np.array(even_flat_levels(bits))
    np.testing.assert_allclose(np.diff(levels), levels[1] - levels[0], rtol=1e-9)
    np.testing.assert_allclose(levels, -levels[::-1])
    own, best = distortion(density, levels), distortion(density, np.array(flat_levels(bits)))
    assert all(own < distortion(density, by * levels) for by in (0.97, 1.03))
    assert best <= own * (1 + 1e-9) < 1.5 * best


@pytest.mark.parametrize("bits", range(1, 9))
def test_flat_levels_are_centroids_of_their_cells(bits: int) -> None:
    density, levels = generalised_gaussian(3.0), np.array(flat_levels(bits))
    np.testing.assert_array_equal(levels, -levels[::-1])
    assert np.abs(levels[-1]) < gaussian_levels(bits)[-1] or bits == 1
    edges = np.concatenate(([-10.0], 0.5 * (levels[1:] + levels[:-1]), [10.0]))
    for i in {0, len(levels) // 2, len(levels) - 1}:
        mass = quad(density.pdf, edges[i], edges[i + 1])[0]
        moment = quad(lambda x: x * density.pdf(x), edges[i], edges[i + 1])[0]
        assert moment / mass == pytest.approx(levels[i], rel=1e-6)
