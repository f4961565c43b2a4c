"""Tiny random models as GGUF files, as llama.cpp's converter writes them."""

import string
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

LAYERS, FULL, WINDOW, HEAD_DIM, CONTEXT = 6, (5,), 32, 64, 512
"""Five layers with windows, and then one that attends to everything: the architecture's default."""
TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    *string.ascii_letters,
    "ab",
    "cd",
]
KINDS = [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * 55


def write_gemma(path: Path) -> Path:
    """Write a Gemma 3, whose metadata name no layer pattern, and a tokenizer of bytes and letters into `path`."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=HEAD_DIM, sliding_window=WINDOW, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    return write_gguf(path, Gemma3ForCausalLM(config), "gemma3", {"rope.freq_base": 1e6})


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    said: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Path:
    """Write a model of len(TOKENS) tokens, and a tokenizer of them, into `path`.

    `said` are metadata beside those of sizes, by their keys without the architecture; `tensors` lie beside the weights.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in (said or {}).items():
        _add(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2" if architecture.startswith("qwen") else "llama")
    if architecture.startswith("qwen"):
        writer.add_token_merges(["a b", "c d"])  # one alone would not be read as a list
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(KINDS)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", _stored(name, weight, architecture, config).numpy())
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
    kinds[type(value)](key, value)


def _stored(name: str, weight: Tensor, architecture: str, config: Any) -> Tensor:
    """A weight as llama.cpp has it: norms of Gemma with their 1, and Llama's pairs of RoPE beside each other."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    for part, heads in (("q_proj.weight", config.num_attention_heads), ("k_proj.weight", config.num_key_value_heads)):
        if architecture == "llama" and name.endswith(part):
            return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
    return weight.contiguous()
