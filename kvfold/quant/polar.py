"""Keys before RoPE, quantised as radii and angles (AMX3 and TBQX3 of the TBQ fork).

RoPE turns the pair k_f = k[f] + i·k[f + D/2] by θ = position·ω_f. Turned back, k_f = r·e^{iφ} does not depend on the
position any more.
"""

from dataclasses import dataclass
from math import log, pi, sqrt

import torch
from torch import Tensor

RADII = (0.3399, 0.6422, 0.8651, 1.0730, 1.2869, 1.5277, 1.8371, 2.4546)
"""Levels of |k_f|/σ: equally probable ones instead of Lloyd–Max's. The block format fixes them."""
RADIUS_BITS = 3
SMALLEST = 1 / 1024
"""Least σ."""
REACH = 2
"""How many radii and angles the search tries to either side."""
PENALTY = 0.7
"""Weight of the squared error in the search's target."""


def default_frequencies(dim: int, base: float) -> tuple[float, ...]:
    """ω_f = base^(−2f/D) for f < D/2."""
    return tuple(base ** (-2 * f / dim) for f in range(dim // 2))


def turn(pairs: Tensor, positions: Tensor, frequencies: tuple[float, ...], back: bool = False) -> Tensor:
    """Pairs (…, T, D/2), complex, turned by the angles of `positions` (…, T), or back."""
    omega = torch.tensor(frequencies, dtype=torch.float64, device=pairs.device)
    angle = positions.double().unsqueeze(-1) * omega
    turned = torch.polar(torch.ones_like(angle), -angle if back else angle)
    return pairs * turned.to(pairs.dtype)


def to_pairs(x: Tensor) -> Tensor:
    """k[f] + i·k[f + D/2]: complex64, (…, D/2)."""
    real, imaginary = x.float().chunk(2, -1)
    return torch.complex(real, imaginary)


def from_pairs(pairs: Tensor) -> Tensor:
    """Undo `to_pairs`."""
    return torch.cat((pairs.real, pairs.imag), -1)


@dataclass(frozen=True)
class Polar:
    """Quantised pairs: indices of radii and angles, uint8, (…, D/2)."""

    sigma: Tensor
    """σ = √(Σ r²/D), at least `SMALLEST`: float32, (…, 1)."""
    radius: Tensor
    angle: Tensor


def encode(pairs: Tensor, angle_bits: int) -> Polar:
    """Indices of the cells that radii and angles of pairs (…, D/2) fall into."""
    sigma = (pairs.abs().square().sum(-1, keepdim=True) / (2 * pairs.shape[-1])).sqrt().clamp_min(SMALLEST)
    bounds = torch.tensor([sqrt(-2 * log(1 - k / 8)) for k in range(1, 8)], device=pairs.device)
    radius = torch.bucketize(pairs.abs() / sigma, bounds, right=True)
    cells = 2**angle_bits
    angle = ((pairs.angle() + pi) * (cells / (2 * pi))).floor().long() % cells
    return Polar(sigma, radius.to(torch.uint8), angle.to(torch.uint8))


def search(pairs: Tensor, first: Polar, angle_bits: int) -> Polar:
    """The neighbours of `first` that maximise ⟨p, p̂⟩ − .7·|p − p̂|² for p = k_f/σ; ties go to the first."""
    p, cells = pairs / first.sigma, 2**angle_bits
    best = torch.full(p.shape, -torch.inf, device=p.device)
    radius, angle = first.radius.clone(), first.angle.clone()
    for step in range(-REACH, REACH + 1):
        r = first.radius.int() + step
        for turn_by in range(-REACH, REACH + 1):
            a = (first.angle.int() + turn_by) % cells
            q = decode(r.clamp(0, 7), a, angle_bits)
            target = (p * q.conj()).real - PENALTY * (p - q).abs().square()
            better = (target > best) & (r >= 0) & (r <= 7)
            best = target.where(better, best)
            radius, angle = r.to(torch.uint8).where(better, radius), a.to(torch.uint8).where(better, angle)
    return Polar(first.sigma, radius, angle)


def centres(angle: Tensor, angle_bits: int) -> Tensor:
    """Middles of angle cells, (i + ½)·2π/2^bits − π."""
    return (angle.float() + 0.5) * (2 * pi / 2**angle_bits) - pi


def decode(radius: Tensor, angle: Tensor, angle_bits: int) -> Tensor:
    """Pairs in units of σ, from indices (…, D/2): complex64."""
    levels = torch.tensor(RADII, device=radius.device)[radius.int()]
    return torch.polar(levels, centres(angle, angle_bits))
