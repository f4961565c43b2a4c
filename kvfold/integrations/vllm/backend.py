"""vLLM's attention interface over folded pages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec

from kvfold.attention.dense import attend_dense
from kvfold.attention.pool import PagedAttention
from kvfold.cache.calibration import Observed
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import PageLayout, PagePool
from kvfold.cache.pool.plan import EngineStep, Slots, plan
from kvfold.formats import FormatPair, KeyStatistics
from kvfold.integrations.vllm.forgetting import FoldedSpec, without_forgotten
from kvfold.integrations.vllm.options import Options, drafts_of

logger = init_logger("vllm.kvfold")

_FORMATS: dict[int, FormatPair] = {}
"""Formats of this process's layers, by head_dim: vLLM asks for a layer's spec without its config."""


class FoldedBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Attention layers whose blocks are folded pages."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[MultipleOf]:
        """Whole pages. A multiple, not the size itself: then the engine never splits its blocks."""
        dims = _FORMATS.keys() if kv_cache_spec is None else [kv_cache_spec.head_size]
        sizes = [_FORMATS[dim].keys.page_size for dim in dims]
        return [MultipleOf(max(sizes, default=64))]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec with the bytes of a folded token: its share of a page.

        Its dtype is uint8, so that the engine zeroes blocks that it hands out where other layers have another dtype.
        Dense layers with a sliding window reuse blocks that were folded, and bytes that they do not overwrite could be
        NaN.
        """
        if spec.head_size_v != spec.head_size:
            raise NotImplementedError(
                f"kvfold: keys of {spec.head_size} channels and values of {spec.head_size_v} are not folded yet; leave "
                "kvfold out for this model"
            )
        layout = PageLayout(_FORMATS[spec.head_size])
        return FoldedSpec.of(spec, state_content_bytes=layout.slot_bytes(spec.dtype.itemsize), dtype=torch.uint8)

    @staticmethod
    def get_impl_cls() -> type["FoldedImpl"]:
        return FoldedImpl

    @staticmethod
    def get_builder_cls() -> type["FoldedBuilder"]:
        return FoldedBuilder


@dataclass(eq=False)
class FoldedMetadata:
    """One step: its plan, or, while keys are measured, where its sequences begin."""

    step: EngineStep | None
    starts: list[int]


class FoldedBuilder(AttentionMetadataBuilder[FoldedMetadata]):  # type: ignore[misc]
    """Plans steps for layers that share blocks."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = _FORMATS[kv_cache_spec.head_size].keys.page_size
        self.pages_a_block = kv_cache_spec.block_size // self.page_size
        options = Options.of(vllm_config.additional_config)
        self.forgets = options is not None and options.eviction is not None
        self.drafts = drafts_of(vllm_config)
        self.slots = Slots(vllm_config.scheduler_config.max_num_seqs, self.drafts)  # of these layers
        self.observing = False  # whether the engine measures keys: steps are whole prompts, and nothing is stored
        self.pages_folded = 0  # so far, of one layer

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FoldedMetadata:
        given = common_attn_metadata
        if given.causal is not True:
            raise NotImplementedError("kvfold: attention that is not causal is not folded")
        starts = given.query_start_loc_cpu.tolist()
        if self.observing:
            return FoldedMetadata(None, starts)
        lengths, table = given.seq_lens.tolist(), given.block_table_tensor.numpy()
        if self.forgets:
            lengths, table = without_forgotten(starts, lengths, table, self.pages_a_block * self.page_size)
        step = plan(starts, lengths, table, self.slots, self.pages_a_block, self.page_size, self.drafts)
        if self.slots.firsts.missed:
            logger.warning_once(
                "kvfold: the first tokens of the last %d prompts are kept dense. A prompt whose pages were found in "
                "the cache is older, and its first token is read folded.",
                self.slots.firsts.count,
            )
        self.pages_folded += len(step.folded)
        return FoldedMetadata(step, starts)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the slots of a sequence that is gone."""
        self.slots.release(self._pages(blocks))

    def replace(self, blocks: Sequence[int], layers: Iterable["FoldedImpl"]) -> None:
        """Forget what is known of blocks whose pages come from elsewhere."""
        pages = self._pages(blocks)
        self.slots.firsts.forget(pages)
        for layer in layers:
            if layer.paged is not None:
                layer.paged.broken.difference_update(pages)

    def _pages(self, blocks: Sequence[int]) -> list[int]:
        return [block * self.pages_a_block + i for block in blocks for i in range(self.pages_a_block)]


class FoldedImpl(AttentionImpl[FoldedMetadata]):  # type: ignore[misc]
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            what = "ALiBi" if alibi_slopes is not None else "layers that read another layer's cache"
            raise NotImplementedError(f"kvfold: {what} cannot be folded yet; leave kvfold out for this model")
        config = get_current_vllm_config()
        options = Options.of(config.additional_config)
        assert options is not None
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.softcap, self.sinks = scale, logits_soft_cap or None, sinks
        self.kv_cache_dtype = kv_cache_dtype
        with set_default_torch_dtype(torch.float32):  # codebooks need it; a model is made under its own
            self.formats = _FORMATS[head_size] = options.formats(head_size)
            self.layout = PageLayout(self.formats)
        self.sequences, self.drafts = config.scheduler_config.max_num_seqs, drafts_of(config)
        self.dtype = config.model_config.dtype
        self.observed = Observed()
        self.statistics: KeyStatistics | None = None  # that formats are fitted to
        self.paged: PagedLayer | None = None  # once the pool is in use
        self._attention: PagedAttention | None = None

    def fit(self, statistics: KeyStatistics) -> None:
        """Fit formats to statistics of this model's keys, values and queries."""
        self.statistics = statistics
        self.formats = self.formats.calibrated(statistics)

    def begin(self, kv_cache: Tensor) -> PagedLayer:
        """The layer in its pool, which is made once, when formats are fitted."""
        if self.paged is None:
            pool = PagePool(kv_cache, self.layout)
            self.paged = PagedLayer(self.formats, pool, self.sequences, self.dtype, self.drafts)
        return self.paged

    def is_broken(self, block: int) -> bool:
        """Whether a block has a page that could not be held (`PagedLayer.broken`)."""
        if self.paged is None or not (broken := self.paged.broken):
            return False
        pages = self.paged.pool.pages_a_block
        return not broken.isdisjoint(range(block * pages, (block + 1) * pages))

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FoldedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's new tokens, (tokens, heads, head_dim), into `output`.

        Keys and values are (tokens, kv_heads, head_dim).
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("kvfold: attention does not quantise its output")
        if attn_metadata is None:  # the engine measures memory
            return output.zero_()
        if attn_metadata.step is None:
            return self._observe(query, key, value, attn_metadata.starts, output)
        if self._attention is None:
            self._attention = PagedAttention(
                self.begin(kv_cache), self.num_heads, scaling=self.scale, softcap=self.softcap, sink_logits=self.sinks
            )
        tokens = attn_metadata.step.tokens
        output[:tokens] = self._attention(query[:tokens], key[:tokens], value[:tokens], attn_metadata.step)
        return output

    def _observe(self, query: Tensor, key: Tensor, value: Tensor, starts: list[int], output: Tensor) -> Tensor:
        """Dense attention of whole prompts; adds their keys, values and queries to the statistics."""
        for first, stop in pairwise(starts):
            q, k, v = (x[first:stop].transpose(0, 1)[None] for x in (query, key, value))
            self.observed.add(q, k, v if self.formats.needs_calibration else None)  # else nothing is rotated by them
            out = attend_dense(q, k, v, scaling=self.scale, softcap=self.softcap, sink_logits=self.sinks)
            output[first:stop] = out[0].transpose(0, 1)
        return output
