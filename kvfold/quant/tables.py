"""Tables of formats on the devices that read them."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_COPIES = WeakIdKeyDictionary()


def on(
    device: torch.device, table: Tensor, dtype: torch.dtype | None = None, expanded: Callable[[], Tensor] | None = None
) -> Tensor:
    """A constant table on a device, in a dtype; a copy is made once, and freed with the original.

    `expanded`: gives what is to be there in the place of the table, from which it is made.
    """
    dtype = dtype or table.dtype
    if table.device == device and table.dtype == dtype and expanded is None:
        return table
    copies = _COPIES.setdefault(table, {})
    if (device, dtype) not in copies:
        copies[device, dtype] = (table if expanded is None else expanded()).to(device, dtype)
    return copies[device, dtype]


def copies_elsewhere(table: Tensor) -> list[Tensor]:
    """The copies that `on` made on other devices."""
    return [copy for (device, _), copy in _COPIES.get(table, {}).items() if device != table.device]
