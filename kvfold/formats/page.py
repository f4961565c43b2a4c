"""The page form: the one in-memory shape that every format folds into.

For one head, a page of P tokens stands for

    x̂[t] = R⁻¹ · ( z  +  a[t,g]  +  s[t,g] · S ⊙ lut[ code[t] ] )

`Pages` holds what differs from page to page; R and lut belong to the format (`PageForm`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.kernels import ops
from kvfold.quant.packing import TILE, Lanes, padded
from kvfold.quant.transforms import ChannelOrder, Transform


@dataclass(eq=False)
class TokenCodes:
    """Folded tokens that are not packed into pages yet.

    Attributes
    ----------
    code
        uint8, (…, T, D).
    scale, offset
        s and a: float16, (…, T, G); both may be absent, `offset` alone too (s = 1, a = 0).
    centre, channel_scale
        z and S of the page that these tokens are: float16, (…, D); absent where a format has none.
    """

    code: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    centre: Tensor | None = None
    channel_scale: Tensor | None = None

    def paged(self, page_size: int) -> "TokenCodes":
        """Tokens (…, N·P, ·) of a format without page metadata as pages (…, N, P, ·)."""

        def split(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.unflatten(-2, (-1, page_size))

        return TokenCodes(self.code.unflatten(-2, (-1, page_size)), split(self.scale), split(self.offset))


@dataclass(eq=False)
class Pages:
    """Folded pages, all on one device.

    Attributes
    ----------
    code
        Packed codes: uint8, (…, N, bytes), laid out by `kvfold.quant.packing`.
    scale, offset
        s ≥ 0 and a: float16, (…, N, P, G); both may be absent, `offset` alone too (s = 1, a = 0).
    centre, channel_scale
        z and S: float16, (…, N, D); absent for z = 0 and S = 1.
    tokens
        How many tokens the N pages stand for; the last page may be part full.
    """

    code: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    centre: Tensor | None = None
    channel_scale: Tensor | None = None
    tokens: int = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is present, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    def map_named(self, fn: Callable[[str, Tensor], Tensor]) -> "Pages":
        """The same pages with each tensor replaced by fn(name, tensor)."""
        return replace(self, **{name: fn(name, tensor) for name, tensor in self.tensors()})  # type: ignore[arg-type]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Pages":
        """The same pages with `fn` applied to each tensor."""
        return self.map_named(lambda _, tensor: fn(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes that the pages take: codes, scales and page metadata."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


@dataclass(frozen=True, eq=False)
class PageForm:
    """What all pages of one format share, and how to read them.

    Attributes
    ----------
    code_dim, page_size
        Channels of a code (D, or more where a residual adds its own), and P.
    bits
        Bits of each group of 16 channels, ⌈code_dim/16⌉ entries.
    lut
        Levels of each channel group: float32, (⌈code_dim/16⌉, levels).
    transform
        R, from D to `code_dim` coordinates.
    lanes
        "tokens" for keys, "channels" for values: see `kvfold.quant.packing`.
    """

    code_dim: int
    page_size: int
    bits: tuple[int, ...]
    lut: Tensor
    transform: Transform | ChannelOrder
    lanes: Lanes = "tokens"

    def pack(self, tokens: TokenCodes) -> Pages:
        """Pack tokens (…, N, P, D), whole pages, with page metadata (…, N, D)."""
        return Pages(
            code=ops.pack(tokens.code, list(self.bits), self.lanes),
            scale=tokens.scale,
            offset=tokens.offset,
            centre=tokens.centre,
            channel_scale=tokens.channel_scale,
            tokens=tokens.code.shape[-3] * self.page_size,
        )

    def levels(self, pages: Pages) -> Tensor:
        """S ⊙ lut[code]: float32, (…, N, P, D). The only place where codes are looked up."""
        lut = self.lut.to(pages.code.device)
        levels = ops.unpack_levels(pages.code, lut, self.page_size, self.code_dim, list(self.bits), self.lanes)
        if pages.channel_scale is not None:
            levels = levels * pages.channel_scale.float().unsqueeze(-2)
        return levels

    def coordinates(self, tokens: TokenCodes) -> Tensor:
        """z + a + s · S ⊙ lut[code] of tokens that are not packed yet: float32, (…, P, code_dim)."""
        group = torch.arange(self.code_dim, device=tokens.code.device) // TILE
        y = self.lut.to(tokens.code.device)[group, tokens.code.long()]
        if tokens.channel_scale is not None:
            y = y * tokens.channel_scale.float().unsqueeze(-2)
        y = _scaled(y, tokens.scale, tokens.offset)
        return y if tokens.centre is None else add_first(y, tokens.centre.float().unsqueeze(-2))

    def clear(self, pages: Pages, slot: int) -> None:
        """Make slots from `slot` on of each page read as nothing, in place; for pages whose tokens have scales."""
        assert pages.scale is not None
        code = ops.unpack(pages.code, self.page_size, self.code_dim, list(self.bits), self.lanes)
        code[..., slot:, :] = 0
        pages.code.copy_(ops.pack(code, list(self.bits), self.lanes))
        for per_token in (pages.scale, pages.offset):
            if per_token is not None:
                per_token[..., slot:, :] = 0

    def unfold(self, pages: Pages) -> Tensor:
        """x̂ of every token: float32, (…, tokens, D)."""
        y = _scaled(self.levels(pages), pages.scale, pages.offset)
        if pages.centre is not None:
            y = add_first(y, pages.centre.float().unsqueeze(-2))
        return self.transform.invert(y).flatten(-3, -2)[..., : pages.tokens, :]


def _scaled(y: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
    """a + s·y for y (…, P, D) and s, a (…, P, G)."""
    if scale is None:
        return y
    y = y.unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)
    return (y if offset is None else y + offset.float().unsqueeze(-1)).flatten(-2)


def add_first(y: Tensor, centre: Tensor) -> Tensor:
    """`y` with `centre` added to its first channels: a residual's channels have no centre."""
    return y + pad(centre, (0, y.shape[-1] - centre.shape[-1]))


def level_table(levels: dict[int, tuple[float, ...]], bits: tuple[int, ...]) -> Tensor:
    """One row of levels for each channel group, padded with zeros to the longest."""
    table = torch.zeros(len(bits), 2 ** max(bits), dtype=torch.float32)
    for row, b in zip(table, bits, strict=True):
        row[: 2**b] = torch.tensor(levels[b])
    return table


def uniform_bits(head_dim: int, bits: int) -> tuple[int, ...]:
    """`bits` for every channel group."""
    return (bits,) * (padded(head_dim) // TILE)
