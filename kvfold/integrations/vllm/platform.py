"""vLLM's platform for CPUs, with attention over folded pages where the config asks for it."""

import os
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

from kvfold.integrations.vllm import counters
from kvfold.integrations.vllm.options import Options, drafts_of, folding_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvfold")

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
FOLDED_WORKER = "kvfold.integrations.vllm.worker.FoldedWorker"
FOLDED_SCHEDULER = "kvfold.integrations.vllm.scheduler.FoldedScheduler"
KEEPER = "KeptPages"
NIXL, FOLDED_NIXL = ("NixlConnector", "NixlPullConnector"), "FoldedNixl"
"""vLLM's names of the connector that another engine's workers read from, and the name of ours."""
DRAFTS = ("ngram",)
"""Ways to draft, by vLLM's names: those without layers of their own."""
DENSE_KERNEL_BLOCK = 32
"""Blocks of layers with a sliding window, which stay dense, are multiples of this."""
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"
"""How many matrix products oneDNN keeps compiled in a worker. Each prompt length adds five, of some 100 kB each. With
oneDNN's own bound of 1,024, memory grows over hundreds of requests, which looks like a leak."""


class FoldedCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """vLLM's own platform, but for a warning, unless the config has options for kvfold."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Called twice, in the first process and in the engine's: what it sets must be the same."""
        super().check_and_update_config(vllm_config)
        from vllm.config import KVTransferConfig

        options = Options.of(vllm_config.additional_config)
        dtype = str(vllm_config.cache_config.cache_dtype)
        if options is None:
            if dtype.startswith("turboquant"):
                logger.warning(
                    "kv_cache_dtype = %r: on a CPU this engine does not fold, it stores one byte a value; with "
                    "--additional-config '{\"kvfold\": {}}' and no kv_cache_dtype it folds to 4 bits.", dtype,
                )  # fmt: skip
            return
        if vllm_config.model_config is None:
            return
        counters.make_folder()
        os.environ.setdefault(*PRIMITIVES)  # processes that start from here inherit it
        _refuse_what_would_be_wrong(vllm_config, options)
        _set_blocks(vllm_config, options)
        _lower_sequences(vllm_config, options)
        vllm_config.parallel_config.worker_cls = FOLDED_WORKER
        vllm_config.scheduler_config.scheduler_cls = FOLDED_SCHEDULER
        if options.keep is not None:
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector=KEEPER, kv_connector_module_path="kvfold.integrations.vllm.keeping", kv_role="kv_both",
                kv_load_failure_policy="recompute",
            )  # fmt: skip
        elif (transfer := vllm_config.kv_transfer_config) is not None:
            transfer.kv_connector, transfer.kv_connector_module_path = FOLDED_NIXL, "kvfold.integrations.vllm.nixl"

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Decoder layers without a sliding window fold; the others are vLLM's."""
        from vllm.config import get_current_vllm_config
        from vllm.v1.attention.backend import AttentionType

        stock = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        asked = attn_selector_config
        options = Options.of(get_current_vllm_config().additional_config)
        folds = not (asked.use_mla or asked.has_sliding_window) and asked.attn_type == AttentionType.DECODER
        if options is not None and folds:
            return "kvfold.integrations.vllm.backend.FoldedBackend"
        if options is not None:
            logger.info_once("kvfold: layers with a sliding window or another kind of attention stay dense.")
        return stock


def _refuse_what_would_be_wrong(vllm_config: "VllmConfig", options: Options) -> None:
    """Raise on settings under which folded pages would not hold what the engine believes."""
    cache, parallel, drafts = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.speculative_config
    scheduler, transfer = vllm_config.scheduler_config.scheduler_cls, vllm_config.kv_transfer_config
    connector, extra = transfer and transfer.kv_connector, (transfer and transfer.kv_connector_extra_config) or {}
    nixl = connector in (*NIXL, FOLDED_NIXL)
    if options.eviction is not None:
        options.policy()  # its file is there, and its budget is enough
    own_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    reasons = {
        f"drafts by {drafts and drafts.method!r} have layers of their own: only {', '.join(DRAFTS)} is folded":
            drafts is not None and drafts.method not in DRAFTS,
        "the connectors behind --kv-offloading-size do not run on CPUs: leave it out":
            cache.kv_offloading_size is not None,
        f"the connector {connector!r} moves blocks of dense values: give NixlConnector, or --keep a folder":
            connector not in (None, *NIXL, FOLDED_NIXL, KEEPER),
        "requests that forget have no whole prompt to give away: leave --eviction or --kv-transfer-config out":
            options.eviction is not None and nixl,
        "pages of models with sliding windows do not travel: leave --kv-transfer-config out":
            nixl and _has_windows(vllm_config.model_config),
        "pages go to a folder or to another engine: give --keep or --kv-transfer-config, not both":
            options.keep is not None and nixl,
        "engines that did not compare their formats would read each other's pages wrongly: leave "
        "enforce_handshake_compat out": nixl and not extra.get("enforce_handshake_compat", True),
        "pages travel from the engine that reads to the one that decodes: leave bidirectional_kv_xfer out":
            nixl and bool(extra.get("bidirectional_kv_xfer")),
        "pages of models with sliding windows are not kept: leave --keep out":
            options.keep is not None and _has_windows(vllm_config.model_config),
        "what a request computes after it forgot something is no other's: give --keep or --eviction, not both":
            options.keep is not None and options.eviction is not None,
        "with stages, what all layers forget together is not known in time: leave --eviction or "
        "--pipeline-parallel-size out": options.eviction is not None and parallel.pipeline_parallel_size > 1,
        f"kv_cache_dtype = {cache.cache_dtype!r} asks for another form of the cache: leave --kv-cache-dtype out":
            cache.cache_dtype not in ("auto", own_dtype),
        "context parallelism splits blocks between workers: leave its options out":
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "this model's latent attention is not folded here, so nothing would be: leave kvfold out":
            vllm_config.model_config.use_mla,
        "with state-space layers blocks are copied when half full: add --no-enable-prefix-caching":
            vllm_config.model_config.is_hybrid and bool(cache.enable_prefix_caching),
        "layers that attend within chunks see a request as several: leave kvfold out for this model":
            "chunked_attention" in (getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()),
        "models that pool generate nothing: leave kvfold out": vllm_config.model_config.runner_type == "pooling",
        f"worker_cls = {parallel.worker_cls!r} does not tell when requests end: leave --worker-cls out":
            parallel.worker_cls not in (STOCK_WORKER, FOLDED_WORKER),
        f"scheduler_cls = {scheduler!r} would let one broken request end all: leave --scheduler-cls out":
            scheduler not in (None, FOLDED_SCHEDULER),
        "the V2 model runner is not supported: set VLLM_USE_V2_MODEL_RUNNER=0": vllm_config.use_v2_model_runner,
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"kvfold: {reason}")


def _set_blocks(vllm_config: "VllmConfig", options: Options) -> None:
    """Blocks of whole pages; with sliding windows, of at least the bytes of `DENSE_KERNEL_BLOCK` dense tokens."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    head_dim, itemsize = model.get_head_size(), model.dtype.itemsize
    page, slot = options.formats(head_dim).keys.page_size, options.slot_bytes(head_dim, itemsize)
    if (drafts := drafts_of(vllm_config)) > page:
        raise ValueError(
            f"kvfold: num_speculative_tokens = {drafts}: give at most {page}, the tokens of a page of {options.format}"
        )
    windowed = _has_windows(model)
    fewest = page
    if windowed:
        while fewest * slot < DENSE_KERNEL_BLOCK * 2 * head_dim * itemsize:
            fewest += page
    if not cache.user_specified_block_size:
        cache.block_size = fewest
    elif cache.block_size % page or cache.block_size < fewest:
        raise ValueError(
            f"kvfold: block_size = {cache.block_size}: pages of {options.format} have {page} tokens, so give a "
            f"multiple of that of at least {fewest}, or leave --block-size out"
        )
    if windowed:
        kv_heads = model.get_num_kv_heads(vllm_config.parallel_config)
        cache.skip_page_size_padded = cache.block_size * kv_heads * slot


def _has_windows(model: Any) -> bool:
    """Whether some layers of a model have a sliding window, by vLLM's config of it."""
    return any("sliding" in kind for kind in getattr(model.hf_text_config, "layer_types", None) or ())


def _lower_sequences(vllm_config: "VllmConfig", options: Options) -> None:
    """Run no more sequences than have room for their unfinished pages in half of the cache's memory, if it is known."""
    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    memory = vllm_config.cache_config.kv_cache_memory_bytes
    layers = -(-folding_layers(model) // parallel.pipeline_parallel_size)
    each = layers * options.tail_bytes(
        model.get_head_size(), model.get_num_kv_heads(parallel), model.dtype.itemsize, drafts_of(vllm_config)
    )
    if memory is None or not each:
        return
    room = memory // 2 // each
    if room < 1:
        raise ValueError(
            f"kvfold: kv_cache_memory_bytes = {memory:,}: one sequence's unfinished page and first tokens take "
            f"{each:,} bytes, and at most half of the memory is for these: give at least {2 * each:,}"
        )
    if scheduler.max_num_seqs > room:
        logger.warning(
            "kvfold: %d sequences at a time in the place of %d: each has an unfinished page of %.1f MiB, and half of "
            "the %.0f MiB for the cache is for these. --kv-cache-memory-bytes raises it.",
            room, scheduler.max_num_seqs, each / 2**20, memory / 2**20,
        )  # fmt: skip
        scheduler.max_num_seqs = room
