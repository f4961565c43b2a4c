"""Decoding steps of attached models as CUDA graphs.

A step launches the same kernels for one token after the other, while tokens do nothing but join what folded layers
hold: how long these are is a number on the GPU (`kvfold.attention.triton.step`). So the launches of a whole forward
pass are recorded once, and replayed for the tokens that follow. Pages fold between two replays.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any
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
from kvfold.integrations.transformers.recorder import RECORDERS
from kvfold.integrations.transformers.step_inputs import StepInputs
from kvfold.kernels.modes import in_no_mode

logger = logging.getLogger("kvfold")

PAGES = 16
"""Pages that a graph has room for beyond those held when it is recorded, or …"""
SHARE = 32
"""… as many as fill 1/32 of them, if that is more. Then another graph is recorded, which takes about six steps."""
TRIES = 4
"""Tokens in a row that find something changed, after which a cache's steps are recorded no more until a prompt."""
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""The relative error by which a replay may differ from the same step without a graph, as other algorithms may run; …"""
TOLERANCE = 1e-2
"""… that of other dtypes, of 16 bits."""
AGREED = 2
"""Replays that must agree, the first at the length that was recorded, and the next at another."""

Forward = Callable[..., Any]


class StepGraphs:
    """The graphs of an attached model, one for each cache that it decodes with. A copied model has none."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[FoldedCache, _Steps] = WeakKeyDictionary()
        # How often rows, weights or inputs were others than a token before, since the last replay or prompt.
        self._changes: WeakKeyDictionary[FoldedCache, int] = WeakKeyDictionary()
        self._logged: set[str] = set()
        self._refused = False  # whether this model's steps turned out to be no graphs

    def __reduce__(self) -> tuple[type["StepGraphs"], tuple[()]]:
        return StepGraphs, ()

    def run(self, module: nn.Module, forward: Forward, cache: FoldedCache, given: dict[str, Any]) -> Any:
        """`forward(**given)`, a pass over `cache` that has begun, by a graph if it can be."""
        if self._refused:
            return forward(**given)
        layers = [layer.folded for layer in cache.layers] if cache.fits_graphs else []
        rows = [layer.groups[0].rows for layer in layers if layer.takes_steps]
        inputs = StepInputs.of(module, given)
        if inputs is None:  # more than a token
            self._changes.pop(cache, None)
            self._free_moved(cache, rows)
            return forward(**given)
        all_step = len(rows) == len(layers)
        ready = all_step and inputs.why_not is None and all(own.fold_ahead() for own in rows)
        steps = self._steps.get(cache)
        if steps is None or not ready or not steps.fits(module, inputs, rows):
            del steps
            self._free_moved(cache, rows)
            why = inputs.why_not or _why_not(module, cache, layers)
            if why is None and (ready or not all_step):
                self._changes[cache] = self._changes.get(cache, 0) + 1
                if self._changes[cache] > TRIES:
                    why = "the cache's rows, the weights or the inputs change from step to step"
            if why is not None:
                self._log(f"this step runs without a CUDA graph: {why}")
            if why is not None or not ready:  # formats await their fit, or a page that the token completes folds
                return forward(**given)
            self._steps.pop(cache, None)  # its memory is free for the next
            steps = self._steps[cache] = _Steps(module, inputs, rows)
        steps.hold_still(cache, rows)
        try:
            out = steps.take(forward, inputs, cache, given, layers, rows)
        except NotRecorded as error:
            self._steps.clear()
            self._refused = True
            self._log(f"decoding goes on without CUDA graphs: {error}")
            if error.output is not None:
                return error.output
            cache.passes.roll_back()
            cache.passes.begin()
            return forward(**given)
        if steps.is_recorded:
            self._changes.pop(cache, None)
        return out

    def _free_moved(self, cache: FoldedCache, rows: Sequence[FoldedRows]) -> None:
        """Let go of steps whose rows have left their storage: what comes next may need its memory."""
        if cache in self._steps and not self._steps[cache].reads(rows):
            del self._steps[cache]

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)


class NotRecorded(Exception):
    """A model's step cannot be a graph. `output`: that of the step, if it has been taken without one."""

    def __init__(self, why: str, output: Any = None) -> None:
        super().__init__(why)
        self.output = output


class _Steps:
    """The steps of one cache.

    The first warms up, the next is rehearsed and then recorded, and later ones are replayed. Until two replays have
    said the same, each is followed by the step without a graph, whose answer counts.
    """

    @in_no_mode
    def __init__(self, module: nn.Module, inputs: StepInputs, rows: Sequence[FoldedRows]) -> None:
        self._module, self._is_training, self._weights = module, module.training, _weights(module)
        self._kind = inputs.kind()
        count = max(own.keys.count for own in rows)
        self._room = count + max(PAGES, count // SHARE)
        self._tails = [_tail_of(own) for own in rows]
        self._reads: list[Any] = []  # what a graph has the addresses of
        width = -(-max(len(told_of_next(own).numbers) for own in rows) // ALIGNED) * ALIGNED
        self._numbers = torch.zeros(len(rows), width, dtype=torch.int32, device=_device_of(module))
        self._inputs: dict[str, Tensor] = {}
        self._recorder = RECORDERS[self._numbers.device.type](self._numbers.device)
        self._output: tuple[list[Any], TreeSpec] | None = None
        self._is_warm = False
        self._agreed = 0  # replays that agreed with a step without a graph

    @property
    def is_recorded(self) -> bool:
        """Whether there is a graph."""
        return self._output is not None

    def reads(self, rows: Sequence[FoldedRows]) -> bool:
        """Whether rows are still where a graph reads them."""
        found = _reads_of(rows)
        return len(found) == len(self._reads) and all(map(is_, found, self._reads))

    def fits(self, module: nn.Module, inputs: StepInputs, rows: Sequence[FoldedRows]) -> bool:
        """Whether the next token goes on: to the same model, with the same weights, and into the same storage."""
        if module is not self._module or module.training != self._is_training or inputs.kind() != self._kind:
            return False
        return self.reads(rows) and all(
            held.get(name) is x and _address(x) == at for held, name, x, at in self._weights
        )

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
        self, forward: Forward, inputs: StepInputs, cache: FoldedCache, given: dict[str, Any],
        layers: Sequence[LayerCache], rows: Sequence[FoldedRows],
    ) -> Any:  # fmt: skip
        """One step: append a token to all layers, and return what the model says."""
        assert all(own.dense.tail is None or own.length < own.dense.room_left for own in rows)
        self._tell(inputs.with_positions(layers[0].columns), rows)
        as_given = partial(self._run, forward, given, inputs.casts, rows)
        if not self._is_warm:
            self._is_warm = True
            return as_given()
        past = cache_name(type(self._module).forward)
        assert past is not None
        recorded = partial(self._run, forward, self._inputs | inputs.others | {past: cache}, inputs.casts, rows)
        if self._output is None:
            try:
                self._recorder.rehearse(recorded)
                self._take_back(layers, rows)
                leaves, spec = tree_flatten(self._recorder.record(recorded))
            except (RuntimeError, NotRecorded) as error:
                raise NotRecorded(f"a step cannot be recorded ({error})") from error
            odd = next((x for x in leaves if x is not cache and not isinstance(x, _LEAVES)), None)
            if odd is not None:
                raise NotRecorded(f"the model's output holds a {type(odd).__name__}")
            self._output = [_CACHE if x is cache else x for x in leaves], spec
            self._take_back(layers, rows)
        self._recorder.replay()
        out = self._copied_output(cache)
        if self._agreed < AGREED:
            return self._checked(out, as_given, rows)
        for layer, own in zip(layers, rows, strict=True):
            own.length += 1
            layer.columns += 1
        return out

    def _take_back(self, layers: Sequence[LayerCache], rows: Sequence[FoldedRows]) -> None:
        """Forget a step's token, for the same to come again."""
        for layer, own in zip(layers, rows, strict=True):
            own.length -= 1
            layer.columns -= 1
            own.empty_next()

    def _run(
        self, forward: Forward, given: dict[str, Any], casts: tuple[bool, torch.dtype], rows: Sequence[FoldedRows]
    ) -> Any:
        """The model's forward pass, with steps in all layers."""
        steps = [GraphStep(own, numbers) for own, numbers in zip(rows, self._numbers, strict=True)]
        for own, step in zip(rows, steps, strict=True):
            own.step = step
        try:
            # Autocast's copies of weights would be freed, and a graph would go on reading them.
            with torch.no_grad(), torch.autocast(self._numbers.device.type, casts[1], casts[0], cache_enabled=False):
                out = forward(**given)
        finally:
            for own in rows:
                own.step = None
        if not all(step.answered for step in steps):
            raise NotRecorded("a layer's token went another way than its step", out)
        return out

    def _checked(self, replayed: Any, as_given: Callable[[], Any], rows: Sequence[FoldedRows]) -> Any:
        """What the model says without a graph; NotRecorded if a replay, which has just been, says something else.

        A model may compute with a cache's length in ways that are not known here, and have positions of its own. The
        graph repeats the length at which it was recorded, so that a replay at another shows it.
        """
        for own in rows:
            own.empty_next()  # tokens that fold by themselves join what is there
        out = as_given()
        for one, other in zip(*(tree_flatten(x)[0] for x in (replayed, out)), strict=True):
            if isinstance(one, Tensor) and (error := _distance(one, other)) > TOLERANCES.get(one.dtype, TOLERANCE):
                raise NotRecorded(
                    f"a replayed step differs by {error:.1e} from one without a graph, so this model must compute "
                    "with the cache's length, or have positions of its own",
                    out,
                )
        self._agreed += 1
        return out

    @in_no_mode
    @torch.no_grad()
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


_LEAVES = (Tensor, type(None), bool, int, float, str)
"""What an output may hold beside the cache."""
_CACHE = object()
"""In an output that is kept, in the place of the cache, which it would keep alive."""


def _distance(one: Tensor, other: Tensor) -> float:
    """Relative distance of two tensors of one shape; where they are equal they may be infinite."""
    apart = torch.where(one == other, 0.0, one.double() - other.double()).norm()
    finite = torch.where(other.isfinite(), other.double(), 0.0)
    return float((apart / finite.norm().clamp_min(1e-30)).nan_to_num(torch.inf))


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
    elsewhere = next((x.device for x in module.parameters() if x.device != device), None)
    if elsewhere is not None:
        return f"the model is on {device} and on {elsewhere}"
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


def _weights(module: nn.Module) -> list[tuple[dict[str, Any], str, Any, int]]:
    """Each parameter, buffer and submodule: where it is kept, its name, itself, and its address."""
    kept = (held for each in module.modules() for held in (each._parameters, each._buffers, each._modules))
    return [(held, name, x, _address(x)) for held in kept for name, x in held.items() if x is not None]


def _address(x: Any) -> int:
    return x.data_ptr() if isinstance(x, Tensor) else 0


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
