"""What kvfold adds to vLLM's /metrics."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from kvfold.integrations.vllm import counters
from kvfold.integrations.vllm.options import Options


class FoldedStats(StatLoggerBase, Collector):  # type: ignore[misc]
    """For `vllm.stat_logger_plugins`: capacity, folded bytes and folds; nothing if the engine does not fold."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.cache = vllm_config.cache_config
        self.options = Options.of(vllm_config.additional_config)
        self.engine = str(engine_index)
        self.usage = 0.0
        if self.options is None:
            return
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        slot = self.options.slot_bytes(model.get_head_size(), model.dtype.itemsize)
        layers = model.get_num_layers(parallel) * parallel.pipeline_parallel_size
        self.token_bytes = slot * model.get_total_num_kv_heads() * layers
        REGISTRY.register(self)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take what the scheduler tells after a step."""
        if scheduler_stats is not None:
            self.usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Nothing to say: the workers said it."""

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        assert self.options is not None
        capacity = self.cache.kv_cache_size_tokens or 0
        labels, values = ["engine", "format"], [self.engine, self.options.format]
        for name, what, value in (
            ("capacity_tokens", "Tokens that the folded KV cache holds", capacity),
            ("used_tokens", "Tokens in blocks that are in use", self.usage * capacity),
            ("bytes_per_token", "Bytes of a folded token, all layers and KV heads", self.token_bytes),
            ("used_bytes", "Bytes of blocks that are in use", self.usage * capacity * self.token_bytes),
        ):
            gauge = GaugeMetricFamily(f"kvfold:{name}", what, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        folds = CounterMetricFamily(
            "kvfold:folds", "Pages folded, of all layers; rate() gives folds a second", labels=labels
        )
        folds.add_metric(values, counters.folds())
        yield folds
