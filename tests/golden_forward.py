"""pypto-lib's forward pass in plain torch, from its design document alone: what the tests hold `polar4` to.

Qwen3 layers over a cache of 4-bit indices and norms: a prompt at once, and then token by token. Queries read keys and
values out of the cache, their own included. All is float32 except where that system rounds to bfloat16. Nothing here
comes from the package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import pi, sqrt

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

HEAD_DIM = 128
PAGE = 128
"""Tokens of a block of the cache."""
LEVELS = 16
EPSILON = 1e-6
"""Under the roots of γ and of the renormalisation; that system has one ε, its model's."""


def bf16(x: Tensor) -> Tensor:
    """`x` rounded to bfloat16, in float32."""
    return x.bfloat16().float()


# ---------------------------------------------------------------- PolarQuant


def codebook() -> Tensor:
    """Levels of N(0, 1/128), (16,), after 200 steps: each the mean of its cell, cells parted at the midpoints."""
    levels = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) * 7 / LEVELS - 3.5
    for _ in range(200):
        outside = torch.tensor([torch.inf], dtype=torch.float64)
        edges = torch.cat((-outside, midpoints(levels), outside))
        density = torch.exp(-0.5 * edges.square()) / sqrt(2 * pi)
        levels = -density.diff() / torch.special.ndtr(edges).diff()
    return (levels / sqrt(HEAD_DIM)).float()


def midpoints(levels: Tensor) -> Tensor:
    """The 15 boundaries between levels, (15,)."""
    return 0.5 * (levels[1:] + levels[:-1])


CODEBOOK = codebook()


def rotation(layer: int) -> Tensor:
    """R of a layer in bfloat16's numbers, (128, 128): Q·sign(diag R) of a Gaussian matrix with a seed of its own."""
    generator = torch.Generator().manual_seed(42 + 1000 * layer)
    # The QR is in double: a float32 one differs with the number of threads, and so some ten entries by an ulp.
    q, r = torch.linalg.qr(torch.randn(HEAD_DIM, HEAD_DIM, generator=generator).double())
    return bf16(q * r.diagonal().sign())


def compress(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Indices, uint8 (…, 128), and γ, float32 (…, 1), of vectors (…, 128)."""
    gamma = (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
    y = bf16(x / gamma) @ r
    return (y.unsqueeze(-1) >= midpoints(CODEBOOK)).sum(-1).to(torch.uint8), gamma


def decompress(indices: Tensor, gamma: Tensor, r: Tensor) -> Tensor:
    """x̂ (…, 128) of indices (…, 128) and γ (…, 1)."""
    y = CODEBOOK[indices.long()]
    y = y * (y.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    return bf16(bf16(y * gamma) @ r.mT)


# ---------------------------------------------------------------- the cache


@dataclass
class Stream:
    """Keys or values of one layer, a row for each token and head: block by block, head by head.

    Attributes
    ----------
    r
        Its rotation, (128, 128).
    kv_heads, tokens
        Heads, and tokens held so far.
    codes, norms
        uint8 (blocks·kv_heads·128, 128) and float32 (blocks·kv_heads·128, 1).
    """

    r: Tensor
    kv_heads: int
    codes: Tensor
    norms: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, r: Tensor, kv_heads: int, tokens: int) -> "Stream":
        """Blocks for up to `tokens` tokens, all 0."""
        rows = -(-tokens // PAGE) * kv_heads * PAGE
        return cls(r, kv_heads, torch.zeros(rows, HEAD_DIM, dtype=torch.uint8), torch.zeros(rows, 1))

    def rows(self, first: int, stop: int) -> Tensor:
        """Numbers of the rows of tokens `first` to `stop`, (kv_heads, tokens)."""
        token, head = torch.arange(first, stop), torch.arange(self.kv_heads).unsqueeze(-1)
        return (token // PAGE * self.kv_heads + head) * PAGE + token % PAGE

    def append(self, x: Tensor) -> None:
        """Compress the next tokens' vectors (kv_heads, n, 128)."""
        rows = self.rows(self.tokens, self.tokens + x.shape[1])
        self.codes[rows], self.norms[rows] = compress(x, self.r)
        self.tokens += x.shape[1]

    def indices(self) -> Tensor:
        """Indices of all tokens, uint8 (kv_heads, tokens, 128)."""
        return self.codes[self.rows(0, self.tokens)]

    def read(self) -> Tensor:
        """All tokens decompressed, (kv_heads, tokens, 128)."""
        return decompress(self.indices(), self.norms[self.rows(0, self.tokens)], self.r)


# ---------------------------------------------------------------- the model


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x/√(mean x² + ε)·weight over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Channels (f, f + 64) of vectors (heads, n, 128) turned by position·θ^(−f/64), positions (n,)."""
    half = HEAD_DIM // 2
    angle = positions.unsqueeze(-1) * theta ** (-torch.arange(half) / half)  # (n, 64)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Causal attention of queries (heads, n, 128) at positions (n,) over keys and values (kv_heads, tokens, 128)."""
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.mT / sqrt(HEAD_DIM)  # (heads, n, tokens)
    later = torch.arange(k.shape[1]) > positions.unsqueeze(-1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(silu(x·gateᵀ) ⊙ x·upᵀ)·downᵀ for x (n, hidden)."""
    return (silu(x @ gate.mT) * (x @ up.mT)) @ down.mT


@dataclass
class Golden:
    """A Qwen3 model's forward pass over a compressed cache, one sequence.

    Attributes
    ----------
    weights
        The model's, float32, by the names of transformers; matrices are (out, in).
    layers, eps, theta
        Its number of layers, the ε of its norms, the base of its RoPE.
    keys, values
        The cache: a stream each for each layer.
    hidden
        The residual stream of the latest pass after each layer, (n, hidden).
    """

    weights: Mapping[str, Tensor]
    layers: int
    eps: float
    theta: float
    keys: list[Stream]
    values: list[Stream]
    hidden: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, tokens: int) -> "Golden":
        """That of a transformers `Qwen3ForCausalLM`, with room for `tokens` tokens."""
        config = model.config
        weights = {name: weight.detach().float() for name, weight in model.state_dict().items()}
        rotations = [rotation(layer) for layer in range(config.num_hidden_layers)]
        keys, values = (
            [Stream.empty(r, config.num_key_value_heads, tokens) for r in rotations] for _ in ("keys", "values")
        )
        theta = config.rope_parameters["rope_theta"]
        return cls(weights, config.num_hidden_layers, config.rms_norm_eps, theta, keys, values)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (n, vocabulary) of the next tokens' ids (n,): a prompt, or one token of decoding."""
        x, self.hidden = self.weights["model.embed_tokens.weight"][ids], []
        for layer in range(self.layers):
            x = self._layer(x, layer)
            self.hidden.append(x)
        return rms_norm(x, self.weights["model.norm.weight"], self.eps) @ self.weights["lm_head.weight"].mT

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        """The residual stream (n, hidden) after a layer, whose cache takes the tokens in."""
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        keys, values = self.keys[layer], self.values[layer]
        positions = torch.arange(keys.tokens, keys.tokens + len(x))

        normed = rms_norm(x, own["input_layernorm.weight"], self.eps)
        q, k, v = (self._heads(normed @ own[f"self_attn.{name}_proj.weight"].mT) for name in "qkv")
        q = rope(rms_norm(q, own["self_attn.q_norm.weight"], self.eps), positions, self.theta)
        k = rope(rms_norm(k, own["self_attn.k_norm.weight"], self.eps), positions, self.theta)
        keys.append(k)
        values.append(v)
        out = attention(q, keys.read(), values.read(), positions)
        x = x + out.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].mT

        normed = rms_norm(x, own["post_attention_layernorm.weight"], self.eps)
        return x + swiglu(normed, *(own[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")))

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        """(n, heads·128) → (heads, n, 128)."""
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
