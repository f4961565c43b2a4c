"""Formats that are fitted to a prompt or by a calibration: bits go where queries look."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_model import LAYERS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.attention import attend
from kvfold.cache.calibration import KIND
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.report import walk_tensors
from kvfold.cache.tail import TAIL_STEP
from kvfold.evaluate import FidelityMeter, read_in_lockstep
from kvfold.formats import FIT_TOKENS, KeyStatistics, Window, get_format, get_formats
from kvfold.formats.base import PAGE_WINDOW
from kvfold.formats.channelwise import PATTERNS, spread_bits
from kvfold.quant.transforms import ChannelOrder

D, SINKS = 64, PAGE_WINDOW.sinks


def _qkv(tokens: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and queries of channels that differ: four query heads over two KV heads."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-1, 1, D)[torch.randperm(D, generator=generator)]
    query = torch.randn(batch, 4, tokens, D, generator=generator) * spread
    key = (torch.randn(batch, 2, tokens, D, generator=generator) * spread.flip(0)).half().float()
    return query, key, torch.randn(batch, 2, tokens, D, generator=generator).half().float()


def _run(cache: LayerCache, query: Tensor, key: Tensor, value: Tensor, chunks: list[int]) -> Tensor:
    out, start = [], cache.columns
    for n in chunks:
        part = slice(start, start + n)
        new = cache.append(key[:, :, part], value[:, :, part])
        out.append(attend(query[:, :, part], new, scaling=D**-0.5, backend="reference"))
        start += n
    return torch.cat(out, 2)


def _order(cache: LayerCache) -> Tensor:
    transform = cache.groups[0].rows.keys.form.transform
    assert isinstance(transform, ChannelOrder)
    return transform.order


def test_bits_follow_importance() -> None:
    query, key, value = _qkv(400)
    cache = LayerCache(LayerConfig("kvfold-3"))
    _run(cache, query, key, value, [400])
    seen = slice(SINKS, FIT_TOKENS)
    energy = query[0, :, seen].square().unflatten(0, (2, 2)).mean((1, 2))
    pages = key[0, :, SINKS : SINKS + 192].unflatten(1, (3, 64))
    importance = energy * pages.var(2, correction=0).mean(1)
    in_order = importance.take_along_dim(_order(cache)[0].long(), -1)
    # bfloat16 energies may swap neighbours that are within half a percent
    assert (in_order[:, 1:] <= in_order[:, :-1] * 1.01).all()
    # The first 16 channels have 5 bits, the last 2: relative errors tell them apart.
    rows = cache.groups[0].rows
    folded = rows.keys.form.unfold(rows.keys.pages())[0]
    x = key[0, :, SINKS : SINKS + folded.shape[1]]
    error = ((folded - x).square().mean(1) / x.var(1)).take_along_dim(_order(cache)[0].long(), -1)
    assert error[:, :16].mean() < 0.1 * error[:, 16:32].mean()
    assert error[:, 16:32].mean() < 0.5 * error[:, 48:].mean()


@pytest.mark.parametrize("chunks", [[600], [100] * 6, [250, 6, 344], [255, 1, 1, 343], [1] * 600])
def test_how_tokens_come_makes_no_difference(chunks: list[int]) -> None:
    query, key, value = _qkv(600)
    whole, parts = LayerCache(LayerConfig("kvfold-3")), LayerCache(LayerConfig("kvfold-3"))
    expected, got = _run(whole, query, key, value, [600]), _run(parts, query, key, value, chunks)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for a, b in zip(whole.unfold(torch.float32), parts.unfold(torch.float32), strict=True):
        assert torch.equal(a, b)


def test_nothing_folds_before_the_statistics_are_complete() -> None:
    query, key, value = _qkv(FIT_TOKENS + 100)
    cache = LayerCache(LayerConfig("kvfold-2"))
    for n in [100, FIT_TOKENS - 101]:
        _run(cache, query, key, value, [n])
        assert cache.groups[0].rows.keys.count == 0
        assert torch.equal(cache.unfold(torch.float32)[0], key[:, :, : cache.columns])
    _run(cache, query, key, value, [1])
    rows = cache.groups[0].rows
    assert rows.keys.count == (FIT_TOKENS - SINKS - PAGE_WINDOW.recent) // 64
    _run(cache, query, key, value, [100])
    assert rows.fit.energy is None  # forgotten once no crop without a trace can go back to it
    tail = rows.dense.tail
    assert tail is not None
    assert tail[0].shape[2] < 64 + PAGE_WINDOW.recent + PAGE_WINDOW.undo + TAIL_STEP


@pytest.mark.parametrize(("held", "back"), [(256, 24), (262, 20), (279, 24), (300, 24), (500, 24)])
def test_a_short_crop_leaves_no_trace(held: int, back: int) -> None:
    query, key, value = _qkv(700)
    other_query, other_key, other_value = _qkv(700, seed=1)
    cropped, straight = LayerCache(LayerConfig("kvfold-3")), LayerCache(LayerConfig("kvfold-3"))
    _run(cropped, query, key, value, [held - back])
    _run(cropped, other_query, other_key, other_value, [back])
    assert cropped.crop(held - back) == 0
    got = _run(cropped, query, key, value, [back, 700 - held])
    expected = _run(straight, query, key, value, [700])[:, :, held - back :]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(cropped.unfold(torch.float32)[0], straight.unfold(torch.float32)[0])


def test_a_long_crop_goes_on() -> None:
    query, key, value = _qkv(700)
    cache = LayerCache(LayerConfig("kvfold-4"))
    _run(cache, query, key, value, [500])
    assert cache.crop(100) > 0  # folded tokens stay folded
    _run(cache, query, key, value, [600])
    assert cache.columns == 700
    got = cache.unfold(torch.float32)[0]
    assert torch.equal(got[:, :, :SINKS], key[:, :, :SINKS])
    assert torch.equal(got[:, :, -24:], key[:, :, -24:])
    assert (((got - key).square().mean((0, 2)) / key.var(2)[0]) < 0.1).all()  # each channel by its own size


def test_going_back_to_before_the_fit() -> None:
    query, key, value = _qkv(400)
    cache = LayerCache(LayerConfig("kvfold-3"))
    _run(cache, query, key, value, [200])
    state = cache.state()
    _run(cache, query, key, value, [200])
    cache.restore(state)
    assert cache.groups[0].rows.formats.awaits_fit
    again = _run(cache, query, key, value, [200])
    straight = _run(LayerCache(LayerConfig("kvfold-3")), query, key, value, [400])[:, :, 200:]
    torch.testing.assert_close(again, straight, atol=1e-4, rtol=1e-4)


def test_rows_have_orders_of_their_own() -> None:
    one, two = _qkv(400, seed=1), _qkv(400, seed=2)
    query, key, value = (torch.cat(pair) for pair in zip(one, two, strict=True))
    both = LayerCache(LayerConfig("kvfold-3"))
    _run(both, query, key, value, [300])
    both.select(torch.tensor([1, 0, 1]))
    out = _run(both, *(x[[1, 0, 1]] for x in (query, key, value)), [100])
    for row, own in enumerate((two, one, two)):
        alone = LayerCache(LayerConfig("kvfold-3"))
        expected = _run(alone, *own, [300, 100])[:, :, 300:]
        torch.testing.assert_close(out[row], expected[0], atol=1e-4, rtol=1e-4)


def test_queries_count_once() -> None:
    """Layers that share a cache attend to the same tokens again, and so does who tries again."""
    query, key, value = _qkv(200)
    cache = LayerCache(LayerConfig("kvfold-3"))
    new = cache.append(key, value)
    outs = [attend(q, new, scaling=D**-0.5) for q in (query, query, 2 * query)]
    assert torch.equal(outs[0], outs[1])
    energy = cache.groups[0].rows.fit.energy
    assert energy is not None
    assert energy.shape[2] == 200 - SINKS
    expected = query[0, :, SINKS:].square().unflatten(0, (2, 2)).mean(1)
    torch.testing.assert_close(energy[0].float(), expected, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("sinks", [0, 240, 256, 300])
def test_windows_of_ones_own(sinks: int) -> None:
    query, key, value = _qkv(600)
    whole, parts = (LayerCache(LayerConfig("kvfold-3", window=Window(sinks, 24, 24))) for _ in range(2))
    expected, got = _run(whole, query, key, value, [600]), _run(parts, query, key, value, [100, 211, 289])
    assert whole.groups[0].rows.keys.count == (600 - sinks - 24) // 64
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_wrong_queries_are_named() -> None:
    query, key, value = _qkv(300)
    new = LayerCache(LayerConfig("kvfold-3")).append(key, value)
    with pytest.raises(ValueError, match=r"query has shape \(1, 3, 300, 64\): give .* a multiple of 2"):
        attend(query[:, :3], new, scaling=1.0)
    query[0, 0, 20, 0] = torch.nan
    with pytest.raises(ValueError, match="query holds a NaN"):
        attend(query, new, scaling=1.0)


def test_formats_with_equal_bits_await_nothing() -> None:
    assert not get_format("kvfold-8", 128).awaits_fit
    assert not get_format("kvfold-4", 48).awaits_fit
    assert get_format("kvfold-4", 64).awaits_fit


def test_the_kernel_reads_what_the_reference_reads() -> None:
    query, key, value = _qkv(500)
    for format in ("kvfold-4", "kvfold-3", "kvfold-2", "kvfold-6:kvfold-1", "kvfold-3:float16"):
        new = LayerCache(LayerConfig(format)).append(key, value)
        got = attend(query, new, scaling=D**-0.5, backend="cpu")
        expected = attend(query, new, scaling=D**-0.5, backend="reference")
        assert (got - expected).square().sum() < 1e-3 * expected.square().sum()


def test_statistics_of_a_calibration(tmp_path: Path) -> None:
    query, key, value = _qkv(200)
    energy = query.square().unflatten(1, (2, 2)).mean(2)
    known = KeyStatistics.of(key[0], energy[0], 64)
    path = tmp_path / "c.safetensors"
    kvfold.Calibration({3: known}, {"model_type": "x"}).save(path)
    loaded = kvfold.Calibration.load(path)
    assert loaded.about == {"model_type": "x"}
    cache = LayerCache(LayerConfig("kvfold-3", statistics=loaded.layers[3]))
    _run(cache, query, key, value, [SINKS + 64 + PAGE_WINDOW.recent])  # folds as soon as a page is ripe
    assert cache.groups[0].rows.keys.count == 1
    assert torch.equal(_order(cache), known.order())


def test_bad_calibrations(tmp_path: Path, demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    config = demo[0].config
    with pytest.raises(FileNotFoundError, match="kvfold calibrate makes one"):
        kvfold.FoldedCache(config, calibration=tmp_path / "none")
    (tmp_path / "text").write_text("not a file of tensors")
    with pytest.raises(ValueError, match="damaged"):
        kvfold.FoldedCache(config, calibration=tmp_path / "text")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="of another kind"):
        kvfold.FoldedCache(config, calibration=tmp_path / "other")
    save_file({"layers.x.key_variance": torch.zeros(1)}, tmp_path / "odd", metadata={"kind": KIND})
    with pytest.raises(ValueError, match="damaged; kvfold calibrate makes a new one"):
        kvfold.FoldedCache(config, calibration=tmp_path / "odd")
    ones = torch.ones(2, 32)
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        kvfold.Calibration({0: KeyStatistics(ones, ones)}).save(tmp_path / "none" / "c")
    for other in (
        kvfold.Calibration({0: KeyStatistics(ones, ones)}, {"model_type": "qwen3"}),
        kvfold.Calibration({30: KeyStatistics(ones, ones)}),
    ):
        with pytest.raises(ValueError, match="calibrate this model"):
            kvfold.FoldedCache(config, calibration=other)
    kvfold.FoldedCache(config, "turboquant-4", calibration=kvfold.Calibration({}))  # has no use for it
    fits = torch.ones(3, 64)
    with pytest.raises(ValueError, match="has no layer 1"):
        kvfold.FoldedCache(config, calibration=kvfold.Calibration({0: KeyStatistics(fits, fits)}))
    with pytest.raises(ValueError, match="2 heads of 32, keys have 3 heads of 64"):
        kvfold.FoldedCache(config, calibration=kvfold.Calibration({0: KeyStatistics(ones, ones)}))
    cache = LayerCache(LayerConfig("kvfold-4", statistics=KeyStatistics(ones, ones)))
    with pytest.raises(ValueError, match="2 heads of 32, keys have 2 heads of 64"):
        cache.append(*_qkv(5)[1:])


def test_calibrating_a_real_model(small: tuple[PreTrainedModel, PreTrainedTokenizerBase], small_ids: Tensor) -> None:
    model = small[0]
    seen: list[int] = []
    calibration = kvfold.calibrate(model, [small_ids[:, 8_000:8_512]], progress=seen.append)
    assert sum(seen) == 512
    assert len(calibration.layers) == LAYERS
    longer = kvfold.calibrate(model, [small_ids[:, 8_000:8_513]])  # one token more hardly counts
    for i, statistics in calibration.layers.items():
        torch.testing.assert_close(longer.layers[i].key_variance, statistics.key_variance)
        assert (longer.layers[i].query_energy / statistics.query_energy - 1).abs().max() < 0.05
    with pytest.raises(ValueError, match="chunk = 0"):
        kvfold.calibrate(model, [small_ids[:, :512]], chunk=0)
    with pytest.raises(ValueError, match="passages: give at least one"):
        kvfold.calibrate(model, [small_ids[:, :70]])


def test_keys_fitted_to_queries_lose_less(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor, tmp_path: Path
) -> None:
    """By the prompt itself or by a file, both beside statistics that are turned around."""
    model, path = demo[0], tmp_path / "smollm2.safetensors"
    calibration = kvfold.calibrate(model, [text_ids[:, 8_000:8_512]])
    calibration.save(path)
    turned = kvfold.Calibration({
        i: KeyStatistics(s.query_energy.flip(-1), s.key_variance.flip(-1).reciprocal())
        for i, s in calibration.layers.items()
    })  # fmt: skip
    caches = {
        name: kvfold.FoldedCache(model.config, "kvfold-2", calibration=own)
        for name, own in {"fitted": None, "calibrated": kvfold.Calibration.load(path), "misled": turned}.items()
    }
    meters = {name: FidelityMeter() for name in ("dense", *caches)}
    read_in_lockstep(model, text_ids[:, :500], DynamicCache(config=model.config), caches, meters)
    kl = {name: meter.result().kl_mean for name, meter in meters.items()}
    assert kl["fitted"] < 0.6 * kl["misled"]
    assert kl["calibrated"] < 0.6 * kl["misled"]


@pytest.mark.parametrize("bits", range(1, 9))
def test_mean_bits(bits: int) -> None:
    for parts in PATTERNS:
        assert sum(spread_bits(bits, parts)) == sum(spread_bits(bits, 2 * parts)) / 2 == bits * parts
    for groups in range(1, 65):
        spread = spread_bits(bits, groups)
        assert len(spread) == groups
        assert list(spread) == sorted(spread, reverse=True)
        assert bits - 0.5 <= sum(spread) / groups <= bits


def test_presets_are_names_of_formats() -> None:
    assert get_formats("compact", 64, 64).keys == get_format("kvfold-3", 64)
    assert get_formats("smallest:near-lossless", 64, 64).values.bits == 4


def test_held_memory_counts_the_order() -> None:
    query, key, value = _qkv(400)
    cache = LayerCache(LayerConfig("kvfold-3"))
    _run(cache, query, key, value, [400])
    assert any(tensor is _order(cache) for tensor in walk_tensors(cache))


def test_no_graph_is_kept_where_gradients_are_on() -> None:
    """Statistics of queries stay in the cache: they must not hold what made the queries."""
    query, key, value = _qkv(100)
    with torch.enable_grad():
        new = LayerCache(LayerConfig("kvfold-3")).append(key, value)
        out = attend(query.requires_grad_(), new, scaling=D**-0.5)
    energy = new.layer.groups[0].rows.fit.energy
    assert energy is not None
    assert not energy.requires_grad
    assert not out.requires_grad
