"""Engines, what they answer, and how answers are compared."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.attention.selector import _cached_get_attn_backend


@contextmanager
def engine(
    model: Path, format: str | None = None, calibration: Path | None = None, in_process: bool = False, **options: Any
) -> Iterator[LLM]:
    """vLLM's engine over a model's folder, with a folded cache or, without a format, as it comes.

    It has processes of its own, as when it serves; `in_process` spares their start, and lets a schedule repeat.
    """
    if format is not None:
        own = {"format": format} | ({} if calibration is None else {"calibration": str(calibration)})
        options["additional_config"] = {"kvfold": own}
    if in_process:
        options["distributed_executor_backend"] = "uni"
        _cached_get_attn_backend.cache_clear()  # it knows attention by the layer and not by the engine
    settings = {
        "dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20,
        "max_num_seqs": 8, "max_num_batched_tokens": 512, "seed": 0, "disable_log_stats": False,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(not in_process)))
        llm = LLM(model=str(model), **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@dataclass(frozen=True)
class Answer:
    """What a request got.

    Attributes
    ----------
    tokens
        The new tokens.
    gaps
        At each of them, by how much the likeliest token's log-probability was ahead of the next one's.
    read
        At each token of the prompt but the first, log-probabilities of the likeliest tokens and of the one that came.
    cached
        Tokens of the prompt that were found in the cache.
    """

    tokens: list[int]
    gaps: list[float]
    read: list[dict[int, float]]
    cached: int


def ask(
    llm: LLM, prompts: Sequence[list[int]], new: int | Sequence[int] = 40, read: int | None = None, **options: Any
) -> list[Answer]:
    """Greedy answers to all prompts at once, up to `new` tokens each; with `read`, that many likeliest at prompts."""
    lengths = [new] * len(prompts) if isinstance(new, int) else new
    settings = [
        SamplingParams(temperature=0, max_tokens=length, logprobs=2, prompt_logprobs=read, detokenize=False, **options)
        for length in lengths
    ]
    return answers(llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False))


def answers(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """What an engine's outputs say; two log-probabilities were asked for at each token."""
    found = []
    for output in outputs:
        best = [sorted((x.logprob for x in at.values()), reverse=True) for at in output.outputs[0].logprobs]
        found.append(
            Answer(
                list(output.outputs[0].token_ids), [first - second for first, second, *_ in best],
                [{token: x.logprob for token, x in at.items()} for at in (output.prompt_logprobs or [])[1:]],
                output.num_cached_tokens or 0,
            )
        )  # fmt: skip
    return found


def alone(llm: LLM, prompts: Sequence[list[int]], new: int | Sequence[int] = 40, **options: Any) -> list[Answer]:
    """Answers to one prompt after the other, with nothing in the cache."""
    lengths = [new] * len(prompts) if isinstance(new, int) else new
    found = []
    for prompt, length in zip(prompts, lengths, strict=True):
        assert llm.reset_prefix_cache()
        found += ask(llm, [prompt], length, **options)
    return found


def slots_in_use(llm: LLM) -> int:
    """Unfinished pages that hold a slot, in all workers; once no request runs, these know which ended."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None and not core.scheduler.has_unfinished_requests():
        core.step_fn()  # in a process of its own it takes this step unasked
    return sum(llm.collective_rpc(_slots_in_use))


def _slots_in_use(worker: Any) -> int:
    return sum(len(builder.slots) for builder in worker._builders())


def counted(llm: LLM, name: str) -> int:
    """One of the engine's counters."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def differences(ones: Sequence[Answer], others: Sequence[Answer]) -> list[tuple[int, int, float]]:
    """For each pair of answers that are not equal: its number, where they part, and how near a tie that was."""
    found = []
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        if one.tokens != other.tokens:
            pairs = zip(one.tokens, other.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            assert at is not None, f"answer {number} ends where the other goes on"
            found.append((number, at, round(max(one.gaps[at], other.gaps[at]), 4)))
    return found
