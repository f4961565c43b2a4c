"""Shared fixtures: the real demo model, and tiny random models of several architectures."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import transformers
from small_model import make_small_model
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvfold
from kvfold.integrations.models import demo_folder, load_model

torch.set_grad_enabled(False)

DATA = Path(__file__).parent / "data"
"""Texts of tests: frozen, as figures hang on them."""

SMALL = {"vocab_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 2048, "pad_token_id": 0}
WINDOWED = SMALL | {"sliding_window": 48}


def _llama(**own: int) -> PreTrainedModel:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMALL | shape | own), intermediate_size=128))


def _qwen3(**own: int) -> PreTrainedModel:
    shape = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SMALL | shape | own), intermediate_size=128))


def _mistral() -> PreTrainedModel:
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(
            **SMALL,
            hidden_size=128,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=80,
            sliding_window=None,
        )
    )


def _phi3() -> PreTrainedModel:
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **SMALL,
            hidden_size=192,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _gemma2(**own: int) -> PreTrainedModel:
    config = transformers.Gemma2Config(
        **(WINDOWED | own), hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, attn_logit_softcapping=20.0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def _gemma3(**own: int) -> PreTrainedModel:
    sizes = WINDOWED | own
    config = transformers.Gemma3TextConfig(
        **sizes, hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
        layer_types=["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2),
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def _gpt_oss(**own: int) -> PreTrainedModel:
    config = transformers.GptOssConfig(
        **(WINDOWED | own), hidden_size=128, intermediate_size=64, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_local_experts=2, num_experts_per_tok=1, attention_dropout=0.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("eager")  # the others take no float64
    return model


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}


def tiny_model(name: str, **own: int) -> PreTrainedModel:
    """A random model whose attention is sharp enough for the cache to matter.

    `own` sizes are those of a Llama, a Qwen 3, a gpt-oss, or a Gemma.

    In float64: codes jump where a value crosses a boundary between levels, and float32's own rounding, which
    differs between a batch and a row or a chunk and a prompt, would now and then push one across.
    """
    torch.manual_seed(0)
    model = ARCHITECTURES[name](**own).eval().double()
    for key, weight in model.named_parameters():
        if "q_proj" in key or "k_proj" in key or "qkv_proj" in key:
            weight.mul_(8)
        elif key.endswith("sinks"):
            weight.normal_()
        elif weight.ndim > 1:
            weight.mul_(2)
    model.generation_config.eos_token_id = None
    return model


def latent_model() -> PreTrainedModel:
    """A random model with latent attention, not attached."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, first_k_dense_replace=2, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).eval()


def model_that_computes_with_values(layers: int = 2) -> PreTrainedModel:
    """A random DiffLlama, which splits cached values before its attention function gets them; not attached."""
    torch.manual_seed(0)
    config = transformers.DiffLlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.DiffLlamaForCausalLM(config).eval()


@pytest.fixture(params=list(ARCHITECTURES))
def tiny(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each architecture in turn, attached."""
    model = tiny_model(request.param)
    assert kvfold.attach(model)
    return model


@pytest.fixture
def llama() -> PreTrainedModel:
    """A tiny Llama, attached."""
    model = tiny_model("llama")
    assert kvfold.attach(model)
    return model


@pytest.fixture
def random_ids() -> Callable[..., torch.Tensor]:
    """Random token ids, the same for the same arguments."""

    def make(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 256, (rows, tokens), generator=generator)

    return make


@contextmanager
def attached(model: PreTrainedModel) -> Iterator[None]:
    """Let a model read folded caches for a while."""
    assert kvfold.attach(model)
    yield
    kvfold.detach(model)


@pytest.fixture(scope="session")
def _demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return kvfold.demo_model()


@pytest.fixture
def demo(
    _demo: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """SmolLM2 and its tokenizer, attached."""
    with attached(_demo[0]):
        yield _demo


@pytest.fixture(scope="session")
def text_ids(_demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> torch.Tensor:
    """12,800 tokens of technical English as SmolLM2 has them, (1, T): the same with any Python."""
    return _demo[1]((DATA / "prose.txt").read_text(), return_tensors="pt").input_ids


@pytest.fixture(scope="session")
def counting(_demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: torch.Tensor) -> torch.Tensor:
    """Prose and then numbers that count up, (1, T): SmolLM2 goes on counting, each token far ahead of all others."""
    numbers = _demo[1](" ".join(map(str, range(100, 180))), return_tensors="pt").input_ids
    return torch.cat((text_ids[:, :300], numbers), 1)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for models that a test unpacks, in the place of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own_cache"))
    return tmp_path / "own_cache" / "kvfold"


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a part of SmolLM2 that is quick (`small_model`)."""
    return make_small_model(demo_folder(), tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def _small(small_folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(str(small_folder), dtype=torch.float32)


@pytest.fixture
def small(
    _small: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """That part and its tokenizer, attached."""
    with attached(_small[0]):
        yield _small


@pytest.fixture(scope="session")
def small_ids(_small: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> torch.Tensor:
    """The text of `text_ids` as that part's tokenizer has it, (1, T)."""
    return _small[1]((DATA / "prose.txt").read_text(), return_tensors="pt").input_ids


@pytest.fixture(scope="session")
def fixed_text() -> str:
    """Prose of another kind, the license's, for figures that are measured on one text and hold on another."""
    return (Path(__file__).parents[1] / "LICENSE").read_text()


@pytest.fixture(scope="session")
def real_heads(
    _demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of some of SmolLM2's layers, for 1,000 tokens of text."""
    model, own, layers = _demo[0], _demo[0].config._attn_implementation, []

    def record(module: object, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> object:
        layers.append((query.clone(), key.clone(), value.clone()))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("record", record)
    model.set_attn_implementation("record")
    try:
        model(text_ids[:, :1000], use_cache=False)
    finally:
        model.set_attn_implementation(own)
    return layers[::6]
