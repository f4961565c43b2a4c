"""A tiny random Gemma 3 as a GGUF file, as llama.cpp's converter writes it: its metadata name no layer pattern."""

import string
from pathlib import Path

import gguf
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

LAYERS, FULL, WINDOW, HEAD_DIM, CONTEXT = 6, (5,), 32, 64, 512
"""Five layers with windows, and then one that attends to everything: the architecture's default."""


def write_gemma(path: Path) -> Path:
    """Write the model and a tokenizer of bytes and letters into `path`."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *string.ascii_letters,
    ]
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, head_dim=HEAD_DIM, sliding_window=WINDOW, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * 53)
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, LAYERS)
    for name, weight in Gemma3ForCausalLM(config).state_dict().items():
        if name != "lm_head.weight":  # the embeddings
            stored = weight + 1 if name.endswith("norm.weight") else weight
            writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
