"""What a GGUF file says of positions, windows and soft caps is what the model computes, or it is refused."""

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tiny_gguf import TOKENS, write_gguf
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.integrations.gguf_configs import gguf_config
from kvfold.integrations.models import load_config, load_model
from kvfold.integrations.transformers.shapes import layer_shapes

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("own_cache")]

SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS), "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
    "tie_word_embeddings": True,
}  # fmt: skip
IDS = torch.randint(4, len(TOKENS), (1, 700), generator=torch.Generator().manual_seed(0))


def made(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith("norm.weight"):
                weight.mul_(8)  # attention that looks somewhere, so that positions and caps count
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **parameters}


def llama3_factors(config: PreTrainedConfig, head_dim: int) -> torch.Tensor:
    """As llama.cpp's converter writes them: by how much each frequency is divided."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return 1 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim) / scaled


SCALING = "rope.scaling."
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"long_factor": [1.0 + i for i in range(16)], "short_factor": [1.0 + i / 8 for i in range(16)]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
CASES: dict[str, tuple[str, PreTrainedConfig, dict[str, Any]]] = {
    "linear": (
        "llama",
        LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=4.0)),
        {f"{SCALING}type": "linear", f"{SCALING}factor": 4.0},
    ),
    "yarn": (
        "qwen2",
        Qwen2Config(**SIZES, rope_parameters=rope("yarn", **YARN)),
        {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 256},
    ),
    "llama3": ("llama", LlamaConfig(**SIZES, rope_parameters=rope("llama3", **LLAMA3)), {}),
    "longrope": (
        "phi3",
        Phi3Config(**SIZES, rope_parameters=rope("longrope", **LONG), original_max_position_embeddings=512),
        {f"{SCALING}original_context_length": 512, f"{SCALING}attn_factor": math.sqrt(1 + math.log(8) / math.log(512))},
    ),
    "head_dim": ("qwen3", Qwen3Config(**SIZES, head_dim=64), {}),
    "global layers": (
        "gemma3",
        Gemma3TextConfig(
            **SIZES, head_dim=32, sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "sliding_attention": rope("default"),
                "full_attention": rope("linear", factor=8.0) | {"rope_theta": 1e6},
            },
        ),
        {f"{SCALING}type": "linear", f"{SCALING}factor": 8.0, "attention.sliding_window_pattern": 2},
    ),
    "pattern": (
        "gemma3",
        Gemma3TextConfig(
            **SIZES, head_dim=32, sliding_window=64,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
        {"attention.sliding_window_pattern": [False, True, True, False]},
    ),
    "soft caps": (
        "gemma2",
        Gemma2Config(
            **SIZES, head_dim=32, sliding_window=64, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
            attn_implementation="eager",
        ),
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    architecture, config, said = CASES[case]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    sizes = {"rope.freq_base": theta, "rope.dimension_count": head_dim}
    beside = {}
    if case == "llama3":
        beside = {"rope_freqs.weight": llama3_factors(config, head_dim)}
    if case == "longrope":
        beside = {f"rope_factors_{kind}.weight": torch.tensor(LONG[f"{kind}_factor"]) for kind in ("long", "short")}
    model = made(config)
    file = write_gguf(tmp_path / "model.gguf", model, architecture, sizes | said, beside)
    read, _ = load_model(file)
    if case == "soft caps":
        read.set_attn_implementation("eager")
    expected = logits(model)
    torch.testing.assert_close(logits(read), expected, atol=1e-3 * expected.std().item(), rtol=1e-3)
    assert layer_shapes(load_config(file)) == layer_shapes(config)


def test_what_transformers_reads_stays(tmp_path: Path) -> None:
    """Gemma 4's layers have heads of two sizes; the larger is the file's key_length."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    writer.add_block_count(4)
    writer.add_key_length(128)
    writer.add_uint32("gemma4.attention.key_length_swa", 64)
    writer.add_array("gemma4.attention.sliding_window_pattern", [True, True, True, False])
    writer.add_rope_freq_base(1e6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = gguf_config(tmp_path / "model.gguf")
    plain = AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    config.layer_types = plain.layer_types
    assert config.to_dict() == plain.to_dict()


@pytest.mark.parametrize(
    ("said", "beside", "expected"),
    [
        ({f"{SCALING}type": "ntk", f"{SCALING}factor": 4.0}, {}, r"rope.scaling.type = 'ntk'"),
        ({f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0}, {}, r"rope.scaling.type = 'yarn'"),
        ({}, {"rope_freqs.weight": 1 + torch.arange(16.0)}, "not Llama 3.1's"),
        ({"attn_logit_softcapping": 30.0}, {}, "attn_logit_softcapping = 30"),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    said: dict[str, Any], beside: dict[str, torch.Tensor], expected: str, tmp_path: Path
) -> None:
    file = write_gguf(
        tmp_path / "model.gguf", made(LlamaConfig(**SIZES)), "llama", {"rope.freq_base": 1e4} | said, beside
    )
    for read in (load_model, load_config):
        with pytest.raises(ValueError, match=expected):
            read(file)


def test_an_architecture_without_a_class_is_told_with_those_that_have_one(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", made(LlamaConfig(**SIZES)), "llama")
    file.write_bytes(file.read_bytes().replace(b"llama", b"ollma"))
    for read in (load_model, load_config):
        with pytest.raises(ValueError, match=r"'ollma'.*gemma3.*qwen3"):
            read(file)


def test_a_file_is_unpacked_once(tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its content and dtype: a copy of it is known, and another file in its place is another model."""
    files = [tmp_path / "a" / "model.gguf", tmp_path / "b" / "model.gguf"]
    for file in files:
        file.parent.mkdir()
    write_gguf(files[0], made(LlamaConfig(**SIZES)), "llama")
    shutil.copy(files[0], files[1])
    caplog.set_level(logging.INFO, "kvfold")

    def unpacked(file: Path, dtype: torch.dtype | None = None) -> tuple[bool, torch.Tensor]:
        caplog.clear()
        model, _ = load_model(file, dtype)
        assert model.dtype == (dtype or torch.float32)
        return "unpacking" in caplog.text, logits(model)

    first, expected = unpacked(files[0])
    again, same = unpacked(files[1])
    assert (first, again) == (True, False)
    assert torch.equal(expected, same)
    assert unpacked(files[0], torch.bfloat16)[0]
    write_gguf(files[0], made(LlamaConfig(**SIZES | {"rms_norm_eps": 0.1})), "llama")
    changed, other = unpacked(files[0])
    assert changed
    assert not torch.allclose(other, expected, rtol=0.1)
    assert len(list(own_cache.iterdir())) == 3


def test_what_cannot_be_unpacked_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", made(LlamaConfig(**SIZES)), "llama")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model.gguf' cannot be loaded"):
        load_model(file)
    assert list(own_cache.iterdir()) == []
