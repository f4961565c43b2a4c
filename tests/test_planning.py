"""Memory projections against the real cache, and against published projections."""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conftest import tiny_model
from measured import measured
from small_model import LAYERS
from tiny_gguf import CONTEXT, FULL, write_gemma
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner, Result

from kvfold import Calibration, FoldedCache, attach
from kvfold.cache.shape import LayerShape
from kvfold.cli.app import app
from kvfold.integrations.models import load_config, load_model
from kvfold.integrations.transformers.prompt import read_prompt
from kvfold.integrations.transformers.shapes import layer_shapes, resolve_head_dim
from kvfold.planning import bytes_per_token, held_bytes, plan

LLAMA_70B = {
    "model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "hidden_size": 8192,
}  # fmt: skip
QWEN3_14B = {
    "model_type": "qwen3", "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
    "hidden_size": 5120, "head_dim": 128,
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "hidden_size": 5376, "head_dim": 128, "sliding_window": 1024,
    },
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


def _layers(plain: dict[str, Any]) -> tuple[LayerShape, ...]:
    return layer_shapes(AutoConfig.for_model(**plain))


@pytest.mark.parametrize("tokens", [10, 100, 300, 1000, 4096])
@pytest.mark.parametrize(
    "format", ["kvfold-4", "turboquant-3", "turboquant-4:kvfold-4", "oscar-4", "turboquant-4:oscar-2"]
)
def test_agrees_with_the_real_cache(
    small: tuple[PreTrainedModel, PreTrainedTokenizerBase], format: str, tokens: int
) -> None:
    """Within 1 % of every byte that a cache of SmolLM2 holds."""
    config = small[0].config
    calibration = Calibration({i: measured(3, 64) for i in range(LAYERS)}) if "oscar" in format else None
    cache = FoldedCache(config, format, calibration=calibration)
    if tokens == 100:  # queries are held, too, so attention must have shown them
        small[0](torch.arange(100).unsqueeze(0), past_key_values=cache, logits_to_keep=1)
    else:
        for layer in range(LAYERS):
            for new in (tokens - 1, 1):
                cache.update(*torch.randn(2, 1, 3, new, 64, dtype=torch.bfloat16), layer)
    projected = held_bytes(layer_shapes(config), format, tokens)
    assert projected == pytest.approx(cache.held_bytes(), rel=0.01)


@pytest.mark.parametrize("format", ["centred-4", "turboquant-3"])
@pytest.mark.parametrize("chunk", [256, 512, 1024, 20_000])
def test_agrees_however_the_tokens_came(format: str, chunk: int) -> None:
    """A cache reserves room as it grows: none beyond a prompt that came at once, and the most after the next page.

    A plan is of a cache whose newest token came alone."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=64, head_dim=64)
    cache, shapes = FoldedCache(config, format), layer_shapes(config)
    layer, tokens = cache.layers[0].folded, 0
    for new in (*[chunk] * (20_000 // chunk), *[64] * 60):
        for some in (new - 1, 1):
            layer.append(*torch.zeros(2, 1, 1, some, 64, dtype=torch.bfloat16))
        tokens += new
        assert held_bytes(shapes, format, tokens) == pytest.approx(cache.held_bytes(), rel=0.01)


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3", "turboquant-4:kvfold-4"])
@pytest.mark.parametrize("dim", [48, 64])
def test_agrees_before_a_prompt_is_fitted(random_ids: Callable[[int, int], Tensor], dim: int, format: str) -> None:
    """While what the fit needs of queries is held, too: below 64 channels only layers' bits wait for it."""
    shape = {"hidden_size": 4 * dim, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, intermediate_size=64, head_dim=dim, **shape)).bfloat16().eval()
    attach(model)
    for tokens in (100, 200, 270, 300):
        cache = FoldedCache(model.config, format)
        for ids in random_ids(1, tokens).split([tokens - 1, 1], dim=1):
            model(ids, past_key_values=cache)
        projected = held_bytes(layer_shapes(model.config), format, tokens)
        tables = 10_000 if format == "kvfold-4" and tokens > 256 else 0  # layers' bits may have levels of their own
        assert abs(projected - cache.held_bytes()) < 0.01 * cache.held_bytes() + tables


@pytest.mark.parametrize(
    ("name", "format"),
    [("gemma2", "kvfold-4"), ("gemma3", "turboquant-3"), ("gpt-oss", "kvfold-4"), ("mistral", "turboquant-3")],
)
def test_agrees_beside_windows(random_ids: Callable[[int, int], Tensor], name: str, format: str) -> None:
    """Layers with windows are of the dtype that the model runs in: float64 here, where folded ones keep 16 bits."""
    model = tiny_model(name)
    attach(model)
    cache = FoldedCache(model.config, format)
    for ids in random_ids(1, 1200).split([1199, 1], dim=1):
        model(ids, past_key_values=cache, logits_to_keep=1)
    projected = held_bytes(layer_shapes(model.config), format, 1200, model.dtype.itemsize)
    tables = 10_000 if format == "kvfold-4" else 0  # layers' bits may have levels of their own
    assert abs(projected - cache.held_bytes()) < 0.01 * cache.held_bytes() + tables


def _gguf(folder: Path, architecture: str) -> Path:
    """A folder with a GGUF file of Gemma 3 270M's shape, without weights."""
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_block_count(18)
    writer.add_embedding_length(640)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(256)
    writer.add_value_length(256)
    writer.add_sliding_window(512)
    writer.add_vocab_size(16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def test_gguf_of_gemma(tmp_path: Path) -> None:
    """Its metadata tell a window, and not which layers have it; weights unpack to float32."""
    folder = _gguf(tmp_path / "gemma", "gemma3")
    config = load_config(folder)
    layers = layer_shapes(config)
    assert [i for i, layer in enumerate(layers) if layer.kind == "full"] == [5, 11, 17]
    assert {layer.window for layer in layers} == {0, 512}
    cache = FoldedCache(config, "turboquant-4")
    for tokens in (1499, 1):
        for index in range(18):
            cache.update(*torch.randn(2, 1, 1, tokens, 256), index)
    asked = ("--model", str(folder), "--context", "1500", "--formats", "turboquant-4", "--json")
    out, narrow = (json.loads(_plan(*asked, *more).stdout) for more in ((), ("--dtype", "bfloat16")))
    assert (out["layers"]["full"], out["layers"]["sliding"], out["dtype"]) == (3, 15, "float32")
    held, held_narrow = out["rows"][0]["held_bytes"], narrow["rows"][0]["held_bytes"]
    assert held == pytest.approx(cache.held_bytes(), rel=0.01)
    assert held == held_narrow  # windows have 16 bits either way


@pytest.mark.contract
@pytest.mark.parametrize(
    ("architecture", "full"),
    [("gemma2", range(1, 18, 2)), ("gemma3", (5, 11, 17)), ("gpt-oss", range(1, 18, 2)), ("llama", range(18)),
     ("qwen3", range(18)), ("phi3", range(18)), ("mistral", ())],
)  # fmt: skip
def test_layers_of_gguf_files(tmp_path: Path, architecture: str, full: Sequence[int]) -> None:
    """Layers have windows where those of the model that transformers loads do; where all have, nothing is planned."""
    folder = _gguf(tmp_path / architecture, architecture)
    layers = layer_shapes(load_config(folder))
    assert [i for i, layer in enumerate(layers) if layer.kind == "full"] == list(full)
    run = _plan("--model", str(folder), "--json")
    if full:
        assert json.loads(run.stdout)["layers"]["full"] == len(full)
    else:
        assert "layers = 18 with windows of 4096: none holds every token" in str(run.exception)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3"])
def test_agrees_with_the_cache_of_a_model_from_gguf(tmp_path: Path, format: str) -> None:
    """A file among others, with weights: what is planned is what the model that is loaded from it holds."""
    folder = tmp_path / "several"
    folder.mkdir()
    file = write_gemma(folder / "tiny.gguf")
    shutil.copy(file, folder / "other.gguf")
    model, tokenizer = load_model(file)
    config = load_config(file)
    assert layer_shapes(config) == layer_shapes(model.config)
    assert [i for i, layer in enumerate(layer_shapes(config)) if layer.kind == "full"] == list(FULL)
    assert config.dtype == model.dtype == torch.float32
    attach(model)
    ids = tokenizer("It rained all day. " * 30, return_tensors="pt").input_ids[:, :CONTEXT]
    for tokens in (20, 200, 500):
        cache = FoldedCache(model.config, format)
        read_prompt(model, ids[:, : tokens + 1], cache)
        run = _plan("--model", str(file), "--context", str(tokens), "--formats", format, "--json")
        assert json.loads(run.stdout)["rows"][0]["held_bytes"] == pytest.approx(cache.held_bytes(), rel=0.01)
    with pytest.raises(
        FileNotFoundError, match=r"nor exactly one .gguf file; name one of its 2, such as '.*other.gguf'"
    ):
        load_config(folder)


@pytest.mark.contract
@pytest.mark.parametrize("weights", ["one file", "shards", "bin", "none"])
def test_the_dtype_that_a_model_loads_in(tmp_path: Path, weights: str) -> None:
    """That of the weights, if the config names none."""
    model = tiny_model("gemma3").to(torch.float16)
    model.save_pretrained(tmp_path, max_shard_size="100KB" if weights == "shards" else "1GB")
    if weights in ("bin", "none"):
        (tmp_path / "model.safetensors").unlink()
    if weights == "bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loads_in = load_config(tmp_path).dtype
    out = json.loads(_plan("--model", str(tmp_path), "--json").stdout)
    if weights == "none":
        assert (loads_in, out["dtype"]) == (None, "bfloat16")
        return
    assert loads_in == AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float16
    assert out["dtype"] == "float16"
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    if weights != "bin":
        with pytest.raises(ValueError, match=r"model.*safetensors is damaged, or no weights of a model"):
            load_config(tmp_path)


def test_known_bytes_a_token() -> None:
    assert bytes_per_token(_layers(LLAMA_70B), "float16") == 327_680
    # The published table says 87,040 and 66,560 for 68 and 52 bytes a vector; with a float16 norm it is 66 and 50.
    assert bytes_per_token(_layers(LLAMA_70B), "turboquant-4") == 80 * 8 * 2 * 66
    assert bytes_per_token(_layers(LLAMA_70B), "turboquant-3") == 80 * 8 * 2 * 50
    assert bytes_per_token(_layers(QWEN3_14B), "bfloat16") == 40 * 8 * 2 * 128 * 2
    assert bytes_per_token(_layers(DEEPSEEK_V3), "bfloat16") == 61 * (512 + 64) * 2


def test_sliding_layers_hold_their_window() -> None:
    layers = _layers(GEMMA3_27B)
    assert [layer.kind for layer in layers].count("full") == 10
    assert layers[5].kind == "full"
    small, large = (held_bytes(layers, "bfloat16", tokens) for tokens in (2_000, 100_000))
    assert large - small == 98_000 * 10 * 16 * 2 * 128 * 2  # only full layers grow
    assert held_bytes(layers, "bfloat16", 10) == 10 * 62 * 16 * 2 * 128 * 2


def test_plans_are_consistent() -> None:
    layers = _layers(QWEN3_14B)
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
        (LLAMA_70B, 128, "hidden_size / num_attention_heads = 128 agrees"),
        (GEMMA3_27B, 128, "hidden_size / num_attention_heads = 168 differs"),
        (DEEPSEEK_V3, 192, "qk_nope_head_dim + qk_rope_head_dim = 192"),
        ({"swa_head_dim": 96, "v_head_dim": 64}, 96, "v_head_dim = 64 differs"),
        ({"v_head_dim": 64}, 64, "v_head_dim = 64"),
    ],
)
def test_head_dim_cascade(config: dict[str, Any], value: int, evidence: str) -> None:
    found = resolve_head_dim(AutoConfig.for_model(**config) if "model_type" in config else PreTrainedConfig(**config))
    assert found.value == value
    assert evidence in found.evidence


def test_gguf_metadata(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    config = load_config("smollm2")
    assert layer_shapes(config) == layer_shapes(demo[0].config) == (LayerShape("full", 3, 64, 64, heads=9),) * 30
    assert config.dtype == demo[0].dtype


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_27B))
    out = json.loads(_plan("--model", str(tmp_path), "--memory", "24GB", "--context", "8192", "--json").stdout)
    assert out["layers"] == {"full": 10, "latent": 0, "dense": 0, "sliding": 52, "none": 0}
    assert out["dtype"] == "bfloat16"
    assert {row["format"] for row in out["rows"]} >= {"bfloat16", "kvfold-4"}
    table = _plan("--layers", "80", "--kv-heads", "8", "--head-dim", "128").stdout
    assert "327,680" in table


def test_weights_are_counted_as_they_load(tmp_path: Path) -> None:
    """By dtype, of shared weights once; by file; by amount. What they take is not left for caches."""
    model = tiny_model("gemma3")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    size = sum(weight.numel() for weight in loaded.parameters())
    file = (tmp_path / "model.safetensors").stat().st_size
    for weights, taken in (
        ("bfloat16", 2 * size), ("float32", 4 * size), (str(tmp_path), file),
        (str(tmp_path / "model.safetensors"), file), ("0.5GB", 500_000_000),
    ):  # fmt: skip
        run = _plan("--model", str(tmp_path), "--memory", "1GB", "--weights", weights, "--json")
        told = json.loads(run.stdout)
        assert told["weights"] == taken
        assert (told["memory"], told["for_caches"]) == (10**9, 10**9 - taken)
    beside = {row["format"]: row["users"] for row in told["rows"]}
    alone = json.loads(_plan("--model", str(tmp_path), "--memory", "1GB", "--json").stdout)
    assert alone["weights"] is None
    for row in alone["rows"]:
        assert beside[row["format"]] == pytest.approx(row["users"] / 2, abs=1)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (
            {"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096},
            "layers = 32 with windows of 4096: none holds every token, so the cache stops growing whatever the format, "
            "and there is nothing to plan. If the model has layers that attend to everything, the file does not tell "
            "which: give a folder with its config.json, or --layers",
        ),
        ({"model_type": "mamba", "num_hidden_layers": 24}, "layers = 24 with nothing that grows: none holds"),
        ({"model_type": "rwkv", "num_hidden_layers": 24}, "layer 0: the config does not tell KV heads"),
        ({"model_type": "deepseek_v4"}, "layer 0 is a DeepseekV4HCACache: what it holds"),
        ({"model_type": "t5"}, "config is of an encoder-decoder model"),
        ({"model_type": "parrot"}, "config.json has model_type = 'parrot': transformers"),
        (
            {"model_type": "siglip_vision_model"},
            "config.json has model_type = 'siglip_vision_model': such a model makes no text",
        ),
        ({"model_type": "clip"}, "config.json has model_type = 'clip': such a model makes no text"),
        ({"model_type": ["llama"]}, "config.json has model_type = ['llama']"),
        ({"model_type": "llama", "num_hidden_layers": "many"}, "num_hidden_layers = 'many': give a whole number"),
    ],
)
def test_what_cannot_be_planned(tmp_path: Path, plain: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(layer_shapes(load_config(tmp_path)), ["kvfold-4"], 10**9, 1000)


def test_gguf_that_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"the architecture 'parrot', and transformers .* reads bloom, .* stablelm",
    ):
        load_config(_gguf(tmp_path / "parrot", "parrot"))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.gguf").write_bytes(b"GGUF..")
    with pytest.raises(ValueError, match=r"damaged/model.gguf is damaged, no GGUF file, or"):
        load_config(damaged)


NUMBERS = ("--layers", "2", "--kv-heads", "2", "--head-dim", "64")


def test_errors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for arguments, message in (
        (("--model", str(tmp_path)), "config.json has model_type = None"),
        (("--model", "/nowhere"), "there is no such file or folder"),
        (("--model", "some/model"), "nothing is downloaded for a plan"),
        (("--layers", "2"), "--kv-heads is missing"),
        (("--layers", "2", "--kv-heads", "2", "--head-dim", "64", "--memory", "much"), "memory = 'much'"),
        ((*NUMBERS, "--weights", "bfloat16"), "weights = 'bfloat16': name the --model"),
        ((*NUMBERS, "--weights", "q4_k_m"), "weights = 'q4_k_m': give float32, bfloat16, float16, int8, a file or"),
        ((*NUMBERS, "--weights", str(tmp_path)), "the folder holds no model*.safetensors"),
        ((*NUMBERS, "--weights", str(tmp_path / "config.json")), "is no file of weights"),
        ((*NUMBERS, "--weights", ""), "weights = '': give float32"),
        ((*NUMBERS, "--weights", "9GB", "--memory", "8GB"), "the weights take 9,000 MB"),
    ):
        run = _plan(*arguments)
        assert isinstance(run.exception, ValueError | OSError)  # which the command line tells in one line
        assert message in str(run.exception)
    with pytest.raises(ValueError, match="tells no head dimension"):
        resolve_head_dim(PreTrainedConfig(hidden_size=100))
    with pytest.raises(ValueError, match="context = 0"):
        plan(_layers(LLAMA_70B), ["bfloat16"], 10**9, 0)
