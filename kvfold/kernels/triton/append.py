"""Writing a token behind those held, where the device is told how many they are."""

import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton import on_its_device


@triton.jit(do_not_specialize=["key_row", "key_head", "value_row", "value_head"])
def _append(
    key, value, keys, values, held, key_row, key_head, value_row, value_head, keys_row, keys_head, values_row,
    values_head, KV_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """A token of one head, the last of `held`."""
    row, head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    at = tl.load(held + row) - 1
    channel, v_channel = tl.arange(0, K), tl.arange(0, V)
    k = tl.load(key + row * key_row + head * key_head + channel, mask=channel < KEY_DIM)
    to = keys + row * keys_row + head * keys_head + at * KEY_DIM + channel
    tl.store(to, k.to(keys.dtype.element_ty), mask=channel < KEY_DIM)
    v = tl.load(value + row * value_row + head * value_head + v_channel, mask=v_channel < VALUE_DIM)
    to = values + row * values_row + head * values_head + at * VALUE_DIM + v_channel
    tl.store(to, v.to(values.dtype.element_ty), mask=v_channel < VALUE_DIM)


@on_its_device
def append(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, held: Tensor) -> None:
    """Write a token of each head, (batch, heads, 1, dim), into the place before place `held` of contiguous storage.

    Storage is (batch, heads, capacity, dim), and `held` int32, (batch,), on the device.
    """
    assert keys.is_contiguous()
    assert values.is_contiguous()
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    _append[(keys.shape[:2].numel(),)](
        key, value, keys, values, held, *key.stride()[:2], *value.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2], KV_HEADS=keys.shape[1], KEY_DIM=keys.shape[3], VALUE_DIM=values.shape[3],
        K=triton.next_power_of_2(keys.shape[3]), V=triton.next_power_of_2(values.shape[3]),
    )  # fmt: skip
