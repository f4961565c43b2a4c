"""Pages that outlive the engine: found after a restart, by other engines, and never where they would be wrong."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import Answer, ask, differences, engine
from rounding import tie_of
from vllm import LLM, TokensPrompt

NEW = 20


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines measure at their start is not found from another run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def prefixes(tiny_ids: list[int]) -> list[list[int]]:
    """Prompts of 5 to 900 tokens; the last two begin alike."""
    return [
        tiny_ids[:5],
        tiny_ids[100:164],
        tiny_ids[200:265],
        tiny_ids[300:800],
        [*tiny_ids[300:700], *tiny_ids[:500]],
    ]


@contextmanager
def _keeping(model: Path, folder: Path, format: str = "kvfold-4", **options: Any) -> Iterator[LLM]:
    own = {"kvfold": {"format": format, "keep": str(folder), "keep_limit": 10**9}}
    with engine(model, additional_config=own, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def fresh(tiny_llama: Path, prefixes: list[list[int]]) -> list[Answer]:
    """What an engine answers that keeps nothing; it measures keys, and the others take what it measured."""
    with engine(tiny_llama, "kvfold-4") as llm:
        return [ask(llm, [prompt], NEW, ignore_eos=True)[0] for prompt in prefixes]


@pytest.fixture(scope="module")
def kept(tiny_llama: Path, prefixes: list[list[int]], fresh: list[Answer], tmp_path_factory) -> Path:
    """The folder that an engine left behind."""
    folder = tmp_path_factory.mktemp("kept")
    with _keeping(tiny_llama, folder) as llm:
        answers = [ask(llm, [prompt], NEW, ignore_eos=True)[0] for prompt in prefixes]
    assert not differences(answers, fresh)
    return folder


def _pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/??/*"))


def _copy(kept: Path, folder: Path) -> list[Path]:
    for path in _pages(kept):
        target = folder / path.relative_to(kept)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return _pages(folder)


def test_a_restarted_engine_reads_nothing_again(
    kept: Path, tiny_llama: Path, prefixes: list[list[int]], fresh: list[Answer], tiny_ids: list[int]
) -> None:
    with _keeping(tiny_llama, kept) as llm:
        together = ask(llm, prefixes, NEW, ignore_eos=True)
        (longer,) = ask(llm, [[*prefixes[3], *fresh[3].tokens, 7, 8]], 1)
    assert [answer.cached for answer in together] == [0, 0, 64, 448, 896]
    assert longer.cached == 512  # what was generated is kept, too
    tie = tie_of(tiny_llama, [tiny_ids[:740]], "kvfold-4", "kvfold-4")
    assert all(gap < tie for _, _, gap in differences(together, fresh))
    whole = sum((len(p) + NEW - 1) // 64 for p in prefixes) - 6  # two begin with the same 400 tokens
    assert len(_pages(kept)) == whole
    dense = whole * 64 * 4 * 2 * 2 * 128 * 2  # layers, heads, keys and values, in bfloat16
    held = sum(path.stat().st_size for path in _pages(kept))
    print(f"\n{held:,} bytes on the disk, {dense / held:.2f} times fewer than in bfloat16")
    firsts = 3 * 4 * 2 * 2 * 128 * 4  # of three pages that begin a prompt, in float32
    assert 3.6 < dense / (held - firsts) < 4


def test_damaged_pages_are_computed(
    kept: Path, tiny_llama: Path, prefixes: list[list[int]], fresh: list[Answer], tmp_path: Path, capfd
) -> None:
    pages = _copy(kept, tmp_path)
    for path in pages[::3]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    for path in pages[1::3]:
        os.truncate(path, 1000)
    with _keeping(tiny_llama, tmp_path) as llm:
        answers = [ask(llm, [prompt], NEW, ignore_eos=True)[0] for prompt in prefixes]
        again = ask(llm, prefixes, NEW, ignore_eos=True)
    assert "is damaged: it is removed, and computed again" in capfd.readouterr().err
    assert not differences(answers, fresh)
    assert not [gap for _, _, gap in differences(again, fresh) if gap > 0.1]
    assert len(_pages(tmp_path)) == len(pages)


def test_other_formats_and_weights_find_nothing(
    kept: Path, tiny_llama: Path, prefixes: list[list[int]], tmp_path: Path
) -> None:
    before = _pages(kept)
    with _keeping(tiny_llama, kept, "kvfold-3") as llm:
        assert not any(answer.cached for answer in ask(llm, prefixes[3:4], 1))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-3  # of which no sketch knows
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path)
    with _keeping(tmp_path, kept) as llm:
        assert not any(answer.cached for answer in ask(llm, prefixes[3:4], 1))
    assert set(before) < set(_pages(kept))


def test_one_engine_reads_prompts_and_another_decodes(
    tiny_llama: Path, prefixes: list[list[int]], fresh: list[Answer], tmp_path: Path
) -> None:
    """At the same time, over one folder; salted prompts and those of embeddings are nobody else's."""
    with _keeping(tiny_llama, tmp_path, enable_prompt_embeds=True) as reads, _keeping(tiny_llama, tmp_path) as decodes:
        ask(reads, prefixes[3:4], 1)
        salted = TokensPrompt(prompt_token_ids=prefixes[4], cache_salt="mine")
        reads.generate([salted, {"prompt_embeds": torch.randn(200, 256)}], use_tqdm=False)
        for _ in range(100):
            if len(_pages(tmp_path)) >= 7 + 14:
                break
            time.sleep(0.1)
        (answer, other) = (ask(decodes, [prompt], NEW, ignore_eos=True)[0] for prompt in prefixes[3:5])
    assert answer.cached == 448
    assert other.cached == 384  # what the first prompt shares, not what was salted
    assert not differences([answer, other], fresh[3:5])
