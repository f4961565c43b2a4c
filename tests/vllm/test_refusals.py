"""What kvfold refuses, and that it is not there unless it is asked for."""

import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm.engine.arg_utils import EngineArgs

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def _config(model: Path, **options: Any) -> Any:
    """What an engine would be started with; this is where settings are refused, before anything is loaded."""
    settings = {"dtype": "float32", "max_model_len": 1024, "additional_config": {"kvfold": {}}}
    return EngineArgs(model=str(model), **(settings | options)).create_engine_config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": NGRAM | {"num_speculative_tokens": 65}}, "= 65: give at most 64, the tokens of a page"),
        ({"scheduler_cls": "own.Scheduler"}, "scheduler_cls = 'own.Scheduler' would let one broken request end all"),
        ({"kv_offloading_size": 1.0}, "behind --kv-offloading-size do not run on CPUs: leave it out"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype = 'fp8' asks for another form of the cache"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype = 'bfloat16' asks for another form of the cache"),
        ({"kv_cache_dtype": "turboquant_4bit_nc"}, "kv_cache_dtype = 'turboquant_4bit_nc' asks for another form"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "'ExampleConnector' moves blocks of dense values: give NixlConnector, or --keep a folder",
        ),
        ({"runner": "pooling"}, "models that pool generate nothing: leave kvfold out"),
        ({"worker_cls": "own.Worker"}, "worker_cls = 'own.Worker' does not tell when requests end"),
        ({"block_size": 96}, "block_size = 96: pages of kvfold-4 have 64 tokens"),
        ({"block_size": 32}, "block_size = 32: .* multiple of that of at least 64"),
    ],
)
def test_engine_settings_under_which_pages_would_be_wrong_are_refused(tiny_llama, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        _config(tiny_llama, **options)


def test_drafts_with_layers_of_their_own_are_refused(tiny_llama: Path) -> None:
    own = {"method": "draft_model", "model": str(tiny_llama), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="drafts by 'draft_model' have layers of their own: only ngram is folded"):
        _config(tiny_llama, speculative_config=own)


@pytest.mark.parametrize(("speculative_config", "most"), [(None, 120), (NGRAM, 62)])
def test_as_many_sequences_run_as_have_room(tiny_llama: Path, speculative_config, most: int) -> None:
    """An unfinished page has 64 tokens, in each of 4 layers 2 heads of 2 x 128 float32 numbers: with four first tokens
    544 KiB a sequence."""
    memory = {"kv_cache_memory_bytes": 128 << 20, "speculative_config": speculative_config}
    assert _config(tiny_llama, **memory, max_num_seqs=256).scheduler_config.max_num_seqs == most
    assert _config(tiny_llama, **memory, max_num_seqs=10).scheduler_config.max_num_seqs == 10
    with pytest.raises(ValueError, match=r"one sequence's unfinished page and first .* bytes.*give at least"):
        _config(tiny_llama, **memory | {"kv_cache_memory_bytes": 1 << 19})


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"formt": "kvfold-4"}, "'formt'.*: give a mapping with some of format, calibration"),
        ({"budget": 1000}, "budget = 1000, but no eviction: give a TRIA file, or 'streaming'"),
        ({"keep_prompt": True}, "keep_prompt = True, but no eviction"),
        ({"eviction": "streaming", "keep_prompt": 1}, r"\['keep_prompt'\] = 1: give true or false"),
        ({"eviction": "streaming", "budget": "2k"}, r"\['budget'\] = '2k': give a number of tokens"),
        ({"eviction": "streaming", "budget": 260}, "budget = 260 holds no more than the first 4 and the newest 128"),
        ({"eviction": "none.tria"}, "'none.tria'.*there is no such file.*kvfold calibrate --eviction"),
        ({"eviction": "streaming", "keep": "folder"}, "give --keep or --eviction, not both"),
        ("kvfold-4", "= 'kvfold-4': give a mapping"),
        ({"format": 4}, r"\['format'\] = 4: give a string"),
        ({"format": "kvfold-x"}, "'kvfold-x' is not known: choose one of"),
        ({"format": "kvfold-4@50"}, "a page is a multiple of 16 tokens"),
        ({"format": "amx3"}, "'amx3' cannot be served: it holds keys as they were before RoPE.*take kvfold-4"),
        ({"format": "tbqx3"}, "'tbqx3' cannot be served: .*take kvfold-4"),
        ({"format": "turboquant-3.5"}, "cannot be served: its values are fitted to each prompt.*take kvfold-4"),
    ],
)
def test_own_options_that_mean_nothing_are_refused(tiny_llama, own, message) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        _config(tiny_llama, additional_config={"kvfold": own})


@pytest.mark.parametrize(
    ("own", "extra", "message"),
    [
        ({"eviction": "streaming"}, {}, "have no whole prompt to give away: leave --eviction or --kv-transfer-config"),
        ({"keep": "folder"}, {}, "give --keep or --kv-transfer-config, not both"),
        (
            {},
            {"enforce_handshake_compat": False},
            "read each other's pages wrongly: leave enforce_handshake_compat out",
        ),
        ({}, {"bidirectional_kv_xfer": True}, "leave bidirectional_kv_xfer out"),
    ],
)
def test_transfers_that_would_give_wrong_pages_are_refused(tiny_llama: Path, own, extra, message) -> None:
    with pytest.raises(ValueError, match=message):
        _config(
            tiny_llama,
            additional_config={"kvfold": own},
            kv_transfer_config=NIXL | {"kv_connector_extra_config": extra},
        )


def test_pages_of_windows_do_not_travel(tiny_gemma3: Path) -> None:
    with pytest.raises(ValueError, match="pages of models with sliding windows do not travel"):
        _config(tiny_gemma3, kv_transfer_config=NIXL)


def test_stages_do_not_forget(tiny_llama: Path) -> None:
    own = {"kvfold": {"eviction": "streaming"}}
    with pytest.raises(ValueError, match="leave --eviction or --pipeline-parallel-size out"):
        _config(tiny_llama, additional_config=own, pipeline_parallel_size=2)


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    transformers.DeepseekV3Config(
        vocab_size=260, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, architectures=["DeepseekV3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match=r"latent attention is not folded here.*leave kvfold out"):
        _config(tmp_path, skip_tokenizer_init=True)


def test_blocks_of_sliding_windows_must_hold_dense_tokens(tiny_gemma3) -> None:
    assert _config(tiny_gemma3).cache_config.block_size == 256
    with pytest.raises(ValueError, match=r"block_size = 64: .* multiple of that of at least 256"):
        _config(tiny_gemma3, block_size=64)


def test_what_is_asked_for_stays(tiny_llama) -> None:
    config = _config(tiny_llama, block_size=128)
    assert config.cache_config.block_size == 128
    assert config.parallel_config.worker_cls == "kvfold.integrations.vllm.worker.FoldedWorker"
    assert config.scheduler_config.scheduler_cls == "kvfold.integrations.vllm.scheduler.FoldedScheduler"
    assert _config(tiny_llama, dtype="bfloat16", kv_cache_dtype="bfloat16").cache_config.block_size == 64
    assert _config(tiny_llama, additional_config={"kvfold": {"format": "kvfold-4@128"}}).cache_config.block_size == 128


class _Said(logging.Handler):
    """vLLM's loggers do not propagate."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_without_options_nothing_changes(tiny_llama) -> None:
    """vLLM takes its own worker and attention; a dtype that it would not fold on a CPU is told of."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.selector import AttentionSelectorConfig

    said = _Said()
    logger = logging.getLogger("vllm.kvfold")
    logger.addHandler(said)
    try:
        config = _config(tiny_llama, additional_config={})
        assert not said.messages
        turboquant = _config(tiny_llama, additional_config={}, kv_cache_dtype="turboquant_4bit_nc")
    finally:
        logger.removeHandler(said)
    assert len(said.messages) == 1
    assert "this engine does not fold, it stores one byte a value" in said.messages[0]
    layer = AttentionSelectorConfig(
        head_size=128, dtype=config.model_config.dtype, kv_cache_dtype="auto", block_size=128,
        attn_type=AttentionType.DECODER,
    )  # fmt: skip
    for stock in (config, turboquant):
        assert (stock.parallel_config.worker_cls, stock.cache_config.block_size) == (STOCK_WORKER, 128)
        assert stock.scheduler_config.scheduler_cls is None
        with set_current_vllm_config(stock):
            assert "cpu_attn" in current_platform.get_attn_backend_cls(None, layer)
    with set_current_vllm_config(_config(tiny_llama)):
        assert "FoldedBackend" in current_platform.get_attn_backend_cls(None, layer)
