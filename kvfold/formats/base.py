"""What every format has in common: fold tokens into the page form, and unfold them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.formats.numbers import LARGEST, whole, whole_field
from kvfold.formats.page import PageForm, Pages, TokenCodes
from kvfold.formats.statistics import KeyStatistics
from kvfold.kernels.places import Places
from kvfold.quant.finite import finite
from kvfold.quant.packing import TILE, Lanes
from kvfold.quant.rotated import RotatedCode

MAX_HEAD_DIM = 1024
UNDO = 24
"""`Window.undo` of formats that fold by page: more tokens than models draft at a time."""
LARGEST_PAGE = 2**16
"""Tokens of the longest page. Names and files with longer pages are refused before any memory is allocated."""
LARGEST_WINDOW = 2**20
"""Tokens of the widest window; wider ones are refused, too."""


def check_page_size(name: str, size: int) -> None:
    """Raise ValueError unless a page can have `size` tokens; `name` is the argument's name in the message."""
    whole(name, size)
    if size % TILE or not TILE <= size <= LARGEST_PAGE:
        raise ValueError(f"{name} = {size}: a page is a multiple of {TILE} tokens, no pages of over {LARGEST_PAGE}")


@dataclass(frozen=True)
class Window:
    """Which tokens stay dense around the folded pages.

    Attributes
    ----------
    sinks
        The first tokens; attention leans on them out of proportion, and they are outliers.
    recent
        At least this many of the newest tokens: a page folds once this many tokens follow it.
    undo
        How many tokens of the newest pass can be cropped (as speculative decoding does) and leave no trace. The dense
        copies of pages that they fold are kept until the next pass.
    """

    sinks: int = 0
    recent: int = 0
    undo: int = 0

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "undo"):
            whole_field(self, name, most=LARGEST_WINDOW)


PAGE_WINDOW = Window(sinks=8, recent=55, undo=UNDO)
"""That of formats whose channels have a centre or scale of their own in each page."""


@dataclass(frozen=True)
class Format(ABC):
    """A named way to choose R, z, S, s, a, lut and bits of the page form (`kvfold.formats.page` says what they are).

    Subclasses say how a page's tokens become codes (`encode`); `fold_from` makes pages of them, and may call one kernel
    for both.

    Attributes
    ----------
    head_dim
        D, a multiple of 8 from 8 to 1,024.
    bits
        Bits of a code.
    page_size
        P, tokens a page, a multiple of 16, up to 65,536.
    seed
        Seed of the rotation.
    lanes
        "tokens" to fold keys, "channels" to fold values (`kvfold.quant.packing`).
    """

    head_dim: int
    bits: int
    page_size: int = 64
    seed: int = 0
    lanes: Lanes = "tokens"

    summary: ClassVar[str]
    """One line: what it is."""
    source: ClassVar[str]
    """Where it comes from."""
    turns_back: ClassVar[bool] = False
    """Whether it must know RoPE's frequencies (`at`)."""
    bit_range: ClassVar[tuple[int, int]] = (1, 8)
    """Fewest and most bits of a code."""

    def __post_init__(self) -> None:
        for name in ("head_dim", "bits", "seed"):
            whole_field(self, name, least=-LARGEST)
        if self.lanes not in ("tokens", "channels"):
            raise ValueError(f"lanes = {self.lanes!r}: give 'tokens' or 'channels'")
        if self.head_dim % 8 or not 8 <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim = {self.head_dim}: {type(self).__name__} folds head dimensions "
                f"that are multiples of 8 from 8 to {MAX_HEAD_DIM}"
            )
        fewest, most = self.bit_range
        if not fewest <= self.bits <= most:
            raise ValueError(f"bits = {self.bits}: a code has {fewest} to {most} bits")
        check_page_size("page_size", self.page_size)

    @property
    def window(self) -> Window:
        """What stays dense."""
        return Window() if self.folds_by_token else Window(undo=UNDO)

    @property
    def folds_by_token(self) -> bool:
        """Whether a token folds by itself, on arrival; otherwise a page folds when it is full."""
        return True

    @property
    def awaits_fit(self) -> bool:
        """Whether this format needs tables from `fitted` before it folds."""
        return False

    @property
    def needs_calibration(self) -> bool:
        """Whether this format needs tables from `fitted` that only a calibration tells, no prompt's first tokens."""
        return False

    def token_code(self, device: torch.device) -> RotatedCode | None:
        """How a token on a device that folds by itself becomes codes; None if no kernel folds such tokens."""
        return None

    def fitted(self, statistics: KeyStatistics) -> "Format":
        """This format with tables fitted to vectors with these statistics."""
        return self

    def fit_tables(self) -> dict[str, Tensor]:
        """The tables that `fitted` made, by name: (batch, heads, …) or, from a calibration, (heads, …)."""
        return {}

    def with_fit_tables(self, tables: Mapping[str, Tensor]) -> "Format":
        """This format with the tables that `fit_tables` returned; raise ValueError if they cannot be such."""
        if tables:
            raise ValueError(f"{type(self).__name__} has no tables called {', '.join(tables)}")
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Format":
        return self  # nothing changes it, and copies of a cache share its tables

    def at(self, layer: int, frequencies: tuple[float, ...] | None) -> "Format":
        """This format in layer `layer` of a model whose RoPE has these frequencies ω_f (None: not known)."""
        return self

    def sharpness(self, count: Tensor) -> Tensor | None:
        """Factors on scores of queries that read `count` tokens each from keys in this format; None without a rule."""
        return None

    def select(self, rows: Tensor) -> "Format":
        """This format, fitted to a batch, for the batch rows `rows`."""
        return self

    @cached_property
    @abstractmethod
    def form(self) -> PageForm:
        """The tables and shapes that all pages of this format share."""

    @abstractmethod
    def encode(self, x: Tensor) -> TokenCodes:
        """Codes, scales and page metadata of `x`, float32, (…, T, D), whose T tokens are one page."""

    def encode_at(self, x: Tensor, position: int) -> TokenCodes:
        """`encode` for tokens that begin at `position`; few formats care."""
        return self.encode(x)

    def fold_from(self, x: Tensor, slot: int = 0, position: int = 0) -> Pages:
        """Pages that hold `x` from slot `slot` of the first page on; all other slots are empty.

        Parameters
        ----------
        x
            Floating point, finite, (…, tokens, head_dim): whole pages unless the format folds by token.
        slot
            0 unless the format folds by token.
        position
            Position of the first token in its sequence; few formats care.
        """
        x = x.float()
        if not self.folds_by_token:
            return self.form.pack(self.encode(x.unflatten(-2, (-1, self.page_size))))
        after = -(slot + x.shape[-2]) % self.page_size
        pages = self.form.pack(pad_tokens(self.encode_at(x, position), slot, after).paged(self.page_size))
        pages.first = position - slot
        return pages

    def fold_into(self, x: Tensor, places: Places) -> None:
        """Fold whole pages, (1, heads, tokens, head_dim), and write each part to its place, on the device of `x`."""
        for name, tensor in self.fold_from(x).tensors():
            places.store(name, tensor)

    def fold(self, x: Tensor, position: int = 0) -> Pages:
        """Fold vectors into pages.

        Parameters
        ----------
        x
            Floating point, finite, shape (…, tokens, head_dim), at least one token. Pages take
            `page_size` tokens each; what is left over makes a part-full last page, which still
            occupies a whole one.
        position
            Position of the first token in its sequence; few formats care.

        Returns
        -------
        Pages

        Raises
        ------
        ValueError
            On a wrong shape, or a NaN, an infinity, or a value beyond what float16 scales hold.
        TypeError
            If `x` is not floating point.
        """
        if not x.is_floating_point():
            raise TypeError(f"x has dtype {x.dtype}: fold takes floating-point vectors")
        if x.ndim < 2 or x.shape[-1] != self.head_dim or x.shape[-2] == 0:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: fold takes (…, tokens, {self.head_dim}) with at least one token"
            )
        if not finite(x):
            raise ValueError("x holds a NaN or an infinity: fold takes finite vectors")
        tokens = x.shape[-2]
        whole = tokens if self.folds_by_token else tokens // self.page_size * self.page_size
        parts = [self.fold_from(x[..., :whole, :], position=position)] if whole else []
        if whole < tokens:
            last = self.encode(x[..., whole:, :].float().unsqueeze(-3))
            parts.append(self.form.pack(pad_tokens(last, 0, self.page_size - (tokens - whole))))
        pages = _joined(parts)
        require_finite(pages)
        pages.tokens = tokens
        return pages

    def unfold(self, pages: Pages) -> Tensor:
        """x̂ of folded vectors: float32, shape (…, tokens, head_dim)."""
        return self.form.unfold(pages)

    @cached_property
    def bytes_per_vector(self) -> float:
        """Bytes of a vector in a full page: its codes and scales, and its share of the page's metadata."""
        return self.fold(torch.zeros(self.page_size, self.head_dim)).nbytes / self.page_size

    @property
    def metadata_bytes_per_page(self) -> int:
        """Bytes of a page that do not belong to a token: its centre and channel scale."""
        page = self.fold(torch.zeros(self.page_size, self.head_dim))
        return sum(t.nbytes for name, t in page.tensors() if name in ("centre", "channel_scale"))


class ByPage(Format):
    """A format that folds whole pages, whose first and newest tokens stay dense."""

    @property
    def window(self) -> Window:
        return PAGE_WINDOW

    @property
    def folds_by_token(self) -> bool:
        return False


def pad_tokens(tokens: TokenCodes, before: int, after: int) -> TokenCodes:
    """Add all-zero tokens before and after."""
    return tokens.map_tokens(lambda t: pad(t, (0, 0, before, after)))


class OutOfRange(ValueError):
    """Vectors are too large for the dtype of a page's scales or centre."""


def require_finite(pages: Pages) -> None:
    """Raise if a scale or centre left the range of its dtype."""
    for name, tensor in pages.tensors():
        if tensor.is_floating_point() and not finite(tensor):
            limit = f"{torch.finfo(tensor.dtype).max:,.7g}"
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tensor.isnan().any():
                raise ValueError(f"the {name} of a page is NaN: the model's own computation broke before the cache")
            raise OutOfRange(f"the {name} of a page is beyond {dtype}'s {limit}: scale the vectors down before folding")


def _joined(parts: list[Pages]) -> Pages:
    """Pages of the same streams, one after the other."""
    if len(parts) == 1:
        return parts[0]
    first, second = parts

    def join(name: str, tensor: Tensor) -> Tensor:
        dim = -2 if name in ("code", "centre", "channel_scale") else -3  # that of pages
        return torch.cat((tensor, getattr(second, name)), dim)

    return first.map_named(join)
