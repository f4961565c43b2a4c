"""kvfold inside vLLM: its CPU engine keeps the KV cache folded, in its own paged pool.

Entry points (pyproject.toml) that vLLM calls in each of its processes; nothing here may import vLLM's config.
"""


def platform() -> str | None:
    """For `vllm.platform_plugins`: kvfold's platform where vLLM would take its own for CPUs, else nothing."""
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    return "kvfold.integrations.vllm.platform.FoldedCpuPlatform"
