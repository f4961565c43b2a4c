"""Kernels on MLX arrays: plain operations everywhere, and a Metal kernel for decoding where there is Metal."""

from kvfold.kernels.mlx.blas import lend_torchs

lend_torchs()  # before MLX is loaded: afterwards it has found its own BLAS

try:
    import mlx.core as mx
except ImportError as error:
    raise ImportError(f"MLX is not installed ({error}): pip install 'kvfold[mlx]'") from None

__all__ = ["mx"]
