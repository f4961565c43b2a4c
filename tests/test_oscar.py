"""OSCAR: rotations by what attention weighs, from a calibration alone."""

from pathlib import Path

import pytest
import torch
from conftest import latent_model, tiny_model
from measured import measured
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.attention import attend
from kvfold.cache.calibration import KIND, ROTATIONS, SINKS, Observed
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import PageLayout, PagePool
from kvfold.evaluate import FidelityMeter, read_in_lockstep
from kvfold.formats import KeyStatistics, get_format, get_formats
from kvfold.formats.oscar import CLIPPED, CLIPPED_BITS
from kvfold.quant.packing import Lanes
from kvfold.quant.spectral import spectral_rotation

Small = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def _sylvester(n: int) -> Tensor:
    """The Hadamard matrix by its recursion."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    half = _sylvester(n // 2)
    return torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_rotation_is_that_of_the_authors(dim: int) -> None:
    """R = U·H·P for row vectors: P gives the place whose bits are i's, reversed, to the i-th largest eigenvalue."""
    some = torch.randn(3, 4 * dim, dim, dtype=torch.float64) * torch.logspace(-1, 1, dim)
    moments = some.mT @ some
    for moment, rotation in zip(moments, spectral_rotation(moments), strict=True):
        values, directions = torch.linalg.eigh(moment)
        by_size = values.argsort(descending=True)
        order = [0] * dim
        for i in range(dim):
            order[int(f"{i:0{dim.bit_length() - 1}b}"[::-1], 2)] = int(by_size[i])
        expected = (directions @ _sylvester(dim) / dim**0.5)[:, order]
        torch.testing.assert_close(rotation.mT.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("dim", "apart"), [(32, 1e-5), (128, 1e-5), (80, 0.15), (96, 0.15), (192, 0.15)])
def test_rotation_makes_coordinates_weigh_alike(dim: int, apart: float) -> None:
    """About, where D is no power of two."""
    some = torch.randn(2, 4 * dim, dim) * torch.logspace(-1, 1, dim)
    moment = some.mT @ some
    rotation = spectral_rotation(moment)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(dim).expand(2, dim, dim), atol=2e-6, rtol=0)
    weights = (rotation @ moment @ rotation.mT).diagonal(dim1=1, dim2=2)
    assert (weights.std(-1) < apart * weights.mean(-1)).all()
    before = moment.diagonal(dim1=1, dim2=2)
    assert (before.std(-1) > 1.0 * before.mean(-1)).all()


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (80, 80), (128, 128), (192, 192), (256, 128)])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_pages_are_the_formula(bits: int, dim: int, group: int, lanes: Lanes) -> None:
    """Token by token and group by group, as the authors' kernel has it."""
    fmt = get_format(f"oscar-{bits}", dim, lanes=lanes).fitted(measured(2, dim))
    x = torch.randn(1, 2, 80, dim, generator=torch.Generator().manual_seed(bits)) + 0.5
    pages = fmt.fold(x)
    assert pages.nbytes == 2 * 128 * (-(-dim // 16) * 2 * bits + 4 * dim // group)
    unfolded, most = fmt.unfold(pages), 2**bits - 1
    for head, token in ((0, 0), (1, 5), (1, 79)):
        rotation = fmt.fit_tables()["rotation"][head].double()
        y = rotation @ x[0, head, token].double()
        if bits <= CLIPPED_BITS:
            end = y.abs().sort().values[int(CLIPPED[lanes] * dim)]
            y = y.clamp(-end, end)
        read = []
        for part in y.split(group):
            low, step = part.min(), (part.max() - part.min()) / most
            read.append(low + step * ((part - low) / step + 0.5).floor().clamp(0, most))
        expected = rotation.mT @ torch.cat(read)
        # float16 rounds a and s, and a code may jump where y lies between two levels
        error, size = (unfolded[0, head, token].double() - expected).norm(), expected.norm()
        assert error < 2e-3 * size + step


def test_rotations_follow_what_attention_weighs() -> None:
    """Both moments, by one product a token; sinks do not count, and queries of all heads that share a KV head do."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 144, dim, generator=generator) for heads, dim in ((6, 32), (2, 32), (2, 16))
    )
    observed = Observed()
    observed.add(query, key, value)
    statistics = observed.statistics()
    for head in range(2):
        seen = [(query[0, h, t], t) for h in range(3 * head, 3 * head + 3) for t in range(SINKS, 144)]
        moment = sum(torch.outer(q, q) for q, _ in seen) / len(seen)
        scores = [sum((q @ key[0, head, t]) ** 2 for q, _ in seen) for t in range(SINKS, 144)]
        weighted = sum(w * torch.outer(v, v) for w, v in zip(scores, value[0, head, SINKS:], strict=True))
        for rotation, own in ((statistics.key_rotation, moment), (statistics.value_rotation, weighted / sum(scores))):
            assert rotation is not None
            # Eigenvectors are known but for their signs, so what counts is what the rotation does to the moment.
            far = (rotation[head] @ own @ rotation[head].mT).diagonal()
            torch.testing.assert_close(far, own.trace().expand(len(far)) / len(far), rtol=1e-4, atol=0)
    in_parts = Observed()
    in_parts.add(query[:, :, :100], key[:, :, :100], value[:, :, :100])
    in_parts.add(query[:, :, 100:], key[:, :, 100:], value[:, :, 100:], begins=False)
    assert in_parts.statistics().value_rotation is not None
    views = Observed()
    views.add(query, key, None)
    assert views.statistics().key_rotation is None


def test_a_calibration_is_asked_for_before_any_token(small: Small, small_ids: Tensor, tmp_path: Path) -> None:
    model = small[0]
    with pytest.raises(ValueError, match=r"'oscar-4' is fitted to the model, .*a file of kvfold calibrate"):
        kvfold.FoldedCache(model.config, "oscar-4")
    with pytest.raises(ValueError, match=r"'kvfold-4:oscar-2' is fitted to the model"):
        kvfold.FoldedCache(model.config, "kvfold-4:oscar-2")
    with pytest.raises(ValueError, match="there is no calibration"):
        LayerCache(LayerConfig("oscar-4")).append(*torch.randn(2, 1, 2, 5, 64))
    calibration = kvfold.calibrate(model, [small_ids[:, :512]])
    old = {i: statistics.with_rotations(keys=False, values=False) for i, statistics in calibration.layers.items()}
    kvfold.Calibration(old).save(tmp_path / "old")
    loaded = kvfold.Calibration.load(tmp_path / "old")  # as files were before
    kvfold.FoldedCache(model.config, "kvfold-4", calibration=loaded)
    with pytest.raises(ValueError, match=r"no rotations of keys, .* make it anew with kvfold calibrate"):
        kvfold.FoldedCache(model.config, "oscar-4", calibration=loaded)
    pair = get_formats("oscar-4", 64, 64)
    layout = PageLayout(pair)
    pool = PagePool(torch.zeros(4, 2, 64, layout.slot_bytes(4) // 4), layout)
    with pytest.raises(ValueError, match="must be fitted before pages are shared"):
        PagedLayer(pair, pool, 1, torch.float32)


def test_latents_and_residuals_are_refused() -> None:
    with pytest.raises(ValueError, match=r"latents \(MLA\) have none"):
        kvfold.FoldedCache(latent_model().config, "oscar-4")
    with pytest.raises(ValueError, match="residuals go with"):
        get_format("oscar-4+qjl", 64)


def test_calibrations_that_are_no_rotations(tmp_path: Path) -> None:
    statistics = measured(2, 64)
    kvfold.Calibration({0: statistics}).save(tmp_path / "right")
    tensors = load_file(tmp_path / "right")
    loaded = kvfold.Calibration.load(tmp_path / "right").layers[0]
    for name in ROTATIONS:
        assert torch.equal(getattr(loaded, name), getattr(statistics, name))
        full = f"layers.0.{name}"
        for wrong in (tensors[full] * 1.1, tensors[full][:1], tensors[full][:, :32], tensors[full] * torch.nan):
            save_file(tensors | {full: wrong.contiguous()}, tmp_path / "wrong", metadata={"kind": KIND})
            with pytest.raises(ValueError, match="damaged; kvfold calibrate makes a new one"):
                kvfold.Calibration.load(tmp_path / "wrong")
    with pytest.raises(ValueError, match="layer 3: key_rotation holds a matrix that is no rotation"):
        kvfold.Calibration({3: KeyStatistics(torch.ones(1, 8), torch.ones(1, 8), key_rotation=torch.ones(1, 8, 8))})


def test_only_formats_that_use_rotations_hold_them(small: Small, small_ids: Tensor) -> None:
    model = small[0]
    calibration = kvfold.calibrate(model, [small_ids[:, :512]])
    for format, held in (("kvfold-4", 0), ("turboquant-4", 0), ("oscar-4:turboquant-4", 1), ("oscar-4", 2)):
        cache = kvfold.FoldedCache(model.config, format, calibration=calibration)
        statistics = cache.layers[0].folded.config.statistics
        assert sum(getattr(statistics, name) is not None for name in ROTATIONS) == held
    statistics = calibration.layers[0]
    rows = LayerCache(LayerConfig("oscar-4", statistics=statistics))
    rows.append(*torch.randn(2, 1, 3, 200, 64))
    assert rows.groups[0].rows.formats.keys.fit_tables()["rotation"] is statistics.key_rotation  # no copy


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_heads_have_rotations_of_their_own(backend: str) -> None:
    """The cache of two heads reads what caches of one head each do."""
    both = measured(2, 64)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 300, 64, generator=generator) for heads in (6, 2, 2))
    whole = LayerCache(LayerConfig("oscar-3", statistics=both)).append(key, value)
    out = attend(query, whole, scaling=0.2, backend=backend)
    for head in range(2):
        some = slice(head, head + 1)
        alone = LayerCache(LayerConfig("oscar-3", statistics=both.of_heads(some)))
        new = alone.append(key[:, some], value[:, some])
        own = attend(query[:, 3 * head : 3 * head + 3], new, scaling=0.2, backend=backend)
        torch.testing.assert_close(out[:, 3 * head : 3 * head + 3], own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("format", ["oscar-4", "kvfold-3:oscar-2"])
def test_padded_batches_read_as_their_rows_alone(format: str) -> None:
    model = tiny_model("llama")
    kvfold.attach(model)
    ids = torch.randint(0, 256, (2, 300), generator=torch.Generator().manual_seed(0))
    calibration = kvfold.calibrate(model, [ids[:1]])
    mask = torch.ones(2, 300, dtype=torch.long)
    mask[1, :100] = 0
    together = kvfold.FoldedCache(model.config, format, calibration=calibration)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=together).logits
    alone = kvfold.FoldedCache(model.config, format, calibration=calibration)
    expected = model(ids[1:, 100:], past_key_values=alone).logits
    assert alone.layers[0].folded.groups[0].rows.keys.count == 2
    torch.testing.assert_close(out[1:, 100:], expected, atol=1e-6, rtol=0)


def test_a_calibrated_rotation_loses_less(small: Small, small_ids: Tensor) -> None:
    """On text other than that measured: less than a rotation that knows nothing of the model, with as many bits."""
    model = small[0]
    calibration = kvfold.calibrate(model, [small_ids[:, 6_000:7_024]])
    caches = {
        name: kvfold.FoldedCache(model.config, name, calibration=calibration)
        for name in ("oscar-4", "oscar-2", "turboquant-4", "turboquant-2")
    }
    meters = {name: FidelityMeter() for name in ("dense", *caches)}
    read_in_lockstep(model, small_ids[:, :700], DynamicCache(config=model.config), caches, meters)
    kl = {name: meter.result().kl_mean for name, meter in meters.items()}
    assert kl["oscar-4"] < 0.5 * kl["turboquant-4"]
    assert kl["oscar-2"] < 0.5 * kl["turboquant-2"]
    assert 0 < kl["oscar-4"] < 0.2 * kl["oscar-2"]
