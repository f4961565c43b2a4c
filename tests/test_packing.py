"""Bit packing: the C++ kernel against the torch truth, and the truth against the layout's description."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold.kernels import ops
from kvfold.kernels.cpu import module
from kvfold.quant import packing


@st.composite
def pages(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], packing.Lanes]:
    """Random pages of codes with mixed bit widths."""
    head_dim = draw(st.sampled_from([8, 16, 40, 64, 80, 128]))
    bits = draw(st.lists(st.integers(1, 8), min_size=-(-head_dim // 16), max_size=-(-head_dim // 16)))
    shape = (*draw(st.sampled_from([(), (1,), (2, 3), (0,)])), draw(st.sampled_from([16, 48, 64])), head_dim)
    limit = torch.tensor(bits).repeat_interleave(16)[:head_dim]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    codes = (torch.rand(shape, generator=generator) * 2.0**limit).to(torch.uint8)
    return codes, bits, draw(st.sampled_from(["tokens", "channels"]))


@given(pages())
def test_kernel_equals_truth_and_round_trips(case: tuple[torch.Tensor, list[int], packing.Lanes]) -> None:
    codes, bits, lanes = case
    size, head_dim = codes.shape[-2:]
    packed = packing.pack(codes, bits, lanes)
    assert packed.shape == (*codes.shape[:-2], packing.code_bytes(size, bits))
    assert torch.equal(packing.unpack(packed, size, head_dim, bits, lanes), codes)
    assert torch.equal(ops.pack(codes, bits, lanes), packed)
    assert torch.equal(ops.unpack(packed, size, head_dim, bits, lanes), codes)
    lut = torch.randn(len(bits), 2 ** max(bits))
    levels = packing.unpack_levels(packed, lut, size, head_dim, bits, lanes)
    assert torch.equal(ops.unpack_levels(packed, lut, size, head_dim, bits, lanes), levels)
    expected = torch.stack([lut[c // 16, codes[..., c].int()] for c in range(head_dim)], dim=-1)
    assert torch.equal(levels, expected)


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_lies_where_the_layout_says(bits: int, lanes: packing.Lanes) -> None:
    """Each bit of each code alone, found at the place that the module's description names."""
    for token, channel in [(0, 0), (5, 9), (15, 15), (16, 16), (31, 30)]:
        lane, step = (token, channel) if lanes == "tokens" else (channel, token)
        row, group = token // 16, channel // 16
        tile = row * 2 + group if lanes == "tokens" else group * 2 + row
        lane, (f, j) = lane % 16, divmod(step % 16, 4)
        for bit in range(bits):
            codes = torch.zeros(32, 32, dtype=torch.uint8)
            codes[token, channel] = 1 << bit
            byte, shift = 32 * bits * tile, 0
            for width in packing.plane_widths(bits):
                if shift <= bit < shift + width:
                    break
                byte, shift = byte + 32 * width, shift + width
            slot = 4 * lane + j
            if width == 1:
                byte, position = byte + slot % 32, slot // 32 * 4 + f
            else:
                vector, field = divmod(f, 8 // width)
                byte, position = byte + 64 * vector + slot, field * width + bit - shift
            packed = ops.pack(codes, [bits] * 2, lanes)
            assert packed.nonzero().tolist() == [[byte]]
            assert packed[byte] == 1 << position


def test_non_contiguous_codes() -> None:
    codes = torch.randint(0, 16, (64, 3, 64), dtype=torch.uint8).transpose(0, 1)
    assert torch.equal(ops.pack(codes, [4] * 4, "tokens"), ops.pack(codes.contiguous(), [4] * 4, "tokens"))


def test_operators_are_sound_under_compile() -> None:
    """Schemas, fake implementations and traceability, as torch itself checks them."""
    codes = torch.randint(0, 8, (2, 64, 64), dtype=torch.uint8)
    packed, lut = ops.pack(codes, [3] * 4, "tokens"), torch.randn(4, 8)
    torch.library.opcheck(ops.pack, (codes, [3] * 4, "tokens"))
    torch.library.opcheck(ops.unpack, (packed, 64, 64, [3] * 4, "tokens"))
    torch.library.opcheck(ops.unpack_levels, (packed, lut, 64, 64, [3] * 4, "channels"))


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ValueError, match=f"bits = {bits}"):
        packing.pack(torch.zeros(16, 16, dtype=torch.uint8), [bits], "tokens")
    with pytest.raises(ValueError, match="bits must be 1 to 8"):
        module.pack(torch.zeros(1, 16, 16, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8), bytes([bits]), True)


def test_wrong_shapes_are_refused() -> None:
    codes = torch.zeros(1, 16, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="15 tokens a page"):
        packing.pack(codes[:, :15], [4, 4], "tokens")
    with pytest.raises(ValueError, match="2 groups"):
        packing.pack(codes, [4], "tokens")
    with pytest.raises(ValueError, match="packed must have"):
        module.pack(codes, torch.zeros(10, dtype=torch.uint8), bytes([4, 4]), True)
    with pytest.raises(ValueError, match="lut must have"):
        module.unpack_levels(
            torch.zeros(256, dtype=torch.uint8), torch.zeros(2, 8), torch.zeros(1, 16, 32), bytes([4, 4]), True
        )
    with pytest.raises(ValueError, match="lanes = 'rows'"):
        ops.pack(codes, [4, 4], "rows")
