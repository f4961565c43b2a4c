"""Kernels in Gluon: their instructions and what they compute as compiled, by a machine for PTX in place of a GPU."""

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_paged import Engine, _tokens
from torch import Tensor

from kvfold.attention import BACKENDS, attend
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.quant import packing

pytest.importorskip("triton")
import ptx_machine
import triton
from compiled import tensor_cores

from kvfold.attention.triton import target
from kvfold.kernels.gluon import numbers, ptx
from kvfold.kernels.gluon.numbers import MOST_BITS, SOURCES, Numbers

LANES, THREADS = 16, np.arange(32)
G, T = THREADS // 4, THREADS % 4


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("bits", range(1, MOST_BITS + 1))
def test_products_of_codes_in_registers(bits: int, one: bool) -> None:
    """Every word of a row of tiles, against the packing's reference: levels, their order, and sums."""
    random = np.random.default_rng(bits)
    tiles = 1 if one else 4
    codes = random.integers(0, 2**bits, (LANES, 16 * tiles))
    packed = packing.pack(torch.from_numpy(codes).to(torch.uint8), [bits] * tiles, "tokens").numpy().reshape(tiles, -1)
    levels = _numbers(random, bits)
    b = random.integers(-128, 128, (16 * tiles, 8))
    words = []
    for width, _, _, offset in ptx.offsets(bits, one):
        at = offset + 4 * G + (64 * (T // 2) if one and width == 4 else 0)
        words.append(_word(packed, np.zeros_like(T) if one else T, at))
    order = ptx.steps(bits)
    if one:
        right = [_bytes(b[[order[t][i] for t in T], G]) for i in range(4)]
        registers = [sum(byte << np.uint32(8 * i) for i, byte in enumerate(right))]
        moved = ptx.shifts(bits)
        shifts = [(T // 2 * moved[width][0] + T % 2 * moved[width][1]).astype(np.uint32) for width in ptx.planes(bits)]
    else:
        registers, shifts = [], []
        for quad in order:
            right = [_bytes(b[16 * T + step, G]) for step in quad]
            registers.append(sum(byte << np.uint32(8 * i) for i, byte in enumerate(right)))
    table = [np.full(32, word, np.uint32) for word in ptx.table(levels)[: ptx.table_words(bits)]]
    zero = [np.zeros(32, np.uint32)] * 4
    found = ptx_machine.run_text(ptx.multiply(bits, one, 1, 1, "s8"), 4, [*zero, *words, *registers, *shifts, *table])
    true = np.array(levels)[codes] @ b - ptx.BIAS[bits] * b.sum(0)
    for r, sums in enumerate(found):
        assert np.array_equal(sums.view(np.int32), true[G + 8 * (r // 2), 2 * T + r % 2])


def _numbers(random: np.random.Generator, bits: int) -> list[int]:
    """Levels with the lower half of them at most 0, the upper half at least 0."""
    if bits == 1:
        return [-32, 32]
    half = 2 ** (bits - 1)
    lower = np.sort(random.choice(np.arange(-127, 1), half, replace=False))
    upper = np.sort(random.choice(np.arange(128), half, replace=False))
    return [*lower.tolist(), *upper.tolist()]


def _word(tiles: NDArray[np.uint8], tile: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(tiles[tile[:, None], at[:, None] + np.arange(4)]).view(np.uint32)[:, 0]


def _bytes(x: NDArray[np.int64]) -> NDArray[np.uint32]:
    return (x & 255).astype(np.uint32)


@pytest.fixture(scope="module")
def ran() -> Iterator[list[str]]:
    if torch.cuda.is_available():
        pytest.skip("a GPU runs them itself: test_triton.py")
    with tensor_cores() as ran:
        yield ran


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("capability", "variables", "version", "runs"),
    [
        ((9, 0), {}, "3.9.1", True),
        ((7, 5), {}, "3.9.1", False),
        ((9, 0), {"KVFOLD_GLUON": "0"}, "3.9.1", False),
        ((9, 0), {"TRITON_INTERPRET": "1"}, "3.9.1", False),
        ((9, 0), {}, "3.8.0", False),
        ((9, 0), {}, "4.0.0", False),
    ],
)
def test_which_devices_run_them(
    capability: tuple[int, int], variables: dict[str, str], version: str, runs: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    target._compiles.cache_clear()
    assert target.tensor_cores(torch.device("cuda")) == runs
    assert not target.tensor_cores(torch.device("cpu"))
    assert ("slower ones run" in caplog.text) == (not version.startswith("3.9"))
    target._compiles.cache_clear()


@pytest.mark.parametrize(("capability", "wide"), [((8, 0), True), ((8, 9), True), ((9, 0), False)])
def test_which_devices_have_wide_programs(
    capability: tuple[int, int], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert target.has_wide_programs(torch.device("cuda")) == wide
    assert not target.has_wide_programs(torch.device("xpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not target.has_wide_programs(torch.device("cuda"))


def test_what_is_compiled_depends_on_what_writes_it() -> None:
    """Triton's cache on the disk does not see functions that write assembly."""
    fields = dataclasses.fields(Numbers)
    assert next(each for each in fields if each.name == "sources").default == SOURCES
    files = [Path(numbers.__file__), Path(ptx.__file__)]
    assert hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest().startswith(SOURCES)


CASES = [
    ("turboquant-4", 128, 4, 300, 1, {}),  # a scale a token
    ("kvfold-4", 128, 4, 300, 1, {}),  # centres and channel scales, 6 to 3 bits
    ("kvfold-2", 64, 3, 300, 1, {}),
    ("turboquant-3", 256, 1, 130, 1, {}),
    ("turboquant-4", 64, 4, 600, 3, {}),  # two warps, and parts of a context
    ("centred-5", 80, 2, 300, 1, {}),  # weights of 16 bits, and five tiles
    ("turboquant-2.5", 128, 1, 330, 1, {}),  # scale groups of unequal bits
    ("affine-4g32", 96, 2, 130, 1, {}),  # offsets
    ("centred-3+sign", 64, 2, 200, 1, {}),  # single bits, channels without a centre
    ("kvarn-4", 64, 4, 300, 1, {}),  # scaled shifts
    ("kvfold-4", 64, 2, 300, 2, {"softcap": 5.0, "sink_logits": torch.arange(4.0)}),
    ("turboquant-4", 64, 2, 100, 2, {"mask": True}),
    ("turboquant-4", 192, 9, 70, 1, {}),  # warps that share tiles unevenly
]


@pytest.mark.parametrize(("name", "dim", "repeat", "held", "tokens", "options"), CASES)
def test_own_error_is_invisible_beside_the_codec(
    ran: list[str], name: str, dim: int, repeat: int, held: int, tokens: int, options: dict
) -> None:
    """At most 1 % of the power of the codec's error, by the kernel's own rounding."""
    key = (_random(1, 2, held + tokens, dim, seed=1) + 2 * _random(dim, seed=2)).bfloat16()
    value, query = (_random(1, n, held + tokens, dim, seed=3).bfloat16() for n in (2, 2 * repeat))
    attention = dict(options)
    if "mask" in attention:
        attention["mask"] = _random(1, 1, tokens, held + tokens, seed=4) < 1
    cache, own = LayerCache(LayerConfig(name)), query[:, :, held:]
    cache.observe(None, cache.append(key[:, :, :held], value[:, :, :held]))
    new = cache.append(key[:, :, held:], value[:, :, held:])
    cache.observe(own, new)
    before = len(ran)
    fast, exact = (
        attend(own.to(dtype), new, scaling=dim**-0.5, backend=backend, **attention).double()
        for backend, dtype in (("triton", torch.float16), ("reference", torch.float64))
    )
    assert len(ran) == before + 1
    error = fast - exact
    assert error.square().sum() < 0.01 * (exact - _dense(own, key, value, **attention)).square().sum()


def _dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (_, heads, n, dim), tokens = query.shape, key.shape[2]
    key, value = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query.double() @ key.mT * dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    reads = torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n) if mask is None else mask
    scores = scores.masked_fill(~reads, -torch.inf)
    if sink_logits is not None:
        scores = torch.cat((scores, sink_logits.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., :tokens] @ value


@pytest.mark.parametrize(("name", "dim", "value_dim"), [("turboquant-4", 160, 128), ("turboquant-3", 576, 512)])
def test_own_error_where_values_are_a_view_of_keys(ran: list[str], name: str, dim: int, value_dim: int) -> None:
    """DeepSeek's shape, and in small: keys with channels that are not coded."""
    key, query = _random(1, 1, 131, dim, seed=1).bfloat16(), _random(1, 9, 1, dim, seed=2).bfloat16()
    cache, value = LayerCache(LayerConfig(name, values_of_keys=True)), key[..., :value_dim]
    cache.observe(None, cache.append(key[:, :, :130], value[:, :, :130]))
    new, before = cache.append(key[:, :, 130:], value[:, :, 130:]), len(ran)
    fast = attend(query.half(), new, scaling=dim**-0.5, backend="triton").double()
    assert len(ran) == before + 1
    exact = attend(query.double(), new, scaling=dim**-0.5, backend="reference")
    assert (fast - exact).square().sum() < 0.01 * (exact - _dense(query, key, value)).square().sum()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_query_of_a_channel_that_is_not_coded(ran: list[str], value: float) -> None:
    """Its scores are -inf for keys of one sign, and a weight of 0 would hide it."""
    key, query = _random(1, 1, 131, 160, seed=1).abs().bfloat16(), _random(1, 2, 1, 160, seed=2).half()
    cache = LayerCache(LayerConfig("turboquant-4", values_of_keys=True))
    cache.observe(None, cache.append(key[:, :, :130], key[:, :, :130, :128]))
    query[0, 1, 0, 150] = value
    out = attend(query, cache.append(key[:, :, 130:], key[:, :, 130:, :128]), scaling=0.1, backend="triton")
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_query_that_is_no_number_gets_nan(ran: list[str], value: float) -> None:
    cache, x = LayerCache(LayerConfig("turboquant-4")), _random(1, 2, 130, 64, seed=1)
    cache.observe(None, cache.append(x, x))
    query = x[:, :, :1].half()
    query[0, 1, 0, 3] = value
    out = attend(query, cache.append(x[:, :, :1], x[:, :, :1]), scaling=0.1, backend="triton")
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


def test_pages_of_a_pool(ran: list[str]) -> None:
    """A step of an engine with sequences of several lengths, their blocks anywhere."""
    sizes = {"a": (300, 1), "b": (63, 1), "c": (130, 3)}
    tokens = {who: _tokens(sum(parts), seed) for seed, (who, parts) in enumerate(sizes.items())}
    for name in ("kvfold-4", "turboquant-3+qjl"):
        outs = []
        for backend in ("triton", "reference"):
            engine = Engine(name, per_block=2, blocks=64, slots=6, dtype=torch.float16, backend="reference")
            engine.step({who: tuple(x[:held] for x in tokens[who]) for who, (held, _) in sizes.items()})
            engine.attention._run, before = BACKENDS[backend], len(ran)
            outs.append(engine.step({who: tuple(x[held:] for x in tokens[who]) for who, (held, _) in sizes.items()}))
            assert len(ran) - before == (backend == "triton")
        for who in sizes:
            assert (outs[0][who] - outs[1][who]).norm() < 0.02 * outs[1][who].norm()


@pytest.mark.parametrize("name", ["kvfold-4", "kvfold-2", "turboquant-4"])
def test_own_error_on_real_heads(ran: list[str], name: str, real_heads: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Again at most 1 %, over the last 2 queries, where outliers and channels of all sizes are what they are."""
    own = codec = 0.0
    for query, key, value in real_heads[::4]:
        cache = LayerCache(LayerConfig(name))
        cache.observe(query[:, :, :998], cache.append(key[:, :, :998], value[:, :, :998]))
        new, q = cache.append(key[:, :, 998:], value[:, :, 998:]), query[:, :, 998:]
        before = len(ran)
        fast = attend(q.half(), new, scaling=1 / 8, backend="triton").double()
        assert len(ran) == before + 1
        exact = attend(q.double(), new, scaling=1 / 8, backend="reference")
        own += (fast - exact).square().sum().item()
        codec += (exact - _dense(q, key, value)).square().sum().item()
    assert own < 0.01 * codec, own / codec
