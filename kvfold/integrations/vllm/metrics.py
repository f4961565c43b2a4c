"""What kvfold adds to vLLM's /metrics."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from kvfold.integrations.vllm import counters
from kvfold.integrations.vllm.options import Options, folding_layers

GAUGES = {
    "capacity_tokens": "Tokens that the KV cache holds",
    "used_tokens": "Tokens in blocks that are in use",
    "bytes_per_token": "Bytes of a folded token, all layers that fold and all their KV heads",
    "used_bytes": "Folded bytes of blocks that are in use",
}


class FoldedStats(StatLoggerBase):  # type: ignore[misc]
    """For `vllm.stat_logger_plugins`: one engine's capacity and use; nothing if it does not fold."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.cache = vllm_config.cache_config
        self.options = Options.of(vllm_config.additional_config)
        self.usage = 0.0
        if self.options is None:
            return
        model = vllm_config.model_config
        slot = self.options.slot_bytes(model.get_head_size(), model.dtype.itemsize)
        self.token_bytes = slot * model.get_total_num_kv_heads() * folding_layers(model)
        if not _ENGINES:
            REGISTRY.register(_Engines())
        _ENGINES[str(engine_index)] = self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Record the scheduler's statistics after a step."""
        if scheduler_stats is not None:
            self.usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Log nothing: the workers have."""

    def gauges(self) -> dict[str, float]:
        """The engine's numbers as they are now, by the names of `GAUGES`."""
        capacity = self.cache.kv_cache_size_tokens or 0
        used = self.usage * capacity
        return {
            "capacity_tokens": capacity, "used_tokens": used, "bytes_per_token": self.token_bytes,
            "used_bytes": used * self.token_bytes,
        }  # fmt: skip


_ENGINES: dict[str, FoldedStats] = {}


class _Engines(Collector):  # type: ignore[misc]
    """All engines of this process: Prometheus wants each name once."""

    def collect(self) -> Iterator[Metric]:
        for name, what in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvfold:{name}", what, labels=["engine", "format"])
            for engine, stats in _ENGINES.items():
                assert stats.options is not None
                gauge.add_metric([engine, stats.options.format], stats.gauges()[name])
            yield gauge
        folds = CounterMetricFamily("kvfold:folds", "Pages folded, of all layers; rate() gives folds a second")
        folds.add_metric([], counters.folds())
        yield folds
