"""How much attention keys can expect, estimated from the model's average queries (TriAttention, arXiv 2604.04921).

For a head with mean query E[q_f] and mean magnitude E|q_f| before RoPE, pairs f of channels, and a key k at position p,

    score = mean_o Σ_f Re( E[q_f]·conj(k_f)·e^{i·Δ_o·ω_f} ) + Σ_f max(0, E|q_f| − |E[q_f]|)·|k_f|,  Δ_o = now − p + 2^o

with o = 0 … 16. A cache holds keys that RoPE has turned, k̃_f = m·k_f·e^{i·p·ω_f}. So the first sum is a dot product of
k̃ with one vector a head, mean_o E[q_f]·e^{i·(now + 2^o)·ω_f}/m, and no key has to be turned back.
"""

import torch
from torch import Tensor

OFFSETS = tuple(2**o for o in range(17))


def expected_queries(
    mean: Tensor, magnitude: Tensor, now: int, frequencies: Tensor, turned_by: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Directions, real parts and then imaginary ones, (heads, 2F), and weights of magnitudes, (heads, F): float32.

    They come of E[q], complex, and E|q|, (heads, F), at the position `now`, with ω_f, float64, and the factor m that
    RoPE applies to keys besides turning them (YaRN's attention factor).
    """
    ahead = now + torch.tensor(OFFSETS, dtype=torch.float64, device=frequencies.device)
    turn = torch.polar(torch.ones((), dtype=torch.float64, device=ahead.device), ahead[:, None] * frequencies).mean(0)
    direction = mean.to(torch.complex128) * turn / turned_by
    spread = (magnitude.double() - mean.to(torch.complex128).abs()).clamp_min(0) / turned_by
    return torch.cat((direction.real, direction.imag), -1).float(), spread.float()


def pair_scores(x: Tensor, direction: Tensor, spread: Tensor) -> Tensor:
    """Scores of keys turned by RoPE, (…, heads, T, D), for each query head: float32, (…, heads, repeat, T).

    Pair f is channels f and f + F. Directions, (heads, repeat, 2F), and spreads, (heads, repeat, F), are those of the
    queries that share a KV head.
    """
    pairs = spread.shape[-1]
    turned = x[..., : 2 * pairs]
    magnitude = torch.hypot(turned[..., :pairs], turned[..., pairs:])
    return direction @ turned.mT + spread @ magnitude.mT
