"""Requests that keep to a budget of tokens: the same blocks go as in transformers, and the pool has them back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rounding
import torch
import transformers
from engines import ask, counted, differences, engine, slots_in_use
from vllm import LLM, SamplingParams

import kvfold
from kvfold.cache.policy import Policy
from kvfold.eviction import Eviction, StreamingLLM, TriAttention
from kvfold.formats.base import Window
from kvfold.integrations.vllm.forgetting import folds

FORMAT = "turboquant-4"
FINE = "turboquant-8"
"""Codes so fine that the first token, which is dense in the engine alone, is the same in FoldedCache, too."""
BUDGET, CHUNK, PAGE = 512, 512, 64
LONG = {"max_model_len": 2048, "max_num_batched_tokens": CHUNK}


@pytest.fixture(scope="module")
def statistics(tiny_llama: Path, tiny_ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TRIA file of the tiny model."""
    model = _model(tiny_llama)
    path = tmp_path_factory.mktemp("statistics") / "tiny.tria"
    kvfold.measure_queries(model, [torch.tensor([tiny_ids[3000:3500]])]).save(path)
    return path


def _model(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert kvfold.attach(model)
    return model


def _engine(model: Path, eviction: object, format: str = FORMAT, **options: Any) -> Any:
    own = {"format": format, "eviction": str(eviction), "budget": options.pop("budget", BUDGET)}
    if (keep_prompt := options.pop("keep_prompt", None)) is not None:
        own["keep_prompt"] = keep_prompt
    return engine(model, in_process=True, additional_config={"kvfold": own}, **(LONG | options))


@dataclass(frozen=True)
class Steps:
    """What the pool held while requests ran.

    Attributes
    ----------
    blocks
        Blocks in use after each step.
    tables
        Of each request, after each step, the blocks of its table, None where one is forgotten.
    tokens
        Each request's new tokens.
    """

    blocks: list[int]
    tables: dict[str, list[list[int | None]]]
    tokens: dict[str, list[int]]


def _scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _run(llm: LLM, prompts: dict[str, list[int]], new: int, group: int = 0) -> Steps:
    """Step by step."""
    engine, scheduler = llm.llm_engine, _scheduler(llm)
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    settings = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    for name, ids in prompts.items():
        engine.add_request(name, {"prompt_token_ids": ids}, settings)
    steps = Steps([], {name: [] for name in prompts}, {})
    while engine.has_unfinished_requests():
        for output in engine.step():
            steps.tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps.blocks.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        for request in scheduler.requests.values():
            table = manager.get_block_ids(request.request_id)[group]
            name = next(name for name in prompts if request.request_id.startswith(name))
            if table:
                steps.tables[name].append([number or None for number in table])
    return steps


def _tokens_forgotten(worker: Any) -> int:
    return worker._forgetting.tokens


def _forgotten(table: list[int | None]) -> set[int]:
    return {place for place, block in enumerate(table) if block is None}


@torch.no_grad()
def _in_transformers(model: Any, policy: Eviction, prompt: list[int], new: list[int]) -> tuple[list[float], set[int]]:
    """By how much the engine's tokens fall short of the likeliest, read in the same chunks, and which pages went."""
    cache = kvfold.FoldedCache(
        model.config, policy=Policy(FINE, window=Window(recent=1)), eviction=policy, dense_dtype=torch.float32
    )
    chunks = [prompt[at : at + CHUNK] for at in range(0, len(prompt), CHUNK)] + [[token] for token in new[:-1]]
    short = []
    for number, chunk in enumerate(chunks):
        logits = model(torch.tensor([chunk]), past_key_values=cache).logits[0, -1].log_softmax(-1)
        if number >= len(chunks) - len(new):
            short.append((logits.max() - logits[new[len(short)]]).item())
    rows = cache.layers[0].folded.groups[0].rows
    pages = {int(position) // PAGE for position in rows.slot_positions()[0, 0]}
    return short, set(range(-(-(len(prompt) + len(new) - 1) // PAGE))) - pages


@pytest.mark.parametrize("kind", ["streaming", "tria"])
def test_the_same_pages_go_as_in_transformers(
    kind: str, tiny_llama: Path, statistics: Path, tiny_ids: list[int]
) -> None:
    """And the answers are the same, up to ties; what attention no longer reads, no request holds."""
    model, prompt, new = _model(tiny_llama), tiny_ids[:1500], 150
    policy: Eviction = StreamingLLM(budget=BUDGET)
    if kind == "tria":
        policy = TriAttention(kvfold.QueryStatistics.load(statistics), budget=BUDGET)
    with _engine(tiny_llama, statistics if kind == "tria" else kind, FINE) as llm:
        steps = _run(llm, {"one": prompt}, new)
        free = _scheduler(llm).kv_cache_manager.block_pool
        assert free.get_num_free_blocks() == free.num_gpu_blocks - 1
        assert slots_in_use(llm) == 0
    short, gone = _in_transformers(model, policy, prompt, steps.tokens["one"])
    tie = rounding.tie_of(tiny_llama, [prompt[:600]], FINE, FINE)
    print(f"\n{kind}: at worst {max(short):.1e} short of the likeliest; a tie is {tie:.1e}; gone: {sorted(gone)}")
    assert max(short) < tie
    assert _forgotten(steps.tables["one"][-1]) == gone
    assert len(gone) > (1500 - BUDGET) // PAGE
    if kind == "tria":
        assert gone != set(range(min(gone), max(gone) + 1)), "a policy that chooses leaves gaps"
    # A chunk comes on top of the budget, and between two triggers 128 tokens.
    assert max(steps.blocks) <= (BUDGET + CHUNK) // PAGE + 1
    assert max(steps.blocks[-new:]) <= (BUDGET + 128) // PAGE + 1


def test_the_prompt_stays_if_it_is_to(tiny_llama: Path, tiny_ids: list[int]) -> None:
    """Then the budget is for what comes after it."""
    with _engine(tiny_llama, "streaming", keep_prompt=True, budget=320, max_model_len=4000) as llm:
        steps = _run(llm, {"one": tiny_ids[:1000]}, 1000)
    gone = _forgotten(steps.tables["one"][-1])
    assert gone
    assert min(gone) >= 1000 // PAGE
    assert max(steps.blocks) <= (1000 + 320 + 128) // PAGE + 1


def test_others_that_share_a_prefix_keep_it(tiny_llama: Path, statistics: Path, tiny_ids: list[int]) -> None:
    """Together each says what it says alone; blocks that one has forgotten stay for the others."""
    prefix = tiny_ids[:448]
    prompts = [prefix + tiny_ids[700:1500], prefix + tiny_ids[2000:2010], prefix + tiny_ids[2500:2900]]
    # All of what is left of the prompts is read in one step, so that each forgets at the same points as alone.
    with _engine(tiny_llama, statistics, max_num_batched_tokens=2048) as llm:
        alone = []
        for prompt in prompts:
            assert llm.reset_prefix_cache()
            ask(llm, [[*prefix, 7]], 1)
            alone += ask(llm, [prompt], 100, ignore_eos=True)
        assert llm.reset_prefix_cache()
        ask(llm, [[*prefix, 7]], 1)
        hits, before = counted(llm, "prefix_cache_hits"), sum(llm.collective_rpc(_tokens_forgotten))
        together = ask(llm, prompts, 100, ignore_eos=True)
        assert counted(llm, "prefix_cache_hits") - hits == 3 * 448
        assert sum(llm.collective_rpc(_tokens_forgotten)) - before > 3 * 128
    differ, tie = differences(alone, together), rounding.tie_of(tiny_llama, [prefix], FORMAT, FORMAT)
    print(f"\nalone beside together: {differ}; a tie is {tie:.1e}")
    assert all(gap < tie for _, _, gap in differ)


def test_what_was_computed_after_forgetting_is_no_others_prefix(tiny_llama: Path, tiny_ids: list[int]) -> None:
    """A second request finds what the first wrote before it forgot, and nothing later: it answers as the first did."""
    prompt = tiny_ids[:1800]
    with _engine(tiny_llama, "streaming") as llm:
        first = _run(llm, {"one": prompt}, 40)
        hits = counted(llm, "prefix_cache_hits")
        again = _run(llm, {"two": prompt}, 40)
        found = counted(llm, "prefix_cache_hits") - hits
    print(f"\nfound {found} of {len(prompt)} tokens")
    assert 0 < found <= BUDGET
    assert len(again.tokens["two"]) == len(first.tokens["one"])


def test_a_long_conversation_in_a_small_pool(tiny_llama: Path, statistics: Path) -> None:
    """20,000 tokens, where 20,000 do not fit; and eight such at once wait for no more than their budgets."""
    ids = torch.randint(3, 259, (8, 19_000), generator=torch.Generator().manual_seed(1)).tolist()
    options = {"max_model_len": 20_480, "hf_overrides": {"max_position_embeddings": 32_768}, "budget": 2048}
    memory = 12 << 20
    with _engine(tiny_llama, statistics, kv_cache_memory_bytes=memory, max_num_seqs=2, **options) as llm:
        pool = _scheduler(llm).kv_cache_manager.block_pool
        assert pool.num_gpu_blocks * PAGE < 20_000
        steps = _run(llm, {"one": ids[0]}, 1000)
        flat = steps.blocks[8:]
        for turn in range(4):  # each finds what the one before left; what is found and what is new must fit together
            assert len(_run(llm, {f"again-{turn}": ids[0][:18_000]}, 5).tokens[f"again-{turn}"]) == 5
        print(f"\n{pool.num_gpu_blocks} blocks; from {min(flat)} to {max(flat)} in use over {len(flat)} steps")
        assert len(steps.tokens["one"]) == 1000
        assert max(flat) <= (2048 + CHUNK + 128) // PAGE + 1
        assert max(steps.blocks[-1000:]) <= (2048 + 128) // PAGE + 1
        both = _run(llm, {"two": ids[1][:6000], "three": ids[2][:6000]}, 300)
        assert max(both.blocks) > (2048 + CHUNK) // PAGE, "they ran together"
        assert counted(llm, "num_preemptions") == 0


def test_windows_stay_as_they_are(tiny_gemma3: Path, tiny_ids: list[int]) -> None:
    """Where blocks are larger because of windows, whole blocks go, of the layers that fold only; and nothing leaks."""
    with _engine(tiny_gemma3, "streaming") as llm:
        scheduler = _scheduler(llm)
        groups = scheduler.kv_cache_config.kv_cache_groups
        (folded,) = (i for i, group in enumerate(groups) if folds(group.kv_cache_spec))
        size = groups[folded].kv_cache_spec.block_size
        assert size > PAGE
        steps = _run(llm, {"one": tiny_ids[:1500]}, 150, group=folded)
        gone = _forgotten(steps.tables["one"][-1])
        print(f"\nblocks of {size} tokens; gone: {sorted(gone)}")
        assert gone == set(range(1, max(gone) + 1))
        held = len(steps.tables["one"][-1]) - len(gone)
        assert (held - 1) * size <= BUDGET + 128
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        whole = ask(llm, [tiny_ids[:400]], 40)[0].tokens
    with engine(tiny_gemma3, FORMAT, in_process=True, **LONG) as llm:
        assert ask(llm, [tiny_ids[:400]], 40)[0].tokens == whole, "a request within its budget forgets nothing"


def test_preempted_requests_begin_again(tiny_llama: Path, tiny_ids: list[int]) -> None:
    """In a pool that is too small for all answers with their prompts; nothing is lost, and nothing leaks."""
    prompts = {name: tiny_ids[at : at + 900] for name, at in (("a", 0), ("b", 1000), ("c", 2000))}
    options = {"keep_prompt": True, "budget": 320, "kv_cache_memory_bytes": 6 << 20, "max_num_seqs": 4}
    with _engine(tiny_llama, "streaming", **options) as llm:
        pool = _scheduler(llm).kv_cache_manager.block_pool
        steps = _run(llm, prompts, 700)
        print(f"\n{pool.num_gpu_blocks} blocks, {counted(llm, 'num_preemptions')} preemptions")
        assert counted(llm, "num_preemptions") > 0
        assert {name: len(tokens) for name, tokens in steps.tokens.items()} == dict.fromkeys(prompts, 700)
        assert all(_forgotten(tables[-1]) for tables in steps.tables.values())
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert slots_in_use(llm) == 0
