"""Memory projections against the real cache, and against published projections."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kvfold import FoldedCache, attach
from kvfold.integrations.models import read_config
from kvfold.planning import bytes_per_token, held_bytes, model_layers, plan, resolve_head_dim

LLAMA_70B = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}
QWEN3_14B = {
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120, "head_dim": 128,
}  # fmt: skip
GEMMA3_27B = {
    "text_config": {
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "hidden_size": 5376,
        "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6,
    }
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize("tokens", [10, 100, 300, 1000, 4096])
@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3", "turboquant-4:kvfold-4"])
def test_agrees_with_the_real_cache(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], format: str, tokens: int
) -> None:
    """Within 1 % of every byte that a cache of SmolLM2 holds."""
    config = demo[0].config
    cache = FoldedCache(config, format)
    if tokens == 100:  # queries are held, too, so attention must have shown them
        demo[0](torch.arange(100).unsqueeze(0), past_key_values=cache, logits_to_keep=1)
    else:
        for layer in range(30):
            cache.update(*torch.randn(2, 1, 3, tokens, 64, dtype=torch.bfloat16), layer)
    projected = held_bytes(model_layers(read_config("smollm2")), format, tokens)
    assert projected == pytest.approx(cache.held_bytes(), rel=0.01)


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3", "turboquant-4:kvfold-4"])
@pytest.mark.parametrize("dim", [48, 64])
def test_agrees_before_a_prompt_is_fitted(random_ids: Callable[[int, int], Tensor], dim: int, format: str) -> None:
    """While what the fit needs of queries is held, too: below 64 channels only layers' bits wait for it."""
    shape = {"hidden_size": 4 * dim, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, intermediate_size=64, head_dim=dim, **shape)).bfloat16().eval()
    attach(model)
    for tokens in (100, 200, 270, 300):
        cache = FoldedCache(model.config, format)
        model(random_ids(1, tokens), past_key_values=cache)
        projected = held_bytes(model_layers(model.config.to_dict()), format, tokens)
        tables = 10_000 if format == "kvfold-4" and tokens > 256 else 0  # layers' bits may have levels of their own
        assert abs(projected - cache.held_bytes()) < 0.01 * cache.held_bytes() + tables


def test_known_bytes_a_token() -> None:
    assert bytes_per_token(model_layers(LLAMA_70B), "float16") == 327_680
    # The published table says 87,040 and 66,560 for 68 and 52 bytes a vector; with a float16 norm it is 66 and 50.
    assert bytes_per_token(model_layers(LLAMA_70B), "turboquant-4") == 80 * 8 * 2 * 66
    assert bytes_per_token(model_layers(LLAMA_70B), "turboquant-3") == 80 * 8 * 2 * 50
    assert bytes_per_token(model_layers(QWEN3_14B), "bfloat16") == 40 * 8 * 2 * 128 * 2
    assert bytes_per_token(model_layers(DEEPSEEK_V3), "bfloat16") == 61 * (512 + 64) * 2


def test_sliding_layers_hold_their_window() -> None:
    layers = model_layers(GEMMA3_27B)
    assert [layer.kind for layer in layers].count("full") == 10
    assert layers[5].kind == "full"
    small, large = (held_bytes(layers, "bfloat16", tokens) for tokens in (2_000, 100_000))
    assert large - small == 98_000 * 10 * 16 * 2 * 128 * 2  # only full layers grow
    assert held_bytes(layers, "bfloat16", 10) == 10 * 62 * 16 * 2 * 128 * 2
    by_type = {**GEMMA3_27B["text_config"], "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 60}
    assert [layer.kind for layer in model_layers(by_type)].count("full") == 2


def test_plans_are_consistent() -> None:
    layers = model_layers(QWEN3_14B)
    memory, context = 24 * 10**9, 32_768
    for row in plan(layers, ["bfloat16", "kvfold-4", "turboquant-3"], memory, context):
        assert held_bytes(layers, row.format, row.longest_context) <= memory
        assert held_bytes(layers, row.format, row.longest_context + 65) > memory
        assert row.users == memory // row.held_bytes
        assert row.bytes_per_token == pytest.approx(row.held_bytes / context, rel=0.02)
    (none,) = plan(layers, ["bfloat16"], 100, context)
    assert (none.longest_context, none.users) == (0, 0)


@pytest.mark.parametrize(
    ("config", "value", "evidence"),
    [
        (QWEN3_14B, 128, "head_dim = 128"),
        (LLAMA_70B, 128, "hidden_size / num_attention_heads = 128"),
        (GEMMA3_27B, 128, "hidden_size / num_attention_heads = 168 differs"),
        (DEEPSEEK_V3, 192, "qk_nope_head_dim + qk_rope_head_dim = 192"),
        ({"swa_head_dim": 96, "v_head_dim": 64}, 96, "v_head_dim = 64 differs"),
        ({"v_head_dim": 64}, 64, "v_head_dim = 64"),
    ],
)
def test_head_dim_cascade(config: dict[str, Any], value: int, evidence: str) -> None:
    found = resolve_head_dim(config)
    assert found.value == value
    assert evidence in found.evidence


def test_gguf_metadata() -> None:
    config = read_config("smollm2")
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert resolve_head_dim(config).value == 64


def _plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_27B))
    out = json.loads(_plan("--model", str(tmp_path), "--memory", "24GB", "--context", "8192", "--json").stdout)
    assert out["layers"] == {"full": 10, "sliding": 52, "latent": 0, "none": 0}
    assert {row["format"] for row in out["rows"]} >= {"bfloat16", "kvfold-4"}
    table = _plan("--layers", "80", "--kv-heads", "8", "--head-dim", "128").stdout
    assert "327,680" in table


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for arguments, message in (
        (("--model", str(tmp_path)), "config needs num_hidden_layers and num_attention_heads"),
        (("--model", "/nowhere"), "there is no such folder"),
        (("--layers", "2"), "--kv-heads is missing"),
        (("--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--memory", "much"), "memory = 'much'"),
    ):
        run = _plan(*arguments)
        assert run.returncode == 1
        assert message in run.stderr
        assert "Traceback" not in run.stderr
    with pytest.raises(ValueError, match="tells no head dimension"):
        resolve_head_dim({"hidden_size": 100, "num_attention_heads": 3})
    with pytest.raises(ValueError, match="context = 0"):
        plan(model_layers(LLAMA_70B), ["bfloat16"], 10**9, 0)
