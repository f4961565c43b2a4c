"""The page form: the one in-memory shape that every format folds into.

For one head, a page of P tokens stands for

    x̂[t] = R⁻¹ · ( z  +  a[t,g]  +  s[t,g] · S ⊙ lut[ code[t] ] )

for token t and each scale group g of channels, which share a and s. With `PageForm.scaled_shifts`, it stands for

    x̂[t] = R⁻¹ · ( s[t] · z  +  a[t] · S  +  s[t] · S ⊙ lut[ code[t] ] )

`Pages` holds what differs from page to page: the centre z, offsets a, scales s, channel scales S and codes. R and the
levels lut belong to the format (`PageForm`).

In shapes, N counts pages, T tokens, D channels of a vector, code_dim those of a code, and G scale groups.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.kernels import ops
from kvfold.quant.packing import TILE, Lanes, padded
from kvfold.quant.tables import on
from kvfold.quant.transforms import AnyTransform


@dataclass(eq=False)
class TokenCodes:
    """Folded tokens that are not packed into pages yet.

    Attributes
    ----------
    code
        uint8, (…, T, code_dim): D channels, or more where a residual adds its own.
    scale, offset
        s, float16 or float32, and a, float16: (…, T, G); both may be absent, `offset` alone too (s = 1, a = 0).
    plain
        Channels that stay numbers: float16, (…, T, plain_dim); may be absent.
    beside
        Bytes that attention does not read: uint8, (…, T, any); may be absent.
    centre, channel_scale
        z and S of the page that these tokens make up: float16, (…, D); absent for z = 0 and S = 1.
    """

    code: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    plain: Tensor | None = None
    beside: Tensor | None = None
    centre: Tensor | None = None
    channel_scale: Tensor | None = None

    def map_tokens(self, fn: Callable[[Tensor], Tensor]) -> "TokenCodes":
        """The same tokens with `fn` applied to each tensor (…, T, ·)."""
        parts = {name: getattr(self, name) for name in PER_TOKEN}
        return replace(self, **{name: fn(part) for name, part in parts.items() if part is not None})

    def paged(self, page_size: int) -> "TokenCodes":
        """Tokens (…, N·P, ·) of a format without page metadata as pages (…, N, P, ·)."""
        return self.map_tokens(lambda t: t.unflatten(-2, (-1, page_size)))


PER_TOKEN = ("code", "scale", "offset", "plain", "beside")
"""Parts of `TokenCodes` that have a token dimension."""


@dataclass(eq=False)
class Pages:
    """Folded pages, all on one device.

    Attributes
    ----------
    code
        Packed codes: uint8, (…, N, bytes), laid out by `kvfold.quant.packing`.
    scale, offset, plain, beside, centre, channel_scale
        As in `TokenCodes`, with (…, N, P, ·) for (…, T, ·), and (…, N, D) for (…, D).
    tokens
        How many tokens the N pages stand for; the last page may be part full.
    first
        Position of their first token, for formats that must know positions.
    """

    code: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    plain: Tensor | None = None
    beside: Tensor | None = None
    centre: Tensor | None = None
    channel_scale: Tensor | None = None
    tokens: int = 0
    first: int = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is present, by name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name not in ("tokens", "first"):
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
        R, from D to `code_dim` coordinates; plain channels bypass it.
    lanes
        "tokens" for keys, "channels" for values: see `kvfold.quant.packing`.
    groups
        Channels of each scale group g, `code_dim` in all; kernels want multiples of 16. (): one group.
    plain_dim
        Last channels of a vector that are not coded: keys only.
    unit_levels
        Whether lut[code] of a token is brought to length 1 before s multiplies it (pypto-lib); for pages without S and
        with one scale a token.
    signed_scale
        Whether s may be negative.
    scaled_shifts
        Whether s multiplies z, and S multiplies a; for pages with S and one scale a token. Keys then have no offsets.
    """

    code_dim: int
    page_size: int
    bits: tuple[int, ...]
    lut: Tensor
    transform: AnyTransform
    lanes: Lanes = "tokens"
    groups: tuple[int, ...] = ()
    plain_dim: int = 0
    unit_levels: bool = False
    signed_scale: bool = False
    scaled_shifts: bool = False

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each channel group, the first group with the same bits and levels."""
        rows = list(zip(self.bits, map(tuple, self.lut.tolist()), strict=False))
        return tuple(map(rows.index, rows))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PageForm":
        return self  # nothing changes it, and copies of a cache share its tables

    def __post_init__(self) -> None:
        if self.plain_dim and self.lanes == "channels":
            raise ValueError(f"plain_dim = {self.plain_dim}: values have no plain channels, keys may")
        if self.scaled_shifts and self.groups:
            raise ValueError(f"groups = {self.groups}: with scaled_shifts, a token has one scale")

    @cached_property
    def groups_are_tiles(self) -> bool:
        """Whether scale groups are whole groups of 16 channels, as the CPU kernel takes them."""
        return not any(width % TILE for width in self.groups)

    @cached_property
    def only_reference(self) -> str | None:
        """Why no kernel reads such pages; None if kernels do."""
        return None

    @property
    def scale_groups(self) -> tuple[slice, ...]:
        """The channels of each scale group."""
        stops = list(accumulate(self.groups or (self.code_dim,)))
        return tuple(slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False))

    def rotated_query(self, q: Tensor) -> Tensor:
        """q̃ = R⁻ᵀ·q and then q's plain channels, (…, code_dim + plain_dim)."""
        if not self.plain_dim:
            return self.transform.apply_to_query(q)
        return torch.cat((self.transform.apply_to_query(q[..., : -self.plain_dim]), q[..., -self.plain_dim :]), -1)

    def pack(self, tokens: TokenCodes) -> Pages:
        """Pack tokens (…, N, P, code_dim), whole pages, with page metadata (…, N, D)."""
        parts = {field.name: getattr(tokens, field.name) for field in fields(tokens) if field.name != "code"}
        for name in ("scale", "offset"):
            held = 0 if parts[name] is None else parts[name].shape[-1]
            if held not in (0, len(self.scale_groups)):
                raise ValueError(f"{name} has {held} groups, the form has {len(self.scale_groups)}")
        code = ops.pack(tokens.code, list(self.bits), self.lanes)
        return Pages(code=code, tokens=tokens.code.shape[-3] * self.page_size, **parts)

    def unpack(self, pages: Pages) -> TokenCodes:
        """Undo `pack`: tokens (…, N, P, code_dim)."""
        parts = {field.name: getattr(pages, field.name) for field in fields(TokenCodes) if field.name != "code"}
        return TokenCodes(ops.unpack(pages.code, self.page_size, self.code_dim, list(self.bits), self.lanes), **parts)

    def levels(self, pages: Pages) -> Tensor:
        """S ⊙ lut[code], at length 1 before S if `unit_levels`: float32, (…, N, P, code_dim)."""
        lut = on(pages.code.device, self.lut)
        levels = ops.unpack_levels(pages.code, lut, self.page_size, self.code_dim, list(self.bits), self.lanes)
        if self.unit_levels:
            levels = levels / levels.square().sum(-1, keepdim=True).sqrt()
        if pages.channel_scale is not None:
            levels = levels * pages.channel_scale.float().unsqueeze(-2)
        return levels

    def coordinates(self, tokens: TokenCodes) -> Tensor:
        """z + a + s · S ⊙ lut[code] of tokens that are not packed yet: float32, (…, P, code_dim)."""
        group = torch.arange(self.code_dim, device=tokens.code.device) // TILE
        y = self.lut.to(tokens.code.device)[group, tokens.code.long()]
        if tokens.channel_scale is not None:
            y = y * tokens.channel_scale.float().unsqueeze(-2)
        return self._shifted(y, tokens)

    def clear(self, pages: Pages, slot: int) -> None:
        """Empty the slots from `slot` on of each page, in place, as if nothing had been there."""
        code = ops.unpack(pages.code, self.page_size, self.code_dim, list(self.bits), self.lanes)
        code[..., slot:, :] = 0
        pages.code.copy_(ops.pack(code, list(self.bits), self.lanes))
        for name, part in pages.tensors():
            if name in PER_TOKEN and name != "code":
                part[..., slot:, :] = 0

    def unfold(self, pages: Pages) -> Tensor:
        """x̂ of every token: float32, (…, tokens, D)."""
        x = self.transform.invert(self._shifted(self.levels(pages), pages))
        if self.plain_dim:
            assert pages.plain is not None
            x = torch.cat((x, pages.plain.float()), -1)
        return x.flatten(-3, -2)[..., : pages.tokens, :]

    def _shifted(self, y: Tensor, of: TokenCodes | Pages) -> Tensor:
        """Levels y = S ⊙ lut[code], (…, P, D), with the scales, offsets and centres of their tokens and pages."""
        centre = None if of.centre is None else of.centre.float().unsqueeze(-2)
        if self.scaled_shifts:
            y = self.scaled(y if centre is None else y + centre, of.scale, None)
            if of.offset is None:
                return y
            spread = 1.0 if of.channel_scale is None else of.channel_scale.float().unsqueeze(-2)
            return y + of.offset.float() * spread
        y = self.scaled(y, of.scale, of.offset)
        return y if centre is None else add_first(y, centre)

    def scaled(self, y: Tensor, scale: Tensor | None, offset: Tensor | None) -> Tensor:
        """a + s·y for y (…, P, D) and s, a (…, P, G)."""
        if scale is None:
            return y
        parts = []
        for g, channels in enumerate(self.scale_groups):
            part = y[..., channels] * scale[..., g, None].float()
            parts.append(part if offset is None else part + offset[..., g, None].float())
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@dataclass(frozen=True, eq=False)
class FirstChannels(PageForm):
    """Reads the first `code_dim` channels of pages whose own form is `whole`: values that are a view of keys."""

    whole: PageForm = None  # type: ignore[assignment]

    @classmethod
    def of(cls, whole: PageForm, code_dim: int, transform: AnyTransform) -> "FirstChannels":
        """The view of `whole`'s first `code_dim` coded channels, which are a multiple of 16 and whole scale groups."""
        groups, held = [], 0
        for width in whole.groups or (whole.code_dim,):
            if held < code_dim:
                groups.append(min(width, code_dim - held))
            held += width
        own = {field.name: getattr(whole, field.name) for field in fields(PageForm)}
        own |= {"code_dim": code_dim, "transform": transform, "plain_dim": 0}
        own["groups"] = tuple(groups) if whole.groups else ()
        return cls(**own, whole=whole)

    @cached_property
    def only_reference(self) -> str | None:
        return self.whole.only_reference if self.bits else "values are a view of float16 keys"

    def levels(self, pages: Pages) -> Tensor:
        return self.whole.levels(pages)[..., : self.code_dim]


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
