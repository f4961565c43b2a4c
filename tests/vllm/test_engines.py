"""How much fits, sliding windows, compiled models, adapters, and what is found wrong only when an engine starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import alone, ask, differences, engine
from rounding import tie_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

import kvfold


def _capacity(model: Path, format: str | None, **options: Any) -> int:
    """Tokens that the engine says it holds, in bfloat16."""
    with engine(model, format, in_process=True, dtype="bfloat16", **options) as llm:
        return llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens


def test_smollm2_holds_over_three_times_as_many_tokens(smollm2: Path, calibration: Path) -> None:
    """By the engine's own count, in equal memory, unfinished pages counted."""
    memory = {"kv_cache_memory_bytes": 512 << 20, "max_model_len": 4096, "max_num_seqs": 8}
    stock = _capacity(smollm2, None, **memory)
    folded = _capacity(smollm2, "kvfold-4", calibration=calibration, **memory)
    print(f"\nSmolLM2 in 512 MiB: bfloat16 {stock:,} tokens, kvfold-4 {folded:,}, {folded / stock:.3f} times")
    assert folded >= 3.4 * stock


def test_heads_of_128_channels_hold_nearly_four_times_as_many_tokens(tiny_llama: Path) -> None:
    memory = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 4}
    stock = _capacity(tiny_llama, None, **memory)
    folded = _capacity(tiny_llama, "kvfold-4@128", **memory)
    print(f"\nheads of 128: bfloat16 {stock:,} tokens, kvfold-4@128 {folded:,}, {folded / stock:.3f} times")
    assert folded >= 3.7 * stock


def test_sliding_windows_stay_dense_beside_folded_layers(tiny_gemma3: Path, tiny_ids: list[int]) -> None:
    """Without codes it answers as vLLM as it comes; with them more fits, and answers do not depend on company."""
    prompts = [tiny_ids[:300], tiny_ids[100:800], tiny_ids[5:20], tiny_ids[:450], tiny_ids[900:1029]]
    options = {"in_process": True, "max_model_len": 4096, "kv_cache_memory_bytes": 64 << 20}
    answers, sizes = {}, {}
    for format in (None, "float16", "kvfold-4"):
        with engine(tiny_gemma3, format, **options) as llm:
            answers[format] = ask(llm, prompts, ignore_eos=True)
            sizes[format] = llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens
            by_itself = alone(llm, prompts, ignore_eos=True)
        differ = differences(answers[format], by_itself)
        tie = tie_of(tiny_gemma3, prompts, format, format)
        assert all(gap < tie for _, _, gap in differ), (differ, tie)
    print(f"\nGemma 3 in 64 MiB: {sizes}, {sizes['kvfold-4'] / sizes[None]:.2f} times")
    assert len({tuple(answer.tokens) for answer in answers[None]}) == len(prompts)
    differ, tie = differences(answers["float16"], answers[None]), tie_of(tiny_gemma3, prompts, "float16", None)
    assert all(gap < tie for _, _, gap in differ), (differ, tie)
    assert sizes["kvfold-4"] > sizes[None]


def test_compiled_models_answer_as_others(tiny_llama: Path, tiny_ids: list[int]) -> None:
    """torch.compile leaves attention alone, while keys are measured too."""
    prompts = [tiny_ids[:300], tiny_ids[100:800], tiny_ids[5:20], tiny_ids[900:1029]]
    answers = []
    for eager in (True, False):
        with engine(tiny_llama, "kvfold-4", in_process=True, enforce_eager=eager) as llm:
            answers.append(ask(llm, prompts, ignore_eos=True))
    differ, tie = differences(*answers), tie_of(tiny_llama, prompts, "kvfold-4", "kvfold-4")
    print(f"\ncompiled beside eager: {differ}; a tie is {tie:.1e}")
    assert all(gap < tie for _, _, gap in differ)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 64}, "takes 64 tokens at a time, formats are fitted to at least 128"),
        ({"skip_tokenizer_init": True}, "without a tokenizer the engine cannot read the text .* give calibration"),
    ],
)
def test_engines_that_could_not_fold_do_not_start(
    tiny_llama: Path, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no other engine has measured this model
    with (
        pytest.raises(ValueError, match=message),
        engine(tiny_llama, "kvfold-4", in_process=True, **options),
    ):
        pass


def test_a_calibration_must_be_there_and_of_this_model(tiny_llama: Path, calibration: Path, tmp_path: Path) -> None:
    """Refused are one of another number of layers, and one of the same shapes and other weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight.flip(0))
    other = tmp_path / "other.safetensors"
    kvfold.calibrate(model, [torch.arange(300)[None] % model.config.vocab_size]).save(other)
    for file, message in (
        (calibration, r"is of a llama with 30 layers, this is a model with .* calibrate this model"),
        (other, r"is of a model with other weights, embeddings among them: calibrate this model"),
    ):
        with pytest.raises(ValueError, match=message), engine(tiny_llama, "kvfold-4", file, in_process=True):
            pass
    with (
        pytest.raises(FileNotFoundError, match="there is no such file"),
        engine(tiny_llama, "kvfold-4", tmp_path / "none.safetensors", in_process=True),
    ):
        pass


def test_adapters_answer_as_models_that_they_are_merged_into(
    tiny_llama: Path, tiny_ids: list[int], tmp_path: Path
) -> None:
    """LoRA is vLLM's; pages of one adapter are not offered to another."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    adapter, (rank, scale) = {}, (8, 2.0)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "v_proj" in name:
            shapes = (rank, weight.shape[1]), (len(weight), rank)
            a, b = (0.05 * torch.randn(shape, generator=generator) for shape in shapes)
            weight += scale * b @ a
            base = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{base}.lora_A.weight": a, f"{base}.lora_B.weight": b}
    model.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(tmp_path / "merged")
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))

    prompts = [tiny_ids[300 * i : 300 * i + 200] for i in range(3)]
    with engine(tiny_llama, "turboquant-4", in_process=True, enable_lora=True, max_lora_rank=rank) as llm:
        base = ask(llm, prompts)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        settings = SamplingParams(temperature=0, max_tokens=40, detokenize=False)
        request = LoRARequest("own", 1, str(tmp_path / "adapter"))
        outputs = llm.generate(given, settings, lora_request=request, use_tqdm=False)
        adapted = [list(output.outputs[0].token_ids) for output in outputs]
        assert not any(output.num_cached_tokens for output in outputs)
    with engine(tmp_path / "merged", "turboquant-4", in_process=True) as llm:
        merged = ask(llm, prompts)
    assert all(one.tokens != other for one, other in zip(base, adapted, strict=True))
    for answer, tokens in zip(merged, adapted, strict=True):
        at = next((i for i, (one, other) in enumerate(zip(answer.tokens, tokens, strict=True)) if one != other), None)
        assert at is None or answer.gaps[at] < 0.1
