"""Fast matrix products for MLX on Linux."""

import ctypes
import logging
import sys
from functools import cache
from pathlib import Path

import torch

from kvfold.kernels.cpu import module

logger = logging.getLogger("kvfold")


@cache
def lend_torchs() -> bool:
    """Let MLX multiply float32 matrices by torch's BLAS; whether it will.

    Its wheels for Linux bring netlib's reference implementation: 4 GFLOP/s where torch has over 100. Nothing happens
    on other systems, where MLX has Apple's, or where torch's library does not show its `sgemm_`. Products of 16-bit
    matrices are MLX's own on a CPU, and as slow. It is too late once MLX is loaded.
    """
    if sys.platform == "linux" and sys.modules.get("mlx.core") is not None:
        logger.info(
            "MLX was loaded before kvfold and multiplies by its own BLAS, some forty times slower than torch's: import "
            "kvfold.integrations.mlx first"
        )
        return False
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if sys.platform != "linux" or not library.is_file():
        return False
    try:
        sgemm = ctypes.CDLL(str(library)).sgemm_
    except (OSError, AttributeError):
        logger.info("MLX multiplies matrices by its own BLAS, which is slow on Linux: torch's is not to be had")
        return False
    module.lend_sgemm(ctypes.cast(sgemm, ctypes.c_void_p).value or 0)
    ctypes.CDLL(module.__file__, mode=ctypes.RTLD_GLOBAL)
    return True
