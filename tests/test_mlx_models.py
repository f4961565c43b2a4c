"""Models of mlx-lm that read folded caches, those that cannot, and prompt caches as mlx-lm handles them."""

import asyncio
import copy
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("the extra mlx is not installed", allow_module_level=True)
from kvfold.kernels.mlx import mx  # isort: split

import mlx_architectures
import mlx_lm.models
from mlx_lm.models import cache as theirs
from mlx_lm.models import llama

import kvfold
from kvfold.integrations.mlx import attach, detach, make_prompt_cache
from kvfold.integrations.mlx.layer import FoldedKVCache

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model() -> Any:
    mx.random.seed(0)
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-5, vocab_size=64,
    )  # fmt: skip
    return llama.Model(arguments)


def _ids(n: int, seed: int = 0) -> mx.array:
    return mx.random.randint(0, 64, (1, n), key=mx.random.key(seed))


# Every architecture


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "folded"), ("gemma3_text", "folded"), ("gpt_oss", "folded"), ("iquestloopcoder", "folded"),
        ("minicpm3", "folded"), ("qwen3_next", "folded"), ("stablelm", "folded"), ("mamba2", "dense"),
        ("recurrent_gemma", "dense"), ("falcon_h1", "dense"), ("gemma2", "refused"), ("plamo", "refused"),
        ("plamo2", "refused"), ("deepseek_v3", "refused"), ("gemma3n", "refused"), ("phi3small", "refused"),
    ],
)  # fmt: skip
def test_one_model_of_each_kind(name: str, kind: str) -> None:
    """None is wrong, and what cannot be right is refused by name before it has read a token."""
    row = mlx_architectures.tried(name)
    assert row.kind == kind
    assert not row.wrong


def test_the_table_has_every_model() -> None:
    """docs/models-mlx.md is of the installed mlx-lm, and no row of it is wrong."""
    page = (ROOT / "docs/models-mlx.md").read_text()
    if f"mlx-lm {importlib.metadata.version('mlx-lm')}" not in page:
        pytest.skip("the page is of another mlx-lm")
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", page, re.MULTILINE))
    assert set(rows.values()) == {"folded", "dense", "refused", "not tried"}
    named = {found.name for found in pkgutil.iter_modules(mlx_lm.models.__path__)}
    assert rows.keys() <= named
    for name in named - rows.keys():
        assert not hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "ModelArgs")


def test_what_is_refused_is_taken_dense() -> None:
    gemma = mlx_architectures.build(importlib.import_module("mlx_lm.models.gemma2"))
    cache = make_prompt_cache(gemma, policy=kvfold.Policy("dense"))
    assert {type(layer) for layer in cache} == {theirs.KVCache}


def test_planning_computes_nothing(model: Any) -> None:
    """A large model's weights are not read for it."""
    weight = model.layers[0].self_attn.q_proj
    weight.weight = mx.zeros((1 << 20, 1 << 20)) + mx.array(1.0)  # 4 TiB, if anybody looked
    weight.weight = weight.weight[:128, :64]
    make_prompt_cache(model, "kvfold-4")


def test_a_model_from_a_file_of_its_own(tmp_path: Path) -> None:
    """mlx-lm runs a checkpoint's `model_file` as a module that Python does not list."""
    detach()
    path = tmp_path / "own.py"
    path.write_text(Path(llama.__file__).read_text().replace("from .", "from mlx_lm.models."))
    spec = importlib.util.spec_from_file_location("custom_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_model"] = module  # dataclasses ask for it while it runs
    spec.loader.exec_module(module)
    del sys.modules["custom_model"]
    own = module.Model(module.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-5, vocab_size=64,
    ))  # fmt: skip
    cache = make_prompt_cache(own, "float16")
    dense = own(_ids(40), cache=theirs.make_prompt_cache(own))
    assert mx.allclose(own(_ids(40), cache=cache), dense, atol=1e-3)


def test_a_detached_model_says_so(model: Any) -> None:
    cache = make_prompt_cache(model, "kvfold-4")
    mx.eval(model(_ids(10), cache=cache))
    detach()
    with pytest.raises(RuntimeError, match=r"call kvfold.integrations.mlx.attach\(\) first"):
        model(_ids(1), cache=cache)
    attach()
    assert model(_ids(1), cache=cache).shape == (1, 1, 64)


# Copies


@pytest.mark.parametrize("format", ["kvfold-4", "kvfold-2", "turboquant-4", "turboquant-2.5"])
@pytest.mark.parametrize("tokens", [0, 100, 330])
def test_copies_go_on_alone(format: str, tokens: int, model: Any) -> None:
    """Before formats are fitted and after, of all layers at once and one by one; neither changes the other."""
    cache = make_prompt_cache(model, format)
    if tokens:
        mx.eval(model(_ids(tokens), cache=cache))
    copies = [copy.deepcopy(cache), [copy.deepcopy(layer) for layer in cache]]
    other = model(_ids(300, seed=1), cache=copies[0])
    assert [layer.offset for layer in cache] == [tokens] * 4
    expected = model(_ids(90, seed=2), cache=cache)
    if tokens == 330 or format.startswith("turbo"):  # bits that are not decided yet are decided by layers together
        assert mx.array_equal(model(_ids(90, seed=2), cache=copies[1]), expected)
    assert theirs.trim_prompt_cache(copies[0], 300) == 300
    assert not mx.array_equal(other[:, :90], expected)
    assert [layer.offset for layer in copies[0]] == [tokens] * 4


# Passes that never ended


def _interrupted(model: Any, where: str, what: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `what` come in the model's third layer: in its own code, as tokens are added, or as they are read."""

    def end(*_: Any, **__: Any) -> None:
        raise what

    if where == "the model":
        monkeypatch.setattr(model.layers[2], "mlp", end)
    else:
        name = {"append": "kvfold.cache.mlx.ArrayLayer.append", "attend": "kvfold.attention.mlx.Reader.read"}[where]
        module, kind, method = name.rsplit(".", 2)
        owner = getattr(importlib.import_module(module), kind)
        before, calls = getattr(owner, method), iter(range(1000))
        monkeypatch.setattr(owner, method, lambda *a, **k: end() if next(calls) == 2 else before(*a, **k))


@pytest.mark.parametrize("what", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, OSError])
@pytest.mark.parametrize("where", ["the model", "append", "attend"])
@pytest.mark.parametrize("before", [0, 300])
def test_an_interrupted_pass_is_found(
    before: int, where: str, what: type[BaseException], model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever comes next is refused: another pass, a trim, a file, and a copy's passes."""
    cache = make_prompt_cache(model, "kvfold-4")
    if before:
        mx.eval(model(_ids(before), cache=cache))
    with monkeypatch.context() as patch:
        _interrupted(model, where, what, patch)
        with pytest.raises(what):
            model(_ids(50), cache=cache)
    twin = copy.deepcopy(cache)
    for use in (
        lambda: model(_ids(1), cache=cache),
        lambda: model(_ids(1), cache=twin),
        lambda: theirs.trim_prompt_cache(copy.deepcopy(cache), 1),
        lambda: theirs.save_prompt_cache(str(tmp_path / "x"), copy.deepcopy(cache)),
    ):
        with pytest.raises(ValueError, match="lost tokens in an earlier pass, make a new one"):
            use()


def test_a_trim_of_some_layers_is_found(model: Any) -> None:
    cache = make_prompt_cache(model, "turboquant-4")
    mx.eval(model(_ids(50), cache=cache))
    cache[1].trim(3)
    with pytest.raises(ValueError, match="layer 0 holds 50 tokens, layer 1 holds 47"):
        model(_ids(1), cache=cache)


def test_a_file_is_loaded_twice(model: Any, tmp_path: Path) -> None:
    """Two loads are two caches."""
    path, cache = str(tmp_path / "cache.safetensors"), make_prompt_cache(model, "kvfold-3")
    mx.eval(model(_ids(100), cache=cache))
    theirs.save_prompt_cache(path, cache)
    one, other = theirs.load_prompt_cache(path), theirs.load_prompt_cache(path)
    assert all(isinstance(layer, FoldedKVCache) for layer in one)
    expected = model(_ids(200, seed=1), cache=cache)
    for loaded in (one, other):
        assert mx.array_equal(model(_ids(200, seed=1), cache=loaded), expected)
        assert len({id(layer.passes) for layer in loaded}) == 1
    assert one[0].passes is not other[0].passes
