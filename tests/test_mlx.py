"""The same cache on MLX: equal bytes, equal answers, mlx-lm's own functions, real models."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import measured
from small_model import LAYERS
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

if find_spec("mlx_lm") is None:  # what is there and does not import is no reason to skip
    pytest.skip("the extra mlx is not installed", allow_module_level=True)
from kvfold.kernels.mlx import mx  # isort: split

import mlx.nn
import mlx_lm
from commands import run_kvfold
from conftest import tiny_model
from metal_on_cpu import metal_kernel
from mlx.utils import tree_flatten
from mlx_lm.models import base, llama
from mlx_lm.models import cache as theirs

import kvfold
import kvfold.integrations.mlx  # before MLX: torch's BLAS
from kvfold.attention import attend as attend_in_torch
from kvfold.attention.mlx import Reader, attend, why_plain
from kvfold.cache.batch import Appended
from kvfold.cache.budgets import FEWEST, PromptBudgets
from kvfold.cache.calibration import Loss
from kvfold.cache.config import LayerConfig
from kvfold.cache.files.layer import layer_to_saved
from kvfold.cache.layer import LayerCache
from kvfold.cache.mlx import ArrayLayer, as_tensors, held_array_bytes
from kvfold.evaluate import evaluate_formats
from kvfold.evaluate.sweep import Sweep
from kvfold.formats import FORMATS, PRESETS, get_formats
from kvfold.integrations.mlx import attach, cache_report, detach, load_mlx_model, make_prompt_cache
from kvfold.integrations.mlx.models import config_as_before
from kvfold.integrations.mlx.runtime import MlxRuntime
from kvfold.kernels.mlx.arrays import to_mlx, to_torch
from kvfold.kernels.mlx.codes import unpack_levels
from kvfold.kernels.mlx.transforms import apply_to_query, invert
from kvfold.quant import packing
from kvfold.quant.transforms import ChannelOrder, HeadMatrices, Matrix, OrderedMatrix, orthogonal


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _transposed(x: Tensor) -> mx.array:
    """(batch, heads, tokens, dim) as models make it: a view of (batch, tokens, heads, dim)."""
    return to_mlx(x.transpose(1, 2).contiguous()).transpose(0, 2, 1, 3)


# Arrays, codes, transforms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int16])
def test_arrays_keep_their_bits(dtype: torch.dtype) -> None:
    x = (_random(2, 3, 4) * 50).to(dtype)
    array = to_mlx(x)
    assert torch.equal(to_torch(array), x)
    for axes in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        assert torch.equal(to_torch(array.transpose(*axes)), x.permute(*axes))
    assert torch.equal(to_torch(array[:, 1:, ::2]), x[:, 1:, ::2])
    assert to_torch(array[:, :0]).shape == (2, 0, 4)


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize("bits", [(4, 4, 4, 4), (6, 4, 3, 3), (1, 2, 3, 4), (7, 8, 5, 1), (2, 2, 2), (5,)])
def test_levels_are_those_of_torch(bits: tuple[int, ...], lanes: packing.Lanes) -> None:
    dim, generator = 16 * len(bits) - 8, torch.Generator().manual_seed(1)
    codes = [torch.randint(0, 2**b, (2, 3, 64, 16), generator=generator, dtype=torch.uint8) for b in bits]
    packed = packing.pack(torch.cat(codes, -1)[..., :dim], bits, lanes)
    lut = _random(len(bits), 2 ** max(bits))
    lut[1:2] = lut[:1]  # groups of equal bits may share levels, and may not
    expected = packing.unpack_levels(packed, lut, 64, dim, bits, lanes)
    rows = list(zip(bits, lut.tolist(), strict=True))
    kinds = [rows.index(row) for row in rows]
    assert torch.equal(to_torch(unpack_levels(to_mlx(packed), lut, kinds, 64, dim, bits, lanes)), expected)


@pytest.mark.parametrize("kind", ["haar", "general", "order", "order of each row", "ordered matrix", "head matrices"])
def test_transforms_are_those_of_torch(kind: str) -> None:
    generator = torch.Generator().manual_seed(2)

    def order(*shape: int) -> ChannelOrder:
        return ChannelOrder(torch.rand(*shape, 32, generator=generator).argsort(-1).to(torch.int16))

    general = torch.eye(32) + 0.1 * _random(32, 32)
    transform = {
        "haar": orthogonal("haar", 32),
        "general": Matrix(general, torch.linalg.inv(general)),
        "order": order(),
        "order of each row": order(2, 3),
        "ordered matrix": OrderedMatrix(order(3), orthogonal("haar", 32).matrix),
        "head matrices": HeadMatrices(torch.linalg.qr(_random(3, 32, 32))[0]),
    }[kind]
    x = _random(2, 3, 4, 5, 32)
    torch.testing.assert_close(to_torch(apply_to_query(transform, to_mlx(x))), transform.apply_to_query(x))
    torch.testing.assert_close(to_torch(invert(transform, to_mlx(x))), transform.invert(x))


# A layer beside torch's


class Pair:
    """One layer in torch and one in MLX that get the same tokens."""

    def __init__(
        self, format: str, dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        if get_formats(format, dim, dim).needs_calibration:
            options["statistics"] = measured(2, dim)
        self.torch, self.mlx = LayerCache(LayerConfig(format, **options)), ArrayLayer(LayerConfig(format, **options))
        self.batch, self.dim, self.dtype, self.generator = batch, dim, dtype, torch.Generator().manual_seed(0)

    def _vectors(self, heads: int, n: int) -> Tensor:
        return torch.randn(self.batch, heads, n, self.dim, generator=self.generator).to(self.dtype)

    def append(self, n: int) -> tuple[Tensor, Appended, Appended]:
        """Add `n` tokens to both; their queries, and what was appended."""
        key, value, query = 2 * self._vectors(2, n) + 1, self._vectors(2, n), self._vectors(6, n)
        return query, self.torch.append(key, value), self.mlx.append(_transposed(key), _transposed(value))

    def read(self, n: int, **options: Any) -> float:
        """Add `n` tokens; how far attention in MLX is from the reference, beside its largest output."""
        query, ours, theirs_ = self.append(n)
        arrays = {name: to_mlx(x) for name, x in options.items()}
        expected = attend_in_torch(query, ours, scaling=self.dim**-0.5, backend="reference", **options).float()
        got = to_torch(attend(_transposed(query), theirs_, scaling=self.dim**-0.5, **arrays)).float()
        return float((got - expected).abs().max() / expected.abs().max())

    def check_bytes(self) -> None:
        """All that both hold is equal, bit for bit."""
        ours, theirs_ = layer_to_saved(self.torch), layer_to_saved(self.mlx)
        assert ours.data == theirs_.data
        assert ours.tensors.keys() == theirs_.tensors.keys()
        for name, tensor in ours.tensors.items():
            other = theirs_.tensors[name]
            other = to_torch(other) if isinstance(other, mx.array) else other
            if name.endswith("query_energy"):  # sums of squares, in an order of their own
                torch.testing.assert_close(other, tensor)
            else:
                assert torch.equal(other, tensor), name


# tq and polar4 fold 128 or more channels, q4_0 and so on all; amx3 and tbqx3 turn RoPE back
AT_128 = ("tq3", "tq4", "polar4", "polar4-u8", "tbqx3-values")
NAMES = (
    *PRESETS, *(name for name in FORMATS if name not in ("amx3", "tbqx3")), "turboquant-4+qjl", "kvfold-4:turboquant-3",
    "turboquant-3+sign", "oscar-2", "kvfold-3@32", "tbq3", "tbq4", "tbqp3", "tbqp4", "tq3", "tq4", "polar4",
    "polar4-u8", "q8_0", "q4_0", "f16", "affine-4g32", "uniform-4", "turboquant-2.5", "float16:kvfold-2",
    "kvfold-5", "centred-4", "bold", "safe",
)  # fmt: skip


@pytest.mark.parametrize("format", dict.fromkeys(NAMES))
def test_pages_and_attention_are_those_of_torch(format: str) -> None:
    """Every format, prompts in chunks and single tokens, keys and values as transposed views."""
    pair = Pair(format, 128 if format in AT_128 else 64)
    for n in (7, 100, 200, 1, 1, 40, 1):
        assert pair.read(n) < 1e-5
    pair.check_bytes()
    assert pair.torch.groups[0].rows.keys.count >= 3
    own = held_array_bytes(pair.mlx.own())
    assert own <= 1.05 * sum(x.nbytes for x in tree_flatten(pair.mlx.to_arrays()[1], destination={}).values())


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_and_batches(format: str, dtype: torch.dtype) -> None:
    pair = Pair(format, batch=2, dtype=dtype)
    for n in (300, 1, 30):
        assert pair.read(n) < 0.01  # the output is rounded to 16 bits
    pair.check_bytes()


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4"])
def test_masks_and_sinks(format: str) -> None:
    pair = Pair(format, batch=2)
    assert pair.read(290) < 1e-5
    seen = torch.rand(2, 1, 5, 295, generator=torch.Generator().manual_seed(3)) > 0.3
    seen[0, :, 1] = False  # a query that sees nothing
    assert pair.read(5, mask=seen) < 1e-5
    added = 3 * _random(1, 6, 4, 299)
    added[..., 100:200] = -torch.inf
    assert pair.read(4, mask=added) < 1e-5
    assert pair.read(70, sink_logits=_random(6)) < 1e-5


@pytest.mark.parametrize("format", ["kvfold-3", "oscar-4"])
def test_calibrated(format: str) -> None:
    """Nothing waits for a prompt then, and what is saved goes on."""
    pair = Pair(format, statistics=measured(2, 64))
    for n in (120, 1, 40):
        assert pair.read(n) < 1e-5
    pair.check_bytes()
    assert pair.mlx.rows.keys.count == 1
    data, arrays = pair.mlx.to_arrays()
    pair.mlx = ArrayLayer.from_arrays(json.loads(json.dumps(data)), arrays, 0)
    for n in (1, 80):
        assert pair.read(n) < 1e-5
    pair.check_bytes()


def test_raw_reads_of_a_transposed_array_would_be_found() -> None:
    """sanctum-mlx's bug: what lies in the buffer of a view is in another order, and pages of it would differ."""
    key = _random(1, 2, 320, 64)
    raw = key.transpose(1, 2).contiguous().view(1, 2, 320, 64)
    ours, wrong = LayerCache(LayerConfig("kvfold-4")), LayerCache(LayerConfig("kvfold-4"))
    for layer, x in ((ours, key), (wrong, raw)):
        layer.observe(None, layer.append(x, x))
    layer = ArrayLayer(LayerConfig("kvfold-4"))
    new = layer.append(_transposed(key), _transposed(key))
    attend(mx.ones((1, 2, 320, 64)), new, scaling=0.1)
    code = to_torch(layer.rows.keys.pages().code)
    assert torch.equal(code, ours.groups[0].rows.keys.pages().code)
    assert not torch.equal(code, wrong.groups[0].rows.keys.pages().code)


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4", "kvfold-3:turboquant-3"])
@pytest.mark.parametrize("keep", [330, 390, 200, 270, 10, 0])
def test_trimming_is_that_of_torch(format: str, keep: int) -> None:
    pair = Pair(format)
    for n in (300, 100, 1):
        pair.read(n)
    assert pair.torch.crop(keep) == pair.mlx.crop(keep)
    for n in (1, 60, 80):
        assert pair.read(n) < 1e-4  # what was reopened is rounded
    if keep != 200:  # there a page was folded again from its rounded values, whose last digits are each library's own
        pair.check_bytes()


def test_the_dense_tail_is_let_go() -> None:
    """Memory that MLX has really taken falls with the tail, and is what the cache says that it holds."""
    layer, key = ArrayLayer(LayerConfig("kvfold-4")), mx.random.normal((1, 4, 512, 128)).astype(mx.float16)
    mx.eval(key)
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(8):
        new = layer.append(key, key)
        mx.eval(attend(key, new, scaling=0.1))
        del new
    mx.eval(list(layer.to_arrays()[1].values()))
    mx.synchronize()
    taken, held = mx.get_active_memory() - before, held_array_bytes(layer.own())
    assert held < 8 * key.nbytes * 2 * 0.32  # 16 bits a value would be all of it
    assert abs(taken - held) < 0.05 * held  # MLX rounds what it takes up to pages of memory


@pytest.mark.parametrize("chunks", [[200], [100] + [1] * 100])
def test_nothing_waits_with_the_first_tokens(chunks: list[int]) -> None:
    """Before the fit, while queries are kept: what MLX has taken is what the cache says that it holds."""
    layer = ArrayLayer(LayerConfig("kvfold-3", budgets=PromptBudgets({0: "kvfold-3"})))
    mx.clear_cache()
    before = mx.get_active_memory()
    for n in chunks:
        key, query = (mx.random.normal((1, heads, n, 128)).astype(mx.float16) for heads in (4, 32))
        mx.eval(attend(query, layer.append(key, key), scaling=0.1))
        del key, query
    mx.synchronize()
    taken, held = mx.get_active_memory() - before, held_array_bytes(layer.own())
    assert abs(taken - held) < 0.05 * held


def _scratch(tokens: int) -> int:
    """Bytes beyond the cache that a decoding step takes at its height, 2 heads of 128."""
    layer, key = ArrayLayer(LayerConfig("kvfold-4")), mx.random.normal((1, 2, tokens, 128)).astype(mx.float16)
    layer.observe(key, layer.append(key, key))
    one = mx.random.normal((1, 2, 1, 128)).astype(mx.float16)
    mx.eval(one, list(layer.to_arrays()[1].values()))
    del key
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attend(one, layer.append(one, one), scaling=0.1))
    return mx.get_peak_memory() - before


def test_no_dense_copy() -> None:
    """What decoding takes beside the cache is what some pages take, however long the context is."""
    short, long = _scratch(4096), _scratch(32768)
    assert long < short + 0.02 * (2 * 2 * 32768 * 128 * 2)
    assert long < 0.2 * (2 * 2 * 32768 * 128 * 2)


def test_trimming_twice() -> None:
    """First onto the start of a page, where no token is left dense."""
    pair = Pair("kvfold-4")
    pair.read(400)
    for keep in (16 + 3 * 64, 150):
        assert pair.torch.crop(keep) == pair.mlx.crop(keep)
    assert pair.read(20) < 1e-4


# Errors


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
@pytest.mark.parametrize("side", ["key", "query"])
def test_nan_shows_until_its_page_folds(bad: float, side: str) -> None:
    """Nobody has looked at tokens of the tail; what attends to a bad one must say NaN, and not something plausible."""
    layer, key, query = ArrayLayer(LayerConfig("kvfold-4")), _random(1, 2, 40, 64), _random(1, 2, 40, 64)
    {"key": key, "query": query}[side][0, 1, 30, 5] = bad  # 1e5 is infinite in float16, and no trouble in a query
    new = layer.append(to_mlx(key), to_mlx(_random(1, 2, 40, 64, seed=2)))
    nan = to_torch(attend(to_mlx(query), new, scaling=0.1)).isnan().all(-1)[0]
    expected = torch.zeros(2, 40, dtype=torch.bool)
    if side == "key":
        expected[1, 30:] = True
    elif bad != 1e5:
        expected[1, 30] = True
    assert torch.equal(nan, expected)


@pytest.mark.contract
def test_layers_have_bits_of_their_own(tmp_path: Path, random_ids: Callable[..., Tensor]) -> None:
    """By a calibration with losses, as in torch."""
    model, network = _tiny("llama", tmp_path)
    statistics = kvfold.calibrate(model, [random_ids(1, 300)])
    calibration = replace(statistics, losses={i: (Loss(4.0**i, 128), Loss(1.0, 128)) for i in range(4)})
    cache = make_prompt_cache(network, "kvfold-3", calibration=calibration)
    ours = kvfold.FoldedCache(model.config, "kvfold-3", calibration=calibration)
    ids = random_ids(1, 200)
    mx.eval(network(mx.array(ids.numpy()), cache=cache))
    model(ids, past_key_values=ours)
    formats = [layer.format for layer in cache_report(cache).layers]
    assert formats == [layer.format for layer in ours.report().layers]
    assert len(set(formats)) > 1


def test_a_calibration_of_other_weights_is_refused(tmp_path: Path, random_ids: Callable[..., Tensor]) -> None:
    """One of torch's knows its model in MLX, quantised, too."""
    model, network = _tiny("llama", tmp_path)
    calibration = kvfold.calibrate(model, [random_ids(1, 300)])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.uniform_(0.5, 2)
    other = kvfold.calibrate(model, [random_ids(1, 300)])
    for quantised in (False, True):
        if quantised:
            mlx.nn.quantize(network, group_size=32, bits=4)
        make_prompt_cache(network, "kvfold-3", calibration=calibration)
        with pytest.raises(ValueError, match=r"other weights, 0.input_layernorm.weight among them: calibrate this"):
            make_prompt_cache(network, "kvfold-3", calibration=other)


@pytest.mark.parametrize("tokens", [100, 300])
def test_a_failed_pass_breaks_the_whole_cache(tokens: int, tmp_path: Path, random_ids: Callable[..., Tensor]) -> None:
    """Whichever part of it failed, and whatever is tried next."""
    _, network = _tiny("llama", tmp_path)
    ids, cache = mx.array(random_ids(1, 400).numpy()), make_prompt_cache(network, "kvfold-4")
    mx.eval(network(ids[:, :tokens], cache=cache))
    weight = network.layers[2].self_attn.q_proj.weight if tokens == 100 else network.layers[2].self_attn.k_proj.weight
    weight[0] = mx.nan
    with pytest.raises(ValueError, match=r"layer 2: .*NaN"):
        network(ids[:, tokens:], cache=cache)
    for use in (
        lambda: network(ids[:, :1], cache=cache),
        lambda: theirs.trim_prompt_cache(cache, 300),
        lambda: theirs.save_prompt_cache(str(tmp_path / "x"), cache),
    ):
        with pytest.raises(ValueError, match=r"lost tokens in an earlier pass, make a new one: layer 2"):
            use()


def test_no_mask_is_no_mask(tmp_path: Path) -> None:
    """To mlx-lm None means that all see all, also of many tokens."""
    _, network = _tiny("llama", tmp_path)
    keys, queries = mx.random.normal((1, 2, 70, 64)), mx.random.normal((1, 6, 70, 64))
    keys = keys.astype(mx.float16).astype(mx.float32)  # as a folded cache keeps them
    folded, dense = make_prompt_cache(network, "float16")[0], theirs.KVCache()
    one, other = (
        base.scaled_dot_product_attention(queries, *cache.update_and_fetch(keys, keys), cache, 0.1, None)
        for cache in (folded, dense)
    )
    assert mx.allclose(one, other, atol=1e-3)


def test_rows_that_no_cache_has_are_refused() -> None:
    layer = ArrayLayer(LayerConfig("turboquant-4"))
    layer.append(mx.ones((2, 2, 5, 64)), mx.ones((2, 2, 5, 64)))
    for rows in ([1, 0], [0]):
        data, arrays = layer.to_arrays()
        data["group0"]["batch_rows"] = rows
        if len(rows) == 1:
            arrays = {name: mx.contiguous(x[:1]) for name, x in arrays.items()}
        with pytest.raises(ValueError, match="rows in another order"):
            ArrayLayer.from_arrays(data, arrays, 0)


def test_what_does_not_fit_is_refused() -> None:
    layer, x = ArrayLayer(LayerConfig("kvfold-4", index=3)), mx.ones((1, 2, 4, 64))
    new = layer.append(x, x)
    for key, value, message in (
        (x[0], x[0], "must both have the shape"),
        (x, x[:, :, :2], "must both have the shape"),
        (x[:, :, :0], x[:, :, :0], "at least one token"),
        (mx.ones((1, 2, 1, 80)), mx.ones((1, 2, 1, 80)), "layer 3: key has 1 rows of 2 heads of 80.*another model"),
        (x.astype(mx.bfloat16), x.astype(mx.bfloat16), "keeps its dense tokens as torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.append(key, value)
    with pytest.raises(TypeError, match="both must be floating point"):
        layer.append(x.astype(mx.int32), x.astype(mx.int32))
    with pytest.raises(ValueError, match="query has shape"):
        attend(mx.ones((1, 3, 4, 64)), new, scaling=1.0)
    with pytest.raises(ValueError, match="padding"):
        layer.append(x, x, [1])


@pytest.mark.parametrize("where", [3, 40])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_an_error_when_its_page_folds(where: int, bad: float) -> None:
    layer = ArrayLayer(LayerConfig("kvfold-4", index=5))
    x = _random(1, 2, 300, 64)
    x[0, 1, where, 7] = bad
    with pytest.raises(ValueError, match=r"layer 5: .*(NaN|infinit|beyond)"):
        layer.observe(to_mlx(x), layer.append(to_mlx(x), to_mlx(x)))


# mlx-lm's models


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2 in mlx-lm, float32, and mlx-lm's tokenizer."""
    return load_mlx_model("smollm2")


def _tiny(name: str, folder: Path) -> tuple[PreTrainedModel, Any]:
    """A tiny random model in torch and in mlx-lm, float32 both, by way of its folder.

    Keys of every other layer cost little, as attention is flat there. So layers get bits of their own, where enough of
    them fold.
    """
    model = tiny_model(name, **({} if name == "gemma3" else {"num_hidden_layers": FEWEST})).float()
    for layer in model.model.layers[1::2]:
        layer.self_attn.q_proj.weight.mul_(0.1)
    kvfold.attach(model)
    model.save_pretrained(folder)
    from mlx_lm.utils import load_model

    config = json.loads((folder / "config.json").read_text())
    return model, load_model(folder, model_config=config_as_before(config))[0]


def _greedy(model: Any, ids: Tensor, cache: list[Any] | None, tokens: int) -> list[int]:
    steps = mlx_lm.generate.__globals__["generate_step"](
        mx.array(ids[0].numpy()), model, max_tokens=tokens, prompt_cache=cache
    )
    return [token for token, _ in steps]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "format"),
    [("llama", "kvfold-4"), ("llama", "turboquant-4"), ("llama", "kvfold-3"), ("qwen3", "kvfold-3"),
     ("gemma3", "kvfold-4")],
)  # fmt: skip
def test_tiny_models_say_what_they_say_in_torch(
    name: str, format: str, tmp_path: Path, random_ids: Callable[..., Tensor]
) -> None:
    """Greedy tokens of mlx-lm's generate_step are those of torch's generate, and logits agree."""
    model, network = _tiny(name, tmp_path)
    kvfold.detach(model)
    kvfold.attach(model, "reference")
    ids = random_ids(1, 400)
    exact = {"dense_dtype": torch.float32}  # as mlx-lm holds windows
    ours, cache = kvfold.FoldedCache(model.config, format, **exact), make_prompt_cache(network, format, **exact)
    folded = [isinstance(layer, kvfold.integrations.mlx.FoldedKVCache) for layer in cache]
    assert folded == [name != "gemma3" or bool(i % 2) for i in range(len(cache))]
    expected = model(ids, past_key_values=ours).logits
    got = to_torch(network(mx.array(ids.numpy()), cache=cache))
    bare = to_torch(network(mx.array(ids.numpy()), cache=theirs.make_prompt_cache(network)))
    # The cache matters, and is the same. In float32 some key lies on the boundary of two codes and falls to either.
    assert (bare - expected).abs().mean() > 10 * (got - expected).abs().mean()
    formats, own = ([row.format for row in report.layers] for report in (ours.report(), cache_report(cache)))
    assert own == formats
    own_bits = format != "turboquant-4" and name != "gemma3"  # two layers are too few
    assert (len({*formats} - {"dense"}) > 1) == own_bits
    said = model.generate(
        ids, past_key_values=kvfold.FoldedCache(model.config, format), max_new_tokens=24, do_sample=False,
        attention_mask=torch.ones_like(ids), output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    own = _greedy(network, ids, make_prompt_cache(network, format), 24)
    for token, other, scores in zip(said.sequences[0, 400:].tolist(), own, said.scores, strict=True):
        if token != other:  # from here on they say other things: both must have been all but equally good
            assert scores[0, token] - scores[0, other] < 0.05 * scores[0].std()
            break
    kvfold.detach(model)


@pytest.mark.contract
def test_smollm2_says_what_it_says_in_torch(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], smollm2: tuple[Any, Any], counting: Tensor
) -> None:
    """Through mlx-lm's own generate: the text, the memory, and one page of every layer."""
    model, tokenizer = demo
    network, wrapped = smollm2
    assert network.args.rope_theta == 100_000
    ids = counting
    ours = kvfold.FoldedCache(model.config, "kvfold-4")
    said = model.generate(
        ids, past_key_values=ours, max_new_tokens=32, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    cache = make_prompt_cache(network, "kvfold-4")
    text = mlx_lm.generate(network, wrapped, ids[0].tolist(), max_tokens=32, prompt_cache=cache)
    assert (
        text == tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).lstrip()
    )  # as mlx-lm's detokenizer has it
    assert cache[0].offset == len(said[0])  # mlx-lm reads one token ahead
    report, held = cache_report(cache), ours.report()
    assert report.held_bytes == pytest.approx(held.held_bytes, rel=0.03)  # its tail has no spare room
    unlike = []
    for layer, own in zip(ours.layers, cache, strict=True):
        first, second = layer.folded.groups[0].rows.keys, own.layer.rows.keys
        assert first.count == second.count > 3
        one, two = (
            form.unfold(replace(pages, centre=None, channel_scale=None))  # the level of each key's channel
            for form, pages in ((first.form, first.pages(0, 1)), (second.form, as_tensors(second.pages(0, 1))))
        )
        unlike.append((one != two).float().mean().item())
    # Keys themselves differ in their last digits; so may the order of two channels, and with it the bits of both.
    assert sorted(unlike)[15] < 0.01
    assert max(unlike) < 0.05


def test_held_bytes_at_4096_tokens(small_folder: Path) -> None:
    """SmolLM2's shape: every byte counted, and MLX has taken no more."""
    network, _ = load_mlx_model(str(small_folder))
    mx.clear_cache()
    before = mx.get_active_memory()
    cache = make_prompt_cache(network, "kvfold-4")
    x = mx.random.normal((1, 3, 4096, 64))
    for layer in cache:
        new = layer.update_and_fetch(x, x)[0].appended
        layer.layer.observe(mx.ones((1, 9, 4096, 64)), new)
        mx.eval(layer.layer.to_arrays()[1])
    del new, layer
    taken, report = mx.get_active_memory() - before - x.nbytes, cache_report(cache)
    assert report.values == LAYERS * 2 * 3 * 64 * 4096
    assert report.bits_per_value <= 5
    assert taken <= 1.02 * report.held_bytes


def test_room_for_more_tokens_is_not_taken_for_bits(tmp_path: Path) -> None:
    """mlx-lm reserves 256 tokens at a time for layers with windows, of which a short text fills few."""
    _, network = _tiny("gemma3", tmp_path)
    cache = make_prompt_cache(network, "kvfold-4")
    for _ in range(24):
        mx.eval(network(mx.array([[5]]), cache=cache))
    report = cache_report(cache)
    assert report.held_bytes >= sum(layer.nbytes for layer in cache)
    windows = [row for row in report.layers if row.format == "dense"]
    assert [8 * row.held_bytes / row.values for row in windows] == [32, 32]
    assert report.dense_share == 1  # so bits a value are not told
    assert report.bits_per_value < 100


def test_evaluation_agrees_with_torch(
    small: tuple[PreTrainedModel, PreTrainedTokenizerBase], small_folder: Path, small_ids: Tensor
) -> None:
    runtime, _ = MlxRuntime.load(str(small_folder), torch.float32)
    runtime.attach()
    passages = [small_ids[:, 8_000:8_640]]
    (ours,) = evaluate_formats(small[0], passages, ["kvfold-3"])
    (row,) = evaluate_formats(runtime, passages, ["kvfold-3"])
    assert row.ppl_dense == pytest.approx(ours.ppl_dense, rel=1e-4)
    assert row.ppl == pytest.approx(ours.ppl, rel=0.01)
    assert row.kl_mean == pytest.approx(ours.kl_mean, rel=0.1)  # docs/mlx.md has it of 4,096 tokens
    assert row.key_error == pytest.approx(ours.key_error, rel=0.01)
    assert row.value_error == pytest.approx(ours.value_error, rel=0.01)
    assert row.to_json()["versions"].keys() >= {"mlx", "mlx-lm", "kvfold"}


def test_ablation_passes_through_mlx(small_folder: Path, fixed_text: str, tmp_path: Path) -> None:
    runtime, tokenizer = MlxRuntime.load(str(small_folder), torch.float32)
    passage = tokenizer(fixed_text, return_tensors="pt").input_ids[:, :400]
    job = Sweep(runtime, [passage], tmp_path / "sweep.jsonl", {"runtime": "mlx"}, family="turboquant")
    rows = job.ablate()
    assert [row["stage"].split("/")[1] for row in rows] == [
        "identity", "bridge", "keys", "values", "residual off", "residual on",
    ]  # fmt: skip
    assert {row["verdict"] for row in rows} == {"pass"}
    assert rows[0]["kl_mean"] == 0
    assert rows[1]["bits_per_value"] > 15


# mlx-lm's functions


@pytest.mark.contract
@pytest.mark.parametrize("format", ["kvfold-4", "kvfold-3", "turboquant-3"])
@pytest.mark.parametrize("tokens", [100, 400])
def test_saved_and_loaded_by_mlx_lm(
    format: str, tokens: int, tmp_path: Path, random_ids: Callable[..., Tensor]
) -> None:
    """A loaded cache goes on bit for bit as the saved one does, before its format is fitted and after."""
    _, network = _tiny("llama", tmp_path / "model")
    ids, path = mx.array(random_ids(1, tokens + 200).numpy()), str(tmp_path / "cache.safetensors")
    cache = make_prompt_cache(network, format)
    mx.eval(network(ids[:, :tokens], cache=cache))
    theirs.save_prompt_cache(path, cache, {"about": "a test"})
    loaded, about = theirs.load_prompt_cache(path, return_metadata=True)
    assert about == {"about": "a test"}
    assert [layer.offset for layer in loaded] == [tokens] * FEWEST
    assert cache_report(loaded).held_bytes == pytest.approx(cache_report(cache).held_bytes, rel=0.1)
    one, other = (network(ids[:, tokens:], cache=each) for each in (cache, loaded))
    assert mx.array_equal(one, other)
    formats = [row.format for row in cache_report(cache).layers]
    assert [row.format for row in cache_report(loaded).layers] == formats
    assert (len({*formats}) > 1) == (format != "turboquant-3")  # layers have bits of their own
    arrays, meta = mx.load(path, return_metadata=True)
    for name, damage in (
        (
            next(name for name in arrays if name.endswith(("tail.keys", "keys.scale"))),
            lambda x: x[..., :-1],
        ),
        (next(name for name in arrays if name.endswith("about")), lambda x: x[:-40]),
    ):
        mx.save_safetensors(
            str(tmp_path / "bad.safetensors"), arrays | {name: mx.contiguous(damage(arrays[name]))}, meta
        )
        with pytest.raises(ValueError, match="damaged"):
            theirs.load_prompt_cache(str(tmp_path / "bad.safetensors"))


def test_an_empty_cache_is_saved(tmp_path: Path) -> None:
    _, network = _tiny("llama", tmp_path / "model")
    theirs.save_prompt_cache(str(tmp_path / "cache"), make_prompt_cache(network, "kvfold-4"))
    loaded = theirs.load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert [layer.empty() for layer in loaded] == [True] * FEWEST


@pytest.mark.contract
def test_speculative_decoding_changes_nothing(tmp_path: Path, random_ids: Callable[..., Tensor]) -> None:
    """mlx-lm trims what a draft got wrong: exactly, and the tokens are those of plain decoding."""
    _, network = _tiny("llama", tmp_path / "a")
    draft = _tiny("qwen3", tmp_path / "b")[1]
    ids = random_ids(1, 330)
    plain = _greedy(network, ids, make_prompt_cache(network, "kvfold-4"), 40)
    steps = mlx_lm.generate.__globals__["speculative_generate_step"](
        mx.array(ids[0].numpy()), network, draft, max_tokens=40, num_draft_tokens=3,
        prompt_cache=make_prompt_cache(network, "kvfold-4") + make_prompt_cache(draft, "kvfold-4"),
    )  # fmt: skip
    assert [token for token, _, _ in steps] == plain


def test_trim_says_when_it_leaves_a_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, network = _tiny("llama", tmp_path)
    cache = make_prompt_cache(network, "kvfold-4")
    mx.eval(network(mx.zeros((1, 400), dtype=mx.int32), cache=cache))
    assert theirs.can_trim_prompt_cache(cache)
    with caplog.at_level(logging.WARNING, "kvfold"):
        assert theirs.trim_prompt_cache(cache, 10) == 10
        assert not caplog.records
        assert theirs.trim_prompt_cache(cache, 200) == 200
    assert len(caplog.records) == 1
    assert "go on from their folded values" in caplog.text
    assert theirs.trim_prompt_cache(cache, 1000) == 190
    assert cache[0].empty()
    with pytest.raises(ValueError, match="n = -5"):
        cache[0].trim(-5)


def test_other_caches_are_read_as_before(tmp_path: Path, random_ids: Callable[..., Tensor]) -> None:
    _, network = _tiny("llama", tmp_path)
    ids = mx.array(random_ids(1, 50).numpy())
    detach()
    before_attaching = llama.scaled_dot_product_attention
    before = network(ids, cache=theirs.make_prompt_cache(network))
    attach()
    attach()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention is not before_attaching
    assert mx.array_equal(network(ids, cache=theirs.make_prompt_cache(network)), before)
    quantised = [layer.to_quantized() for layer in theirs.make_prompt_cache(network)]
    assert network(ids, cache=quantised).shape == before.shape
    detach()
    assert llama.scaled_dot_product_attention is before_attaching


@pytest.mark.contract
def test_misuse(tmp_path: Path, random_ids: Callable[..., Tensor], caplog: pytest.LogCaptureFixture) -> None:
    _, network = _tiny("llama", tmp_path)
    ids = random_ids(1, 20)
    for options, message in (
        ({"format": "nope"}, "'nope' is not known"),
        ({"format": "kvfold-4", "policy": kvfold.Policy("kvfold-4")}, "give one of them"),
        ({"format": "polar4"}, "polar4 rows are of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            make_prompt_cache(network, **options)
    with pytest.raises(ValueError, match="kv_bits = 4: this cache is folded already"):
        list(mlx_lm.generate.__globals__["generate_step"](
            mx.array(ids[0].numpy()), network, max_tokens=3, prompt_cache=make_prompt_cache(network), kv_bits=4,
            quantized_kv_start=0,
        ))  # fmt: skip
    cache = make_prompt_cache(network, "turboquant-4")
    bad = mx.full((1, 2, 1, 64), mx.nan)
    with pytest.raises(ValueError, match=r"layer 1: .*NaN"):
        cache[1].update_and_fetch(bad, bad)
    with pytest.raises(ValueError, match=r"lost tokens in an earlier pass, make a new one: layer 1"):
        network(mx.array(ids.numpy()), cache=cache)
    keys, _ = make_prompt_cache(network)[0].update_and_fetch(bad, bad)
    assert keys.shape == (1, 2, 1, 64)
    for use in (lambda: keys.swapaxes(1, 2), lambda: keys[0], lambda: mx.sum(keys)):
        with pytest.raises(TypeError):
            use()
    with caplog.at_level(logging.WARNING, "kvfold"):
        assert all(type(layer) is theirs.KVCache for layer in make_prompt_cache(network, policy=kvfold.Policy("dense")))
        assert not caplog.records


@pytest.mark.contract
def test_configs_of_transformers_5() -> None:
    """mlx-lm's Llama takes no `rope_parameters`, and would turn keys by 10,000."""
    assert config_as_before({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}) == {"rope_theta": 5e5}
    scaled = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    assert config_as_before({"rope_parameters": scaled})["rope_scaling"] == {
        "rope_type": "llama3", "type": "llama3", "factor": 8.0,
    }  # fmt: skip
    own = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4}}
    assert config_as_before(own) == {}
    gemma = {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    assert config_as_before({"rope_parameters": {"partial_rotary_factor": 0.5}}) == {"partial_rotary_factor": 0.5}
    told = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3}
    assert config_as_before(gemma) == told
    assert config_as_before({"text_config": gemma})["text_config"] == gemma | told


def test_windows_that_mlx_lm_would_misplace_are_refused(tmp_path: Path) -> None:
    """Its Gemma 3 takes a period, and these layers have none."""
    _tiny("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["full_attention", "sliding_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    from transformers import AutoTokenizer

    from kvfold.integrations.models import demo_folder

    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layer 0 attends to everything by the config's layer_types"):
        load_mlx_model(tmp_path)


# The command line


def test_generate_by_mlx() -> None:
    options = ("--prompt", "Why is the sky blue?", "--max-new-tokens", "12", "--json")
    by_torch, by_mlx = (
        json.loads(run_kvfold("generate", *options, *runtime).stdout)
        for runtime in ((), ("--runtime", "mlx", "--cache-limit-mb", "64", "--memory-limit-mb", "8000"))
    )
    assert by_mlx["runtime"] == "mlx"
    assert by_mlx["text"] == by_torch["text"]
    assert 0.02 < by_mlx["tokens_per_second"] / by_torch["tokens_per_second"] < 20
    assert by_mlx["prompt_tokens"] == by_torch["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runtime", "tpu"), "runtime = 'tpu': choose one of torch, mlx"),
        (("--cache-limit-mb", "64"), "cache-limit-mb = 64, and runtime = 'torch'"),
        (("--runtime", "mlx", "--cache", "x"), "cache = x, and runtime = 'mlx'"),
        (("--runtime", "mlx", "--wired-limit-mb", "64"), "only Metal has memory that is wired"),
        (("--runtime", "mlx", "--memory-limit-mb", "-1"), "memory = -1: give a number of MiB"),
    ],
)
def test_errors_of_the_command_line(arguments: tuple[str, ...], message: str) -> None:
    if "wired" in message and mx.metal.is_available():
        pytest.skip("there is Metal")
    ran = run_kvfold("generate", "--prompt", "x", *arguments)
    assert ran.returncode == 1
    assert message in " ".join(ran.stderr.split())


def test_without_mlx_one_line_says_so() -> None:
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None\n"
        "from kvfold.cli import main; sys.argv = ['kvfold', 'generate', '--runtime', 'mlx', '--prompt', 'x']; main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert "MLX is not installed" in lines[0]
    assert "pip install 'kvfold[mlx]'" in lines[0]


# The Metal kernel, run as C++


@pytest.mark.parametrize(
    ("format", "dim"),
    [
        ("kvfold-4", 64), ("kvfold-2", 128), ("turboquant-4", 64), ("turboquant-3+sign", 64), ("hadamard-3", 80),
        ("affine-4g32", 64), ("turboquant-2.5", 128), ("kvfold-3@32", 64), ("centred-5", 64), ("hadamard-1", 64),
        ("turboquant-7", 64), ("kvarn-4", 64), ("kvarn-3@128", 128),
    ],
)  # fmt: skip
def test_the_metal_kernel_reads_what_plain_operations_read(format: str, dim: int, tmp_path: Path) -> None:
    """Whole pages and a part-full one, two batch rows, three query heads that share a KV head."""
    pair = Pair(format, dim, batch=2)
    for n in (300, 270, 9):
        query, new, _ = pair.append(n)
        pair.torch.observe(query, new)
        pair.mlx.rows.observe(to_mlx(query), n)
    rows = pair.mlx.rows
    q = to_mlx(_random(2, 2, 3, 1, rows.keys.form.code_dim))
    until = rows.folded_stop
    assert why_plain(rows, 3) is None
    plain = Reader(rows, [until - 1], [until], None)
    plain.read_pages(q)
    fast = Reader(rows, [until - 1], [until], None)
    fast.decode_pages(q, metal_kernel(tmp_path))
    for name in ("maximum", "total", "rotated"):
        one, other = (to_torch(getattr(each, name)) for each in (plain, fast))
        assert (other - one).abs().max() < 5e-5 * one.abs().max()


def test_what_the_metal_kernel_does_not_read() -> None:
    for format, dim in (("float16", 64), ("polar4", 128), ("turboquant-4", 64)):
        pair = Pair(format, dim)
        pair.append(300)
        assert why_plain(pair.mlx.rows, 3 if format != "turboquant-4" else 64)
