"""How fast a model reads and writes with a dense cache and with folded ones, and what the caches take."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.cache.report import held_bytes
from kvfold.evaluate.quality import versions
from kvfold.formats.numbers import LARGEST, whole
from kvfold.integrations.transformers import FoldedCache
from kvfold.integrations.transformers.calls import cache_argument

DENSE = "dense"
CHUNK = 1024
"""Tokens of a prompt that are read at a time."""


@dataclass(frozen=True)
class SpeedRow:
    """One cache, dense or in a format, after a prompt of `context` tokens, decoding one token at a time."""

    format: str
    context: int
    new_tokens: int
    prefill_ms: float
    decode_tok_s: float
    """By the median step, as the ms below."""
    ms_per_token: float
    ms_per_token_quartiles: tuple[float, float]
    throughput_tok_s: float
    """New tokens over all time, the prompt's included."""
    decode_ratio: float
    """The median over steps of the dense cache's time divided by this one's; steps alternate, so that both see the same
    machine."""
    held_bytes: int
    """Every byte that the cache owns at the end."""
    peak_bytes: int | None
    """How much the process grew at most while it read the prompt; None where the system does not tell (Linux does)."""

    def to_json(self, **about: Any) -> dict[str, Any]:
        """As a JSON object, with versions and what else is given."""
        return {**about, **asdict(self), "threads": torch.get_num_threads(), "versions": versions()}


@torch.no_grad()
def measure_speed(
    model: PreTrainedModel,
    ids: Tensor,
    formats: Sequence[str],
    contexts: Sequence[int],
    new_tokens: int = 32,
    progress: Callable[[int], None] = lambda _: None,
) -> list[SpeedRow]:
    """Time an attached model with dense and folded caches side by side, the dense one first after each context.

    `ids` is a text, (1, tokens), longer than every context; `progress` is called with tokens read or decoded.
    """
    whole("new_tokens", new_tokens, 2)  # quartiles need so many
    for context in contexts:
        if not 1 <= whole("context", context, -LARGEST) <= ids.shape[1] - new_tokens:
            raise ValueError(
                f"context = {context}: the text has {ids.shape[1]} tokens, so give 1 to {ids.shape[1] - new_tokens}"
            )
    for name in (DENSE, DENSE, *formats):  # work of first calls only: tables, operators, threads
        model(ids[:, :400], **cache_argument(model, _cache(model, name)), logits_to_keep=1)
    rows = []
    for context in contexts:
        caches: dict[str, Cache] = {}
        prefill, peak = {}, {}
        for name in (DENSE, *formats):
            before = _reset_peak()
            start = time.perf_counter()
            cache = _cache(model, name)
            for first in range(0, context, CHUNK):
                part = ids[:, first : min(first + CHUNK, context)]
                model(part, **cache_argument(model, cache), logits_to_keep=1)
                progress(part.shape[1])
            prefill[name] = 1e3 * (time.perf_counter() - start)
            peak[name] = None if before is None else max((_resident("VmHWM") or 0) - before, 0)
            caches[name] = cache
        steps: dict[str, list[float]] = {name: [] for name in caches}
        for t in range(context, context + new_tokens):
            for name, cache in caches.items():
                start = time.perf_counter()
                model(ids[:, t : t + 1], **cache_argument(model, cache))
                steps[name].append(1e3 * (time.perf_counter() - start))
                progress(1)
        for name, cache in caches.items():
            quartiles = statistics.quantiles(steps[name], n=4)
            rows.append(
                SpeedRow(
                    format=name,
                    context=context,
                    new_tokens=new_tokens,
                    prefill_ms=prefill[name],
                    decode_tok_s=1e3 / quartiles[1],
                    ms_per_token=quartiles[1],
                    ms_per_token_quartiles=(quartiles[0], quartiles[2]),
                    throughput_tok_s=1e3 * new_tokens / (prefill[name] + sum(steps[name])),
                    decode_ratio=statistics.median(
                        d / f for d, f in zip(steps[DENSE], steps[name], strict=True)
                    ),
                    held_bytes=held_bytes(cache.layers),
                    peak_bytes=peak[name],
                )
            )  # fmt: skip
    return rows


def _cache(model: PreTrainedModel, name: str) -> Cache:
    return DynamicCache(config=model.config) if name == DENSE else FoldedCache(model.config, name)


def _resident(field: str) -> int | None:
    """A field of this process's status in bytes; None where the system has none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)


def _reset_peak() -> int | None:
    """Reset the peak of the resident set; returns the present one, or None if the system cannot reset it.

    Freed memory is returned to the system first. Otherwise one cache would reuse what another's run has left.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")
