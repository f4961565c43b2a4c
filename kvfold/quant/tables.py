"""Tables of formats on the devices that read them."""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_COPIES = WeakIdKeyDictionary()


def on(device: torch.device, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A table that nobody changes, on a device: what is elsewhere is copied there once, and goes with its original."""
    dtype = dtype or table.dtype
    if table.device == device and table.dtype == dtype:
        return table
    copies = _COPIES.setdefault(table, {})
    if (device, dtype) not in copies:
        copies[device, dtype] = table.to(device, dtype)
    return copies[device, dtype]


def copies_elsewhere(table: Tensor) -> list[Tensor]:
    """What `on` copied to other devices."""
    return [copy for (device, _), copy in _COPIES.get(table, {}).items() if device != table.device]
