"""Statistics as a calibration has them, of random numbers, for formats that need them to fold."""

import torch

from kvfold.formats import KeyStatistics
from kvfold.quant.spectral import spectral_rotation


def measured(kv_heads: int, key_dim: int, value_dim: int | None = None, seed: int = 0) -> KeyStatistics:
    """Statistics of channels that differ, with rotations that differ from head to head."""
    generator = torch.Generator().manual_seed(seed)

    def rotation(dim: int) -> torch.Tensor:
        some = torch.randn(kv_heads, 2 * dim, dim, generator=generator) * torch.logspace(-1, 1, dim)
        return spectral_rotation(some.mT @ some)

    energy, variance = torch.rand(2, kv_heads, key_dim, generator=generator)
    return KeyStatistics(energy, variance, energy + 1, rotation(key_dim), rotation(value_dim or key_dim))
