"""One sequence's blocks in an engine's pool, as an eviction policy reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.pool.layer import PagedLayer
from kvfold.formats import FormatPair
from kvfold.formats.page import PageForm, Pages


@dataclass(frozen=True)
class BlockTokens:
    """The tokens of one sequence that a layer holds in whole blocks (`kvfold.eviction.policy.HeldTokens`).

    Attributes
    ----------
    layer
        The layer.
    blocks
        Numbers of the blocks in the pool, in the order of their tokens. All of their pages are folded.
    places
        Which blocks of the sequence these are; those between were forgotten.
    seen
        Tokens of the sequence that came.
    """

    layer: PagedLayer
    blocks: Sequence[int]
    places: Sequence[int]
    seen: int

    @property
    def formats(self) -> FormatPair:
        return self.layer.formats

    @property
    def keys(self) -> "BlockTokens":
        return self

    @property
    def form(self) -> PageForm:
        return self.formats.keys.form

    @property
    def kv_heads(self) -> int:
        return self.layer.pool.kv_heads

    @property
    def key_dim(self) -> int:
        return self.formats.keys.head_dim

    @property
    def page_size(self) -> int:
        """Tokens of a block, which go together."""
        return self.layer.pool.pages_a_block * self.layer.pool.layout.page_size

    @property
    def length(self) -> int:
        """Tokens that are held, in whole blocks and after them."""
        return len(self.blocks) * self.page_size + self.seen % self.page_size

    def pages(self, start: int = 0, stop: int | None = None) -> Pages:
        """The keys of blocks `start` to `stop`."""
        per = self.layer.pool.pages_a_block
        numbers = torch.tensor(self.blocks[start:stop])[:, None] * per + torch.arange(per)
        return self.layer.pool.read_keys(numbers.flatten())

    def folded_positions(self, slots: int) -> Tensor:
        """Positions of the first `slots` tokens: int64, (1, kv_heads, slots)."""
        first = torch.tensor(self.places[: slots // self.page_size])[:, None] * self.page_size
        return (first + torch.arange(self.page_size)).flatten().expand(1, self.kv_heads, -1)
