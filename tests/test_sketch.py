"""A calibration knows its model by a few numbers of its weights, in every runtime and dtype."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvfold
from kvfold.cache.report import held_bytes
from kvfold.cache.sketch import sketch
from kvfold.integrations.weights import sketch_of

SIZES = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
IDS = torch.randint(600, (1, 300), generator=torch.Generator().manual_seed(0))


def llama(seed: int, layers: int = 3) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, num_key_value_heads=1, num_hidden_layers=layers, max_position_embeddings=512)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def measured() -> kvfold.Calibration:
    return kvfold.calibrate(llama(0), [IDS])


def read(model: PreTrainedModel, calibration: kvfold.Calibration | Path) -> kvfold.FoldedCache:
    kvfold.attach(model)
    cache = kvfold.FoldedCache(model.config, "kvfold-3", calibration=calibration)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


def changed(name: str) -> PreTrainedModel:
    """The model that is measured, but for one weight."""
    model = llama(0)
    with torch.no_grad():
        weight = model.get_parameter(name)
        weight.copy_(torch.randn_like(weight) * weight.std() if weight.ndim == 2 else 0.5 + torch.rand_like(weight))
    return model


def test_its_own_model_takes_it_in_every_dtype(measured: kvfold.Calibration, tmp_path: Path) -> None:
    measured.save(tmp_path / "it")
    assert kvfold.Calibration.load(tmp_path / "it").about["layers"] == "3"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cache = read(llama(0).to(dtype), tmp_path / "it")
        assert cache.report().dense_share < 0.9
    assert held_bytes(cache.sketch) < 16_000
    tuned = llama(0)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.01 * weight.std().nan_to_num(0.01).item())
    read(tuned, measured)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"],
)
def test_other_weights_are_refused(measured: kvfold.Calibration, name: str, tmp_path: Path) -> None:
    measured.save(tmp_path / "it")
    for calibration in (measured, tmp_path / "it"):
        with pytest.raises(ValueError, match=r"other weights, .* among them: calibrate this model"):
            read(changed(name), calibration)


def test_another_model_is_refused(measured: kvfold.Calibration) -> None:
    """Of the same shapes; with fewer layers, before anything is read; and after a reset, too."""
    with pytest.raises(ValueError, match="other weights"):
        read(llama(1), measured)
    with pytest.raises(ValueError, match="a llama with 3 layers, this is a llama with 4: calibrate this model"):
        kvfold.FoldedCache(llama(0, layers=4).config, calibration=measured)
    with pytest.raises(ValueError, match="a llama with 3 layers, this is a llama with 2: calibrate this model"):
        kvfold.FoldedCache(llama(0, layers=2).config, calibration=measured)
    cache = read(llama(0), measured)
    cache.reset()
    other = llama(1)
    kvfold.attach(other)
    with pytest.raises(ValueError, match="other weights"), torch.no_grad():
        other(IDS, past_key_values=copy.deepcopy(cache))


def test_a_file_that_says_nothing_of_weights_is_told(
    measured: kvfold.Calibration, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kvfold.Calibration(measured.layers).save(tmp_path / "old")
    read(llama(1), tmp_path / "old")
    assert "does not say of which weights it is" in caplog.text


def test_a_sketch_is_taken_where_weights_are_plain(measured: kvfold.Calibration) -> None:
    own = sketch_of(llama(0))
    assert own.keys() == measured.sketch.keys()
    assert "embeddings" in own
    assert len(own) == 1 + 3 * 3  # of each layer: two norms, and the projection of keys
    assert "embeddings" not in sketch_of(llama(0), first_shard=False)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=600))
    assert {"embeddings", "0.ln_1.weight", "1.ln_2.bias"} <= sketch_of(gpt2).keys()
    with torch.device("meta"):
        assert sketch_of(LlamaForCausalLM(llama(0).config)) == {}
    two = [("vision.layers.0.norm.weight", torch.zeros(4)), ("text.layers.0.norm.weight", torch.ones(4) / 2)]
    assert sketch(two, lambda weight, where: weight[where]) == {}  # whose is it?
