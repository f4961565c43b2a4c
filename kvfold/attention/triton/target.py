"""Which of the kernels for pages a device runs."""

import logging
import os
from functools import cache

import torch

from kvfold.kernels.triton import is_nvidia

logger = logging.getLogger("kvfold")

SWITCH = "KVFOLD_GLUON"
"""Set to 0, this environment variable keeps to the kernels in Triton."""
TESTED = "3.9."
"""Triton's releases that the kernels in Gluon were compiled with: Gluon is experimental, and changes."""


def tensor_cores(device: torch.device) -> bool:
    """Whether a device runs the kernels in Gluon: it is NVIDIA's, multiplies bytes, and Triton's Gluon is known."""
    if not is_nvidia(device) or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return os.environ.get(SWITCH) != "0" and os.environ.get("TRITON_INTERPRET", "0") == "0" and _compiles()


def has_wide_programs(device: torch.device) -> bool:
    """Whether programs of prompts have 128 rows: on NVIDIA's GPUs before Hopper, and in the interpreter.

    There, of fewer rows a warp has all, and exchanges their maxima with the others. Hopper's products take 64 rows of
    four warps at once, and would keep twice as many queries in shared memory.
    """
    return device.type == "cpu" or (is_nvidia(device) and torch.cuda.get_device_capability(device) < (9, 0))


@cache
def _compiles() -> bool:
    """Whether the kernels can be imported; the log says so if not, as those in Triton are slower."""
    try:
        import triton

        if triton.__version__.startswith(TESTED):
            import kvfold.kernels.gluon.attend  # noqa: F401

            return True
        why = f"they were compiled with Triton {TESTED}*, this is {triton.__version__}"
    except Exception as error:  # whatever an experimental module raises
        why = f"{type(error).__name__}: {error}"
    logger.warning("kernels for tensor cores are left out, and slower ones run: %s", why)
    return False
