"""The smallest random model of each of transformers' architectures, by its config's defaults shrunk field by field."""

import dataclasses
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every model type that AutoModelForCausalLM knows."""

VOCABULARY = 256
WINDOW = 48
"""Width of sliding windows, and the most tokens that sparse attention chooses."""

NAMES: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size encoder_hash_byte_group_vocab "
                 "pronunciation_vocab_size shape_vocab_size"),
    (128, "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim embedding_size attention_hidden_size "
          "lru_width input_embedding_size output_embedding_size pronunciation_embed_dim shape_embed_dim mamba_d_ssm "
          "ple_embed_dim hidden_size_global out_hidden_size"),
    (64, "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner dff dim_ff ffn_hidden_size "
         "moe_intermediate_size intermediate_size_mlp dense_intermediate_size shared_expert_intermediate_size "
         "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size index_topk "
         "expert_ffn_hidden_size feed_forward_size indexer_budget rel_extent"),
    (32, "head_dim global_head_dim d_head dim_head attention_head_size qk_nope_head_dim v_head_dim swa_head_dim "
         "kv_lora_rank kv_channels index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim "
         "q_lora_rank o_lora_rank indexer_head_dim mamba_d_head mamba_head_dim mamba_chunk_size chunk_size"),
    (16, "qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank "
         "laurel_rank hidden_size_per_layer_input adapter_rank router_hidden_size gated_norm_rank num_mel_bins "
         "prompt_mid_dim hc_lowrank"),
    (8, "mamba_n_heads mamba_num_heads n_mamba_heads index_block_size patch_size audio_num_codebooks"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads index_n_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
        "linear_num_heads linear_num_value_heads "
        "indexer_n_heads indexer_compress_ratio split_ngram_parts"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups "
        "num_experts num_local_experts n_routed_experts moe_num_experts "  # all are asked, so that none is a leap
        "num_experts_per_tok num_experts_per_token moe_topk moe_k index_topk_blocks top_k num_codebooks "
        "heads_per_ngram"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts n_groups "
        "first_k_dense_replace num_dense_layers zero_expert_num mamba_n_groups mamba_ngroups num_nextn_predict_layers "
        "indexer_kv_heads"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size "
             "local_attention local_attention_window_len keep_window_size"),
    (2048, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
           "model_max_length context_length original_max_position_embeddings ngram_vocab_size_base"),
    (32, "image_size"),
)  # fmt: skip
SIZES = {name: size for size, names in NAMES for name in names.split()}
"""Sizes of fields, by their names."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks",
          "num_encoder_layers", "num_decoder_layers")  # fmt: skip

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 32},
    "blt_local_encoder": {"hidden_size_global": 128},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                            "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 2, "moe_top_k": 2}},
    "dots3_note_audio_encoder": {"adapter_input_size": 128, "adapter_output_size": 128},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32,
                        "swa_kv_lora_rank": 32, "swa_head_dim": 48, "swa_qk_nope_head_dim": 32, "swa_v_head_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 128, "adapter_out_dim": 128},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                     "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
                    "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 16},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 32},
    "reformer": {"axial_pos_embds_dim": [64, 64], "attn_layers": ["local", "lsh"]},
    "zamba": {"attention_head_dim": 64, "attention_hidden_size": 256, "n_mamba_heads": 2, "num_hidden_layers": 4,
              "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "num_experts": 1},
}  # fmt: skip
"""Fields that an architecture wants otherwise."""


DECODERS = {"musicgen": "musicgen_decoder", "musicgen_melody": "musicgen_melody_decoder"}
"""Types of decoders inside."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The config of `model_type`, shrunk."""
    return _shrunk(CONFIG_MAPPING[DECODERS.get(model_type, model_type)])


def tiny_model(model_type: str) -> PreTrainedModel:
    """A random model whose attention is sharp enough for the cache to matter."""
    torch.manual_seed(0)
    model = _model(tiny_config(model_type), model_type).eval().float()
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    _sharpen(model)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
    return model


def _model(config: PreTrainedConfig, model_type: str) -> PreTrainedModel:
    if model_type in DECODERS:  # the mapping names the config that holds it
        cls: type[PreTrainedModel] = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        return cls(config)
    return AutoModelForCausalLM.from_config(config)


QUERIES_AND_KEYS = {
    "q_proj",
    "k_proj",
    "qkv_proj",
    "q_lin",
    "k_lin",
    "query",
    "key",
    "query_key_value",
    "c_attn",
    "qkv",
    "Wqkv",
    "in_proj_qkv",
    "q_b_proj",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "q",
    "k",
    "query_proj",
    "key_proj",
    "wq_b",
    "project_q",
    "project_k",
    "Wq",
    "Wk",
    "linear_q",
    "linear_k",
}


@torch.no_grad()
def _sharpen(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        parts = name.split(".")
        if weight.is_floating_point() and QUERIES_AND_KEYS & set(parts):
            weight.mul_(8)
        elif parts[-1] in ("sinks", "sink"):
            weight.normal_(generator=generator)
        elif weight.is_floating_point() and weight.ndim > 1:
            weight.mul_(2)


def _shrunk(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {name: size for name, size in SIZES.items() if name in fields}
    for name in fields:
        if name.endswith(("_token_id", "_token_index")):
            given[name] = VOCABULARY - 1
    given |= {name: i for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if name in fields}
    if "is_decoder" in fields:
        given["is_decoder"] = True
    for name, sub in cls.sub_configs.items():
        if sub is AutoConfig:
            default = getattr(getattr(cls, "sub_configs_defaults", {}).get(name), "model_type", None)
            if default not in CONFIG_MAPPING:
                continue
            sub = CONFIG_MAPPING[default]
        if name in fields:
            given[name] = _shrunk(sub).to_dict()
    if "attention_multiplier" in fields:  # 1 by default, which checkpoints do not keep
        given["attention_multiplier"] = 32**-0.5
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        given["num_key_value_heads"] = given["num_attention_heads"]
    given |= _layers(cls, fields)
    return cls(**given | EXCEPTIONS.get(cls.model_type, {}))


def _layers(cls: type[PreTrainedConfig], fields: dict[str, Any]) -> dict[str, Any]:
    """The number of layers, and lists of one entry a layer, with each kind at least once."""
    own = next((name for name in LAYERS if name in fields), None)
    if own is None:
        return {}
    try:
        default = cls()
    except Exception:
        return {name: 2 for name in LAYERS if name in fields}
    given: dict[str, Any] = {}
    kinds = getattr(default, "layer_types", None)
    if kinds is None and "sliding_window" in fields and "None" in str(fields["sliding_window"].type):
        # a window for all layers or none, and checkpoints with none
        given["sliding_window"] = None
    kinds = list(dict.fromkeys(kinds)) if kinds else ["full_attention"]
    number = max(2 * len(kinds), 2)
    given |= {name: number for name in LAYERS if name in fields}
    if "layer_types" in fields and getattr(default, "layer_types", None):
        given["layer_types"] = kinds * 2 if len(kinds) > 1 else kinds * number
    for name in ("mlp_layer_types", "indexer_types", "layers_block_type"):
        value = getattr(default, name, None)
        if name in fields and isinstance(value, list):
            every = list(dict.fromkeys(value))
            given[name] = [every[min(i, len(every) - 1)] for i in range(number)]
    return given
