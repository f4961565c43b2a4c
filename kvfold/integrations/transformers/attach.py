"""Let a model's attention read folded caches."""

import inspect
import logging
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvfold.attention import BACKENDS, attend, attend_dense
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.handle import FoldedHandle, appended_of
from kvfold.integrations.transformers.latent import from_latent, latent_modules, leave_folded, to_latent
from kvfold.integrations.transformers.operator import append_and_attend, take_awaited

logger = logging.getLogger("kvfold")

NAME = "kvfold"
"""Name of the attention function; `kvfold_reference` and so on ask for one backend."""
_STATE = "_kvfold_attached"


def attach(model: PreTrainedModel, backend: str | None = None) -> bool:
    """Make `model` read folded caches folded.

    Its attention implementation becomes "kvfold": folded layers are read as codes, dense layers (and
    other caches) go through scaled-dot-product attention as before. `detach` undoes it.

    Parameters
    ----------
    model
        Any decoder-only model of transformers ≥ 5.16 whose attention can be replaced.
    backend
        One of `kvfold.attention.BACKENDS`; None for the fastest that takes each call.

    Returns
    -------
    bool
        Whether folded reading is on. If the model's own attention code cannot be replaced, this says so
        in the log, and a `FoldedCache` is unfolded when read.
    """
    if hasattr(model, _STATE):
        own = model.get_decoder().config._attn_implementation
        if backend is not None and own != f"{NAME}_{backend}":
            raise ValueError(f"backend = {backend!r}, but the model is attached as {own!r}: kvfold.detach it first")
        return True
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)}, or None")
    name = NAME if backend is None else f"{NAME}_{backend}"
    decoder = model.get_decoder()
    before = [(config, config._attn_implementation_internal) for config in _configs(decoder.config)]
    try:
        decoder.set_attn_implementation(name)
    except ValueError as error:
        logger.warning("kvfold.attach: %s", error)
    if decoder.config._attn_implementation != name:
        _restore(before)
        logger.warning(
            "%s has its own attention code, which cannot be replaced: it runs with a FoldedCache, but unfolds it "
            "at every read",
            type(model).__name__,
        )
        return False
    hooks = []
    for module in {id(model): model, id(decoder): decoder}.values():
        hooks.append(module.register_forward_pre_hook(_before_forward, with_kwargs=True))
        hooks.append(module.register_forward_hook(_after_forward, with_kwargs=True, always_call=True))
    hooks.append(decoder.register_forward_pre_hook(_show_model, with_kwargs=True))
    for latent in latent_modules(decoder):
        latent.expand_kv = leave_folded(latent.expand_kv)  # type: ignore[assignment, arg-type]
    setattr(model, _STATE, (before, hooks))
    return True


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`; nothing happens if the model is not attached."""
    if not hasattr(model, _STATE):
        return
    before, hooks = getattr(model, _STATE)
    for hook in hooks:
        hook.remove()
    for latent in latent_modules(model):
        vars(latent).pop("expand_kv", None)
    _restore(before)
    delattr(model, _STATE)


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """`config` and the configs inside it."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(each for value in inner for each in _configs(value))]


def _restore(before: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, implementation in before:
        config._attn_implementation_internal = implementation


def _argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An argument of `module.forward`, whether given by position or by name."""
    if name in kwargs or not args:
        return kwargs.get(name)
    return inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments.get(name)


def _before_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _argument(module, args, kwargs, "past_key_values")
    if not isinstance(cache, FoldedCache):
        return
    mine, theirs = cache.text_config, module.config.get_text_config(decoder=True)
    if (mine.model_type, mine.num_hidden_layers) != (theirs.model_type, theirs.num_hidden_layers):
        raise ValueError(
            f"this cache was made for a {mine.model_type} config with {mine.num_hidden_layers} layers, the model is a "
            f"{theirs.model_type} with {theirs.num_hidden_layers}: make one with FoldedCache(model.config)"
        )
    cache.forward_pass.reads_folded = True
    mask = _argument(module, args, kwargs, "attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and cache.awaits_rows:
        cache.set_padding(mask)


def _show_model(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _argument(decoder, args, kwargs, "past_key_values")
    if isinstance(cache, FoldedCache):
        cache.read_by(decoder)


def _after_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = _argument(module, args, kwargs, "past_key_values")
    if isinstance(cache, FoldedCache):
        cache.end_pass(broken=output is None)  # a hook that is always called gets None after an exception


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    backend: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of every layer of an attached model."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    appended = appended_of(key, value)
    awaited = None if appended is not None else take_awaited(query, key, value)
    folded = appended is not None or awaited is not None
    if not folded:
        key, value = (x.to_unfolded() if isinstance(x, FoldedHandle) else x for x in (key, value))
    if not causal and attention_mask is None and query.shape[2] > 1 and (folded or softcap or s_aux is not None):
        raise ValueError("this model attends to later tokens without a mask, which folded attention does not do")
    if folded:
        if module.training:
            raise ValueError(
                "the model is in training mode, but no gradients flow through a folded cache: call model.eval()"
            )
        if kwargs.get("position_bias") is not None:
            raise ValueError("this model adds position biases to its scores, which folded attention does not take")
    if awaited is not None:
        keys, values = awaited
        tensors = (None if x is None else x.detach() for x in (query, keys.new, values.new, attention_mask))
        sink_logits = None if s_aux is None else s_aux.detach()
        assert keys.cache.number is not None  # `read_by` has seen to it
        return append_and_attend(
            keys.cache.number, keys.layer, *tensors, scaling, softcap, sink_logits, backend
        ), None  # fmt: skip
    if appended is not None:
        latent = appended.layer.values_of_keys
        out = attend(
            to_latent(module, query) if latent else query,
            appended, scaling=scaling, mask=attention_mask, softcap=softcap, sink_logits=s_aux, backend=backend,
        )  # fmt: skip
        out = from_latent(module, out) if latent else out
    elif softcap is not None or s_aux is not None:
        out = attend_dense(query, key, value, scaling=scaling, mask=attention_mask, softcap=softcap, sink_logits=s_aux)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out.transpose(1, 2).contiguous(), None


for _backend in (None, *BACKENDS):
    _name = NAME if _backend is None else f"{NAME}_{_backend}"
    AttentionInterface.register(_name, partial(_attention, backend=_backend))
    AttentionMaskInterface.register(_name, sdpa_mask)
