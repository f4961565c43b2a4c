"""Replaces vLLM's TURBOQUANT backend on GPUs; kvfold's Triton kernels will be called from here."""

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

from kvfold.integrations.vllm.options import Options


class FoldedGpuBackend(TurboQuantAttentionBackend):  # type: ignore[misc]
    """vLLM's own backend; it raises if the config asks for kvfold, as no kernel is called yet."""

    @staticmethod
    def get_impl_cls() -> type:
        """vLLM's implementation; raises NotImplementedError if the config asks for kvfold."""
        config = get_current_vllm_config_or_none()
        if config is not None and Options.of(config.additional_config) is not None:
            raise NotImplementedError(
                "kvfold folds on CPUs only so far: leave kvfold out of --additional-config, and this engine's own "
                "TurboQuant serves"
            )
        return TurboQuantAttentionBackend.get_impl_cls()
