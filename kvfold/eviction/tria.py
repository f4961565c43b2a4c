"""Statistics of a model's queries before RoPE, and the TRIA file that holds them.

A file of version 1 or 2 is little-endian. By byte offset it has

    0    u32 magic, u32 version
    8    u32 layers, heads, kv_heads, head_dim, pairs
    28   f32 rope_theta, attn_scale
    36   28 zeros
    64   in version 2: f32[layers] budget scales

and then, for each layer and head, f32[pairs] each of Re E[q], Im E[q], E|q| and |E q|/E|q|.
"""

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short

import torch
from torch import Tensor

from kvfold.cache.files.paths import check_input, replacing
from kvfold.formats.numbers import MOST_OF_A_MODEL, real, whole_field

MAGIC = 0x54524941
HEADER = struct.Struct("<7I2f28x")
POSITIVE = 1e-30, 1e30
"""Bounds of numbers above 0: a file has them as float32."""
BANDS = 2
"""How many of its strongest pairs decide a layer's budget."""


@dataclass(frozen=True, eq=False)
class QueryStatistics:
    """Means of each head's queries before RoPE, as pairs q_f = q[f] + i·q[f + F] of the channels that RoPE turns.

    Attributes
    ----------
    heads, kv_heads
        Of the model.
    head_dim
        Channels of a head, 2F or more. `measure_queries` writes 2F, the channels that RoPE turns; `FoldedCache` refuses
        a policy whose statistics have more.
    rope_theta, attn_scale
        Of the model, as recorded when it was measured; the F frequencies are θ^(−f/F) if RoPE is not scaled.
    tables
        Re E[q], Im E[q], E|q| and |E q|/E|q|: float32, (layers, heads, 4, F). Zeros where a layer was not measured.
    budget_scales
        Of each layer, for `TriAttention(layer_budgets=True)`; (): a file of version 1, which has none.
    """

    kv_heads: int
    head_dim: int
    rope_theta: float
    attn_scale: float
    tables: Tensor
    budget_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tables, Tensor):
            raise ValueError(f"tables = {short(self.tables)}: give a tensor, (layers, heads, 4, pairs)")
        if self.tables.ndim != 4 or self.tables.shape[2] != 4 or not self.tables.is_floating_point():
            raise ValueError(
                f"tables are {self.tables.dtype} of the shape {tuple(self.tables.shape)}: give floating-point numbers "
                "of the shape (layers, heads, 4, pairs)"
            )
        for name in ("kv_heads", "head_dim"):
            whole_field(self, name, 1, MOST_OF_A_MODEL)
        if self.heads % self.kv_heads or 2 * self.pairs > self.head_dim:
            raise ValueError(
                f"tables of {self.heads} heads and {self.pairs} pairs do not fit kv_heads = {self.kv_heads} and "
                f"head_dim = {self.head_dim}"
            )
        if len(self.budget_scales) not in (0, self.layers):
            raise ValueError(f"budget_scales are {len(self.budget_scales)}: give one for each of {self.layers} layers")
        for name in ("rope_theta", "attn_scale"):
            object.__setattr__(self, name, real(name, getattr(self, name), *POSITIVE))
        for scale in self.budget_scales:
            real("budget_scales", scale, *POSITIVE)
        if not self.tables.isfinite().all():
            raise ValueError("tables hold a NaN or an infinity")

    @classmethod
    def of(
        cls, mean: Tensor, magnitude: Tensor, kv_heads: int, head_dim: int, rope_theta: float, attn_scale: float
    ) -> "QueryStatistics":
        """Statistics of E[q], complex, and E|q|, both (layers, heads, F); layers that are all 0 were not measured."""
        concentration = torch.where(magnitude > 0, mean.abs() / magnitude, 0)
        tables = torch.stack((mean.real, mean.imag, magnitude, concentration), 2).float()
        return cls(kv_heads, head_dim, rope_theta, attn_scale, tables, tuple(budget_scales(tables)))

    @property
    def layers(self) -> int:
        return self.tables.shape[0]

    @property
    def heads(self) -> int:
        return self.tables.shape[1]

    @property
    def pairs(self) -> int:
        """F, pairs of channels that RoPE turns."""
        return self.tables.shape[3]

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """E[q], complex64, and E|q|, float32, of a layer: (heads, F)."""
        real, imaginary, magnitude, _ = self.tables[layer].unbind(1)
        return torch.complex(real, imaginary), magnitude

    def measured(self, layer: int) -> bool:
        """Whether a layer was measured."""
        return layer < self.layers and bool(self.tables[layer].any())

    def of_heads(self, heads: slice, kv_heads: int) -> "QueryStatistics":
        """Those of some heads, which attend to so many KV heads: the part of a worker that has these alone."""
        return replace(self, tables=self.tables[:, heads], kv_heads=kv_heads)

    def with_rope_theta(self, rope_theta: float) -> "QueryStatistics":
        """The same under another rope_theta: for a file whose queries are right and whose header is not."""
        return replace(self, rope_theta=rope_theta)

    def to_bytes(self) -> bytes:
        """A TRIA file; of version 1 if there are no budget scales."""
        version = 2 if self.budget_scales else 1
        sizes = self.layers, self.heads, self.kv_heads, self.head_dim, self.pairs
        scales = struct.pack(f"<{len(self.budget_scales)}f", *self.budget_scales)
        numbers = self.tables.float().contiguous().cpu().numpy().astype("<f4").tobytes()
        return HEADER.pack(MAGIC, version, *sizes, self.rope_theta, self.attn_scale) + scales + numbers

    @classmethod
    def from_bytes(cls, data: bytes) -> "QueryStatistics":
        """What `to_bytes` wrote.

        Raises
        ------
        ValueError
            If it is no TRIA file of version 1 or 2, or damaged.
        """
        if len(data) < HEADER.size or struct.unpack_from("<I", data)[0] != MAGIC:
            raise ValueError("this is no TRIA file: it does not begin with its magic number and a header of 64 bytes")
        _, version, layers, heads, kv_heads, head_dim, pairs, rope_theta, attn_scale = HEADER.unpack_from(data)
        if version not in (1, 2):
            raise ValueError(f"a TRIA file of version {version}: versions 1 and 2 are known")
        sizes = (layers, heads, kv_heads, head_dim, pairs)
        if not all(0 < size <= MOST_OF_A_MODEL for size in sizes) or heads % kv_heads or 2 * pairs > head_dim:
            raise ValueError(
                f"the file is damaged: its header says {layers} layers, {heads} heads, {kv_heads} KV heads of "
                f"{head_dim} and {pairs} pairs"
            )
        if any(data[36 : HEADER.size]):
            raise ValueError("bytes 36 to 63 of the file are not zero: it is damaged, or of a later version")
        after = HEADER.size + (4 * layers if version == 2 else 0)
        expected = after + layers * heads * 4 * pairs * 4
        if len(data) != expected:
            raise ValueError(
                f"the file has {len(data)} bytes, and {layers} layers, {heads} heads and {pairs} pairs take "
                f"{expected}: it is truncated or of another model"
            )
        scales = struct.unpack_from(f"<{layers}f", data, HEADER.size) if version == 2 else ()
        numbers = torch.frombuffer(bytearray(data[after:]), dtype=torch.float32)
        tables = numbers.view(layers, heads, 4, pairs)
        try:
            return cls(kv_heads, head_dim, rope_theta, attn_scale, tables, scales)
        except ValueError as error:
            raise ValueError(f"the file is damaged: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a TRIA file."""
        with replacing(path) as file:
            file.write(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "QueryStatistics":
        """Read a TRIA file.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no TRIA file of version 1 or 2, or damaged.
        """
        check_input(path, "statistics", "kvfold calibrate --eviction")
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"statistics = {str(path)!r}: {error}") from None


def budget_scales(tables: Tensor) -> list[float]:
    """1 + (1 − m_l) of each layer, with mean 1: m_l is |E q|/E|q| of the two strongest pairs, averaged over heads.

    Layers that were not measured get 1.
    """
    strongest = tables[:, :, 2].topk(min(BANDS, tables.shape[3]), -1).indices
    raw = 2 - tables[:, :, 3].gather(-1, strongest).mean((1, 2)).double()
    measured = tables[:, :, 2].flatten(1).any(-1)
    scales = torch.where(measured, raw / raw[measured].mean(), 1.0) if measured.any() else torch.ones_like(raw)
    return scales.float().tolist()
