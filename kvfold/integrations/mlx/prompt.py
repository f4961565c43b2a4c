"""Answering prompts with mlx-lm."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.sample_utils import make_sampler
from torch import Tensor

from kvfold.formats.numbers import whole
from kvfold.integrations.transformers.prompt import Answer

MIB = 2**20


def set_memory_limits(cache: int | None = None, memory: int | None = None, wired: int | None = None) -> None:
    """Set MLX's own memory limits, in MiB, for the whole process.

    `cache` is freed memory that MLX keeps for itself. `memory` is what it takes in all; it waits for running work, and
    then swaps, before it takes more. `wired` stays in memory and is not swapped, on Macs from macOS 15 on; it replaces
    mlx-lm's own choice.

    Raises ValueError if a number is negative or beyond any memory, or `wired` is given where there is no Metal.
    """
    for name, mib in (("cache", cache), ("memory", memory), ("wired", wired)):
        if mib is not None:
            whole(name, mib, what="a number of MiB")
    if wired is not None and not mx.metal.is_available():
        raise ValueError(f"wired = {wired}: only Metal has memory that is wired, and there is none here; leave it out")
    for limit, mib in ((mx.set_cache_limit, cache), (mx.set_memory_limit, memory), (mx.set_wired_limit, wired)):
        if mib is not None:
            limit(mib * MIB)


def mlx_answer(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    cache: list[Any],
    max_new_tokens: int,
    temperature: float = 0.0,
    *,
    wired: bool = False,
    progress: Callable[[int, int], None] = lambda read, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Read `ids` (1, T) into an empty cache, and answer; greedy at temperature 0.

    `wired` says whether the caller has set a limit of wired memory; that limit then stays. `progress` is called with
    how many tokens of the prompt have been read and how many it has. `say` is called with each piece of text.
    """
    said: list[int] = []
    detokenizer, start = tokenizer.detokenizer, time.perf_counter()

    def read(tokens: int, total: int) -> None:
        nonlocal start
        if tokens < total:  # the last call comes with the first new token
            start = time.perf_counter()
        progress(tokens, total)

    with nullcontext() if wired else wired_limit(model, [generation_stream]):
        for token, _ in generate_step(
            mx.array(ids[0].numpy()),
            model,
            max_tokens=max_new_tokens,
            sampler=make_sampler(temp=temperature),
            prompt_cache=cache,
            prefill_step_size=512,
            prompt_progress_callback=read,
        ):
            said.append(token)
            if token in tokenizer.eos_token_ids:
                break
            detokenizer.add_token(token)
            say(detokenizer.last_segment)
    seconds = time.perf_counter() - start
    detokenizer.finalize()
    say(detokenizer.last_segment)
    new = torch.tensor([said], dtype=ids.dtype)
    return Answer(detokenizer.text, len(said), seconds, torch.cat((ids, new), 1))
