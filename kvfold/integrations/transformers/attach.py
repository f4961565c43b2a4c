"""Let a model's attention read folded caches."""

import logging
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvfold.attention import attend, attend_dense
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.handle import appended_of

logger = logging.getLogger("kvfold")

NAME = "kvfold"
_STATE = "_kvfold_attached"


def attach(model: PreTrainedModel) -> bool:
    """Make `model` read folded caches folded.

    Its attention implementation becomes "kvfold": folded layers are read as codes, dense layers (and
    other caches) go through scaled-dot-product attention as before. `detach` undoes it.

    Parameters
    ----------
    model
        Any decoder-only model of transformers ≥ 5.16 whose attention can be replaced.

    Returns
    -------
    bool
        Whether folded reading is on. If the model's own attention code cannot be replaced, this says so
        in the log, and a `FoldedCache` is unfolded when read.
    """
    if hasattr(model, _STATE):
        return True
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        logger.warning("kvfold.attach: %s", error)
    if model.get_decoder().config._attn_implementation != NAME:
        logger.warning(
            "%s has its own attention code, which cannot be replaced: it runs with a FoldedCache, but unfolds it "
            "at every read", type(model).__name__,
        )  # fmt: skip
        return False
    hooks = (
        model.register_forward_pre_hook(_before_forward, with_kwargs=True),
        model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
    )
    setattr(model, _STATE, (before, hooks))
    return True


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`; nothing happens if the model is not attached."""
    if not hasattr(model, _STATE):
        return
    before, hooks = getattr(model, _STATE)
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(before)
    delattr(model, _STATE)


def _before_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, FoldedCache):
        return
    mine, theirs = cache.text_config, model.config.get_text_config(decoder=True)
    if (mine.model_type, mine.num_hidden_layers) != (theirs.model_type, theirs.num_hidden_layers):
        raise ValueError(
            f"this cache was made for a {mine.model_type} config with {mine.num_hidden_layers} layers, the model is a "
            f"{theirs.model_type} with {theirs.num_hidden_layers}: make one with FoldedCache(model.config)"
        )
    cache.forward_pass.reads_folded = True
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        cache.set_padding(mask)


def _after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, FoldedCache):
        cache.forward_pass.reads_folded = False


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of every layer of an attached model."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    appended = appended_of(key)
    if appended is not None:
        if kwargs.get("position_bias") is not None:
            raise ValueError("this model adds position biases to its scores, which folded attention does not take")
        out = attend(query, appended, scaling=scaling, mask=attention_mask, softcap=softcap, sink_logits=s_aux)
    elif softcap is not None or s_aux is not None:
        out = attend_dense(query, key, value, scaling=scaling, mask=attention_mask, softcap=softcap, sink_logits=s_aux)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
