"""One architecture of each kind beside its own dense cache, by the checks that docs/models.md is made with."""

import pytest
from architectures import check

KINDS = {
    "llama": "folded",
    "gemma2": "folded",  # sliding windows between, scores capped, eager by itself
    "deepseek_v3": "folded",  # of latents
    "gemma3n_text": "folded",  # the last layers read others' keys
    "qwen3_next": "folded",  # linear attention between
    "gemma3": "folded",  # the text of a vision-language model
    "diffllama": "unfolded",  # computes with values first
    "bloom": "unfolded",  # attention code of its own
    "recurrent_gemma": "dense",
    "deepseek_v32": "dense",  # chooses what it reads
}


@pytest.mark.parametrize("model_type", KINDS)
def test_answers_are_those_of_its_own_cache(model_type: str) -> None:
    row = check(model_type)
    assert not row.wrong
    assert not row.crashed
    assert row.verdict == KINDS[model_type]
