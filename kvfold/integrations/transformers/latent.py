"""Multi-head latent attention (MLA): queries are taken into the latent space, so that nothing is expanded.

Such a model caches for each token a latent and a rotary part, shared by all heads, and expands them to keys
[W_k·latent, rotary] and values W_v·latent of each head (arXiv 2405.04434). As q·(W_k·c) = (W_kᵀ·q)·c and
Σ p·(W_v·c) = W_v·Σ p·c, attention can read the latents as they are: one KV head, keys of latent and rotary part, values
that are the latent again.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.integrations.transformers.handle import appended_of
from kvfold.integrations.transformers.layer import FoldedLayer


class LatentLayer(FoldedLayer):
    """A folded layer that transformers gives a latent (batch, 1, n, rank) and a rotary part (batch, 1, n, rope).

    Releases before transformers 5.20 give expanded keys and values instead, which fold as any others.
    """

    def __init__(self, *args: Any, rank: int, rope: int) -> None:
        super().__init__(*args)
        self.rank, self.rope = rank, rope

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        parts = key_states.shape[1], key_states.shape[-1], value_states.shape[-1]
        if not self.folded.columns:
            config = self.folded.config
            self.folded.config = replace(config, values_of_keys=parts == (1, self.rank, self.rope))
        return super().update(key_states, value_states, *args, **kwargs)

    def as_stored(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        if not self.folded.config.values_of_keys:
            return key_states, value_states
        return torch.cat((key_states, value_states), -1), key_states


def latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Attention modules that expand what they cached, by weights without a bias."""
    for module in model.modules():
        up = getattr(module, "kv_b_proj", None)
        if hasattr(module, "expand_kv") and isinstance(up, nn.Module) and getattr(up, "bias", None) is None:
            yield module


def expand_unless_folded(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """`module.expand_kv`, but folded handles go on to the attention function as they are."""
    if appended_of(kv_nope, k_rot) is not None:
        return kv_nope, k_rot
    expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, kv_nope, k_rot)
    return expanded


def to_latent(module: Any, query: Tensor) -> Tensor:
    """[W_kᵀ·q, rotary part] of queries (batch, heads, n, nope + rope)."""
    plain, rotary = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), -1)
    weights = _weights(module, query)[:, : module.qk_nope_head_dim]
    return torch.cat((plain.to(weights.dtype) @ weights, rotary.to(weights.dtype)), -1)


def from_latent(module: Any, out: Tensor) -> Tensor:
    """W_v·c of sums of latents (batch, heads, n, rank)."""
    weights = _weights(module, out)[:, module.qk_nope_head_dim :]
    return out.to(weights.dtype) @ weights.mT


def _weights(module: Any, like: Tensor) -> Tensor:
    """W_k and W_v of each head: (heads, nope + v, rank).

    The weight of a plain linear layer is read. A wrapped one (LoRA, weights that are quantised or offloaded) is called
    with each unit vector, on the device and in the dtype of `like`.
    """
    up = module.kv_b_proj
    if type(up) is nn.Linear and not _is_wrapped(up):
        weight = up.weight
    else:
        rank = module.kv_lora_rank
        weight = up(torch.eye(rank, dtype=like.dtype, device=like.device)).mT
    return weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))


def _is_wrapped(linear: nn.Linear) -> bool:
    """Whether calling a linear layer may give something else than the product with its weight."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    return bool(hooked) or linear.weight.is_meta or hasattr(linear, "parametrizations")
