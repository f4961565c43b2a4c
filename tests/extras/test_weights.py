"""Quantised weights beside folded caches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_kvfold
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import GgufConfig

import kvfold
from kvfold.cache.report import held_bytes
from kvfold.integrations.models import demo_folder, load_config
from kvfold.integrations.text import standard_text
from kvfold.integrations.weights import quantize_weights, weight_bytes, weights_held

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def int8() -> Demo:
    """The demo model in bfloat16 with weights of 8 bits, attached."""
    model, tokenizer = kvfold.load_model("smollm2", torch.bfloat16, "int8")
    kvfold.attach(model)
    return model, tokenizer


@pytest.fixture(scope="module")
def ids(int8: Demo) -> torch.Tensor:
    """500 tokens, (1, 500)."""
    return int8[1](standard_text()[20_000:23_000], return_tensors="pt").input_ids[:, :500]


def folded_loss(model: PreTrainedModel, ids: torch.Tensor, format: str) -> float:
    """Of the second half of a text, in nats a token, read through a folded cache."""
    cache = kvfold.FoldedCache(model.config, format)
    with torch.no_grad():
        model(ids[:, :400], past_key_values=cache)
        logits = model(ids[:, 400:], past_key_values=cache).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 401:]).item()


def test_int8_weights_and_a_folded_cache_go_together(int8: Demo, ids: torch.Tensor) -> None:
    """The weights are smaller by what is planned, the model still predicts the text, and the cache is as small."""
    model, _ = int8
    plain, _ = kvfold.load_model("smollm2", torch.bfloat16)
    kvfold.attach(plain)
    assert weights_held(plain) == weight_bytes(load_config("smollm2"), torch.bfloat16)
    assert weights_held(model) == pytest.approx(weight_bytes(load_config("smollm2"), torch.bfloat16, "int8"), rel=0.01)
    assert weights_held(model) < 0.65 * weights_held(plain)
    losses = {name: folded_loss(own, ids, "kvfold-4") for name, own in (("plain", plain), ("int8", model))}
    assert losses["int8"] == pytest.approx(losses["plain"], abs=0.05)
    assert losses["int8"] != losses["plain"]
    dense = folded_loss(model, ids, "dense")
    assert losses["int8"] == pytest.approx(dense, abs=0.05)


def test_a_cache_of_a_quantised_model_is_saved_and_belongs_to_it(int8: Demo, ids: torch.Tensor, tmp_path: Path) -> None:
    """A saved cache goes on with the weights that made it, and says so of others."""
    model, _ = int8
    cache = kvfold.FoldedCache(model.config, "kvfold-3")
    with torch.no_grad():
        model(ids[:, :450], past_key_values=cache)
        cache.save(tmp_path / "it.kv", ids=ids[:, :450])
        again = kvfold.FoldedCache.load(tmp_path / "it.kv", model.config)
        assert held_bytes(again) == pytest.approx(held_bytes(cache), rel=0.1)
        expected = model(ids[:, 450:], past_key_values=cache).logits
        assert torch.equal(model(ids[:, 450:], past_key_values=again).logits, expected)
        plain, _ = kvfold.load_model("smollm2", torch.bfloat16)
        kvfold.attach(plain)
        with pytest.raises(ValueError, match="saved by another model"):
            plain(ids[:, 450:], past_key_values=kvfold.FoldedCache.load(tmp_path / "it.kv", plain.config))


def test_a_calibration_is_measured_on_quantised_weights(int8: Demo, ids: torch.Tensor) -> None:
    model, _ = int8
    measured = kvfold.calibrate(model, [ids])
    cache = kvfold.FoldedCache(model.config, "kvfold-3", calibration=measured)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert cache.report().dense_share < 0.6


def test_weights_that_were_quantised_before_are_loaded_as_they_are(ids: torch.Tensor, tmp_path: Path) -> None:
    """bitsandbytes' 4 bits, through transformers; `weights` then is refused."""
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        demo_folder(), quantization_config=four, dtype=torch.bfloat16, device_map="cpu"
    ).eval()
    kvfold.attach(model)
    assert weights_held(model) < 0.5 * weight_bytes(load_config("smollm2"), torch.bfloat16)
    assert folded_loss(model, ids, "kvfold-4") == pytest.approx(folded_loss(model, ids, "dense"), abs=0.05)
    with pytest.raises(ValueError, match="quantised already"):
        quantize_weights(model, "int8")


def test_the_command_line_quantises(tmp_path: Path) -> None:
    run = run_kvfold(
        "bench", "--weights", "int8", "--dtype", "bfloat16", "--contexts", "300", "--new", "2", "--formats", "kvfold-4",
        "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert {row["weights"] for row in rows} == {"int8"}
    assert rows[0]["weights_bytes"] < 0.65 * weight_bytes(load_config("smollm2"), torch.bfloat16)
    said = run_kvfold("generate", "--prompt", "The capital of France is", "--raw", "--weights", "int8", "--json",
                      "--max-new-tokens", "3")  # fmt: skip
    assert "Paris" in json.loads(said.stdout)["text"]


def test_what_is_measured_on_quantised_weights_says_so(small_folder: Path, tmp_path: Path) -> None:
    """And outcomes of the weights as they are are no outcomes of these."""
    text = tmp_path / "text.txt"
    text.write_text(standard_text()[:12_000])
    small = ("--model", str(small_folder), "--text", str(text), "--passages", "1")
    rows: dict[str, list[dict[str, Any]]] = {}
    losses = []
    for weights in (("--weights", "int8"), ()):
        for command, options in (
            ("sweep", (*small, "--passage", "600", "--key-bits", "4", "--value-bits", "4", "--page-sizes", "")),
            ("tasks", (*small[:2], "--tasks", "needle", "--lengths", "300", "--repeats", "1", "--formats", "kvfold-4")),
        ):
            out = tmp_path / f"{command}.jsonl"
            run = run_kvfold(command, *options, *weights, "--out", str(out))
            assert run.returncode == 0, run.stderr
            rows[command] = [json.loads(line) for line in out.read_text().splitlines()]
        out = tmp_path / f"{len(weights)}.safetensors"
        run = run_kvfold("calibrate", *small, "--passage", "600", "--out", str(out), *weights, "--json")
        assert run.returncode == 0, run.stderr
        losses.append(json.loads(run.stdout)["losses"])
    assert losses[0] != losses[1]
    for command, found in rows.items():
        own = [row.get("eval", row).get("weights") for row in found]
        assert own == ["int8"] * (len(own) // 2) + [None] * (len(own) // 2), command


def test_what_is_not_quantised_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A model without linear layers is refused, one that is mostly embeddings warned of, and GGUF is no hindrance."""
    with pytest.raises(ValueError, match="GPT2Model has no linear layer"):
        quantize_weights(GPT2Model(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100)), "int8")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=5_000, tie_word_embeddings=True, **sizes))
    model.config.quantization_config = GgufConfig()  # as transformers leaves it on what it has unpacked
    with caplog.at_level("WARNING", "kvfold"):
        quantize_weights(model, "int8")
    assert "% of the weights are in linear layers" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_counts_what_is_loaded(dtype: torch.dtype) -> None:
    model, _ = kvfold.load_model("smollm2", dtype, "int8")
    planned = weight_bytes(load_config("smollm2"), dtype, "int8")
    assert weights_held(model) == pytest.approx(planned, rel=0.01)
