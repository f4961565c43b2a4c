"""Where folded pages go: one after the other, or straight to their places in a pool."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Where each part of some pages lies, in units of a page of one head."""

    # By the names of `kvfold.formats.page.Pages`: a tensor whose memory begins with the first unit, and the stride from
    # unit to unit in elements.
    parts: dict[str, tuple[Tensor, int]]
    # The unit of the first head of each page, int64, (pages); those of its other heads follow. None: units are in
    # order, stream by stream, page by page.
    units: Tensor | None = None

    def of(self, name: str) -> tuple[Tensor | None, int]:
        """A part and its stride; None and 0 if pages have none."""
        return self.parts.get(name, (None, 0))

    def store(self, name: str, tensor: Tensor) -> None:
        """Copy a part of folded pages, (1, heads, pages, …), to where it goes."""
        assert self.units is not None
        part, stride = self.parts[name]
        heads, own = tensor.shape[1], tensor.shape[3:].numel()
        units = self.units[:, None] + torch.arange(heads, device=self.units.device)
        count = (part.numel() - own) // stride + 1
        torch.as_strided(part, (count, own), (stride, 1))[units] = tensor[0].transpose(0, 1).flatten(2)
