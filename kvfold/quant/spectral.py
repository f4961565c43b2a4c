"""Rotations by what attention weighs, spread evenly over all coordinates (OSCAR, arXiv 2605.17757)."""

import torch
from torch import Tensor

from kvfold.quant.transforms import Hadamard, orthogonal


def spectral_rotation(moment: Tensor) -> Tensor:
    """R = (U·H·P)ᵀ of each head, for column vectors: y = R·x.

    The columns of U are the moment's eigenvectors, with eigenvalues that ascend. H is the normalised Hadamard matrix,
    without random signs, so each coordinate of y has the mean of all eigenvalues as its own second moment (about, if D
    is no power of two). P orders these coordinates by reversed bits, so that groups of neighbours get a mixture.

    Parameters
    ----------
    moment
        Second moments, (heads, D, D), symmetric: E[q·qᵀ] of queries for keys.

    Returns
    -------
    Tensor
        float32, (heads, D, D), orthogonal.
    """
    dim = moment.shape[-1]
    exact = moment.double().cpu()
    directions = torch.linalg.eigh((exact + exact.mT) / 2).eigenvectors
    rotation = (directions @ hadamard(dim).double())[..., bit_reversed(dim)].mT
    return rotation.float().contiguous().to(moment.device)


def hadamard(dim: int) -> Tensor:
    """H/√D without signs, float32, (D, D); for D = m·2^k with odd m > 1, H_{2^k} ⊗ Q_m with the Haar Q_m of `Hadamard`.

    The factors come the other way round than there. Neighbouring directions, whose eigenvalues are alike, are so dealt
    out to the m parts that Q weighs unequally.
    """
    transform = orthogonal("hadamard", dim)
    assert isinstance(transform, Hadamard)
    power = dim & -dim
    return (
        (transform.matrix * transform.signs)
        .view(dim // power, power, dim // power, power)
        .permute(1, 0, 3, 2)
        .reshape(dim, dim)
    )


def bit_reversed(dim: int) -> Tensor:
    """Which coordinate of U·H stands at each place: int64, (D,).

    The authors give place br(i) to the direction with the i-th largest eigenvalue, where br reverses the bits of a
    number below 2^k; if D is no power of two, those of at least D are left out.
    """
    width = (dim - 1).bit_length()
    reverse = [int(f"{i:0{width}b}"[::-1], 2) for i in range(2**width)]
    places = torch.tensor([i for i in reverse if i < dim])
    return torch.arange(dim - 1, -1, -1)[places.argsort()]
