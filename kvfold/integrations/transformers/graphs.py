"""Decoding steps of attached models as CUDA graphs.

A step launches the same kernels for one token after the other, while tokens do nothing but join what folded layers
hold: how long these are is a number on the GPU (`kvfold.attention.triton.step`). So the launches of a whole forward
pass are recorded once, and replayed for the tokens that follow. Pages fold between two replays.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import is_
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from kvfold.attention.triton.spans import ALIGNED
from kvfold.attention.triton.step import GraphStep, told_of_next, why_no_step
from kvfold.cache.layer import LayerCache
from kvfold.cache.rows import FoldedRows
from kvfold.cache.tail import Sides, tail_capacity
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.calls import cache_name
from kvfold.kernels.modes import in_no_mode

logger = logging.getLogger("kvfold")

PAGES = 16
"""Pages that a graph has room for beyond those held when it is recorded, or …"""
SHARE = 32
"""… as many as fill 1/32 of them, if that is more. Then another graph is recorded, which takes about three steps."""
TOLERANCE = 1e-2
"""The relative error by which a replay may differ from the same step without a graph, for other algorithms."""

Forward = Callable[..., Any]


class Recorder(Protocol):
    """Records what a function launches, and replays it."""

    def record(self, function: Callable[[], Any]) -> Any:
        """Call `function`, which only then is recorded, and return what it returns: tensors without numbers yet."""

    def replay(self) -> None:
        """Launch it all again, over the same memory."""


class CudaGraph:
    """A `Recorder` by CUDA, or HIP."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, function: Callable[[], Any]) -> Any:
        with torch.cuda.graph(self._graph):
            return function()

    def replay(self) -> None:
        self._graph.replay()


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": CudaGraph}
"""By the type of a model's device."""


class StepGraphs:
    """The graphs of an attached model, one for each cache that it decodes with. A copied model has none."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[FoldedCache, _Steps] = WeakKeyDictionary()
        self._logged: set[str] = set()
        self._refused = False  # whether this model's steps turned out to be no graphs

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[()]]:
        return StepGraphs, ()

    def run(self, module: nn.Module, forward: Forward, cache: FoldedCache, given: dict[str, Any]) -> Any:
        """`forward(**given)`, a pass over `cache` that has begun, by a graph if it can be."""
        inputs = None if self._refused else _Inputs.of(module, given)
        if inputs is None:  # more than a token
            return forward(**given)
        if inputs.why_not is not None:
            return self._without(inputs.why_not, forward, given)
        layers = [layer.folded for layer in cache.layers] if cache.fits_graphs else []
        rows = [layer.groups[0].rows for layer in layers if layer.takes_steps]
        ready = len(rows) == len(layers) and all(own.fold_ahead() for own in rows)
        steps = self._steps.get(cache)
        if steps is None or not ready or not steps.fits(module, inputs, rows):
            why = _why_not(module, cache, layers)
            if why is not None:
                return self._without(why, forward, given)
            if not ready:  # the first tokens, the next one after a change, or one that completes a page that folds
                return forward(**given)
            self._steps.pop(cache, None)  # its memory is free for the next
            steps = self._steps[cache] = _Steps(module, inputs, rows)
        steps.hold_still(cache, rows)
        try:
            return steps.take(forward, inputs, cache, layers, rows)
        except NotRecorded as error:
            del self._steps[cache]
            self._refused = True
            self._log(f"decoding goes on without CUDA graphs: {error}")
            if error.output is not None:
                return error.output
            cache.passes.roll_back()
            cache.passes.begin()
            return forward(**given)

    def _without(self, why: str, forward: Forward, given: dict[str, Any]) -> Any:
        self._log(f"this step runs without a CUDA graph: {why}")
        return forward(**given)

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)


class NotRecorded(Exception):
    """A model's step cannot be a graph. `output`: that of the step, if it has been taken without one."""

    def __init__(self, why: str, output: Any = None) -> None:
        super().__init__(why)
        self.output = output


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What a forward pass of one token is given: tensors that a graph reads, and what stays the same in it."""

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    casts: tuple[bool, torch.dtype]  # whether autocast is on, and to what
    why_not: str | None

    @classmethod
    def of(cls, module: nn.Module, given: Mapping[str, Any]) -> "_Inputs | None":
        """None if it is more than one token."""
        token = given.get("input_ids")
        token = given.get("inputs_embeds") if token is None else token
        if not isinstance(token, Tensor) or token.ndim < 2 or token.shape[1] != 1:
            return None
        past = cache_name(type(module).forward)
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and name != "attention_mask"}
        others = {name: x for name, x in given.items() if name not in tensors and name not in (past, "attention_mask")}
        mask, why = given.get("attention_mask"), None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            why = None if bool(mask.all()) else "attention_mask hides tokens"
        elif mask is not None:
            why = "attention_mask is no mask of columns, (batch, columns)"
        elsewhere = next((name for name, x in tensors.items() if x.device != token.device), None)
        held = next(
            (name for name, x in others.items() if any(isinstance(y, Tensor) for y in tree_flatten(x)[0])), None
        )
        if "position_ids" not in _parameters(type(module).forward):
            why = "the model's forward takes no position_ids, so a graph would repeat the first token's"
        elif elsewhere is not None:
            why = f"{elsewhere} is on another device than the token"
        elif held is not None:
            why = f"{held} holds tensors"
        device = token.device.type
        casts = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(tensors, others, casts, why)

    def is_like(self, other: "_Inputs") -> bool:
        """Whether one graph serves both."""
        if self.tensors.keys() != other.tensors.keys() or self.others != other.others or self.casts != other.casts:
            return False
        pairs = ((x, other.tensors[name]) for name, x in self.tensors.items())
        return all(x.shape == y.shape and x.dtype == y.dtype and x.device == y.device for x, y in pairs)

    def with_positions(self, columns: int) -> dict[str, Tensor]:
        """The tensors, positions among them; `columns` came before the token."""
        if "position_ids" in self.tensors:
            return self.tensors
        token = self.tensors["input_ids" if "input_ids" in self.tensors else "inputs_embeds"]
        positions = torch.full(token.shape[:2], columns, dtype=torch.int64, device=token.device)
        return self.tensors | {"position_ids": positions}


class _Steps:
    """The steps of one cache: the first is taken as it is, the second recorded, and replayed as those after it."""

    @in_no_mode
    def __init__(self, module: nn.Module, inputs: _Inputs, rows: Sequence[FoldedRows]) -> None:
        self._module, self._like, self._weights = module, inputs, _weights(module)
        count = max(own.keys.count for own in rows)
        self._room = count + max(PAGES, count // SHARE)
        self._tails = [_tail_of(own) for own in rows]
        self._reads: list[Any] = []  # what a graph has the addresses of
        width = -(-max(len(told_of_next(own).numbers) for own in rows) // ALIGNED) * ALIGNED
        self._numbers = torch.zeros(len(rows), width, dtype=torch.int32, device=_device_of(module))
        self._inputs: dict[str, Tensor] = {}
        self._recorder: Recorder | None = None
        self._output: tuple[list[Any], TreeSpec] | None = None
        self._is_warm = self._is_checked = False

    def fits(self, module: nn.Module, inputs: _Inputs, rows: Sequence[FoldedRows]) -> bool:
        """Whether the next token goes on: to the same model, with the same weights, and into the same storage."""
        if module is not self._module or not inputs.is_like(self._like) or not _same(_reads_of(rows), self._reads):
            return False
        return all(held.get(name) is x and _address(x) == at for held, name, x, at in self._weights)

    @in_no_mode
    def hold_still(self, cache: FoldedCache, rows: Sequence[FoldedRows]) -> None:
        """Let rows stay in storage of their own, where new tokens join them."""
        stays = [own.dense.tail is None or own.dense.tail is tail for own, tail in zip(rows, self._tails, strict=True)]
        if self._reads and all(stays):
            return
        cache.passes.begin()  # what the pass goes back to must not be what is overwritten now
        for own, tail in zip(rows, self._tails, strict=True):
            own.stay_in(tail, self._room)
        self._reads = _reads_of(rows)

    def take(
        self, forward: Forward, inputs: _Inputs, cache: FoldedCache, layers: Sequence[LayerCache],
        rows: Sequence[FoldedRows],
    ) -> Any:  # fmt: skip
        """One step: append a token to all layers, and return what the model says."""
        self._tell(inputs.with_positions(layers[0].columns), rows)
        run = partial(self._run, forward, inputs.others, cache, rows)
        if not self._is_warm:
            self._is_warm = True
            return run()
        if self._recorder is None:
            recorder = RECORDERS[self._numbers.device.type]()
            try:
                out = recorder.record(run)
            except (RuntimeError, NotRecorded) as error:
                raise NotRecorded(f"a step cannot be recorded ({error})") from error
            leaves, spec = tree_flatten(out)
            self._output = [_CACHE if x is cache else x for x in leaves], spec
            self._recorder = recorder
            recorder.replay()
            return self._copied_output(cache)
        self._recorder.replay()
        out = self._copied_output(cache)
        if not self._is_checked:
            return self._checked(out, run, rows)
        for layer, own in zip(layers, rows, strict=True):
            own.length += 1
            layer.columns += 1
        return out

    def _run(self, forward: Forward, others: dict[str, Any], cache: FoldedCache, rows: Sequence[FoldedRows]) -> Any:
        """The model's forward pass, with steps in all layers."""
        steps = [GraphStep(own, numbers) for own, numbers in zip(rows, self._numbers, strict=True)]
        for own, step in zip(rows, steps, strict=True):
            own.step = step
        try:
            past = cache_name(type(self._module).forward)
            assert past is not None
            with torch.no_grad():
                out = forward(**self._inputs, **others, **{past: cache})
        finally:
            for own in rows:
                own.step = None
        if not all(step.answered for step in steps):
            raise NotRecorded("a layer's token went another way than its step", out)
        return out

    def _checked(self, replayed: Any, run: Callable[[], Any], rows: Sequence[FoldedRows]) -> Any:
        """What the model says without a graph; NotRecorded if a replay, which has just been, says something else.

        A model may compute with a cache's length in ways that are not known here. The graph would repeat the length at
        which it was recorded, so the first replay at another length shows it.
        """
        for own in rows:
            own.empty_next()  # tokens that fold by themselves join what is there
        out = run()
        for one, other in zip(*(tree_flatten(x)[0] for x in (replayed, out)), strict=True):
            if isinstance(one, Tensor) and one.is_floating_point():
                error = (one.double() - other.double()).norm() / other.double().norm()
                if not error <= TOLERANCE:
                    raise NotRecorded(
                        f"a replayed step differs by {error:.1e} from one without a graph, so this model must compute "
                        "with the cache's length",
                        out,
                    )
        self._is_checked = True
        return out

    @in_no_mode
    def _tell(self, inputs: Mapping[str, Tensor], rows: Sequence[FoldedRows]) -> None:
        """Put the inputs, and how long rows will be with the token, where the graph reads them."""
        for name, x in inputs.items():
            if name in self._inputs:
                self._inputs[name].copy_(x)
            else:
                self._inputs[name] = x.clone()
        told: dict[tuple[object, ...], list[int]] = {}  # most layers are told the same
        numbers = []
        for own in rows:
            key = (own.schedule, own.length, own.evicted, own.keys.count, own.dense.tail_start, own.batch)
            if key not in told:
                found = told_of_next(own).numbers
                told[key] = found + [0] * (self._numbers.shape[1] - len(found))
            numbers.append(told[key])
        self._numbers.copy_(torch.tensor(numbers, dtype=torch.int32))

    def _copied_output(self, cache: FoldedCache) -> Any:
        """What the model said: the next replay overwrites the graph's own."""
        assert self._output is not None
        leaves, spec = self._output
        copied = [cache if x is _CACHE else x.clone() if isinstance(x, Tensor) else x for x in leaves]
        return tree_unflatten(copied, spec)


_CACHE = object()
"""In an output that is kept, in the place of the cache, which it would keep alive."""


def _why_not(module: nn.Module, cache: FoldedCache, layers: Sequence[LayerCache]) -> str | None:
    """Why a token's step cannot be a graph; None if it can."""
    if not layers:
        return "some layers of this cache do not fold, or have a sliding window"
    if cache.evictor is not None and cache.evictor.policy.asks_queries:
        return "its eviction policy keeps queries"
    if cache.forward_pass.backend not in (None, GraphStep.backend):
        return f"the model is attached with backend {cache.forward_pass.backend!r}"
    if any(layer.config.sharpen for layer in layers):
        return "scores are sharpened by the cache's length"
    if any(len(layer.groups) > 1 or group.padding for layer in layers for group in layer.groups):
        return "the batch is padded"
    device = _device_of(module)
    if device.type not in RECORDERS:
        return f"the model is on {device}, and graphs are recorded on {' and '.join(RECORDERS)}"
    query = torch.empty(0, dtype=next(module.parameters()).dtype, device=device)
    return next((why for layer in layers for own in layer.groups if (why := why_no_step(query, own.rows))), None)


def _tail_of(rows: FoldedRows) -> Sides | None:
    """Storage for as many dense tokens as rows ever hold between two steps; None if they hold none."""
    tail = rows.dense.tail
    if tail is None:
        return None
    most = max(rows.window.recent + rows.page_size, rows.length - rows.dense.tail_start) + 1
    return rows.dense.room(*tail, tail_capacity(most))


def _reads_of(rows: Sequence[FoldedRows]) -> list[Any]:
    """What a graph of rows reads at addresses that it has."""
    found: list[Any] = []
    for own in rows:
        found += [own.formats, *(own.dense.sinks or ())]
        found += [part for pages in own.pages() if pages is not None for _, part in pages.tensors()]
    return found


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _weights(module: nn.Module) -> list[tuple[dict[str, Any], str, Any, int]]:
    """Each parameter, buffer and submodule: where it is kept, its name, itself, and its address."""
    kept = (held for each in module.modules() for held in (each._parameters, each._buffers, each._modules))
    return [(held, name, x, _address(x)) for held in kept for name, x in held.items() if x is not None]


def _address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, Tensor) else 0


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


@cache
def _parameters(forward: Forward) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)
