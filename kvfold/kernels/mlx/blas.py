"""Fast matrix products for MLX on Linux."""

import ctypes
import logging
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from kvfold.kernels.cpu import module

logger = logging.getLogger("kvfold")

LENT = Path(module.__file__).parent / "liblent_blas.so"
"""Built from `kernels/cpu/blas.cpp`, on Linux."""


@cache
def lend_torchs() -> bool:
    """Let MLX multiply float32 matrices by torch's BLAS; returns whether it will.

    MLX's wheels for Linux bring netlib's reference implementation, which is many times slower. Nothing happens on other
    systems, where MLX has Apple's BLAS, or where torch's library does not export `sgemm_`. On a CPU MLX multiplies
    16-bit matrices by its own code, which stays as slow. Call it before MLX is loaded: later it has no effect.
    """
    if sys.platform == "linux" and sys.modules.get("mlx.core") is not None:
        logger.warning(
            "MLX was loaded before kvfold and multiplies by its own BLAS, far slower than torch's: import "
            "kvfold.integrations.mlx first"
        )
        return False
    if sys.platform != "linux" or find_spec("mlx") is None or not LENT.is_file():
        return False
    try:
        sgemm = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        logger.warning("MLX multiplies matrices by its own BLAS, which is slow on Linux: torch's is not to be had")
        return False
    ctypes.CDLL(str(LENT)).kvfold_lend_sgemm(ctypes.cast(sgemm, ctypes.c_void_p))
    ctypes.CDLL(str(LENT), mode=ctypes.RTLD_GLOBAL)
    return True
