"""Invertible transforms R of a head's coordinates.

A rotation spreads a vector's energy evenly over its coordinates, which then all follow one known
density, so that one codebook fits every head of every model (TurboQuant, arXiv 2504.19874, §3).
Random numbers come from NumPy's frozen MT19937 stream: the same seed gives the same matrix on every
machine and in every release.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.quant.tables import on


class Transform(ABC):
    """x ↦ R·x for row vectors, the map back, and what it does to queries; R is float32, (code_dim, D).

    Without a residual, code_dim is D and the map back is R⁻¹. A residual adds rows to R for its own channels. The map
    back, (D, code_dim), then adds up what codes and signs stand for. It is no inverse, but is still written R⁻¹.
    """

    general_inverse: Tensor | None = None
    """The map back, (D, code_dim); None if R is orthogonal, as the map back is R transposed then."""

    @property
    def matrix(self) -> Tensor:
        """R in a CPU's memory."""
        return self.matrix_on(torch.device("cpu"))

    @property
    def inverse(self) -> Tensor:
        """The map back, written R⁻¹: float32, (D, code_dim)."""
        return self.matrix.mT if self.general_inverse is None else self.general_inverse

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds."""

    @abstractmethod
    def matrix_on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """R on a device, in a dtype."""

    def apply(self, x: Tensor) -> Tensor:
        """R·x for every row of `x` (…, D)."""
        return x @ self.matrix_on(x.device, x.dtype).mT

    def invert(self, y: Tensor) -> Tensor:
        """R⁻¹·y for every row of `y` (…, code_dim)."""
        if self.general_inverse is None:
            return y @ self.matrix_on(y.device, y.dtype)
        return y @ on(y.device, self.general_inverse, y.dtype).mT

    def apply_to_query(self, q: Tensor) -> Tensor:
        """q̃ = R⁻ᵀ·q for every row of `q` (…, D), so that q̃·y = q·(R⁻¹·y) for coordinates y (…, code_dim)."""
        if self.general_inverse is None:
            return q @ self.matrix_on(q.device, q.dtype).mT
        return q @ on(q.device, self.general_inverse, q.dtype)


@dataclass(frozen=True, eq=False)
class Matrix(Transform):
    """Any R, held."""

    held: Tensor
    general_inverse: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("held", "general_inverse"):  # kernels read them by address
            own = getattr(self, name)
            object.__setattr__(self, name, None if own is None else own.contiguous())

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.held,) if self.general_inverse is None else (self.held, self.general_inverse)

    def matrix_on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        return on(device, self.held, dtype)


@dataclass(frozen=True, eq=False)
class Hadamard(Transform):
    """(Q ⊗ H/√2^k)·diag(signs). CPU kernels compute it by butterflies, so nothing holds its D² numbers there."""

    signs: Tensor
    """±1, float32, (D,)."""
    mix: Tensor | None = None
    """Q, (m, m), float32, for D = m·2^k with odd m; None for m = 1."""

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.signs,) if self.mix is None else (self.signs, self.mix)

    def matrix_on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        if device.type == "cpu":  # only the reference asks for it there, which is slow anyway
            return self._expanded().to(dtype)
        return on(device, self.signs, dtype, self._expanded)

    def _expanded(self) -> Tensor:
        """R, float32, (D, D)."""
        power, h = len(self.signs) & -len(self.signs), torch.ones(1, 1, dtype=torch.float64)
        while len(h) < power:  # H_2n = [[H_n, H_n], [H_n, -H_n]]
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
        h /= sqrt(power)
        return ((h if self.mix is None else torch.kron(self.mix.double(), h)) * self.signs).float()


@dataclass(frozen=True, eq=False)
class ChannelOrder:
    """A permutation of each head's channels, with the interface of `Transform`, for vectors (…, heads, n, m, D)."""

    order: Tensor
    """order[…, i] is the channel that comes i-th: int16, (D,), (heads, D) or (batch, heads, D)."""

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.order,)

    def apply(self, x: Tensor) -> Tensor:
        return x.gather(-1, self._index(x).expand(x.shape))

    def invert(self, y: Tensor) -> Tensor:
        return y.gather(-1, self._index(y).argsort(-1).expand(y.shape))

    def apply_to_query(self, q: Tensor) -> Tensor:
        return self.apply(q)  # a permutation is orthogonal

    def _index(self, x: Tensor) -> Tensor:
        index = on(x.device, self.order).long()[..., None, None, :]
        return index[(None,) * (x.ndim - index.ndim)]


@dataclass(frozen=True, eq=False)
class OrderedMatrix:
    """A permutation of each head's channels, then an orthogonal matrix that heads share; interface of `Transform`."""

    order: ChannelOrder
    matrix: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.order.tensors(), self.matrix)

    def apply(self, x: Tensor) -> Tensor:
        return self.order.apply(x) @ on(x.device, self.matrix, x.dtype).mT

    def invert(self, y: Tensor) -> Tensor:
        return self.order.invert(y @ on(y.device, self.matrix, y.dtype))

    def apply_to_query(self, q: Tensor) -> Tensor:
        return self.apply(q)  # R is orthogonal


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """An orthogonal matrix for each head, with the interface of `Transform`, for vectors (…, heads, n, m, D)."""

    matrix: Tensor
    """float32, (heads, D, D)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", self.matrix.contiguous())  # kernels read it by address

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.matrix,)

    def apply(self, x: Tensor) -> Tensor:
        return self._times(x, on(x.device, self.matrix, x.dtype).mT)

    def invert(self, y: Tensor) -> Tensor:
        return self._times(y, on(y.device, self.matrix, y.dtype))

    def apply_to_query(self, q: Tensor) -> Tensor:
        return self.apply(q)  # R is orthogonal

    @staticmethod
    def _times(x: Tensor, matrices: Tensor) -> Tensor:
        """x · M for every head's rows, as one product a head: a broadcast one would copy M for each n."""
        return (x.flatten(-3, -2) @ matrices).unflatten(-2, x.shape[-3:-1])


AnyTransform = Transform | ChannelOrder | OrderedMatrix | HeadMatrices


@lru_cache(maxsize=256)
def as_they_come(d: int) -> ChannelOrder:
    """The order that changes nothing."""
    return ChannelOrder(torch.arange(d, dtype=torch.int16))


def haar(d: int, seed: int) -> NDArray[np.float64]:
    """A rotation drawn uniformly: the Q of a Gaussian matrix, its columns signed by diag(R).

    Without the signs, QR's own convention would bias the draw (Mezzadri, math-ph/0609050).
    """
    gaussian = np.random.RandomState(seed).standard_normal((d, d))
    q, r = np.linalg.qr(gaussian)
    return np.asarray(q * np.sign(np.diag(r)))


def walsh_hadamard(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Unnormalised Walsh–Hadamard transform of the rows of `x` (…, 2^k), by butterflies."""
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"x has {n} columns: the butterfly needs a power of two")
    half = 1
    while half < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        half *= 2
    return x


def randomised_hadamard(d: int, seed: int) -> Hadamard:
    """H·diag(±1)/√d; for d = m·2^k with odd m > 1, (Q_m ⊗ H_{2^k})·diag(±1) with Haar Q_m.

    The Kronecker factor mixes the m blocks, so every output coordinate sees every input coordinate
    for head dimensions such as 80, 96 or 192 too.
    """
    odd = d // (d & -d)
    mix = haar(odd, seed) if odd > 1 else None
    signs = np.random.RandomState(seed).randint(0, 2, d) * 2.0 - 1.0
    return Hadamard(torch.from_numpy(signs).float(), None if mix is None else torch.from_numpy(mix).float())


_BUILDERS: dict[str, Callable[[int, int], Transform]] = {
    "identity": lambda d, seed: Matrix(torch.eye(d)),
    "haar": lambda d, seed: Matrix(torch.from_numpy(haar(d, seed)).float()),
    "hadamard": randomised_hadamard,
}


@lru_cache(maxsize=256)
def orthogonal(kind: str, d: int, seed: int = 0) -> Transform:
    """The orthogonal transform `kind` ("identity", "haar", "hadamard") of `d` coordinates.

    Cached: all layers share one object for each (kind, d, seed).
    """
    if kind not in _BUILDERS:
        raise ValueError(f"transform = {kind!r}: choose one of {', '.join(sorted(_BUILDERS))}")
    return _BUILDERS[kind](d, seed)
