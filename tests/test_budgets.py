"""Bits of layers by what folding them costs: the spread itself, and what it brings a real model."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from commands import run_kvfold
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from small_model import LAYERS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.cache.budgets import Item, Stream, budgeted, choice, spread
from kvfold.cache.calibration import KIND, Loss
from kvfold.evaluate import FidelityMeter, read_in_lockstep
from kvfold.formats import KeyStatistics, get_formats
from kvfold.integrations.transformers.layer import FoldedLayer

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]
Ids = Callable[..., Tensor]

kls = st.floats(0, 10, allow_subnormal=False)


def _left(items: dict[Stream, Item], bits: dict[Stream, int]) -> float:
    """What is lost in all, up to a factor."""
    return sum(item.loss.kl * 4.0 ** -bits[side] for side, item in items.items())


def test_what_a_side_can_get() -> None:
    assert [list(choice(bits)) for bits in range(1, 9)] == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [5], [6], [7], [8]]


@given(st.lists(st.tuples(st.integers(1, 8), kls), min_size=1, max_size=6))
def test_the_spread_is_the_best_there_is(drawn: list[tuple[int, float]]) -> None:
    items = {Stream(i // 2, i % 2): Item(bits, Loss(kl, 192)) for i, (bits, kl) in enumerate(drawn)}
    got, total = spread(items), sum(item.bits for item in items.values())
    assert sum(got.values()) == total
    ranges = [choice(item.bits) for item in items.values()]
    others = [dict(zip(items, bits, strict=True)) for bits in product(*ranges) if sum(bits) == total]
    assert got in others
    best = min(_left(items, bits) for bits in others)
    assert _left(items, got) <= best * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(1, 8), kls, st.sampled_from([64, 192, 576])), min_size=1, max_size=20))
def test_sides_of_several_widths_hold_no_more(drawn: list[tuple[int, float, int]]) -> None:
    items = {Stream(i, 0): Item(bits, Loss(kl, channels)) for i, (bits, kl, channels) in enumerate(drawn)}
    got = spread(items)
    held, before = (
        sum(bits * item.loss.channels for bits, item in zip(each, items.values(), strict=True))
        for each in (got.values(), [item.bits for item in items.values()])
    )
    assert held <= before
    assert before - held < 576  # no more is left over than the widest side could not take
    assert all(got[side] in choice(item.bits) for side, item in items.items())


def _calibration(*losses: tuple[float, ...], channels: int = 128) -> kvfold.Calibration:
    """Of layers of two KV heads of 64."""
    ones = torch.ones(2, 64)
    return kvfold.Calibration(
        {i: KeyStatistics(ones, ones) for i in range(len(losses))},
        losses={i: tuple(Loss(kl, channels) for kl in own) for i, own in enumerate(losses)},
    )


def test_names() -> None:
    uneven = _calibration((1.0, 1e-9), (1.0, 1e-9), (1e-9, 1e-9), (1.0, 1.0))

    def names(policy: kvfold.Policy) -> list[str | None]:
        spread_ = budgeted(policy, uneven, 4)
        return [spread_.format_of(i, 4) for i in range(4)]

    assert names(kvfold.Policy("kvfold-3")) == ["kvfold-4:kvfold-2", "kvfold-4:kvfold-2", "kvfold-2", "kvfold-4"]
    assert names(kvfold.Policy("compact")) == names(kvfold.Policy("kvfold-3"))
    paged = names(kvfold.Policy("kvfold-3@128"))
    assert paged[0] == "kvfold-4@128:kvfold-2@128"
    assert paged[2] == "kvfold-2@128"
    assert names(kvfold.Policy("turboquant-4")) == ["turboquant-4"] * 4
    keys_only = names(kvfold.Policy("kvfold-3:turboquant-4"))
    assert keys_only[2] == "kvfold-2:turboquant-4"
    assert sum(int(name[7]) for name in keys_only if name) == 12
    assert names(kvfold.Policy("kvfold-3", dense_first=1, exceptions=((-1, "kvfold-2"), (1, "dense")))) == [
        None, None, "kvfold-3", "kvfold-2",
    ]  # fmt: skip
    plain = kvfold.Policy("kvfold-3")
    assert budgeted(plain, None, 4) is plain
    assert budgeted(plain, _calibration((), ()), 4).format_of(0, 4) == "kvfold-3"


def test_a_file_keeps_losses(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    calibration = _calibration((0.5, 0.25), (0.125,))
    calibration.save(path)
    loaded = kvfold.Calibration.load(path)
    assert loaded.losses == calibration.losses
    assert loaded.losses[1][0].channels == 128
    good = load_file(path)
    for bad in ([[0.5]], [0.5, 128.0], [[torch.nan, 128.0]], [[0.5, 0.0]], [[0.5, 128.0]] * 3):
        save_file(good | {"layers.1.loss": torch.tensor(bad)}, path, metadata={"kind": KIND})
        with pytest.raises(ValueError, match="damaged; kvfold calibrate makes a new one"):
            kvfold.Calibration.load(path)


@pytest.fixture(scope="module")
def measured(_demo: Demo, text_ids: Tensor) -> kvfold.Calibration:
    """SmolLM2's, of a passage of technical English."""
    passages = [text_ids[:, 8_000:8_512]]
    seen: list[tuple[int, int]] = []
    calibration = kvfold.measure_losses(
        _demo[0], passages, kvfold.calibrate(_demo[0], passages), progress=lambda *each: seen.append(each)
    )
    kvfold.detach(_demo[0])
    assert seen == [(done, 60) for done in range(1, 61)]
    return calibration


def test_a_real_model_loses_less(demo: Demo, measured: kvfold.Calibration, fixed_text: str) -> None:
    """On a text that nothing was measured on, with no more bytes."""
    model, tokenizer = demo
    assert [[loss.channels for loss in own] for own in measured.losses.values()] == [[192, 192]] * 30
    for number in (0, 1):
        kl = [own[number].kl for own in measured.losses.values()]
        assert min(kl) > 0
        assert max(kl) > 30 * min(kl)
    ids = tokenizer(fixed_text, return_tensors="pt").input_ids[:, :800]
    caches = {
        "even": kvfold.FoldedCache(model.config, "kvfold-3", calibration=replace(measured, losses={})),
        "uneven": kvfold.FoldedCache(model.config, "kvfold-3", calibration=measured),
    }
    meters = {name: FidelityMeter() for name in ("dense", *caches)}
    read_in_lockstep(model, ids, DynamicCache(config=model.config), caches, meters)
    assert meters["uneven"].result().kl_mean < 0.8 * meters["even"].result().kl_mean
    bits = {name: cache.bits_per_value() for name, cache in caches.items()}
    assert bits["uneven"] < bits["even"] + 0.06  # level tables of more bits


def test_layers_have_their_own_formats(demo: Demo, measured: kvfold.Calibration, text_ids: Tensor) -> None:
    model = demo[0]
    cache = kvfold.FoldedCache(model.config, "kvfold-3", calibration=measured)
    model(text_ids[:, :400], past_key_values=cache, logits_to_keep=1)
    bits = []
    for row in cache.report().layers:
        pair = get_formats(row.format, 64, 64)
        bits += [pair.keys.bits, pair.values.bits]
    assert sum(bits) == 180
    assert set(bits) == {2, 3, 4}
    held = [row.held_bytes for row in cache.report().layers]
    own = [a + b for a, b in zip(bits[::2], bits[1::2], strict=True)]
    assert held[own.index(max(own))] > held[own.index(min(own))]


def test_a_saved_cache_goes_on(demo: Demo, measured: kvfold.Calibration, text_ids: Tensor, tmp_path: Path) -> None:
    model = demo[0]
    cache = kvfold.FoldedCache(model.config, "kvfold-3", calibration=measured)
    model(text_ids[:, :400], past_key_values=cache, logits_to_keep=1)
    cache.save(tmp_path / "cache")
    loaded = kvfold.FoldedCache.load(tmp_path / "cache", model.config)
    assert [row.format for row in loaded.report().layers] == [row.format for row in cache.report().layers]
    expected, got = (model(text_ids[:, 400:500], past_key_values=c).logits for c in (cache, loaded))
    assert torch.equal(got, expected)


def test_only_layers_that_fold_are_measured(random_ids: Ids) -> None:
    model = tiny_model("gemma3")
    ids = [random_ids(1, 600)]
    calibration = kvfold.measure_losses(model, ids, kvfold.calibrate(model, ids))
    assert list(calibration.losses) == [1, 3]  # the others have sliding windows
    uneven = replace(calibration, losses={1: (Loss(1.0, 256),) * 2, 3: (Loss(1e-9, 256),) * 2})
    cache = kvfold.FoldedCache(model.config, "kvfold-4", calibration=uneven)
    assert isinstance(cache.layers[1], FoldedLayer)
    assert not isinstance(cache.layers[0], FoldedLayer)
    model(ids[0], past_key_values=cache)
    assert [row.format for row in cache.report().layers][1::2] == ["kvfold-5", "kvfold-3"]


def test_latents_are_one_side(random_ids: Ids) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, kv_lora_rank=128, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval().double()
    ids = [random_ids(1, 600)]
    calibration = kvfold.measure_losses(model, ids, kvfold.calibrate(model, ids))
    assert all(len(own) == 1 and own[0].kl > 0 and own[0].channels == 128 for own in calibration.losses.values())
    uneven = replace(calibration, losses={0: (Loss(1.0, 128),), 1: (Loss(1e-9, 128),)})
    cache = kvfold.FoldedCache(config, "kvfold-3", calibration=uneven)
    model(ids[0], past_key_values=cache)
    assert [row.format for row in cache.report().layers] == ["kvfold-4", "kvfold-2"]
    keys = budgeted(kvfold.Policy("kvfold-3:turboquant-4"), uneven, 2)
    assert [keys.format_of(i, 2) for i in (0, 1)] == ["kvfold-4:turboquant-4", "kvfold-2:turboquant-4"]


def test_measuring_says_what_it_lacks(llama: PreTrainedModel, random_ids: Ids) -> None:
    calibration = kvfold.calibrate(llama, [random_ids(1, 200)])
    with pytest.raises(ValueError, match="at least one of 512 tokens or more to measure losses on"):
        kvfold.measure_losses(llama, [random_ids(1, 511)], calibration)
    with pytest.raises(ValueError, match="calibrate this model"):
        kvfold.measure_losses(llama, [random_ids(1, 512)], kvfold.Calibration(calibration.layers, {"model_type": "x"}))


def test_commands(small_folder: Path, tmp_path: Path) -> None:
    def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_kvfold(command, "--model", str(small_folder), *arguments)

    full, plain, out = (str(tmp_path / name) for name in ("full", "plain", "tasks.jsonl"))
    measuring = ("calibrate", "--passage", "512", "--passages", "1", "--out")
    done = run(*measuring, full, "--json")
    assert done.returncode == 0, done.stderr
    told, losses = json.loads(done.stdout)["losses"], kvfold.Calibration.load(full).losses
    assert [row["layer"] for row in told] == list(losses) == list(range(LAYERS))
    spread_ = budgeted(kvfold.Policy("kvfold-2"), kvfold.Calibration.load(full), LAYERS)
    assert [row["kvfold-2"] for row in told] == [spread_.format_of(i, LAYERS) for i in range(LAYERS)]
    names = {side for row in told for side in row["kvfold-2"].split(":")}
    assert names > {"kvfold-1"}
    done = run(*measuring, plain, "--no-budgets")
    assert done.returncode == 0, done.stderr
    assert not kvfold.Calibration.load(plain).losses
    done = run("calibrate", "--passage", "400", "--passages", "1", "--out", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "or --no-budgets" in done.stderr
    assert not (tmp_path / "none").exists()
    asking = ("tasks", "--tasks", "needle", "--lengths", "400", "--repeats", "1", "--formats", "compact", "--out", out)
    asked = 0
    for calibration, new in (((), 2), (("--calibration", full), 1)):
        done = run(*asking, *calibration)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
        cases = len({row["case"] for row in rows})
        assert len(rows) == asked + new * cases  # dense ones once, and each calibration's once
        asked = len(rows)
