"""kvfold for mlx-lm: `pip install 'kvfold[mlx]'`, on Macs and, on the CPU, on Linux."""

import kvfold.attention.mlx  # before mlx-lm: its error says if MLX is missing

try:
    import mlx_lm  # noqa: F401
except ImportError as error:
    raise ImportError(f"mlx-lm is not installed ({error}): pip install 'kvfold[mlx]'") from None

import kvfold.integrations.mlx.batch  # noqa: F401  # gives layers their `merge`
from kvfold.integrations.mlx.attach import attach, detach
from kvfold.integrations.mlx.cache import cache_report, make_prompt_cache
from kvfold.integrations.mlx.layer import FoldedKVCache
from kvfold.integrations.mlx.models import load_mlx_model

__all__ = ["FoldedKVCache", "attach", "cache_report", "detach", "load_mlx_model", "make_prompt_cache"]
