"""Every architecture of mlx-lm, tiny and random, in kvfold's MLX cache beside mlx-lm's own.

    python benchmarks/mlx_architectures.py                 # all, as the table of docs/models-mlx.md
    python benchmarks/mlx_architectures.py llama gemma2    # some

For each model file of the installed mlx-lm: the smallest model that its arguments describe, a prompt in chunks, single
tokens, a trim and a copy, and what its logits say beside those of mlx-lm's dense cache. A row that is wrong, or that
breaks, ends the script with 1.
"""

import copy
import importlib
import logging
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import version
from typing import Any

import kvfold.integrations.mlx as ours  # before MLX: torch's BLAS

# isort: split
import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_map
from mlx_lm.models import cache as theirs

FORMATS = {"float16": 0.05, "turboquant-8": 0.12, "kvfold-4": 0.3}
"""And how far logits may be from those of a dense cache, by their norms; those of another prompt are about 1.4 away."""

CHUNKS = (190, 110, 1, 1, 30)
VOCABULARY = 128

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "num_vocab": VOCABULARY, "hidden_size": 128, "n_embd": 128, "d_model": 128,
    "model_dim": 128, "hidden_dim": 128, "block_dim": 128, "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4,
    "n_layers": 4, "num_transformer_layers": 4, "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_kv_heads": 2, "num_attention_groups": 2, "head_dim": 64,
    "intermediate_size": 128, "ffn_hidden_size": 128, "ff_intermediate_size": 128, "block_ff_dim": 128,
    "rms_norm_eps": 1e-5, "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    "max_position_embeddings": 2048, "n_positions": 2048, "n_ctx": 2048, "rope_theta": 1e4,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "use_bias": False, "bias": False,
    "use_qkv_bias": False, "rope_traditional": False, "rope_scaling": None, "sliding_window": 64,
    "sliding_window_size": 64, "attention_window_size": 64, "window_size": 64, "moe_intermediate_size": 64,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 4,
    "num_experts_per_token": 4, "moe_topk": 4, "moe_top_k": 4, "moe_k": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "num_shared_expert": 1, "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "shared_intermediate_size": 64, "expert_ffn_hidden_size": 64,
    "share_expert_dim": 64, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu", "partial_rotary_factor": 0.5,
    "rotary_dim": 32, "query_pre_attn_scalar": 64, "use_qk_norm": True, "qk_norm": True, "kv_lora_rank": 64,
    "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "conv_L_cache": 3,
    "conv_bias": False, "conv_kernel": 4, "use_conv_bias": False, "state_size": 16, "ssm_state_size": 16,
    "time_step_rank": 8, "n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_d_head": 32, "mamba_n_heads": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_ssm": 128,
    "mamba_chunk_size": 32, "mamba_proj_bias": False, "time_step_limit": (0.001, 100.0), "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "index_head_dim": 32, "index_n_heads": 2, "index_topk": 64, "sliding_window_pattern": 2, "logits_scaling": 1.0,
    "attention_multiplier": 0.125, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "group_norm_size": 2,
    "layer_group_size": 2, "dim_model_base": 128, "scale_depth": 1.0, "scale_emb": 1.0, "num_nextn_predict_layers": 0,
    "post_norm": True, "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16,
    "time_step_min": 0.001, "time_step_max": 0.1, "conv1d_width": 4, "logits_soft_cap": 30.0,
}  # fmt: skip
"""Sizes, by the names that arguments give them; what is not here and has a default keeps it.

All experts are asked: a choice among them would turn on a last digit.
"""


MIXED = ["sliding_attention", "full_attention"] * 2
ROPES = {kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")}
LINEAR = ["linear_attention", "full_attention"] * 2
YARN = {"type": "yarn", "rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1, "llama_4_scaling_beta": 0.1,
        "short_factor": [1.0] * 16, "long_factor": [1.0] * 16}  # fmt: skip

# Where a name means something else, or a model file has names that no other has.
OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": {"layer_types": MIXED},
    "baichuan_m1": {"tie_word_embeddings": False, "conv_window": 2, "sliding_window_layers": [0, 2]},
    "cohere2": {"head_dim": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 4},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "exaone": {"head_dim": 32},
    "exaone4": {"sliding_window_pattern": "LLLG"},
    "exaone_moe": {"is_moe_layer": [False, True] * 2, "layer_types": MIXED},
    "gemma3n.text": {
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
        "layer_types": MIXED,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 16,
        "intermediate_size": [128] * 4,
    },
    "gear": {"layer_types": ["full_attention", "conv_mixer"] * 2},
    "gemma4.text": {"num_kv_shared_layers": 2, "layer_types": MIXED, "vocab_size_per_layer_input": VOCABULARY},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": MIXED, "vocab_size_per_layer_input": VOCABULARY},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4}},
    "gpt_bigcode": {"n_inner": 128},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "cla_share_factor": 2,
        "use_cla": True,
        "use_mixed_mlp_moe": True,
        "rope_scaling": {"alpha": 1.0, "type": "dynamic", "factor": 1.0},
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3.text": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
        },
        "hidden_act": "situ",
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
        "attn_res_block_size": 2,
        "routed_expert_hidden_size": 64,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 2048,
    },
    "lfm2": {
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 32,
        "full_attn_idxs": [1, 3],
        "layer_types": None,
    },
    "lfm2-vl.text": {
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 32,
        "full_attn_idxs": [1, 3],
    },
    "lfm2_moe": {"num_dense_layers": 1, "use_expert_bias": True, "full_attn_idxs": [1, 3]},
    "lille-130m": {"block_size": 2048},
    "llama4.text": {
        "intermediate_size_mlp": 128,
        "attention_chunk_size": 64,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"intermediate_size_mlp": 128, "no_rope_layers": [1, 0] * 2},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "zero_expert_num": 1,
        "zero_expert_type": "identity",
    },
    "longcat_flash_ngram": {"mla_scale_kv_lora": True, "mla_scale_q_lora": True, "zero_expert_num": 1},
    "mellum": {"layer_types": MIXED, "rope_parameters": ROPES},
    "mimo_v2_flash": {
        "add_full_attention_sink_bias": True,
        "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [1, 0] * 2,
        "swa_head_dim": 64,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_rope_theta": 1e4,
        "swa_v_head_dim": 64,
        "moe_layer_freq": [0, 1, 1, 1],
    },
    "minicpm3": {"rope_scaling": YARN},
    "minimax_m3_vl.text": {
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_freq": [0, 1, 1, 1],
        "index_block_size": 16,
        "index_topk_blocks": 4,
        "dense_intermediate_size": 128,
        "num_key_value_heads": 2,
    },
    "ministral3": {"rope_parameters": YARN, "layer_types": MIXED},
    "mistral4": {"rope_parameters": YARN},
    "muse_spark.text": {
        "post_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1e4},
        "layer_rope_theta": [1e4, 0.0] * 2,
        "layer_types": MIXED,
        "final_logit_softcapping": 30.0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 64,
        "num_shared_experts": 0,
        "rope_theta": 1e4,
    },
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": i == 1, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            }
            for i in range(4)
        ],
    },
    "nemotron_h": {"hybrid_override_pattern": list("M*-*E*")},
    "olmo_hybrid": {"linear_allow_neg_eigval": True, "layer_types": LINEAR},
    "openelm": {
        "ffn_dim_divisor": 8,
        "ffn_multipliers": [1.0] * 4,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "gegelu_limit": 20.0,
        "blocksparse_block_size": 32,
        "vocab_size": 100352,
    },
    "plamo": {"num_attention_heads": 8, "n_shared_head": 4},
    "qwen": {"kv_channels": 32, "intermediate_size": 256},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"hidden_act": "gelu", "layer_types": MIXED, "rope_parameters": ROPES},
}


def small(module: Any) -> dict[str, Any]:
    """Arguments of a model file: what COMMON has of them, then what it has of its own."""
    name = module.__name__.rpartition(".")[2]
    known = {f.name for f in fields(module.ModelArgs)}
    needed = {f.name for f in fields(module.ModelArgs) if f.default is MISSING and f.default_factory is MISSING}
    found = {key: value for key, value in COMMON.items() if key in known}
    if "text_config" in known:
        found["text_config"] = COMMON | {"model_type": name} | OWN.get(f"{name}.text", {})
    found["model_type"] = name
    missing = needed - found.keys() - OWN.get(name, {}).keys()
    if missing:
        raise KeyError(f"{name} needs {sorted(missing)}")
    return found | OWN.get(name, {})


def build(module: Any) -> Any:
    """A model with random weights, large enough that attention matters."""
    model = module.Model(module.ModelArgs.from_dict(small(module)))
    mx.random.seed(0)

    def spread(x: mx.array) -> mx.array:
        if x.ndim < 2 or not mx.issubdtype(x.dtype, mx.floating):
            return x
        return mx.random.normal(x.shape, x.dtype) * (1.2 / x.shape[-1] ** 0.5)

    model.update(tree_map(spread, model.parameters()))
    return model


def logits(model: Any, cache: list[Any], tokens: mx.array, chunks: tuple[int, ...]) -> mx.array:
    """Of all tokens, read chunk by chunk."""
    read, out = 0, []
    for n in chunks:
        new = model(tokens[:, read : read + n], cache=cache).astype(mx.float32)
        out.append(mx.where(mx.isinf(new), 0, new))  # of tokens that a model never says
        mx.eval(out, [layer.state for layer in cache])
        read += n
    return mx.concatenate(out, 1)


def distance(x: mx.array, y: mx.array) -> float:
    return float(mx.linalg.norm(x - y) / mx.linalg.norm(y))


@dataclass
class Row:
    """What became of one architecture."""

    name: str
    kind: str
    about: str
    far: dict[str, float] = field(default_factory=dict)
    wrong: bool = False


def tried(name: str) -> Row | None:
    """One architecture; None if the file is no model."""
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        return Row(name, "not tried", f"does not import: {error}")
    except SystemExit:
        return Row(name, "not tried", "does not import: its file ends the process")
    if not hasattr(module, "ModelArgs") or not hasattr(module, "Model"):
        return None
    tokens = mx.random.randint(1, VOCABULARY - 8, (1, sum(CHUNKS)), key=mx.random.key(1))
    try:
        model = build(module)
        dense = logits(model, theirs.make_prompt_cache(model), tokens, CHUNKS)
        again = logits(model, theirs.make_prompt_cache(model), tokens, CHUNKS)
    except Exception as error:  # without kvfold
        return Row(name, "not tried", f"mlx-lm's own: {type(error).__name__}: {error}".splitlines()[0])
    if not mx.isfinite(dense).all() or not mx.array_equal(dense, again):
        return Row(name, "not tried", "its dense logits are not finite, or not the same twice")
    row = Row(name, "folded", "")
    for format, most in FORMATS.items():
        try:
            with Said() as said:
                cache = ours.make_prompt_cache(model, format)
        except ValueError as error:
            named, _, why = str(error).splitlines()[0].partition("mlx-lm's own (")
            return Row(name, "refused", why.removesuffix(")"), wrong=not named.startswith(f"{name} computes with"))
        kinds = Counter(type(layer).__name__ for layer in cache)
        row.about = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        if "FoldedKVCache" not in kinds:
            row.kind = "dense"
            row.wrong |= not said.lines
        got = logits(model, cache, tokens, CHUNKS)
        row.far[format] = distance(got, dense)
        row.wrong |= not row.far[format] <= most
        twin = copy.deepcopy(cache)
        ends = [logits(model, each, tokens[:, :40], (40,)) for each in (cache, twin)]
        row.wrong |= not mx.array_equal(*ends)
        if theirs.can_trim_prompt_cache(twin):
            theirs.trim_prompt_cache(twin, 8)
            theirs.trim_prompt_cache(cache, 8)
            ends = [logits(model, each, tokens[:, :8], (8,)) for each in (cache, twin)]
            row.wrong |= not mx.array_equal(*ends)
        held = [layer for layer in ours.cache_report(cache).layers if layer.format != "dense"]
        row.wrong |= any(layer.tokens != sum(CHUNKS) + 40 for layer in held)
    return row


class Said(logging.Handler):
    """What the log says meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def __enter__(self) -> "Said":
        logging.getLogger("kvfold").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("kvfold").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def names() -> Iterator[str]:
    for found in pkgutil.iter_modules(mlx_lm.models.__path__):
        if not sys.argv[1:] or found.name in sys.argv[1:]:
            yield found.name


def main() -> int:
    rows = []
    print("| model | | caches, or why | " + " | ".join(FORMATS) + " |\n| --- | --- | --- |" + " --- |" * len(FORMATS))
    for name in names():
        try:
            row = tried(name)
        except Exception as error:
            row = Row(name, "crashed", f"{type(error).__name__}: {error}".splitlines()[0], wrong=True)
        if row is None:
            continue
        rows.append(row)
        far = " | ".join(f"{row.far[format]:.4f}" if format in row.far else "" for format in FORMATS)
        print(f"| `{row.name}` | {row.kind}{', wrong' * row.wrong} | {row.about} | {far} |", flush=True)
        mx.clear_cache()
    counts = Counter(row.kind for row in rows)
    print(f"\nmlx-lm {version('mlx-lm')}: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
