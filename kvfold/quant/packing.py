"""The bit layout of a page's codes: the reference for every packing kernel.

Codes of one page form a matrix of P tokens × D channels. It is cut into tiles of 16 lanes × 16 steps.
A dot-product instruction sums over steps and keeps lanes apart, so

- keys have tokens as lanes and channels as steps (scores sum over channels), tiles in the order
  [16 tokens][16 channels];
- values have channels as lanes and tokens as steps (outputs sum over tokens), tiles in the order
  [16 channels][16 tokens].

A tile of b-bit codes takes 32·b bytes. b is written as a sum of the plane widths 8, 4, 2, 1 (7 = 4+2+1). The widest
plane comes first and holds the lowest bits. With step = 4·f + j (f, j < 4), a plane of width w ≥ 2 is a run of 64-byte
vectors: byte 4·lane + j of vector v holds, from its low bits up, the fields f = v·(8/w), v·(8/w) + 1, …  One load, a
shift and a mask then give 16 lanes × 4 steps ready for a u8×s8 dot product with no horizontal sum. A plane of width 1
is half a vector: byte i holds, from its low bits up, the four fields of 4·lane + j = i, then those of
4·lane + j = 32 + i.

Head dimensions that are no multiple of 16 are padded with zero codes to the next one.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Lanes = Literal["tokens", "channels"]

TILE = 16
"""Lanes and steps of a tile; also the channels that share one bit width."""


def plane_widths(bits: int) -> tuple[int, ...]:
    """Widths of the planes that a `bits`-bit code is split into: 7 → (4, 2, 1)."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits = {bits}: codes have 1 to 8 bits")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def padded(head_dim: int) -> int:
    """`head_dim` rounded up to whole tiles."""
    return -(-head_dim // TILE) * TILE


def code_bytes(page_size: int, bits: Sequence[int]) -> int:
    """Bytes of a page's codes, for `bits` of each group of 16 channels."""
    return page_size * 2 * sum(bits)


def pack(codes: Tensor, bits: Sequence[int], lanes: Lanes) -> Tensor:
    """Pages of codes, uint8, (…, P, D), as bytes (…, `code_bytes(P, bits)`).

    P is a multiple of 16, and each code is below 2^b of its group of 16 channels.
    """
    tiles = _to_tiles(codes, lanes)
    packed = [_pack_tile(tile, b) for tile, b in _in_order(tiles, bits, lanes)]
    return torch.cat(packed, dim=-1)


def unpack(packed: Tensor, page_size: int, head_dim: int, bits: Sequence[int], lanes: Lanes) -> Tensor:
    """Undo `pack`: uint8 codes of shape (…, P, D)."""
    tiles = packed.new_empty(*packed.shape[:-1], page_size // TILE, len(bits), TILE, TILE)
    start = 0
    for tile, b in _in_order(tiles, bits, lanes):
        tile.copy_(_unpack_tile(packed[..., start : start + 32 * b], b))
        start += 32 * b
    return _from_tiles(tiles, lanes)[..., :head_dim]


def unpack_levels(packed: Tensor, lut: Tensor, page_size: int, head_dim: int, bits: Sequence[int],
                  lanes: Lanes) -> Tensor:  # fmt: skip
    """lut[code] of every code: float32, shape (…, P, D); `lut` is float32, (⌈D/16⌉, levels)."""
    codes = unpack(packed, page_size, head_dim, bits, lanes).int()
    first = torch.arange(head_dim, device=packed.device, dtype=torch.int32) // TILE * lut.shape[1]
    return lut.flatten()[codes + first]


def _to_tiles(codes: Tensor, lanes: Lanes) -> Tensor:
    """(…, P, D) → (…, token tile, channel group, lane, step)."""
    tokens, channels = codes.shape[-2:]
    if tokens % TILE:
        raise ValueError(f"codes have {tokens} tokens a page: a page is a multiple of {TILE} tokens")
    codes = torch.nn.functional.pad(codes, (0, padded(channels) - channels))
    tiles = codes.unflatten(-1, (codes.shape[-1] // TILE, TILE)).unflatten(-3, (tokens // TILE, TILE)).transpose(-3, -2)
    return tiles if lanes == "tokens" else tiles.mT


def _from_tiles(tiles: Tensor, lanes: Lanes) -> Tensor:
    tiles = tiles if lanes == "tokens" else tiles.mT
    return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _in_order(tiles: Tensor, bits: Sequence[int], lanes: Lanes) -> list[tuple[Tensor, int]]:
    """Tiles (…, lane, step) in the order of storage, each with its bits."""
    rows, groups = tiles.shape[-4], tiles.shape[-3]
    if len(bits) != groups:
        raise ValueError(f"bits has {len(bits)} entries: {groups} groups of {TILE} channels need one each")
    if lanes == "tokens":
        return [(tiles[..., r, g, :, :], bits[g]) for r in range(rows) for g in range(groups)]
    return [(tiles[..., r, g, :, :], bits[g]) for g in range(groups) for r in range(rows)]


def _pack_tile(tile: Tensor, bits: int) -> Tensor:
    """(…, 16 lanes, 16 steps) → (…, 32·bits) bytes."""
    fields = tile.unflatten(-1, (4, 4)).transpose(-3, -2).flatten(-2)  # (…, f, 4·lane + j)
    planes, shift = [], 0
    for width in plane_widths(bits):
        plane = (fields >> shift) & (2**width - 1)
        if width == 1:  # four fields of two slots to a byte
            parts = plane.unflatten(-1, (2, 32)).transpose(-3, -2).flatten(-3, -2).unsqueeze(-3).unbind(-2)
        else:  # 8/width fields of one slot to a byte
            parts = plane.unflatten(-2, (width // 2, 8 // width)).unbind(-2)
        byte = torch.zeros_like(parts[0])
        for k, part in enumerate(parts):
            byte |= part << (k * width)
        planes.append(byte.flatten(-2))
        shift += width
    return torch.cat(planes, dim=-1)


def _unpack_tile(packed: Tensor, bits: int) -> Tensor:
    """(…, 32·bits) bytes → (…, 16 lanes, 16 steps)."""
    fields = packed.new_zeros(*packed.shape[:-1], 4, 64)
    start, shift = 0, 0
    for width in plane_widths(bits):
        byte = packed[..., start : start + 32 * width]
        parts = [(byte >> (k * width)) & (2**width - 1) for k in range(8 // width)]
        if width == 1:
            plane = torch.stack(parts, dim=-2).unflatten(-2, (2, 4)).transpose(-3, -2).flatten(-2)
        else:
            plane = torch.stack([p.unflatten(-1, (width // 2, 64)) for p in parts], dim=-2).flatten(-3, -2)
        fields |= plane << shift
        start += 32 * width
        shift += width
    return fields.unflatten(-1, (16, 4)).transpose(-3, -2).flatten(-2)
