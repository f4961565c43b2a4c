"""Rotations: orthogonal, reproducible, mixing."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from kvfold.cache.report import walk_tensors
from kvfold.quant.transforms import (
    ChannelOrder,
    HeadMatrices,
    Matrix,
    as_they_come,
    haar,
    orthogonal,
    randomised_hadamard,
    walsh_hadamard,
)

HAAR_64_0 = 0.22390910834125655
SIGNS_8_0 = [False, True, True, False, True, True, True, True]
HEAD_DIMS = [8, 40, 64, 80, 96, 128, 192, 256, 512, 576]


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("kind", ["identity", "haar", "hadamard"])
def test_orthogonal(kind: str, d: int) -> None:
    transform = orthogonal(kind, d, seed=3)
    x = torch.randn(5, d)
    torch.testing.assert_close(transform.matrix @ transform.matrix.mT, torch.eye(d), atol=5e-6, rtol=0)
    torch.testing.assert_close(transform.invert(transform.apply(x)), x, atol=1e-5, rtol=0)


def test_queries_follow_any_invertible_transform() -> None:
    """q̃·(R·x) = q·x, also when R is not orthogonal."""
    matrix = torch.randn(16, 16) + 4 * torch.eye(16)
    transform = Matrix(matrix, torch.linalg.inv(matrix))
    q, x = torch.randn(3, 16), torch.randn(7, 16)
    torch.testing.assert_close(transform.apply_to_query(q) @ transform.apply(x).mT, q @ x.mT, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_butterfly_is_the_hadamard_matrix(n: int) -> None:
    np.testing.assert_array_equal(walsh_hadamard(np.eye(n)), hadamard(n))


def test_butterfly_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="12 columns"):
        walsh_hadamard(np.eye(12))


@pytest.mark.parametrize("d", [64, 96, 256])
def test_a_hadamard_transform_holds_no_matrix(d: int) -> None:
    """D² numbers of float32 would be a third of a bit a value where three layers of 256 channels fold."""
    transform = randomised_hadamard(d, seed=1)
    power = d & -d
    mix = haar(d // power, 1) if d > power else np.eye(1)
    matrix = np.kron(mix, walsh_hadamard(np.eye(power)) / np.sqrt(power)) * transform.signs.numpy()
    np.testing.assert_allclose(transform.matrix.numpy(), matrix, atol=1e-7)
    transform.invert(transform.apply(torch.randn(3, d)))
    assert sum(t.numel() for t in walk_tensors(transform)) == d + (0 if d == power else (d // power) ** 2)


@pytest.mark.parametrize("d", [64, 80, 192])
def test_hadamard_spreads_every_coordinate_over_all(d: int) -> None:
    spread = np.abs(randomised_hadamard(d, seed=0).matrix.numpy())
    assert spread.min() > 0
    if d == 64:
        np.testing.assert_allclose(spread, 1 / 8, atol=1e-7)


def test_haar_is_uniform() -> None:
    """Mean 0 and variance 1/d of the entries; a QR without sign fix has a biased diagonal."""
    draws = np.stack([haar(16, seed) for seed in range(400)])
    assert abs(np.trace(draws, axis1=1, axis2=2).mean()) < 0.2
    np.testing.assert_allclose(draws.var(axis=0), 1 / 16, atol=0.02)


def test_seeds() -> None:
    assert np.array_equal(haar(64, 1), haar(64, 1))
    assert not np.array_equal(haar(64, 1), haar(64, 2))
    # The stream is frozen: these numbers must never change, or folded data would become unreadable.
    assert haar(64, 0)[0, 0] == pytest.approx(HAAR_64_0, abs=1e-9)
    assert (randomised_hadamard(8, 0).matrix[0] > 0).tolist() == SIGNS_8_0


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="transform = 'dct'"):
        orthogonal("dct", 64)


def test_an_order_of_channels_is_a_permutation_matrix() -> None:
    torch.manual_seed(0)
    order = torch.stack([torch.randperm(64) for _ in range(6)]).view(2, 3, 64).to(torch.int16)
    x, q = torch.randn(2, 3, 5, 16, 64), torch.randn(2, 3, 2, 7, 64)
    by_index = ChannelOrder(order)
    for row in range(2):
        for head in range(3):
            by_matrix = Matrix(torch.eye(64)[order[row, head].long()])
            assert torch.equal(by_index.apply(x)[row, head], by_matrix.apply(x[row, head]))
            assert torch.equal(by_index.apply_to_query(q)[row, head], by_matrix.apply_to_query(q[row, head]))
    assert torch.equal(by_index.invert(by_index.apply(x)), x)
    shared = ChannelOrder(order[0])
    assert torch.equal(shared.apply(x)[1], shared.apply(x[1]))
    assert torch.equal(as_they_come(64).apply(x), x)


def test_heads_have_matrices_of_their_own() -> None:
    torch.manual_seed(0)
    matrices = torch.linalg.qr(torch.randn(3, 64, 64))[0]
    x, transform = torch.randn(2, 3, 5, 16, 64), HeadMatrices(matrices)
    for head in range(3):
        alone, own = Matrix(matrices[head]), x[:, head]
        for name in ("apply", "invert", "apply_to_query"):
            torch.testing.assert_close(getattr(transform, name)(x)[:, head], getattr(alone, name)(own))
    torch.testing.assert_close(transform.invert(transform.apply(x)), x)
