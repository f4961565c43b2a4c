"""What the engine's scheduler does to sequences: company, chunks, preemption, sampling, aborts, more workers."""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import Answer, alone, ask, counted, differences, engine, slots_in_use
from rounding import tie_of
from vllm import LLM, SamplingParams
from vllm.v1.request import RequestStatus

BLOCKS = 19
"""Of 64 tokens, one of them for the engine itself: hardly more than the longest request takes."""


@dataclass(frozen=True)
class Requests:
    """Prompts and how many new tokens each asks for."""

    prompts: list[list[int]]
    new: list[int]


@pytest.fixture(scope="module")
def requests(tiny_ids: list[int]) -> Requests:
    """64 prompts of 1 to 700 tokens, those around whole pages among them; every fourth begins as the others do."""
    rng = random.Random(0)
    prompts, new = [], []
    for i in range(64):
        length = [1, 2, 63, 64, 65, 127, 128, 129][i] if i < 8 else rng.randint(1, 700)
        first = 0 if i % 4 == 0 else rng.randrange(3000)
        prompts.append(tiny_ids[first : first + length])
        new.append(rng.randint(1, 40))
    return Requests(prompts, new)


@pytest.fixture(scope="module", params=["float16", "kvfold-4"])
def format(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tie(format: str, tiny_llama: Path, tiny_ids: list[int]) -> float:
    return tie_of(tiny_llama, [tiny_ids[first : first + 740] for first in range(0, 3000, 740)], format, format)


@pytest.fixture(scope="module")
def llm(format: str, tiny_llama: Path) -> Iterator[LLM]:
    """An engine that has too little memory for what it runs, and takes prompts in chunks of two pages."""
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 12, "num_gpu_blocks_override": BLOCKS}
    with engine(tiny_llama, format, in_process=True, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def by_itself(llm: LLM, requests: Requests) -> list[Answer]:
    """What each request gets alone."""
    return alone(llm, requests.prompts, requests.new, ignore_eos=True)


def test_64_requests_at_once_get_what_each_gets_alone(
    format: str, llm: LLM, requests: Requests, by_itself: list[Answer], tie: float
) -> None:
    """In chunks, in a pool that is too small for them, so that some are preempted and computed again."""
    assert llm.reset_prefix_cache()
    before = counted(llm, "num_preemptions")
    together = ask(llm, requests.prompts, requests.new, ignore_eos=True)
    preempted = counted(llm, "num_preemptions") - before
    differ = differences(together, by_itself)
    print(f"\n{format}: 64 at once, {preempted} preempted, {len(differ)} part: {differ}; a tie is {tie:.1e}")
    assert preempted > 0
    assert all(gap < tie for _, _, gap in differ)
    assert len({tuple(answer.tokens) for answer in together}) > 50  # the model does not say the same to everything
    assert any(answer.cached for answer in together)
    assert slots_in_use(llm) == 0


def test_samples_of_one_prompt_have_tails_of_their_own(format: str, llm: LLM, tiny_ids: list[int], tie: float) -> None:
    """What each token was said to be worth is what reading the whole sample says, though three grow from one prompt.

    They take more memory than there is, so some are preempted.
    """
    prompts = [tiny_ids[:150], tiny_ids[300:364], tiny_ids[700:1001]]
    params = SamplingParams(n=3, temperature=0.8, max_tokens=70, logprobs=0, ignore_eos=True, detokenize=False)
    before = counted(llm, "num_preemptions")
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert counted(llm, "num_preemptions") > before
    samples, said = [], []
    for ids, output in zip(prompts, outputs, strict=True):
        for sample in output.outputs:
            samples.append(ids + list(sample.token_ids))
            said.append([at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)])
    assert len(set(map(tuple, samples))) == 9
    worst = 0.0
    for ids, answer, own in zip(samples, ask(llm, samples, 1, read=0), said, strict=True):
        read = [at[token] for token, at in zip(ids[-70:], answer.read[-70:], strict=True)]
        worst = max(worst, *(abs(a - b) for a, b in zip(read, own, strict=True)))
    print(f"\n{format}: log-probabilities of samples differ from reading them by {worst:.1e} at most")
    assert worst < tie  # without codes, float16's rounding falls to either side as codes do
    assert slots_in_use(llm) == 0


class Stepped:
    """Some of the requests in an engine that is stepped by hand."""

    def __init__(self, llm: LLM, requests: Requests, chosen: range) -> None:
        assert llm.reset_prefix_cache()
        self.llm, self.core, self.left = llm, llm.llm_engine, set(chosen)
        self.finished: dict[int, list[int]] = {}
        for i in chosen:
            params = SamplingParams(temperature=0, max_tokens=requests.new[i], ignore_eos=True, detokenize=False)
            self.core.add_request(str(i), {"prompt_token_ids": requests.prompts[i]}, params)

    def step(self) -> None:
        for output in self.core.step():
            if output.finished:
                self.finished[_number(output.request_id)] = list(output.outputs[0].token_ids)

    def abort(self, some: list[int]) -> None:
        self.left -= set(some)
        self.core.abort_request([str(i) for i in some])

    def preempted(self) -> list[int]:
        """Requests that lost their blocks and wait to be computed again."""
        waiting = self.core.engine_core.engine_core.scheduler.waiting
        return [_number(request.request_id) for request in waiting if request.status == RequestStatus.PREEMPTED]

    def check(self, by_itself: list[Answer], tie: float) -> None:
        """All that were not aborted get what each gets alone, and nothing is held any more."""
        while self.core.has_unfinished_requests():
            self.step()
        assert self.finished.keys() == self.left
        for i, tokens in self.finished.items():
            got = Answer(tokens, by_itself[i].gaps, [], 0)
            assert all(gap < tie for _, _, gap in differences([got], [by_itself[i]]))
        assert slots_in_use(self.llm) == 0
        assert self.llm.reset_prefix_cache()  # it does only while no block is held


def _number(request_id: str) -> int:
    return int(request_id.split("-")[0])


def test_aborted_requests_give_everything_back(
    llm: LLM, requests: Requests, by_itself: list[Answer], tie: float
) -> None:
    """Some run, some wait; the others do not notice."""
    engine = Stepped(llm, requests, range(8, 32))
    for _ in range(8):
        engine.step()
    assert slots_in_use(llm) > 0
    engine.abort([i for i in engine.left if i % 2 and i not in engine.finished])
    engine.check(by_itself, tie)


def test_a_preempted_request_may_be_aborted(llm: LLM, requests: Requests, by_itself: list[Answer], tie: float) -> None:
    """Its blocks have been others' since then: their unfinished pages stay."""
    engine = Stepped(llm, requests, range(8, 32))
    lost: list[int] = []
    while not lost:
        assert llm.llm_engine.has_unfinished_requests()  # some request waits for blocks until then
        before = engine.preempted()
        engine.step()
        lost = [i for i in engine.preempted() if i in before]
    engine.abort(lost)
    engine.check(by_itself, tie)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("format", ["kvfold-4"], indirect=True, scope="module")
def test_two_workers_answer_as_one(
    format: str,
    requests: Requests,
    by_itself: list[Answer],
    tie: float,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensor parallelism gives each one of the two KV heads, fitted to what its own keys are like. Each keeps its own
    pages, and finds them again."""
    one, other, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{one}|{other}")  # on one NUMA node vLLM wants to be told
    few = slice(8, 18)
    own = {"kvfold": {"format": format, "keep": str(tmp_path), "keep_limit": 10**9}}
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 12, "tensor_parallel_size": 2}
    prompts, new = requests.prompts[few], requests.new[few]
    with engine(tiny_llama, additional_config=own, **options) as llm:
        answers = ask(llm, prompts, new, ignore_eos=True)
        assert slots_in_use(llm) == 0
        assert llm.reset_prefix_cache()
        time.sleep(1)  # what waits is written
        again = ask(llm, prompts, new, ignore_eos=True)
    for said in (answers, again):
        differ = differences(said, by_itself[few])
        print(f"\n{format}: beside one worker {len(differ)} of {len(answers)} part: {differ}")
        assert all(gap < tie for _, _, gap in differ)
    assert [answer.cached for answer in again] == [(len(prompt) - 1) // 64 * 64 for prompt in prompts]
    assert len({file.relative_to(tmp_path).parts[0] for file in tmp_path.glob("*/??/*")}) == 2
