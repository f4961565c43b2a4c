"""Triton's kernels against their truths: on a GPU, or in Triton's interpreter where there is none."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from measured import measured
from test_paged import Engine, _tokens
from torch import Tensor

from kvfold.attention import BACKENDS, attend, triton
from kvfold.attention.triton import launch, unfolded
from kvfold.attention.triton.target import SWITCH, tensor_cores
from kvfold.cache import rows
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.pool.layout import PagePool
from kvfold.formats import get_format, get_formats
from kvfold.formats.channelwise import SCALES
from kvfold.kernels import ops
from kvfold.quant import packing, rotated
from kvfold.quant.codebooks import sphere_levels
from kvfold.quant.rotated import RotatedCode
from kvfold.quant.scales import SCALE_RULES
from kvfold.quant.transforms import orthogonal

pytest.importorskip("triton")
from kvfold.kernels.triton import fold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS = 2

NAMES = (
    "kvfold-5", "kvfold-4", "kvfold-3", "kvfold-2@32", "kvarn-4", "oscar-4", "oscar-2", "turboquant-8",
    "turboquant-4@48", "turboquant-1",
    "turboquant-2.5", "turboquant-4+qjl:centred-3+sign", "centred-5", "hadamard-6", "hadamard-7", "affine-4g32",
    "uniform-4", "uniform-3r", "q8_0", "q4_0", "tq3", "tq4", "polar4", "polar4-u8", "tbq3", "tbq4", "tbqp3", "tbqp4",
    "amx3", "float16", "float16:turboquant-3", "kvfold-7", "turboquant-2+qjl", "hadamard-2+sign", "turboquant-4@128",
    "turboquant-3.5", "turboquant-3.5q", "turboquant-3+srht", "bold",
)  # fmt: skip


def _dim(name: str) -> int:
    return 64 if name.startswith(("kvfold", "centred", "hadamard", "tbq", "q", "uniform", "affine")) else 128


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _attend(
    backend: str, name: str, held: int, chunks: Sequence[int], dtype: torch.dtype, repeat: int, **options
) -> Tensor:
    """What tokens get that come in chunks, after `held` others."""
    tokens, dim = held + sum(chunks), options.pop("dim", _dim(name))
    value_dim, batch = options.pop("value_dim", dim), options.pop("batch", 1)
    padding, attention = options.pop("padding", None), options.pop("attention", {})
    q = _random(batch, KV_HEADS * repeat, tokens, dim, seed=1).to(dtype)
    key = (_random(batch, KV_HEADS, tokens, dim, seed=2) + 2 * _random(dim, seed=3)).to(dtype)
    value = _random(batch, KV_HEADS, tokens, dim, seed=4).to(dtype)
    value = (key if options.get("values_of_keys") else value)[..., :value_dim]
    if get_formats(name, dim, value_dim, values_of_keys=options.get("values_of_keys", False)).needs_calibration:
        options["statistics"] = measured(KV_HEADS, dim, value_dim)
    cache, done, outs = LayerCache(LayerConfig(name, **options)), held, []
    if held:
        cache.observe(None, cache.append(key[:, :, :held], value[:, :, :held], padding))
    for n in chunks:
        part = slice(done, done + n)
        new = cache.append(key[:, :, part], value[:, :, part], padding)
        outs.append(attend(q[:, :, part], new, scaling=dim**-0.5, backend=backend, **attention))
        done += n
    return torch.cat(outs, 2)


def _check(
    name: str, held: int, chunks: Sequence[int], dtype: torch.dtype = torch.float32, repeat: int = 3, **options
) -> None:
    with patch.dict(os.environ, {SWITCH: "0"}):
        fast = _attend("triton", name, held, chunks, dtype, repeat, **options)
    true = _attend("reference", name, held, chunks, dtype, repeat, **options)
    assert true.abs().amax() > 0.1
    if dtype == torch.float32:
        torch.testing.assert_close(fast, true, rtol=0, atol=2e-5)
    else:
        assert (fast.float() - true.float()).norm() < 4e-3 * true.float().norm()
    if dtype != torch.float32 and tensor_cores(torch.device(DEVICE)):  # the kernel in Gluon, which rounds more
        whole = _attend("triton", name, held, chunks, dtype, repeat, **options)
        assert (whole.float() - true.float()).norm() < 3e-2 * true.float().norm()


@pytest.mark.parametrize("name", NAMES)
def test_every_format(name: str) -> None:
    fitted = get_formats(name, _dim(name), _dim(name)).awaits_fit
    _check(name, 290 if fitted else 130, (1, 4))


@pytest.mark.parametrize("name", ["kvfold-4", "turboquant-4", "centred-3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(name: str, dtype: torch.dtype) -> None:
    _check(name, 300, (1, 4), dtype)


@pytest.mark.parametrize(("dim", "repeat"), [(72, 1), (80, 1), (96, 2), (128, 8), (256, 4)])
def test_head_dimensions_and_groups(dim: int, repeat: int) -> None:
    _check("kvfold-4", 270, (1,), dim=dim, repeat=repeat)
    _check("turboquant-4", 0, (1, 1), dim=dim, repeat=repeat)
    _check("turboquant-4", 130, (2,), dim=dim, repeat=repeat)
    _check("oscar-3", 130, (2,), dim=dim, repeat=repeat)


def test_a_prompt_of_more_rows_than_a_program_takes() -> None:
    _check("turboquant-3", 0, (70, 1))


@pytest.fixture
def unfolds(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Calls of `unfolded`."""
    monkeypatch.setattr("kvfold.attention.triton.launch.unfolded", spy := Mock(wraps=unfolded.unfolded))
    return spy


@pytest.mark.parametrize("name", NAMES)
def test_many_rows_read_pages_unfolded(name: str, unfolds: Mock) -> None:
    _check(name, 290, (32,), repeat=2)
    assert unfolds.called == ("float16" not in name)


def test_prompts_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, with all options, with pages that do not fit together, and with masks, where codes are read."""
    for name in ("kvfold-4", "turboquant-4", "oscar-3"):
        _check(name, 290, (40, 1), torch.bfloat16, repeat=2)
    monkeypatch.setattr(unfolded, "BYTES", 1)
    _check("kvfold-3", 390, (40,), repeat=2, batch=2, padding=[0, 100])
    _check("turboquant-4", 700, (40,), repeat=2)  # few rows, so that parts of the context are read beside each other
    _check("turboquant-4", 200, (70,), dim=80, value_dim=64, values_of_keys=True, repeat=1)
    _check("kvfold-4", 270, (64,), dim=96, repeat=1, attention={"softcap": 5.0, "sink_logits": _random(2, seed=9)})
    mask = _random(2, 4, 40, 340, seed=8) < 1  # decides alone: the future may be seen
    mask[0, 2, 7] = False  # who may see nothing
    for some in (mask, mask[:, :1], mask[:1, :, :1]):
        _check("centred-4", 300, (40,), batch=2, repeat=2, attention={"mask": some})


@pytest.mark.parametrize("dim", [128, 256])
def test_programs_of_many_rows(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where 128 rows of a program have room, the last of which are not all there; and the same with fewer each."""
    for wide in (True, False):
        monkeypatch.setattr(launch, "has_wide_programs", asked := Mock(return_value=wide))
        _check("turboquant-4", 200, (40,), torch.bfloat16, repeat=4, dim=dim)
        assert asked.called == (dim == 128)


@pytest.mark.parametrize(("name", "per_block"), [("kvfold-4", 2), ("turboquant-3+qjl", 1)])
def test_prompts_over_pages_of_a_pool(
    name: str, per_block: int, unfolds: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that all have prompts; beside one that has a single token, codes are read as for that."""
    monkeypatch.setattr(unfolded, "BYTES", 2**19)
    prompts = {"a": (200, 30), "b": (64, 22), "d": (0, 22), "f": (130, 64)}
    for more, expected in (({}, True), ({"c": (90, 1)}, False)):
        unfolds.reset_mock()
        _check_pool(name, prompts | more, per_block=per_block)
        assert unfolds.called == expected


def test_rows_of_different_lengths() -> None:
    """Padded on the left, one of them wholly at first."""
    for name in ("kvfold-4", "turboquant-3"):
        _check(name, 0, (1,), batch=2, padding=[0, 100])
        _check(name, 380, (1, 5), batch=2, padding=[0, 100])


def test_options() -> None:
    logits = _random(6, seed=9)
    _check("turboquant-4", 150, (5,), attention={"softcap": 5.0, "sink_logits": logits})
    mask = _random(2, 6, 8, 108, seed=8) < 1  # decides alone: the future may be seen
    mask[0, 2, 7] = False  # who may see nothing
    for some in (mask, mask[:, :1], mask[:1, :, :1]):
        _check("centred-4", 100, (8,), batch=2, attention={"mask": some})


def test_latent_keys_that_are_values() -> None:
    """DeepSeek's shape, and in small."""
    _check("turboquant-4", 200, (1, 5), dim=80, value_dim=64, values_of_keys=True)
    _check("turboquant-4", 70, (1,), dim=576, value_dim=512, values_of_keys=True, repeat=8)


def test_long_prompts_are_read_some_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    some_at_a_time = {name: partial(getattr(triton, name), queries=9) for name in ("attend_rows", "attend_pool")}
    monkeypatch.setitem(BACKENDS, "triton", SimpleNamespace(**{**vars(triton), **some_at_a_time}))
    _check("kvfold-4", 280, (20, 1))
    mask = _random(1, 6, 20, 100, seed=8) < 1
    for some in (mask, mask[:, :, :1]):
        _check("centred-4", 80, (20,), attention={"mask": some})
    test_pages_of_a_pool("kvfold-4", 2, {})


def _append(cache: LayerCache, x: Tensor, at_a_time: int) -> None:
    for part in x.split(at_a_time, 2):
        cache.append(part, part)


def test_steps_on_a_gpu_do_not_wait_to_see_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows in what attention gives, and raises an error with its page."""
    monkeypatch.setattr(rows, "checks_tokens", lambda x: False)
    for name in ("kvfold-4", "turboquant-4"):
        for value, sign in ((torch.nan, 1), (torch.inf, 1), (torch.inf, -1)):
            cache, x = LayerCache(LayerConfig(name, index=7)), _random(1, 2, 300, 64)
            cache.observe(None, cache.append(x, x))
            bad = x[:, :, :1].clone()
            bad[0, 1, 0, 3] = value
            new = cache.append(bad, x[:, :, :1])
            out = attend(sign * x[:, :, :1].abs(), new, scaling=0.1, softcap=5.0, backend="triton")
            assert out[0, 1].isnan().all()
            assert out[0, 0].isfinite().all()
            before = cache.columns
            chunk = copy.deepcopy(cache)
            with pytest.raises(ValueError, match=r"layer 7: the (scale|centre) of a page is"):
                _append(cache, x, 1)
            assert cache.columns - before <= 64 + cache.groups[0].rows.window.recent
            with pytest.raises(ValueError, match=r"layer 7: the (scale|centre) of a page is"):
                _append(chunk, x, 150)
        with pytest.raises(ValueError, match="position 300"):  # several tokens at a time are looked at
            LayerCache(LayerConfig(name)).append(torch.cat((x, bad), 2), torch.cat((x, x[:, :, :1]), 2))


CAPPED = {"softcap": 5.0, "sink_logits": torch.arange(6.0).to(DEVICE) / 6}


@pytest.mark.parametrize(
    ("name", "per_block", "options"),
    [("kvfold-4", 1, {}), ("kvfold-3@32", 2, {}), ("turboquant-3+qjl", 1, CAPPED), ("affine-4g32", 3, {}),
     ("float16", 2, {})],
)  # fmt: skip
def test_pages_of_a_pool(name: str, per_block: int, options: dict) -> None:
    """A step of an engine with long, short and new sequences, their blocks anywhere, after steps of the reference."""
    sizes = {"a": (900, 1), "b": (64, 5), "c": (63, 1), "d": (0, 1), "e": (0, 18), "f": (130, 4)}
    _check_pool(name, sizes, per_block=per_block, **options)


def _check_pool(name: str, sizes: dict[str, tuple[int, int]], **options) -> None:
    """A step of sequences that hold some tokens, and the tokens that come."""
    tokens = {who: _tokens(sum(parts), seed) for seed, (who, parts) in enumerate(sizes.items())}
    outs = []
    for backend in ("triton", "reference"):
        engine = Engine(name, blocks=64, slots=6, device=DEVICE, backend="reference", **options)
        engine.step({who: tuple(x[:held] for x in tokens[who]) for who, (held, _) in sizes.items() if held})
        engine.attention._run = BACKENDS[backend]
        outs.append(engine.step({who: tuple(x[held:] for x in tokens[who]) for who, (held, _) in sizes.items()}))
    for who in sizes:
        torch.testing.assert_close(outs[0][who], outs[1][who], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["kvfold-4", "centred-3@32", "turboquant-3+qjl"])
def test_pages_are_folded_straight_into_a_pool(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's pages where the reference has them, and nothing elsewhere."""
    pools = []
    for backend in ("triton", "reference"):
        engine = Engine(name, per_block=2, repeat=1, device=DEVICE, backend=backend)
        pools.append(engine.layer.pool)
        pools[-1].pages.fill_(0xAB)
        with monkeypatch.context() as patch:
            if backend == "triton":
                patch.delattr(PagePool, "write")
            for turn, sizes in enumerate(({"a": 70, "b": 63}, {"a": 58, "b": 1, "c": 3}, {"a": 1, "c": 126})):
                engine.step({who: _tokens(count, 7 * turn + ord(who), repeat=1) for who, count in sizes.items()})
    here, there = pools
    layout = here.layout
    written = (there.pages[..., : layout.used] != 0xAB).any(-1)
    assert written.sum() == here.kv_heads * sum(length // layout.page_size for length in engine.length.values())
    assert (here.pages[~written] == 0xAB).all()
    pages = written.flatten(0, 1)[:, 0].nonzero()[:, 0]
    for fmt, mine, true in zip(
        (engine.formats.keys, engine.formats.values), here.read(pages), there.read(pages), strict=True
    ):
        error = (fmt.unfold(mine) - fmt.unfold(true)).norm() / fmt.unfold(true).norm()
        assert error < 0.01  # codes that lie on an edge may go either way


def test_a_long_context_is_read_in_parts() -> None:
    _check("turboquant-4", 900, (1, 5), repeat=1)
    _check("kvfold-3", 1_500, (1,), torch.bfloat16, batch=2, padding=[0, 1_200])


def test_same_inputs_give_the_same_bits() -> None:
    one, other = (_attend("triton", "kvfold-4", 700, (1,), torch.bfloat16, 4) for _ in range(2))
    assert torch.equal(one, other)


def test_kernels_compile(tmp_path: Path) -> None:
    """The interpreter takes more than the compilers do."""
    script = Path(__file__).parents[1] / "benchmarks" / "compile_kernels.py"
    command = [
        sys.executable,
        str(script),
        "--formats",
        "kvfold-4",
        "--dims",
        "128",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, check=True, capture_output=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["target"] for row in rows} == {"cuda:90", "hip:gfx942"}
    assert {row["kernel"] for row in rows} == {
        "attend_pages", "unfold", "attend_dense", "together", "combine", "_fold_rotated", "_fold_channelwise", "_pack",
        "_append", "_fold_token",
    }  # fmt: skip
    ours = [row for row in rows if row["for"].startswith("kvfold-4, D128, 4 heads") and row["kernel"] != "together"]
    assert all(not row["spilled"] and row["shared bytes"] <= 2**15 for row in ours)
    for tokens, kernels in ((1, {"attend_pages"}), (64, {"unfold"})):  # which read codes
        ran = {row["kernel"] for row in ours if row["for"].endswith(f"× {tokens}")}
        assert ran == kernels | {"attend_dense", "combine"}


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize("bits", [(b,) * 4 for b in range(1, 9)] + [(6, 4, 3, 3), (3, 2, 2, 1), (8, 5, 7, 1)])
def test_pack(bits: tuple[int, ...], lanes: packing.Lanes) -> None:
    for page_size, dim in ((64, 64), (48, 60)):
        most = torch.tensor(bits).repeat_interleave(packing.TILE)[:dim]
        codes = (torch.rand(1, 2, page_size, dim, generator=torch.Generator().manual_seed(0)) * 2**most).to(torch.uint8)
        assert torch.equal(fold.pack(codes.to(DEVICE), bits, lanes).cpu(), packing.pack(codes, bits, lanes))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize(("bits", "dim"), [(1, 64), (4, 128), (8, 80)])
def test_fold_rotated(rule: str, bits: int, dim: int) -> None:
    how = RotatedCode(orthogonal("haar", dim), sphere_levels_of(bits, dim), rule)
    x = _random(1, 2, 70, dim)
    x[0, 0, 5] = 0
    packed, scale, _ = fold.fold_rotated(x, how, "tokens", 64, 20)
    code = packing.unpack(packed.cpu(), 64, dim, [bits] * -(-dim // 16), "tokens").flatten(-3, -2)
    true_code, true_scale, _ = rotated.encode(x.cpu(), how)
    assert not code[..., :20, :].any()
    assert not code[..., 90:, :].any()
    assert (code[..., 20:90, :] != true_code).float().mean() < 1e-3  # only what lies on an edge
    scale = scale.flatten(-2).cpu()
    assert not scale[..., :20].any()
    torch.testing.assert_close(scale[..., 20:90], true_scale, rtol=4e-3, atol=1e-6)


def test_fold_rotated_without_tokens() -> None:
    how = RotatedCode(orthogonal("hadamard", 64), sphere_levels_of(4, 64), "matched")
    packed, scale, _ = fold.fold_rotated(_random(1, 1, 0, 64), how, "tokens", 64, 5)
    assert scale.shape == (1, 1, 1, 64)
    assert not packed.any()
    assert not scale.any()


def test_fold_rotated_about_a_centre() -> None:
    how = RotatedCode(orthogonal("hadamard", 64), sphere_levels_of(3, 64), "least_squares", centred=True)
    x = _random(2, 1, 128, 64) + 3
    packed, scale, centre = fold.fold_rotated(x, how, "channels", 64, 0)
    true_code, true_scale, true_centre = rotated.encode(x.cpu().unflatten(-2, (-1, 64)), how)
    torch.testing.assert_close(centre.cpu(), true_centre, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(scale.cpu(), true_scale, rtol=1e-2, atol=1e-4)
    code = packing.unpack(packed.cpu(), 64, 64, [3] * 4, "channels")
    assert (code != true_code).float().mean() < 0.01


@pytest.mark.parametrize(
    ("name", "dim", "dtype", "ordered"),
    [("kvfold-4", 64, torch.bfloat16, True), ("kvfold-2@32", 64, torch.float32, False),
     ("kvfold-3@48", 72, torch.float32, True), ("kvfold-6", 64, torch.float16, True)],
)  # fmt: skip
def test_fold_channelwise(name: str, dim: int, dtype: torch.dtype, ordered: bool) -> None:
    """The same pages as on a CPU, where rounding does not decide between candidates that are alike."""
    fmt = get_format(name, dim)
    form, size = fmt.form, fmt.page_size
    x = (_random(1, 2 * size, 2, dim) + _random(dim, seed=1)).to(dtype).transpose(1, 2)
    x[0, 0, :, 3] = 0.5  # a scale of 0
    order = _random(1, 2, dim, seed=2).argsort(-1).to(torch.int16) if ordered else None
    given = form.lut, list(form.bits), SCALES, "tokens", size
    here = fold.fold_channelwise(x, order, *given)
    there = ops.fold_channelwise(x.cpu(), None if order is None else order.cpu(), *given)
    code, true_code = (packing.unpack(each[0].cpu(), size, dim, form.bits, "tokens") for each in (here, there))
    same = torch.ones((*true_code.shape[:-2], dim), dtype=torch.bool)
    for mine, true in zip(here[1:], there[1:], strict=True):
        same &= mine.cpu() == true
    assert same.float().mean() > 0.98
    assert (code != true_code).transpose(-1, -2)[same].float().mean() < 1e-3


def sphere_levels_of(bits: int, dim: int) -> Tensor:
    return torch.tensor(sphere_levels(bits, dim), dtype=torch.float32).to(DEVICE)
