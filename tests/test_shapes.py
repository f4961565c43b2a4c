"""What layers hold by a config: the same for the planner and the cache, and what models hold in fact."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvfold import FoldedCache
from kvfold.cache.shape import LayerShape
from kvfold.integrations.models import load_config
from kvfold.integrations.transformers.latent import LatentLayer
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.shapes import layer_shapes
from kvfold.planning import held_bytes

Made = TypeVar("Made")
Counts = dict[tuple[str, int, int, int, int], int]

PUBLISHED: dict[str, tuple[dict[str, Any], Counts]] = {
    "Gemma 2 2B": (
        {"model_type": "gemma2", "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
         "head_dim": 256, "hidden_size": 2304, "sliding_window": 4096, "torch_dtype": "float32"},
        {("full", 4, 256, 256, 0): 13, ("sliding", 4, 256, 256, 4096): 13},
    ),
    "Gemma 3 27B": (
        {"model_type": "gemma3", "torch_dtype": "bfloat16",
         "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
                         "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024}},
        {("full", 16, 128, 128, 0): 10, ("sliding", 16, 128, 128, 1024): 52},
    ),
    "Gemma 3n E4B": (
        {"model_type": "gemma3n",
         "text_config": {"model_type": "gemma3n_text", "num_hidden_layers": 35, "num_attention_heads": 8,
                         "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048, "sliding_window": 512,
                         "num_kv_shared_layers": 15,
                         "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7}},
        {("full", 2, 256, 256, 0): 4, ("sliding", 2, 256, 256, 512): 16, ("none", 0, 0, 0, 0): 15},
    ),
    "Llama 4 Scout": (
        {"model_type": "llama4",
         "text_config": {"model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40,
                         "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 5120,
                         "attention_chunk_size": 8192, "no_rope_layers": []}},
        {("full", 8, 128, 128, 0): 12, ("sliding", 8, 128, 128, 8192): 36},
    ),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4,
         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048},
        {("full", 2, 256, 256, 0): 12, ("none", 0, 0, 0, 0): 36},
    ),
    "Jamba": (
        {"model_type": "jamba", "num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4,
         "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096},
        {("full", 8, 128, 128, 0): 4, ("none", 0, 0, 0, 0): 28},
    ),
    "DeepSeek V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
         "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        {("latent", 1, 512, 64, 0): 61},
    ),
    "DeepSeek V3.2": (
        {"model_type": "deepseek_v32", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
         "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
        {("dense", 1, 512, 64, 0): 61},
    ),
    "GPT-2": (
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_ctx": 1024},
        {("full", 12, 64, 64, 0): 12},
    ),
    "BLOOM 560M": (
        {"model_type": "bloom", "n_layer": 24, "num_attention_heads": 16, "n_embed": 1024},
        {("full", 16, 64, 64, 0): 24},
    ),
    "Falcon 7B": (
        {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544,
         "multi_query": True, "new_decoder_architecture": False},
        {("full", 1, 64, 64, 0): 32},
    ),
    "Falcon 40B": (
        {"model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
         "hidden_size": 8192, "multi_query": True, "new_decoder_architecture": True},
        {("full", 128, 64, 64, 0): 60},
    ),
    "Mistral 7B v0.3": (
        {"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096, "sliding_window": None},
        {("full", 8, 128, 128, 0): 32},
    ),
    "gpt-oss 20B": (
        {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 64, "hidden_size": 2880, "sliding_window": 128},
        {("full", 8, 64, 64, 0): 12, ("sliding", 8, 64, 64, 128): 12},
    ),
    "Llama 3.2 Vision 11B": (
        {"model_type": "mllama",
         "text_config": {"model_type": "mllama_text_model", "num_hidden_layers": 40, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "hidden_size": 4096,
                         "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}},
        {("full", 8, 128, 128, 0): 32, ("none", 0, 0, 0, 0): 8},
    ),
}  # fmt: skip

# Kinds that differ in their layers, in where their configs tell shapes, and in what they hold beside keys and values.
ODD: dict[str, dict[str, Any]] = {
    "gpt2": {}, "gpt_bigcode": {}, "falcon": {}, "gpt_neox": {}, "opt": {}, "codegen": {}, "phi3": {}, "cohere2": {},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 5}, "gemma4_text": {"num_hidden_layers": 6},
    "llama4_text": {},
    "mimo_v2_flash": {}, "mllama": {"text_config": {"num_hidden_layers": 5, "cross_attention_layers": [3]}},
    "deepseek_v3": {}, "hy_v4": {"num_hidden_layers": 8}, "dots3_note_text": {"num_hidden_layers": 8},
    "jamba": {"num_hidden_layers": 8}, "qwen3_next": {}, "modernbert-decoder": {}, "minicpm3": {},
}  # fmt: skip


def _counts(shapes: tuple[LayerShape, ...]) -> Counts:
    return dict(Counter((s.kind, s.kv_heads, s.key_dim, s.value_dim, s.window) for s in shapes))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, tmp_path: Path) -> None:
    plain, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert _counts(layer_shapes(load_config(tmp_path))) == expected


def _config(kind: str, **options: Any) -> PreTrainedConfig:
    try:
        return transformers.CONFIG_MAPPING[kind](**options)
    except Exception as error:  # some have no defaults that their own checks pass
        pytest.skip(f"{kind} has no default config: {error}")


def _refused(make: Callable[[], Made]) -> tuple[str, Made | None]:
    """The error of what is refused, or what is made."""
    try:
        return "", make()
    except ValueError as error:
        return str(error), None


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_the_cache_folds_what_is_planned_to_fold(kind: str) -> None:
    """Each architecture of transformers by its default config: the same layers fold, slide, or hold nothing."""
    config = _config(kind)
    refused, _ = _refused(lambda: layer_shapes(config))
    if refused:
        assert _refused(lambda: FoldedCache(config))[0] == refused
        return
    shapes = layer_shapes(config)
    refused, cache = _refused(lambda: FoldedCache(config, "turboquant-4"))
    if refused:  # a head dimension that is no multiple of 8
        assert _refused(lambda: held_bytes(shapes, "turboquant-4", 1000))[0] == refused
        return
    assert cache is not None
    assert len(shapes) == len(cache.layers)
    own = DynamicCache(config=config).layers
    cross = getattr(config.get_text_config(decoder=True), "cross_attention_layers", ())
    for i, (shape, layer) in enumerate(zip(shapes, cache.layers, strict=True)):
        assert shape.folds == isinstance(layer, FoldedLayer)
        assert (shape.kind == "latent") == isinstance(layer, LatentLayer)
        if type(own[i]) is transformers.cache_utils.DynamicLayer:
            assert shape.folds == (i not in cross)
        elif shape.kind in ("dense", "sliding", "none"):
            assert getattr(layer, "sliding_window", 0) == shape.window
            grows = isinstance(layer, transformers.cache_utils.DynamicLayer)
            assert grows == (shape.kind != "none")


@pytest.mark.parametrize("kind", ODD)
def test_layers_hold_what_the_config_says(kind: str) -> None:
    """Of models without data, by transformers' own cache after three tokens."""
    config = _config(kind, **(({} if "text_config" in ODD[kind] else {"num_hidden_layers": 4}) | ODD[kind]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.zeros(1, 3, dtype=torch.long, device="meta"), past_key_values=cache)
    shapes = layer_shapes(model.config)
    assert len(shapes) == len(cache.layers)
    for shape, layer in zip(shapes, cache.layers, strict=True):
        held = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        numbers = sum(each.numel() for each in held if each is not None)
        assert numbers == 3 * shape.values_per_token
        if shape.kind != "none":
            assert layer.keys.shape == (1, shape.kv_heads, 3, shape.key_dim)
            assert layer.values.shape == (1, shape.kv_heads, 3, shape.value_dim)
