"""Let a model's attention read folded caches."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from threading import RLock
from types import MethodType
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention import BACKENDS
from kvfold.formats.numbers import truth
from kvfold.integrations.transformers.attention import attention
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calls import cache_name
from kvfold.integrations.transformers.graphs import StepGraphs
from kvfold.integrations.transformers.latent import expand_unless_folded, latent_modules
from kvfold.integrations.transformers.layer import ATTACHMENT

logger = logging.getLogger("kvfold")

NAME = "kvfold"
"""The attention implementation of models that do not support "sdpa", during passes over folded caches."""


class Lock:
    """A lock that a thread may take again. Copies are others: a copied model computes beside its original."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Lock"], tuple[()]]:
        return Lock, ()


def attach(model: PreTrainedModel, backend: str | None = None, *, cuda_graphs: bool = False) -> bool:
    """Make `model` read folded caches folded.

    A forward pass that is given a `FoldedCache` reads it as codes. Dense layers of the cache, and all other passes, run
    as before, bit for bit. `detach` undoes it. Passes of a model that is set to another attention than "sdpa", such as
    "eager", or that has no "sdpa", run one at a time, whatever the threads that call it.

    Parameters
    ----------
    model
        Any decoder-only model of transformers ≥ 5.16 whose attention can be replaced.
    backend
        One of `kvfold.attention.BACKENDS`; None for the fastest that takes each call.
    cuda_graphs
        Whether steps of one token a row are recorded as CUDA graphs and replayed, the whole model with them, which
        saves the time that Python takes between kernels. It is for caches whose layers all fold, and batches without
        padding; the log says if a step cannot be a graph. Outputs are copies without gradients. Nothing of the model
        but weights and inputs may change what it computes from one step to the next.

    Returns
    -------
    bool
        Whether folded reading is on. If the model's own attention code cannot be replaced, this says so
        in the log, and a `FoldedCache` is unfolded when read.

    Raises
    ------
    ValueError
        If there is no such backend, or the model is attached with another, or without the graphs that are wanted.
    """
    truth("cuda_graphs", cuda_graphs)
    attached = vars(model).get(ATTACHMENT)
    if attached is not None and _is_guarded(model):
        if backend is not None and attached.backend != backend:
            raise ValueError(
                f"backend = {backend!r}, but the model is attached with {attached.backend!r}: kvfold.detach it first"
            )
        if cuda_graphs and attached.graphs is None:
            raise ValueError("cuda_graphs = True, but the model is attached without: kvfold.detach it first")
        return True
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)}, or None")
    if cache_name(type(model).forward) is None:
        logger.warning("%s takes no cache of keys and values: there is nothing to read folded", type(model).__name__)
        return False
    decoder = _decoder_of(model)
    configs = [] if decoder is None else _replaceable(decoder)
    if decoder is None or not configs:
        logger.warning(
            "%s has its own attention code, which cannot be replaced: it runs with a FoldedCache, but unfolds it "
            "at every read",
            type(model).__name__,
        )
        return False
    implementation = "sdpa" if getattr(decoder, "_supports_sdpa", False) else NAME
    attachment = Attachment(decoder, backend, implementation, configs, StepGraphs() if cuda_graphs else None)
    for module in {id(model): model, id(decoder): decoder}.values():
        setattr(module, ATTACHMENT, attachment)
        if not _is_guarded(module):
            _guard(module)
    for latent in latent_modules(decoder):
        latent.expand_kv = MethodType(expand_unless_folded, latent)  # type: ignore[assignment]
    return True


def detach(model: PreTrainedModel) -> None:
    """Undo `attach`; nothing happens if the model is not attached."""
    attachment = vars(model).get(ATTACHMENT)
    if attachment is None:
        return
    for module in {id(model): model, id(attachment.decoder): attachment.decoder}.values():
        vars(module).pop(ATTACHMENT, None)  # a guard that was wrapped since stays, and does nothing
        if _is_guarded(module):
            _restore(module)
    for latent in latent_modules(attachment.decoder):
        vars(latent).pop("expand_kv", None)


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """The part of a model that attends to the text; None if the model names none that runs alone."""
    for part in (model.get_decoder(), model.base_model):  # in some models get_decoder() is the last layer
        if isinstance(part, PreTrainedModel):
            return part
    return None


@dataclass(eq=False)
class Attachment:
    """What an attached model needs during a pass over a folded cache."""

    decoder: nn.Module  # the part that attends
    backend: str | None  # the backend that was asked for
    # The attention implementation during the pass, by transformers' name; models prepare masks for it.
    implementation: str
    configs: list[PreTrainedConfig]  # configs by which the decoder's layers choose their attention
    graphs: StepGraphs | None  # that its steps are recorded in; None if none are wanted
    # What they chose before a pass over a folded cache switched them; None while they are not switched.
    own: list[str] | None = None
    lock: Lock = field(default_factory=Lock)  # held by passes of a model that has to be switched

    def run(
        self, module: nn.Module, forward: Callable[..., Any], cache: FoldedCache, /, *args: Any, **kwargs: Any
    ) -> Any:
        """A pass over a folded cache that has begun."""
        if self.graphs is None or is_dynamo_compiling():
            return forward(*args, **kwargs)
        given = inspect.signature(forward).bind_partial(*args).arguments | kwargs if args else kwargs
        return self.graphs.run(module, forward, cache, given)

    @contextmanager
    def in_use(self, folded: bool) -> Iterator[None]:
        """Let layers use `implementation` in a pass over a folded cache, and in others what was set, even amid one."""
        switched = [self.implementation] * len(self.configs)
        if self.own is None and self._chosen() == switched:  # `own` is set before they are switched
            yield
            return
        with nullcontext() if is_dynamo_compiling() else self.lock:  # a graph has no locks
            before, outer = self._chosen(), self.own
            self.own = before if outer is None else outer
            try:
                self._choose(switched if folded else self.own)
                yield
            finally:
                self._choose(before)
                self.own = outer

    def _chosen(self) -> list[str]:
        return [config._attn_implementation_internal for config in self.configs]

    def _choose(self, names: list[str]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            config._attn_implementation_internal = name


def _replaceable(decoder: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs by which layers choose their attention; none if they do not choose."""
    if not _chooses(decoder):
        return []
    configs = _configs(decoder.config)
    before = [config._attn_implementation_internal for config in configs]
    _register()
    try:
        decoder.set_attn_implementation(NAME)
        return [config for config in configs if config._attn_implementation_internal == NAME]
    except ValueError as error:
        logger.warning("kvfold.attach: %s", error)
        return []
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation_internal = own


def _chooses(decoder: nn.Module) -> bool:
    """Whether modules that keep keys in a cache look their attention function up.

    transformers checks the whole file of a model, where attention to images may do so, and attention to text may not.
    """
    kinds = {type(module) for module in decoder.modules() if getattr(module, "layer_idx", None) is not None}
    try:
        return any("ALL_ATTENTION_FUNCTIONS" in inspect.getsource(kind) for kind in kinds)
    except OSError:  # code without a file
        return True


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """`config` and the configs inside it."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(each for value in inner for each in _configs(value))]


def _register() -> None:
    """Let models call `attention` by the names of `Attachment.implementation`.

    For everything that is not folded, in any model, "sdpa" calls the function that was registered before.
    """
    if NAME in ALL_ATTENTION_FUNCTIONS:
        return
    AttentionInterface.register("sdpa", partial(attention, own=ALL_ATTENTION_FUNCTIONS["sdpa"]))
    AttentionInterface.register(NAME, partial(attention, own=None))
    AttentionMaskInterface.register(NAME, eager_mask)


def _guard(module: nn.Module) -> None:
    """Put a guard in front of a module's `forward`, which may be an older guard that something has wrapped.

    The module keeps what is guarded, as copies of it must have their own.
    """
    kept = next(name for name in (f"_kvfold_forward{i}" for i in count()) if name not in vars(module))
    setattr(module, kept, module.forward)
    module.forward = MethodType(_guarded(module.forward, kept), module)


def _guarded(forward: Callable[..., Any], kept: str) -> Callable[..., Any]:
    """A `forward` for attached models that begins each pass over a folded cache and ends it, even if it raises.

    `kept` is the attribute that holds what it guards.
    """

    @wraps(forward)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        run, attachment = getattr(self, kept), vars(self).get(ATTACHMENT)
        if attachment is None:
            return run(*args, **kwargs)
        cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, FoldedCache)), None)
        if cache is None:
            with attachment.in_use(folded=False):
                return run(*args, **kwargs)
        kwargs = _by_its_name(type(self).forward, cache, kwargs)
        mask = _attention_mask(run, args, kwargs)
        if cache.forward_pass.reads_folded:  # a model has called its decoder
            cache.take_padding(mask)
            return run(*args, **kwargs)
        if cache.folds and (kwargs.get("output_attentions") or getattr(self.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions = True, but folded attention gives no weights: leave it out, or kvfold.detach(model)"
            )
        try:
            cache.begin_pass(self, attachment.decoder, attachment.backend, mask)
            with attachment.in_use(folded=cache.folds):
                output = attachment.run(self, run, cache, *args, **kwargs)
            cache.end_pass(broken=False)
        except BaseException:
            cache.end_pass(broken=True)
            raise
        return output

    guarded.guards = kept  # type: ignore[attr-defined]
    return guarded


def _by_its_name(forward: Callable[..., Any], cache: FoldedCache, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments, with the cache under the name that `forward` has for it.

    A caller may give it under the name of another release of transformers (`cache` or `past_key_values`).
    """
    given = next((name for name, x in kwargs.items() if x is cache), None)
    name = cache_name(forward)
    names = ("cache", "past_key_values")
    if name is None or given == name or given not in names or kwargs.get(name) is not None:
        return kwargs
    return {(name if key == given else key): x for key, x in kwargs.items() if key != name}


def _is_guarded(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, "guards")


def _restore(module: nn.Module) -> None:
    """Give a module back the `forward` that it had."""
    forward = vars(module).pop(vars(module)["forward"].__func__.guards)
    if isinstance(forward, MethodType) and forward.__func__ is type(module).forward:
        del vars(module)["forward"]
    else:  # the module had one of its own, such as accelerate sets
        module.forward = forward


def _attention_mask(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask that a call is given, whether by position or by name."""
    if "attention_mask" in kwargs or not args:
        return kwargs.get("attention_mask")
    return inspect.signature(forward).bind_partial(*args, **kwargs).arguments.get("attention_mask")
