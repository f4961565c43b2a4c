"""tq3 and tq4: the 18 checks of ggml_turboquant's own program, in its order, and what it says of them besides."""

import time
from typing import Any

import blocks_by_hand
import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.attention.reference import page_scores
from kvfold.formats.block import BlockFormat
from kvfold.formats.tq import TQ
from kvfold.quant.bitstream import from_stream, to_stream
from kvfold.quant.codebooks import distortion, sphere_coordinate
from kvfold.quant.transforms import Transform

PUBLISHED = {3: 0.034, 4: 0.0093}
"""Mean squared error of a unit vector."""


def tq(bits: int) -> TQ:
    """tq3 or tq4."""
    fmt = kvfold.get_format(f"tq{bits}", 128)
    assert isinstance(fmt, TQ)
    return fmt


def rotation(bits: int) -> Tensor:
    """Π, (128, 128)."""
    transform = tq(bits).form.transform
    assert isinstance(transform, Transform)
    return transform.matrix


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    """N(0, 1), (*shape, 128)."""
    return torch.randn(*shape, 128, generator=torch.Generator().manual_seed(seed))


def unit_vectors(n: int) -> Tensor:
    """Directions drawn uniformly, (n, 128)."""
    x = gaussian(n)
    return x / x.norm(dim=-1, keepdim=True)


def there_and_back(fmt: TQ, x: Tensor) -> Tensor:
    """x̂ by way of blocks."""
    return fmt.unfold(fmt.from_bytes(fmt.to_bytes(fmt.fold(x))))


def squared_error(fmt: TQ, x: Tensor) -> float:
    """Mean of ‖x − x̂‖² over vectors (n, 128)."""
    return (x - there_and_back(fmt, x)).square().sum(-1).mean().item()


def checks(*numbers: int) -> Any:
    """Bits 3 and 4 in turn, as the checks of these numbers."""
    ids = [f"check {number:02}: tq{bits}" for number, bits in zip(numbers, (3, 4), strict=True)]
    return pytest.mark.parametrize("bits", [3, 4], ids=ids)


class TestChecks:
    @checks(1, 2)
    def test_init(self, bits: int) -> None:
        fmt = tq(bits)
        assert fmt.bits == bits
        assert fmt.seed == 42
        assert fmt.block_bytes == {3: 52, 4: 68}[bits]
        assert fmt.bytes_per_vector == fmt.block_bytes  # in pages, too

    @checks(3, 4)
    def test_levels(self, bits: int) -> None:
        levels = tq(bits).form.lut[0]
        assert levels.shape == (2**bits,)
        assert torch.equal(levels, torch.tensor(blocks_by_hand.TQ_LEVELS[bits]))

    def test_check_05_dimension_is_128(self) -> None:
        assert tq(3).head_dim == tq(3).form.code_dim == 128
        with pytest.raises(ValueError, match="head_dim = 64: tq3 blocks are of 128"):
            TQ(64, bits=3)

    def test_check_06_columns_have_length_1(self) -> None:
        matrix = rotation(3)
        torch.testing.assert_close(matrix.norm(dim=0), torch.ones(128), atol=1e-6, rtol=0)

    def test_check_07_columns_are_orthogonal(self) -> None:
        matrix = rotation(3)
        torch.testing.assert_close(matrix.mT @ matrix, torch.eye(128), atol=1e-6, rtol=0)
        torch.testing.assert_close(matrix, torch.tensor(blocks_by_hand.tq_rotation()), atol=1e-6, rtol=0)
        assert torch.equal(matrix, rotation(4))

    def test_check_08_five_bits_are_refused(self) -> None:
        with pytest.raises(ValueError, match="bits = 5: a code has 3 to 4 bits"):
            TQ(128, bits=5)
        with pytest.raises(ValueError, match="'tq5' is not known"):
            kvfold.get_format("tq5", 128)

    @checks(9, 10)
    def test_pack_and_unpack(self, bits: int) -> None:
        code = (torch.arange(128) % 2**bits).to(torch.uint8)
        stream = to_stream(code, bits)
        assert stream.shape == (16 * bits,)
        assert torch.equal(from_stream(stream, bits), code)
        number = sum(int(c) << bits * k for k, c in enumerate(code))  # code k at bits k·b of one long number
        assert bytes(stream.tolist()) == number.to_bytes(16 * bits, "little")

    @checks(11, 12)
    def test_mean_squared_error(self, bits: int) -> None:
        fmt = tq(bits)
        assert 0.3 * PUBLISHED[bits] < squared_error(fmt, unit_vectors(1000)) < 3 * PUBLISHED[bits]
        exact = 128 * distortion(sphere_coordinate(128), fmt.form.lut[0].double().numpy())
        assert squared_error(fmt, unit_vectors(20_000)) == pytest.approx(exact, rel=0.01)
        assert exact == pytest.approx({3: 0.033966, 4: 0.009315}[bits], rel=0.005)  # converged levels'

    @pytest.mark.parametrize("bits", [3, 4])
    def test_check_13_a_zero_vector_stays_zero(self, bits: int) -> None:
        fmt, x = tq(bits), gaussian(3)
        x[1] = 0
        pages = fmt.fold(x)
        assert not fmt.to_bytes(pages)[1, :4].any()
        assert torch.equal(there_and_back(fmt, x)[1], torch.zeros(128))
        assert there_and_back(fmt, x)[0].norm() > 0

    @pytest.mark.parametrize("bits", [3, 4])
    def test_check_14_length_is_kept(self, bits: int) -> None:
        fmt, x = tq(bits), 3.7 * unit_vectors(1000)
        length = there_and_back(fmt, x).norm(dim=-1)
        kept = (length - 3.7).abs() < 0.1 * 3.7
        assert kept[0]
        assert kept.float().mean() > 0.99
        assert length.mean().item() == pytest.approx({3: 0.984, 4: 0.9955}[bits] * 3.7, rel=0.005)  # a little short
        stored = fmt.to_bytes(fmt.fold(x))[:, :4].contiguous().view(torch.float32)
        torch.testing.assert_close(stored, torch.full((1000, 1), 3.7))

    @checks(15, 16)
    def test_compression_ratio(self, bits: int) -> None:
        """Of blocks, and of full pages in memory, to float16."""
        fmt, least, x = tq(bits), {3: 4, 4: 3}[bits], gaussian(6400)
        pages = fmt.fold(x)
        assert x.half().nbytes / fmt.to_bytes(pages).nbytes > least
        assert x.half().nbytes / pages.nbytes > least

    @pytest.mark.parametrize("bits", [3, 4])
    def test_check_17_a_batch(self, bits: int) -> None:
        fmt, x = tq(bits), 0.1 * gaussian(8)
        assert 0 < squared_error(fmt, x) < 0.1
        alone = torch.stack([there_and_back(fmt, row[None])[0] for row in x])
        torch.testing.assert_close(there_and_back(fmt, x), alone)
        heads = there_and_back(fmt, x[:, None])[:, 0]  # (heads, tokens, 128)
        torch.testing.assert_close(heads, alone)

    @pytest.mark.parametrize("bits", [3, 4])
    def test_check_18_more_than_1000_vectors_a_second(self, bits: int) -> None:
        """More than 100,000 are usual on one core."""
        fmt, x, seconds = tq(bits), gaussian(10_000), []
        for _ in range(3):
            start = time.perf_counter()
            fmt.fold(x)
            seconds.append(time.perf_counter() - start)
        assert 10_000 / min(seconds) > 1000


def test_blocks_are_the_codes_of_rotated_directions() -> None:
    """‖x‖ first, then the level nearest to each coordinate of Π·x/‖x‖, by hand."""
    for bits in (3, 4):
        fmt, x = tq(bits), 5 * gaussian(50)
        blocks = fmt.to_bytes(fmt.fold(x))
        torch.testing.assert_close(blocks[:, :4].contiguous().view(torch.float32)[:, 0], x.norm(dim=-1))
        y = (x / x.norm(dim=-1, keepdim=True)) @ rotation(bits).mT
        nearest = (y.unsqueeze(-1) - fmt.form.lut[0]).abs().argmin(-1)
        assert (from_stream(blocks[:, 4:], bits) == nearest).float().mean() > 0.999  # but for near ties


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_fused_dot_with_a_rotated_query(bits: int, tokens: int) -> None:
    """‖x‖·⟨Π·q, c⟩ = ⟨q, x̂⟩: keys are never rotated back."""
    fmt = tq(bits)
    x = gaussian(2, 3, tokens) * torch.linspace(0.1, 20, tokens).unsqueeze(-1)  # (batch, kv_heads, tokens, 128)
    q = gaussian(2, 3, 4, 5, seed=1)  # (batch, kv_heads, repeat, queries, 128)
    pages = fmt.fold(x)
    expected = q.double() @ fmt.unfold(pages).double().mT.unsqueeze(2)
    closest = {"atol": 1e-5 * expected.abs().max().item(), "rtol": 0.0}

    rotated = fmt.form.rotated_query(q)
    fused = page_scores(rotated, pages, fmt.form)[..., :tokens]
    torch.testing.assert_close(fused.double(), expected, **closest)

    torch.testing.assert_close(rotated, (q.double() @ rotation(bits).double().mT).float(), atol=1e-5, rtol=0)
    blocks = fmt.to_bytes(pages)
    c = fmt.form.lut[0][from_stream(blocks[..., 4:], bits).long()].unsqueeze(2)
    norm = blocks[..., :4].contiguous().view(torch.float32).mT.unsqueeze(2)
    torch.testing.assert_close((rotated @ c.mT * norm).double(), expected, **closest)


def test_bytes_a_token_of_a_70b_model() -> None:
    """The seed's projection: 80 layers, 8 KV heads of 128, keys and values; its contexts count in 1,024 tokens."""
    vectors = 2 * 80 * 8
    size = {name: block_bytes(name) for name in ("float16", "q8_0", "tq3", "tq4")}
    assert vectors * size["float16"] == 327_680
    assert vectors * size["tq3"] == 66_560
    assert vectors * size["tq4"] == 87_040
    # The seed counts Q8_0 as a byte a value, 163,840 a token. Its blocks of 32 have a float16 scale each besides:
    # 136 bytes a vector.
    assert vectors * size["q8_0"] == 174_080 == 163_840 + vectors * 128 // 32 * 2

    for gib, thousands in ((34, (109, 536, 410)), (22, (70, 347, 265))):
        for name, expected in zip(("float16", "tq3", "tq4"), thousands, strict=True):
            assert round(gib * 2**30 / (vectors * size[name]) / 1024) == expected


def block_bytes(name: str) -> int:
    """Bytes of a vector of 128."""
    fmt = kvfold.get_format(name, 128)
    assert isinstance(fmt, BlockFormat)
    return fmt.block_bytes
