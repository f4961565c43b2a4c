"""Codes as a stream of bits, least significant first: the order of every public block format."""

import torch
from torch import Tensor


def to_stream(codes: Tensor, bits: int) -> Tensor:
    """Codes (…, n), uint8, as bytes (…, n·bits/8): bit i of the stream is bit i % 8 of byte i // 8."""
    own = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    by_byte = own.flatten(-2).unflatten(-1, (-1, 8))
    return (by_byte << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def from_stream(stream: Tensor, bits: int) -> Tensor:
    """Undo `to_stream`: uint8 codes (…, n)."""
    own = (stream.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=stream.device)) & 1
    by_code = own.flatten(-2).unflatten(-1, (-1, bits))
    return (by_code << torch.arange(bits, dtype=torch.uint8, device=stream.device)).sum(-1, dtype=torch.uint8)


def to_bytes(numbers: Tensor) -> Tensor:
    """Numbers (…, n) as little-endian bytes (…, n·itemsize)."""
    return numbers.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `to_bytes`."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype)
