"""kvfold inside vLLM: its CPU engine keeps the KV cache folded, in its own paged pool.

Entry points (pyproject.toml) that vLLM calls in each of its processes; nothing here may import vLLM's config.
"""

import logging
import os

logger = logging.getLogger("kvfold")


def platform() -> str | None:
    """For `vllm.platform_plugins`: kvfold's platform where vLLM would take its own for CPUs, else nothing."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    return "kvfold.integrations.vllm.platform.FoldedCpuPlatform"


def register() -> None:
    """For `vllm.general_plugins`: kvfold's backend in the place of TURBOQUANT on GPUs.

    On CPUs it warns if the environment names the device, as vLLM then ignores platform plugins.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.TURBOQUANT, "kvfold.integrations.vllm.gpu.FoldedGpuBackend")
    elif current_platform.is_cpu() and os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        logger.warning(
            "VLLM_TARGET_DEVICE = cpu makes vLLM pass by plugins for platforms, so kvfold folds nothing here: unset it."
        )
