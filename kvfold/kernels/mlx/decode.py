"""Decoding over folded pages in one Metal kernel; `kvfold.attention.mlx` with plain operations is its reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import accumulate
from typing import Any

from torch import Tensor

from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.arrays import table
from kvfold.quant.packing import TILE, code_bytes

THREADS = 64
SIMD = 32
MOST_SPLITS = 32
"""Parts that a context is read in, at the most."""
FEWEST_PAGES = 4
"""Pages of a part, at the least."""
MOST_REPEAT = 16
MOST_SHARED = 24 * 1024
"""Bytes of threadgroup memory that a kernel may take; Metal has 32 KiB."""
INPUTS = ("q", "sizes", *(f"{side}_{name}" for side in "kv" for name in
          ("code", "scale", "offset", "centre", "channel_scale", "lut")))  # fmt: skip
OUTPUTS = ("out_maximum", "out_total", "out_sum")


@dataclass(frozen=True, eq=False)
class Side:
    """Keys or values of a layer, and the form that their pages have."""

    # Arrays of pages by their name in `kvfold.formats.page.Pages`, (batch, kv_heads, capacity, …).
    parts: dict[str, mx.array]
    # Of the form: channels of a code, tokens a page, bits of each tile, widths of scale groups, levels.
    dim: int
    page_size: int
    bits: tuple[int, ...]
    groups: tuple[int, ...]
    lut: Tensor
    scaled_shifts: bool = False


def why_not(bits: Sequence[int], groups: Sequence[int], unit_levels: bool, plain_dim: int) -> str | None:
    """Why the kernel does not read pages of a form; None if it does."""
    if not bits:
        return "pages hold numbers"
    if unit_levels or plain_dim:
        return "levels are brought to unit length, or channels stay numbers"
    if any(stop % TILE for stop in list(accumulate(groups))[:-1]):
        return "scale groups are no multiples of 16 channels"
    return None


def fits(repeat: int, key_dim: int, page_size: int) -> bool:
    """Whether the queries that share a KV head fit into a threadgroup's memory."""
    return repeat <= MOST_REPEAT and 4 * repeat * (key_dim + page_size + SIMD) <= MOST_SHARED


def decode(
    q: mx.array, keys: Side, values: Side, pages: int, tokens: int, kernel: Callable[..., Any] | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Read the first `tokens` folded tokens, which lie in `pages` pages, with one query a head.

    Queries are rotated and scaled: float32, (batch, kv_heads, repeat, code_dim). Tests make the kernel by `kernel`
    instead of `mx.fast.metal_kernel`.

    Returns for each part of the context the highest score and Σ exp(score − highest), (batch, kv_heads, repeat, parts),
    and the sum of values with these weights, in rotated coordinates, (batch, kv_heads, repeat, parts, code_dim).
    """
    batch, kv_heads, repeat, _ = q.shape
    splits = max(1, min(MOST_SPLITS, pages // FEWEST_PAGES))
    own = _kernel(_constants(keys, values, repeat), kernel or mx.fast.metal_kernel)
    nothing = mx.zeros((1,), mx.float16)
    inputs = [q, mx.array([pages, tokens, splits, keys.parts["code"].shape[2]], dtype=mx.int32)]
    for side in (keys, values):
        inputs += [side.parts.get(name, nothing) for name in ("code", "scale", "offset", "centre", "channel_scale")]
        inputs.append(table(side.lut))
    units = batch * kv_heads
    states = ((units, splits, repeat), (units, splits, repeat), (units, splits, repeat, values.dim))
    outputs = own(
        inputs=inputs, grid=(THREADS * splits, units, 1), threadgroup=(THREADS, 1, 1),
        output_shapes=list(states), output_dtypes=[mx.float32] * 3,
    )  # fmt: skip
    highest, total, summed = (x.reshape(batch, kv_heads, *x.shape[1:]).swapaxes(2, 3) for x in outputs)
    return highest, total, summed


def _constants(keys: Side, values: Side, repeat: int) -> str:
    """The constants that the kernel is compiled with, as Metal source."""
    numbers: dict[str, int] = {
        "THREADS": THREADS, "SIMDGROUPS": THREADS // SIMD, "REPEAT": repeat, "PAGE": keys.page_size,
        "CHANNELS": -(-values.dim // THREADS),
    }  # fmt: skip
    lists: dict[str, Sequence[int]] = {}
    for name, side in (("K", keys), ("V", values)):
        groups = side.groups or (side.dim,)
        centre = side.parts.get("centre")
        numbers |= {
            f"{name}_DIM": side.dim, f"{name}_TILES": len(side.bits), f"{name}_GROUPS": len(groups),
            f"{name}_BYTES": code_bytes(side.page_size, side.bits), f"{name}_LEVELS": side.lut.shape[1],
            f"{name}_CENTRE": 0 if centre is None else centre.shape[-1],
            **{f"{name}_{part.upper()}": int(part in side.parts) for part in ("scale", "offset", "channel_scale")},
            f"{name}_SCALED_SHIFTS": int(side.scaled_shifts),
        }  # fmt: skip
        lists |= {
            f"{name}_BITS": side.bits, f"{name}_FIRST": [0, *accumulate(groups)],
            f"{name}_START": [32 * n for n in accumulate(side.bits, initial=0)],
        }  # fmt: skip
    lines = [f"constant constexpr int {name} = {n};" for name, n in numbers.items()]
    lines += [f"constant constexpr int {name}[] = {{{', '.join(map(str, own))}}};" for name, own in lists.items()]
    return "\n".join(lines) + "\n"


@cache  # MLX would compile again at each call
def _kernel(constants: str, make: Callable[..., Any]) -> Any:
    """The kernel that is compiled for these constants."""
    helpers, body = (files(__package__) / "decode.metal").read_text().split("\n---\n")
    return make(
        name=f"kvfold_decode_{sha256(constants.encode()).hexdigest()[:16]}",
        input_names=list(INPUTS),
        output_names=list(OUTPUTS),
        source=body,
        header=constants + helpers,
    )
