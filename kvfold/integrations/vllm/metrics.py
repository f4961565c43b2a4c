"""What kvfold adds to vLLM's /metrics."""

from functools import cache
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from kvfold.integrations.vllm import counters
from kvfold.integrations.vllm.options import Options, folding_layers

GAUGES = {
    "capacity_tokens": "Tokens that the KV cache holds",
    "used_tokens": "Tokens in blocks that are in use",
    "bytes_per_token": "Bytes of a folded token, all layers that fold and all their KV heads",
    "used_bytes": "Folded bytes of blocks that are in use",
    "folds_total": "Pages folded, of all layers; rate() gives folds a second",
    "forgotten_tokens_total": "Tokens that requests have forgotten to keep to their budget",
}
"""All are gauges. Where several processes serve one port, Prometheus' client merges their files, and for a gauge it can
be told which number is the right one; counters of several processes it would add."""


class FoldedStats(StatLoggerBase):  # type: ignore[misc]
    """For `vllm.stat_logger_plugins`: one engine's capacity and use; nothing if it does not fold."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.cache, self.engine = vllm_config.cache_config, engine_index
        self.options = Options.of(vllm_config.additional_config)
        self.usage = 0.0
        if self.options is None:
            return
        model = vllm_config.model_config
        slot = self.options.slot_bytes(model.get_head_size(), model.dtype.itemsize)
        self.token_bytes = slot * model.get_total_num_kv_heads() * folding_layers(model)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Publish the numbers after a step."""
        if scheduler_stats is not None:
            self.usage = scheduler_stats.kv_cache_usage
            self._publish()

    def log_engine_initialized(self) -> None:
        """Publish the capacity; the workers have logged it."""
        self._publish()

    def _publish(self) -> None:
        if self.options is None:
            return
        capacity = self.cache.kv_cache_size_tokens or 0
        used = round(self.usage * capacity)
        folds, forgotten = counters.counted(self.engine)
        numbers = {
            "capacity_tokens": capacity, "used_tokens": used, "bytes_per_token": self.token_bytes,
            "used_bytes": used * self.token_bytes, "folds_total": folds, "forgotten_tokens_total": forgotten,
        }  # fmt: skip
        for name, number in numbers.items():
            _gauge(name).labels(str(self.engine), self.options.format).set(number)


@cache
def _gauge(name: str) -> Gauge:
    """A gauge, made once: Prometheus wants each name once in a process."""
    # What only grows is right at its highest: a process may publish late what it read before another.
    mode: Any = "max" if name.endswith("_total") else "mostrecent"
    return Gauge(f"kvfold:{name}", GAUGES[name], ["engine", "format"], multiprocess_mode=mode)
