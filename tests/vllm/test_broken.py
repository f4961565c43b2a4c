"""A NaN or an infinity in one request ends that request, beside what vLLM does as it comes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from engines import alone, differences, engine, slots_in_use
from rounding import tie_of
from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

PLANTED = 259
"""A token whose embedding is beyond float16. No text has it, and the model never says it by itself."""
NEW = 40


@pytest.fixture(scope="module")
def planted(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.model.embed_tokens.weight[PLANTED] = 1e6
    model.lm_head.weight[PLANTED] = 0
    folder = tmp_path_factory.mktemp("planted")
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[None, "kvfold-4"], ids=["stock", "kvfold-4"])
def llm(planted: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, str | None]]:
    options = {"dtype": "float16", "max_num_seqs": 16, "enable_prompt_embeds": True}
    with engine(planted, request.param, in_process=True, **options) as llm:
        yield llm, request.param


@pytest.fixture(scope="module")
def sound(tiny_ids: list[int]) -> list[list[int]]:
    """16 prompts without the planted token."""
    ids = [token for token in tiny_ids if token != PLANTED]
    return [ids[200 * i : 200 * i + 40 + 11 * i] for i in range(16)]


def _generate(llm: LLM, prompts: list[list[int] | torch.Tensor], new: int = NEW) -> list[RequestOutput]:
    given = [{"prompt_embeds" if torch.is_tensor(each) else "prompt_token_ids": each} for each in prompts]
    settings = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    return llm.generate(given, settings, use_tqdm=False)


def _assert_ends(output: RequestOutput, format: str | None) -> None:
    """vLLM as it comes says something that means nothing; folded, the request says that it failed."""
    (answer,) = output.outputs
    if format is None:
        assert answer.finish_reason == "length"
        assert len(set(answer.token_ids)) == 1
    else:
        assert answer.finish_reason == "error"
        assert answer.stop_reason == "kvfold: the model computed a NaN or an infinity for this request"
        assert not answer.token_ids


def test_it_alone_ends_and_says_why(
    llm: tuple[LLM, str | None], sound: list[list[int]], planted: Path, tiny_ids: list[int]
) -> None:
    own, format = llm
    by_itself = alone(own, sound, NEW, ignore_eos=True)
    broken = {3: 5, 7: 64, 11: len(sound[11]) - 1, 15: 100}  # in the first page, later, at the very end
    prompts = [[PLANTED if i == broken.get(n) else token for i, token in enumerate(p)] for n, p in enumerate(sound)]
    assert own.reset_prefix_cache()
    outputs = _generate(own, prompts)
    for number in broken:
        _assert_ends(outputs[number], format)
    tie = 50 * tie_of(planted, [tiny_ids[:700]], format, format)  # in float16, not in float32
    others = [number for number in range(16) if number not in broken]
    said = [[list(outputs[n].outputs[0].token_ids) for n in others], [by_itself[n].tokens for n in others]]
    parted = [n for n, one, other in zip(others, *said, strict=True) if one != other]
    print(f"\n{format or 'stock'}: others that part by rounding: {parted}")
    together = alone(own, [sound[n] for n in parted], NEW, ignore_eos=True)
    assert all(gap < tie for _, _, gap in differences(together, [by_itself[n] for n in parted]))
    assert len(parted) <= 3
    if format:
        assert slots_in_use(own) == 0


def test_nobody_is_offered_its_pages(llm: tuple[LLM, str | None], sound: list[list[int]]) -> None:
    own, format = llm
    assert own.reset_prefix_cache()
    _generate(own, [sound[15][:140]])
    prompt = [*sound[15][:140], PLANTED, *sound[15]]
    for _ in range(2):
        (output,) = _generate(own, [prompt])
        _assert_ends(output, format)
        assert output.num_cached_tokens <= 128 or format is None
    (whole,) = _generate(own, [sound[15]])
    assert whole.outputs[0].finish_reason == "length"
    assert whole.num_cached_tokens == 128  # what was sound before stays


def test_embeddings_of_a_client(llm: tuple[LLM, str | None], sound: list[list[int]]) -> None:
    own, format = llm
    width = own.llm_engine.model_config.get_hidden_size()
    embeds = torch.randn(100, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32).half()
    embeds[30, 3] = torch.nan
    output, other = _generate(own, [embeds, sound[0]])
    _assert_ends(output, format)
    assert other.outputs[0].finish_reason == "length"


def test_many_later_the_engine_is_up(llm: tuple[LLM, str | None], sound: list[list[int]]) -> None:
    own, format = llm
    assert own.reset_prefix_cache()
    before = _generate(own, [sound[0]])[0].outputs[0].token_ids
    short = [sound[i % 16][:20] for i in range(1000)]
    outputs = _generate(own, [[PLANTED, *each] if i % 5 == 0 else each for i, each in enumerate(short)], 2)
    if format:  # stock, blocks that held NaN may spoil what comes later
        assert [output.outputs[0].finish_reason == "error" for output in outputs] == [i % 5 == 0 for i in range(1000)]
        assert slots_in_use(own) == 0
        assert own.reset_prefix_cache()
        assert _generate(own, [sound[0]])[0].outputs[0].token_ids == before


def test_pages_that_are_loaded_over_broken_ones_are_sound(
    planted: Path, sound: list[list[int]], tiny_ids: list[int], tmp_path: Path
) -> None:
    """In a pool so small that a later request gets the blocks of one that broke."""
    prompt = [token for token in tiny_ids if token != PLANTED][:500]
    own = {"kvfold": {"format": "kvfold-4", "keep": str(tmp_path), "keep_limit": 10**9}}
    options = {"dtype": "float16", "max_model_len": 576, "num_gpu_blocks_override": 10, "max_num_seqs": 2}
    with engine(planted, additional_config=own, in_process=True, **options) as llm:
        (fresh,) = _generate(llm, [prompt])
        assert llm.reset_prefix_cache()
        (broken,) = _generate(llm, [[PLANTED, *prompt[1:]]])
        _assert_ends(broken, "kvfold-4")
        (loaded,) = _generate(llm, [prompt])
    assert loaded.num_cached_tokens == 448
    assert loaded.outputs[0].finish_reason == "length"
    assert loaded.outputs[0].token_ids == fresh.outputs[0].token_ids
