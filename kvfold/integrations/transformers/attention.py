"""The attention function of attached models."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.utils.generic import TransformersKwargs

from kvfold.attention import attend, attend_dense
from kvfold.integrations.transformers.handle import FoldedHandle, appended_of
from kvfold.integrations.transformers.latent import from_latent, to_latent
from kvfold.integrations.transformers.masks import where_allowed
from kvfold.integrations.transformers.operator import append_and_attend, take_awaited

Attention = Callable[..., tuple[Tensor, Tensor | None]]

_HARMLESS = {
    *TransformersKwargs.__annotations__, "dropout", "sliding_window", "position_embeddings", "cache_position",
    "use_cache", "position_bias", "scaling", "softcap", "s_aux",
}  # fmt: skip
"""Keywords that folded attention uses, or may ignore."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    own: Attention | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls as a layer's attention function.

    Folded keys and values are read folded; everything else goes on to `own`, the attention function that this one
    wraps. It is None for models for which transformers has only "eager". Of the other arguments of that function,
    folded attention uses `scaling`, `softcap` (a bound of scores) and `s_aux` (logits of attention sinks). Raises
    ValueError if it is asked for something that it does not do.
    """
    appended = appended_of(key, value)
    awaited = None if appended is not None else take_awaited(query, key, value)
    if appended is None and awaited is None:
        key, value = (x.to_unfolded() if isinstance(x, FoldedHandle) else x for x in (key, value))
        if own is not None:
            return own(module, query, key, value, attention_mask, **kwargs)

    _check(module, query, attention_mask, kwargs, swallows=own is not None)
    scaling, softcap, s_aux = (kwargs.get(name) for name in ("scaling", "softcap", "s_aux"))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if appended is None and awaited is None:
        out = attend_dense(query, key, value, scaling=scaling, mask=attention_mask, softcap=softcap, sink_logits=s_aux)
        return out.transpose(1, 2).contiguous(), None
    if awaited is not None:
        keys, values = awaited
        tensors = (None if x is None else x.detach() for x in (query, keys.new, values.new, attention_mask))
        sink_logits = None if s_aux is None else s_aux.detach()
        assert keys.cache.number is not None  # set by `begin_pass`
        backend = keys.cache.forward_pass.backend
        return append_and_attend(
            keys.cache.number, keys.layer, *tensors, scaling, softcap, sink_logits, backend
        ), None  # fmt: skip
    assert appended is not None
    assert isinstance(key, FoldedHandle)
    latent = appended.layer.config.values_of_keys
    out = attend(
        to_latent(module, query) if latent else query,
        appended, scaling=scaling, mask=where_allowed(attention_mask), softcap=softcap, sink_logits=s_aux,
        backend=key.backend,
    )  # fmt: skip
    out = from_latent(module, out) if latent else out
    return out.transpose(1, 2).contiguous(), None


def _check(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any], swallows: bool
) -> None:
    """Raise if folded attention would give another answer than the function that it replaces.

    That function `swallows` keywords that it does not know if it is "sdpa"; models that choose it expect that.
    """
    if module.training:
        raise ValueError(
            "the model is in training mode, but no gradients flow through a folded cache: call model.eval()"
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal and attention_mask is None and query.shape[2] > 1:
        raise ValueError("this model attends to later tokens without a mask, which folded attention does not do")
    if kwargs.get("position_bias") is not None:
        raise ValueError("this model adds position biases to its scores, which folded attention does not take")
    unknown = [] if swallows else sorted(n for n, x in kwargs.items() if x is not None and n not in _HARMLESS)
    if unknown:
        raise ValueError(
            f"this model's attention takes {', '.join(unknown)}, which folded attention does not know: "
            "kvfold.detach(model), and its FoldedCache is unfolded at each read"
        )
