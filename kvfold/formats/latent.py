"""Keys whose last channels stay uncoded, and values that are a view of keys: multi-head latent attention (MLA)."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

from torch import Tensor
from torch.nn.functional import pad

from kvfold.formats.base import Format
from kvfold.formats.float16 import Float16
from kvfold.formats.names import get_format, parse
from kvfold.formats.page import FirstChannels, PageForm, Pages, TokenCodes
from kvfold.formats.rules import log_stand_in
from kvfold.formats.tbq import ROPE
from kvfold.formats.wrapped import Wrapped
from kvfold.quant.transforms import AnyTransform, Matrix, Transform


@dataclass(frozen=True, kw_only=True)
class Latent(Wrapped):
    """The first channels in another format, the rest (rotary ones) as float16.

    Rotary channels of DeepSeek's keys are some eighty times larger than the latent ones: any code's error in them would
    outweigh all others.
    """

    summary = "The latent part of MLA keys in another format, the rotary part float16"
    source = "TBQ fork of llama.cpp"
    bit_range = (1, 16)

    @classmethod
    def of(cls, base: Format, head_dim: int) -> "Latent":
        """Keys of `head_dim` whose first channels are in `base`."""
        return cls(head_dim=head_dim, bits=base.bits, page_size=base.page_size, lanes=base.lanes, base=base)

    @cached_property
    def form(self) -> PageForm:
        return replace(self.base.form, plain_dim=self.head_dim - self.base.head_dim)

    def encode(self, x: Tensor) -> TokenCodes:
        coded, plain = x.split((self.base.head_dim, self.head_dim - self.base.head_dim), -1)
        return replace(self.base.encode(coded), plain=plain.half())

    def fold_from(self, x: Tensor, slot: int = 0, position: int = 0) -> Pages:
        coded, plain = x.split((self.base.head_dim, self.head_dim - self.base.head_dim), -1)
        after = -(slot + x.shape[-2]) % self.page_size
        plain = pad(plain.half(), (0, 0, slot, after)).unflatten(-2, (-1, self.page_size))
        return replace(self.base.fold_from(coded, slot, position), plain=plain)


@dataclass(frozen=True, kw_only=True)
class KeyView(Format):
    """Values that are the first channels of their keys: they have no pages of their own.

    If keys have a residual, values are read from the codes alone: its signs only correct products with queries.
    """

    keys: Format

    summary = "The first channels of the keys"
    source = "multi-head latent attention (arXiv 2405.04434)"
    bit_range = (1, 16)

    @classmethod
    def of(cls, keys: Format, head_dim: int) -> "KeyView":
        """The first `head_dim` channels of `keys`."""
        return cls(head_dim=head_dim, bits=keys.bits, page_size=keys.page_size, lanes=keys.lanes, keys=keys)

    @property
    def folds_by_token(self) -> bool:
        return self.keys.folds_by_token

    @property
    def bytes_per_vector(self) -> float:
        return 0.0

    @property
    def metadata_bytes_per_page(self) -> int:
        return 0

    @cached_property
    def form(self) -> PageForm:
        whole = self.keys.form
        return FirstChannels.of(whole, self.head_dim, _first(whole.transform, self.head_dim))

    def encode(self, x: Tensor) -> TokenCodes:
        raise NotImplementedError("values that are a view of keys are folded with them")


@cache
def _first(transform: AnyTransform, dim: int) -> AnyTransform:
    """The part of a transform that maps the first `dim` channels to the first `dim` coordinates."""
    if not isinstance(transform, Transform) or transform.matrix.shape[0] <= dim:
        return transform
    return Matrix(transform.matrix[:dim, :dim])


def latent(name: str, key_dim: int, latent_dim: int) -> Format:
    """The format of MLA keys: `name` for their first `latent_dim` channels, float16 for the rest.

    A latent has no RoPE, so amx3 and tbqx3 become tbq3.
    """
    block = parse(name).block
    if block in ("amx3", "tbqx3"):
        name = name.replace(block, log_stand_in(block, "tbq3", "it turns RoPE back, and a latent has none"), 1)
        block = "tbq3"
    if block is not None and block.startswith("tbq") and (latent_dim, key_dim - latent_dim) == (512, ROPE):
        return get_format(name, key_dim)
    base = get_format(name, latent_dim)
    if base.needs_calibration:
        raise ValueError(
            f"format = {name!r}: it needs a calibration's rotations, and latents (MLA) have none: a latent is key and "
            "value in one; choose another format, such as kvfold-4"
        )
    return get_format("float16", key_dim) if isinstance(base, Float16) else Latent.of(base, key_dim)
