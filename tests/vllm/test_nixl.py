"""One engine reads prompts, another takes their pages by vLLM's own transfer, and decodes."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import answers, differences, engine
from rounding import tie_of
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

FORMAT, PAGE, NEW = "kvfold-4", 64, 24
LENGTHS = (10, PAGE, PAGE + 1, 400, 7 * PAGE)
"""Of prompts: less than a page, whole pages, one token more, and some more."""


@contextmanager
def _engine(model: Path, role: str, format: str = FORMAT, **options: Any) -> Iterator[LLM]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role=role, kv_load_failure_policy="recompute")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        with engine(model, format, kv_transfer_config=transfer, **options) as llm:
            yield llm


def _ask(llm: LLM, prompts: list[list[int]], new: int, given: list[dict[str, Any] | None]) -> list[Any]:
    settings = [
        SamplingParams(
            temperature=0, max_tokens=new, logprobs=2, detokenize=False, ignore_eos=True,
            extra_args=None if each is None else {"kv_transfer_params": each},
        )
        for each in given
    ]  # fmt: skip
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)


@pytest.fixture(scope="module")
def decodes(tiny_llama: Path) -> Iterator[LLM]:
    with _engine(tiny_llama, "kv_consumer") as llm:
        yield llm


def _handed_over(reads: LLM, decodes: LLM, prompts: list[list[int]]) -> list[Any]:
    first = _ask(reads, prompts, 1, [{"do_remote_decode": True, "do_remote_prefill": False}] * len(prompts))
    return _ask(decodes, prompts, NEW, [output.kv_transfer_params for output in first])


def _folded(worker: Any) -> int:
    return sum(builder.pages_folded for builder in worker._builders())


def _pages_folded(llm: LLM) -> int:
    """How many pages an engine has folded itself so far."""
    return sum(llm.collective_rpc(_folded))


def test_pages_travel(decodes: LLM, tiny_llama: Path, tiny_ids: list[int]) -> None:
    """The engine that decodes reads less than a page, and says what it says if it reads all by itself."""
    prompts = [tiny_ids[100 * i : 100 * i + length] for i, length in enumerate(LENGTHS)]
    alone = answers(_ask(decodes, prompts, NEW, [None] * len(prompts)))
    assert decodes.reset_prefix_cache()
    folded = [_pages_folded(decodes)]
    with _engine(tiny_llama, "kv_producer") as reads:
        first = _handed_over(reads, decodes, prompts)
        folded.append(_pages_folded(decodes))
        again = _handed_over(reads, decodes, prompts)
    assert folded[0] == sum((length + NEW - 1) // PAGE for length in LENGTHS)
    assert folded[1] - folded[0] == sum((length + NEW - 1) // PAGE - (length - 1) // PAGE for length in LENGTHS)
    tie = tie_of(tiny_llama, [prompts[3]], FORMAT, FORMAT)
    for said in map(answers, (first, again)):
        differ = differences(said, alone)
        print(f"\nhanded over beside alone: {differ}; a tie is {tie:.1e}")
        assert all(gap < tie for _, _, gap in differ)


def test_engines_of_another_kind_refuse_each_other(decodes: LLM, tiny_llama: Path, tiny_ids: list[int]) -> None:
    """Then prompts are read where they are decoded."""
    prompts = [tiny_ids[:400]]
    before = _pages_folded(decodes)
    (alone,) = _ask(decodes, prompts, NEW, [None])
    pages = _pages_folded(decodes) - before
    assert decodes.reset_prefix_cache()
    with _engine(tiny_llama, "kv_producer", "kvfold-3") as reads:
        (answer,) = _handed_over(reads, decodes, prompts)
    assert _pages_folded(decodes) - before == 2 * pages
    assert answer.outputs[0].token_ids == alone.outputs[0].token_ids
