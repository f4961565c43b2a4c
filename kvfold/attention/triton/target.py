"""Which of the kernels for pages a device runs."""

from functools import cache

import torch


def tensor_cores(device: torch.device) -> bool:
    """Whether a device runs the kernels in Gluon: it is NVIDIA's, multiplies bytes, and Triton is new enough."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return _gluon_has_assembly()


@cache
def _gluon_has_assembly() -> bool:
    try:
        from triton.experimental.gluon import language
    except ImportError:  # before Triton 3.4
        return False
    return hasattr(language, "inline_asm")
