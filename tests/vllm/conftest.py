"""The engine's environment, texts, and small models that show what SmolLM2 cannot."""

import os
from collections.abc import Iterator
from pathlib import Path

# vLLM reads these when it is imported, and its processes inherit them.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # "auto" keeps a core for itself
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait by spinning starve those of other processes
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # lets a test send a function to the worker
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.evaluate import split_passages
from kvfold.integrations.models import demo_folder
from kvfold.integrations.transformers import calibrate
from kvfold.integrations.unpacking import kept_models

torch.set_grad_enabled(False)

DATA = Path(__file__).parents[1] / "data"
"""Texts of tests: frozen, as figures hang on them."""


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of this run, with the models that are unpacked: what engines of earlier runs measured is not believed."""
    own = tmp_path_factory.mktemp("cache")
    (own / "kvfold").mkdir()
    demo_folder()
    for model in kept_models().iterdir():
        if (model / "config.json").is_file():
            (own / "kvfold" / model.name).symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture(scope="session")
def smollm2(own_cache: None) -> Path:
    """The folder of the real model."""
    return demo_folder()


@pytest.fixture(scope="session")
def demo_model(smollm2: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same model in transformers, in float32, attached."""
    model, tokenizer = kvfold.demo_model()
    assert kvfold.attach(model)
    return model, tokenizer


@pytest.fixture(scope="session")
def calibration(demo_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path_factory) -> Path:
    """A calibration file of SmolLM2."""
    model, tokenizer = demo_model
    ids = tokenizer((DATA / "prose.txt").read_text(), return_tensors="pt").input_ids
    path = tmp_path_factory.mktemp("calibration") / "smollm2.safetensors"
    calibrate(model, split_passages(ids, 512, 2)).save(path)
    return path


@pytest.fixture(scope="session")
def prompts(demo_model: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> list[list[int]]:
    """Twelve prompts as token ids: questions, prose to go on with, and code, 5 to 600 tokens."""
    tokenizer = demo_model[1]
    prose, code = (tokenizer((DATA / name).read_text()).input_ids for name in ("prose.txt", "code.txt"))

    def chat(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(words).input_ids

    return [
        chat("What is the capital of France?"),
        chat("List five animals that live in Africa, and say a word about each."),
        chat("How do I boil an egg?"),
        tokenizer("Once upon a time there").input_ids,
        prose[4_000:4_063],
        prose[5_000:5_064],
        prose[6_000:6_065],
        prose[7_000:7_128],
        prose[10_000:10_600],
        tokenizer("def fibonacci(n):\n    ").input_ids,
        code[200:290],
        code[900:1_156],
    ]


TINY = {"vocab_size": 260, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _save(model: PreTrainedModel, folder: Path) -> Path:
    """A random model whose attention is sharp enough for the cache to matter, with a tokenizer of bytes."""
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.mul_(4)
        elif "q_norm" in name:
            weight.add_(2)
        elif weight.ndim > 1:
            weight.mul_(2)
    model.save_pretrained(folder)
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, two KV heads of 128."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **TINY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128,
    )  # fmt: skip
    return _save(transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers with a sliding window of 128 tokens, and one without."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **TINY, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=128, query_pre_attn_scalar=64,
    )  # fmt: skip
    assert config.layer_types.count("full_attention") == 1
    return _save(transformers.Gemma3ForCausalLM(config), tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def tiny_ids() -> list[int]:
    """Random tokens for the tiny models."""
    return torch.randint(3, TINY["vocab_size"] - 1, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
