from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

GivenSpan = tuple[Tensor, Tensor, int, int, int]  # keys, values, place and position of the first, how many
MaskAt = tuple[int, int, int, int, int]  # address, strides of (batch, heads, queries), positions

def pack(codes: Tensor, packed: Tensor, bits: bytes, lanes_are_tokens: bool) -> None: ...
def unpack(packed: Tensor, codes: Tensor, bits: bytes, lanes_are_tokens: bool) -> None: ...
def unpack_levels(packed: Tensor, lut: Tensor, levels: Tensor, bits: bytes, lanes_are_tokens: bool) -> None: ...
def fold_channelwise(
    isa: str,
    x: int,
    dtype: int,
    x_batch: int,
    x_head: int,
    x_token: int,
    page_size: int,
    order: int,
    order_batch: int,
    order_head: int,
    lut: Tensor,
    bits: bytes,
    steps: int,
    lanes_are_tokens: bool,
    code: Tensor,
    centre: Tensor,
    scale: Tensor,
    threads: int,
) -> None: ...
def fold(
    isa: str,
    x: int,
    dtype: int,
    x_batch: int,
    x_head: int,
    x_token: int,
    tokens: int,
    first: int,
    rotation: Rotation,
    levels: Tensor,
    rule: int,
    lanes_are_tokens: bool,
    code: Tensor,
    scale: Tensor,
    centre: Tensor | None,
    threads: int,
) -> None: ...
def instruction_sets() -> list[str]: ...
def in_integers(isa: str, side: Side) -> bool: ...

class Side:
    def __init__(
        self,
        code: int,
        code_batch: int,
        code_head: int,
        page_size: int,
        code_dim: int,
        bits: bytes,
        lanes_are_tokens: bool,
        lut: int,
        lut_row: int,
        unit_levels: bool,
        scaled_shifts: bool,
    ) -> None: ...
    def set_first_channels(self, code_dim: int) -> None: ...
    def set_scale(
        self,
        scale: int,
        dtype: int,
        is_signed: bool,
        offset: int,
        batch: int,
        head: int,
        groups: int,
        group_of_each_tile: bytes,
    ) -> None: ...
    def set_plain(self, plain: int, batch: int, head: int, dim: int) -> None: ...
    def set_centre(self, centre: int, channel_scale: int, batch: int, head: int, dim: int) -> None: ...

class Rotation:
    @staticmethod
    def matrix(dim: int, code_dim: int, matrix: int, inverse: int) -> Rotation: ...
    @staticmethod
    def order(dim: int, order: int, batch: int, head: int) -> Rotation: ...
    @staticmethod
    def ordered_matrix(dim: int, order: int, batch: int, head: int, matrix: int) -> Rotation: ...
    @staticmethod
    def head_matrices(dim: int, matrix: int, head: int) -> Rotation: ...
    @staticmethod
    def hadamard(dim: int, signs: int, mix: int) -> Rotation: ...

class Addresses:
    def __init__(self, tensors: Sequence[Tensor], /) -> None: ...
    def moved(self) -> bool: ...

class Rows(Addresses):
    def __init__(
        self,
        isa: str,
        keys: Side,
        values: Side,
        key_rotation: Rotation,
        value_rotation: Rotation,
        page_rows: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        pages_first: int,
        read: Sequence[Tensor],
    ) -> None: ...
    def attend(
        self,
        query: Tensor,
        out: Tensor,
        scaling: float,
        pages: int,
        reach: list[int],
        sinks: GivenSpan | None,
        dense: GivenSpan | None,
        mask: MaskAt | None,
        softcap: float,
        sink_logits: int,
        threads: int,
        /,
    ) -> bool | None: ...

def copy(isa: str, tensors: Sequence[tuple[Tensor, Tensor]], first: int, /) -> bool | None: ...

class TokenSide:
    def __init__(
        self,
        rotation: Rotation,
        levels: int,
        bits: int,
        rule: int,
        lanes_are_tokens: bool,
        page_size: int,
        code: int,
        code_batch: int,
        code_head: int,
        scale: int,
        scale_batch: int,
        scale_head: int,
        /,
    ) -> None: ...

class Step(Addresses):
    backend: ClassVar[str]

    def __init__(
        self,
        rows: Rows,
        length: int,
        until: int,
        pages: int,
        sinks: GivenSpan | None,
        tail: GivenSpan | None,
        folds: Sequence[tuple[int, TokenSide]],
        read: Sequence[Tensor | TokenSide],
        /,
    ) -> None: ...
    def append(self, key: Tensor, value: Tensor, length: int, /) -> bool: ...
    def attend(
        self, query: Tensor, out: Tensor, length: int, scaling: float, softcap: float, threads: int, /
    ) -> bool | None: ...

def fold_token(
    isa: str, sides: Sequence[tuple[Tensor, int, TokenSide]], batch: int, heads: int, page: int, slot: int, /
) -> bool: ...

class PagedLayer:
    def __init__(
        self,
        isa: str,
        keys: Side,
        values: Side,
        key_rotation: Rotation,
        value_rotation: Rotation,
        kv_heads: int,
        repeat: int,
        key_dim: int,
        value_dim: int,
        scaling: float,
        softcap: float,
        sink_logits: int,
        dtype: int,
        tail_keys: int,
        tail_values: int,
        first_keys: int,
        first_values: int,
    ) -> None: ...

class PagedStep:
    def attend(
        self,
        layer: PagedLayer,
        query: int,
        query_token: int,
        query_head: int,
        key: int,
        key_token: int,
        key_head: int,
        value: int,
        value_token: int,
        value_head: int,
        out: int,
        threads: int,
    ) -> list[int]: ...

def paged_step(rows: NDArray[np.int64], page_at: NDArray[np.int64], page_size: int) -> PagedStep: ...
