"""Bits of layers by a prompt's own first tokens: what folding far tokens costs, and what that brings a real model."""

import logging
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from small_model import LAYERS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.attention import attend
from kvfold.cache.budgets import FEWEST, NOISE, Item, PromptBudgets, Stream, choice, shrunk, spread
from kvfold.cache.calibration import Loss
from kvfold.cache.config import LayerConfig
from kvfold.cache.files.layer import layer_from_saved, layer_to_saved
from kvfold.cache.layer import LayerCache
from kvfold.cache.prompt_costs import EVERY, STAND_IN, count_sampled, far_errors, sampled
from kvfold.evaluate import FidelityMeter, read_in_lockstep
from kvfold.formats import FIT_TOKENS, Window, get_format
from kvfold.formats.base import PAGE_WINDOW
from kvfold.integrations.transformers.layer import FoldedLayer

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]
Ids = Callable[..., Tensor]

WINDOW = Window(sinks=16, recent=24, undo=24)
COSTS = st.floats(1e-6, 1, allow_subnormal=False)


@pytest.fixture
def uneven() -> PreTrainedModel:
    """A tiny Llama in which keys of every second layer cost little, as attention is flat. Bits depend on the prompt."""
    model = tiny_model("llama", num_hidden_layers=FEWEST + 2)
    for layer in model.model.layers[1::2]:
        layer.self_attn.q_proj.weight.mul_(0.1)
    assert kvfold.attach(model)
    return model


@pytest.fixture
def uneven_small(small: Demo) -> PreTrainedModel:
    """The same with the first layers of SmolLM2."""
    model = deepcopy(small[0])
    for layer in model.model.layers[1::2]:
        layer.self_attn.q_proj.weight.mul_(0.05)
    return model


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _bits(cache: kvfold.FoldedCache) -> list[tuple[int, int]]:
    """Bits of each folded layer's keys and values, by what its pages are folded with."""
    pairs = [layer.folded.groups[0].rows.formats for layer in cache.layers if isinstance(layer, FoldedLayer)]
    assert not any(pair.awaits_bits for pair in pairs)
    return [(pair.keys.bits, pair.values.bits) for pair in pairs]


def _formats(cache: kvfold.FoldedCache) -> list[str]:
    return [row.format for row in cache.report().layers]


def _names(bits: list[tuple[int, int]]) -> list[str]:
    return [f"kvfold-{k}" if k == v else f"kvfold-{k}:kvfold-{v}" for k, v in bits]


def _decided(costs: list[tuple[float, float]], base: int) -> list[tuple[int, ...]]:
    budgets = PromptBudgets(dict.fromkeys(range(len(costs)), f"kvfold-{base}"))
    for layer, own in enumerate(costs):
        budgets.decide(layer, 0, own, (192, 192))
    return [tuple(budgets.shares[0][layer].bits.values()) for layer in range(len(costs))]


# What folding costs


def test_errors_are_those_of_far_tokens_alone() -> None:
    """Against the definition, written out query by query in float64."""
    tokens, scaling = 256, 0.2
    query, key, value = _random(2, 4, tokens, 64), _random(2, 2, tokens, 64, seed=1), _random(2, 2, tokens, 64, seed=2)
    own = sampled(0, WINDOW.sinks, tokens)
    got = far_errors(query[:, :, own], key, value, WINDOW, scaling)
    folded = [key.clone(), value.clone()]
    for x, lanes in zip(folded, ("tokens", "channels"), strict=True):
        fmt = get_format(STAND_IN, 64, lanes=lanes)  # type: ignore[arg-type]
        x[:, :, 16:208] = fmt.unfold(fmt.fold(x[:, :, 16:208]))
    q = query[:, :, own].bfloat16().double()
    errors, power = [0.0, 0.0], 0.0
    for i, position in enumerate(range(tokens)[WINDOW.sinks :][EVERY - 1 :: EVERY]):
        far = slice(WINDOW.sinks, max(position - WINDOW.recent + 1, WINDOW.sinks))
        outputs = []
        for wrong in ((), (0,), (1,)):
            sides = [x[:, :, : position + 1].double().repeat_interleave(2, 1) for x in (key, value)]
            for side in wrong:
                sides[side][:, :, far] = folded[side].double().repeat_interleave(2, 1)[:, :, far]
            weights = ((q[:, :, i : i + 1] @ sides[0].mT) * scaling).softmax(-1)
            outputs.append(weights @ sides[1])
        power += outputs[0].square().sum().item()
        errors = [e + (x - outputs[0]).square().sum().item() for e, x in zip(errors, outputs[1:], strict=True)]
    assert got == pytest.approx([e / power for e in errors], rel=0.01)
    assert min(got) > 0.001
    assert far_errors(query[:, :, own], key, value, Window(16, recent=256), scaling) == (0, 0)
    assert far_errors(query[:, :, own], key, value, WINDOW, None) != pytest.approx(got, rel=0.01)
    assert far_errors(query[:, :, own], key, torch.zeros_like(value), WINDOW, scaling) == (0, 0)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.sampled_from([0, 4, 16]))
def test_the_same_queries_are_looked_at_however_they_come(chunks: list[int], sinks: int) -> None:
    stop, positions = 256, torch.arange(sum(chunks))
    got, first = [], 0
    for n in chunks:
        got.append(positions[first : first + n][sampled(first, sinks, stop)])
        first += n
        assert sum(map(len, got)) == count_sampled(min(first, stop), sinks)
    assert torch.equal(torch.cat(got), positions[sinks:stop][EVERY - 1 :: EVERY])


# What bits follow


@given(st.lists(st.tuples(COSTS, COSTS), min_size=1, max_size=12), st.integers(1, 8))
def test_the_sum_is_kept(costs: list[tuple[float, float]], base: int) -> None:
    bits = _decided(costs, base)
    assert sum(map(sum, bits)) == 2 * base * len(costs)
    assert all(n in choice(base) for own in bits for n in own)


def test_layers_with_more_heads_count_for_more() -> None:
    """Eight KV heads in the first layers and one in the others, or the other way round."""
    for seed, heads in product(range(20), ([8] * 15 + [1] * 15, [1] * 15 + [8] * 15)):
        budgets = PromptBudgets(dict.fromkeys(range(30), "kvfold-3"))
        costs = (_random(30, 2, seed=seed) * 1.6).exp().tolist()
        for layer, own in enumerate(costs):
            budgets.decide(layer, 0, own, (64 * heads[layer],) * 2)
        held = sum(sum(budgets.shares[0][i].bits.values()) * heads[i] for i in range(30))
        assert held / (2 * sum(heads)) == pytest.approx(3, abs=0.15)


def test_most_of_the_gain_needs_no_layer_to_come() -> None:
    """Costs as uneven as those of a real model: deviation 1.6 in the logarithm."""
    for seed in range(5):
        costs: list[tuple[float, float]] = [(k, v) for k, v in (_random(30, 2, seed=seed) * 1.6).exp().tolist()]
        at_once = spread({Stream(i, n): Item(3, Loss(own[n], 192)) for i, own in enumerate(costs) for n in (0, 1)})
        flat = torch.tensor(costs).flatten()
        alike, best, decided = (
            (flat * 4.0 ** -torch.tensor(bits).flatten()).sum()
            for bits in ([3] * 60, list(at_once.values()), _decided(costs, 3))
        )
        assert alike - decided > 0.6 * (alike - best)


def test_layers_are_decided_by_those_before() -> None:
    budgets = PromptBudgets({3: "kvfold-3", 0: "compact", 5: "kvfold-4:turboquant-4"})
    assert list(budgets.formats) == [0, 3, 5]

    def decide() -> list[str]:
        costs = {0: (1.0, 1e-3), 3: (1e-3, 1e-3), 5: (0.5, 0.1)}
        return [budgets.decide(layer, 0, own, (128, 128)) for layer, own in costs.items()]

    first = decide()
    assert first[0] == "kvfold-4:kvfold-2"
    assert first[2].endswith(":turboquant-4")  # which has no neighbours
    assert decide() == first  # a pass that broke, read once more
    assert budgets.decide(3, 7, (1.0, 1e-3), (128, 128)) == "kvfold-4:kvfold-2"  # other sequences
    assert decide() == first
    assert budgets.decide(3, 0, None, (128, 128)) == "kvfold-3"


# How far costs are believed


@pytest.mark.parametrize("layers", [3, 10, 30])
def test_where_costs_differ_by_noise_alone_it_costs_next_to_nothing(layers: int) -> None:
    """Layers lose alike, and costs differ by chance. Bits moved in vain cost a few percent, over a hundred draws."""
    lost = 0.0
    for seed in range(100):
        costs = _random(layers, 1, seed=seed) * NOISE**0.5 + _random(layers, 2, seed=seed + 1000) * 0.3
        bits = _decided([(k, v) for k, v in costs.exp().tolist()], 3)
        lost += torch.tensor(bits).sub(3).mul(-2).exp2().mean().item() / 100
    assert lost < 1.03


def test_costs_that_differ_more_are_believed_the_more() -> None:
    """Against the definition: with deviations of 2 over 100 layers, beta is 1 - .6 / 4."""
    logs = (_random(100, 1) * 2).expand(-1, 2)
    got = torch.tensor(shrunk(logs.exp().tolist())).log()
    mean, variance = logs.mean(), logs.var()
    assert torch.allclose((got - mean) / (logs - mean), 1 - NOISE / variance, atol=0.03)


@given(st.lists(st.tuples(COSTS, COSTS), min_size=1, max_size=12))
def test_belief_keeps_order_and_mean(costs: list[tuple[float, float]]) -> None:
    got = torch.tensor(shrunk(costs), dtype=torch.float64).flatten()
    flat = torch.tensor(costs, dtype=torch.float64).flatten()
    assert got.log().mean().item() == pytest.approx(flat.log().mean().item(), abs=1e-9)
    in_order = got[flat.argsort()].log()
    assert (in_order.diff() >= -1e-9).all()
    assert in_order.max() - in_order.min() <= flat.log().max() - flat.log().min() + 1e-9


def test_nothing_to_lose_stays_nothing_to_lose() -> None:
    assert shrunk([(0.0, 0.0)]) == [[0.0, 0.0]]
    (first, second) = shrunk([(0.0, 1e-3), (1.0, 1e-3)])
    assert first[0] == 0 < second[1] <= second[0]


# In caches


def test_a_real_model_loses_less(demo: Demo, fixed_text: str) -> None:
    model, tokenizer = demo
    ids = tokenizer(fixed_text, return_tensors="pt").input_ids[:, :800]
    caches = {
        "alike": kvfold.FoldedCache(model.config, policy=kvfold.Policy("kvfold-3", budgets=False)),
        "own": kvfold.FoldedCache(model.config, "kvfold-3"),
    }
    meters = {name: FidelityMeter() for name in ("dense", *caches)}
    read_in_lockstep(model, ids, DynamicCache(config=model.config), caches, meters)
    assert meters["own"].result().kl_mean < 0.8 * meters["alike"].result().kl_mean
    assert caches["own"].bits_per_value() < caches["alike"].bits_per_value() + 0.06  # level tables of more bits


def test_layers_have_bits_of_their_own(uneven_small: PreTrainedModel, small_ids: Tensor) -> None:
    """Whole, in chunks, token by token past the fit; and none of it if the policy says so."""
    model, ids = uneven_small, small_ids[:, :300]
    found, codes = [], []
    for chunks in ([300], [100, 100, 100], [250, *[1] * 50], [7, 256, 37]):
        cache = kvfold.FoldedCache(model.config, "kvfold-3")
        for part in ids.split(chunks, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        found.append(_bits(cache))
        codes.append(torch.cat([layer.folded.groups[0].rows.values.pages().code for layer in cache.layers[:2]], -1))
        assert _formats(cache) == _names(_bits(cache))
    assert sum(map(sum, found[0])) == 6 * LAYERS
    assert {n for own in found[0] for n in own} == {2, 3, 4}
    assert all(bits == found[0] for bits in found)
    assert all((other == codes[0]).float().mean() > 0.99 for other in codes)
    alike = kvfold.FoldedCache(model.config, policy=kvfold.Policy("kvfold-3", budgets=False))
    model(ids, past_key_values=alike, logits_to_keep=1)
    assert set(_bits(alike)) == {(3, 3)}
    assert set(_formats(alike)) == {"kvfold-3"}
    assert cache.bits_per_value() < alike.bits_per_value() + 0.2  # level tables, at 300 tokens


@pytest.mark.parametrize(
    ("format", "keys", "values"), [("near-lossless", 4, 4), ("smallest", 2, 2), ("kvfold-8:kvfold-4", 8, 4)]
)
def test_bits_of_other_formats(demo: Demo, text_ids: Tensor, format: str, keys: int, values: int) -> None:
    cache = kvfold.FoldedCache(demo[0].config, format)
    demo[0](text_ids[:, :300], past_key_values=cache, logits_to_keep=1)
    for number, asked in enumerate((keys, values)):
        found = [own[number] for own in _bits(cache)]
        assert set(found) <= set(choice(asked))
    assert len(set(_bits(cache))) > 2
    assert sum(map(sum, _bits(cache))) == 30 * (keys + values)


def test_policies_keep_what_they_name(uneven: PreTrainedModel, random_ids: Ids) -> None:
    policy = kvfold.Policy("kvfold-3:turboquant-4", exceptions=((1, "kvfold-3"), (-1, "dense")))
    cache = kvfold.FoldedCache(uneven.config, policy=policy)
    uneven(random_ids(1, 300), past_key_values=cache)
    bits = _bits(cache)
    assert bits[1] == (3, 3)
    others = [own for layer, own in enumerate(bits) if layer != 1]
    assert {own[1] for own in others} == {4}
    assert sum(own[0] for own in others) == 3 * FEWEST
    assert len({own[0] for own in others}) > 1
    for format in ("turboquant-4", "float16"):
        assert all(layer.folded.config.budgets is None for layer in kvfold.FoldedCache(uneven.config, format).layers)


def test_few_layers_keep_even_bits(uneven: PreTrainedModel, random_ids: Ids) -> None:
    """Though they differ as much, and nothing waits for their queries."""
    for dense, even in ((2, False), (3, True)):
        policy = kvfold.Policy("kvfold-3", exceptions=[(layer, "dense") for layer in range(dense)])
        cache = kvfold.FoldedCache(uneven.config, policy=policy)
        uneven(random_ids(1, 300), past_key_values=cache)
        assert (set(_bits(cache)) == {(3, 3)}) == even
        folded = [layer.folded for layer in cache.layers if isinstance(layer, FoldedLayer)]
        assert len(folded) == FEWEST + 2 - dense
        assert all((layer.config.budgets is None) == even for layer in folded)


@pytest.mark.parametrize("format", ["kvfold-1", "kvfold-5", "kvfold-8", "kvfold-5:kvfold-6"])
def test_where_no_bit_can_move_nothing_waits_for_it(uneven: PreTrainedModel, random_ids: Ids, format: str) -> None:
    cache = kvfold.FoldedCache(uneven.config, format)
    assert all(layer.folded.config.budgets is None for layer in cache.layers)
    uneven(random_ids(1, 300), past_key_values=cache)
    assert set(_formats(cache)) == {format}


def test_queries_are_held_by_themselves() -> None:
    """And no longer than they are of use. The model's own query is not kept alive by a view."""
    layer = LayerCache(LayerConfig("kvfold-3", budgets=PromptBudgets({0: "kvfold-3"})))
    sinks, held = PAGE_WINDOW.sinks, 0
    for n in (sinks + 2, 200, 68, 24):
        held += n
        kept = None if held >= FIT_TOKENS + 24 else count_sampled(min(held, FIT_TOKENS), sinks)
        query, x = (_random(1, heads, n, 64).bfloat16() for heads in (4, 2))
        attend(query, layer.append(x, x), scaling=0.125)
        queries = layer.groups[0].rows.fit.queries
        assert (queries is None) == (kept is None)
        if queries is not None:
            assert queries.shape[2] == kept
            assert queries.untyped_storage().nbytes() == kept * 4 * 64 * 2
            assert any(queries is x for part in layer.own() for x in part)


def test_a_crop_into_the_sinks_is_another_prompt(uneven: PreTrainedModel, random_ids: Ids) -> None:
    ids, fresh, cache = random_ids(1, 300), *(kvfold.FoldedCache(uneven.config, "kvfold-3") for _ in range(2))
    stays = PAGE_WINDOW.sinks
    expected = uneven(ids, past_key_values=fresh).logits[:, stays:]
    uneven(torch.cat((ids[:, :stays], random_ids(1, 400, seed=1)), 1), past_key_values=cache)
    cache.crop(stays)
    got = uneven(ids[:, stays:], past_key_values=cache).logits
    assert _bits(cache) == _bits(fresh)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_without_queries_all_are_alike(
    uneven: PreTrainedModel, random_ids: Ids, caplog: pytest.LogCaptureFixture
) -> None:
    cache = kvfold.FoldedCache(uneven.config, "kvfold-3")
    kvfold.detach(uneven)
    with caplog.at_level(logging.WARNING):
        uneven(random_ids(1, 300), past_key_values=cache)
    kvfold.attach(uneven)
    assert set(_bits(cache)) == {(3, 3)}
    assert "all layers keep the bits of their format" in caplog.text


def test_going_back_behind_the_fit(uneven: PreTrainedModel, random_ids: Ids) -> None:
    """A crop that leaves no trace takes bits back too, a broken pass does, and so does a reset."""
    ids, other = random_ids(1, 300), random_ids(1, 300, seed=1)
    expected = kvfold.FoldedCache(uneven.config, "kvfold-3")
    logits = uneven(ids, past_key_values=expected).logits[:, -20:]
    cache = kvfold.FoldedCache(uneven.config, "kvfold-3")
    uneven(torch.cat((ids[:, :250], other[:, :20]), 1), past_key_values=cache)
    assert cache.get_seq_length() > FIT_TOKENS
    cache.crop(250)
    assert set(_formats(cache)) == {"kvfold-3"}
    uneven(ids[:, 250:280], past_key_values=cache)
    assert torch.allclose(uneven(ids[:, 280:], past_key_values=cache).logits, logits, atol=1e-4)
    assert _bits(cache) == _bits(expected)

    cache.reset()
    assert set(_formats(cache)) == {"kvfold-3"}
    uneven(ids[:, :200], past_key_values=cache)
    broken = uneven.model.layers[3].mlp.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        uneven(ids[:, 200:280], past_key_values=cache)
    broken.remove()
    assert set(_formats(cache)) == {"kvfold-3"}
    uneven(ids[:, 200:280], past_key_values=cache)
    assert _bits(cache) == _bits(expected)


@pytest.mark.parametrize("held", [100, 262, 290])
def test_a_saved_cache_goes_on(uneven: PreTrainedModel, random_ids: Ids, tmp_path: Path, held: int) -> None:
    """Before the fit, just after it, where a crop may still go back behind it, and later."""
    ids = random_ids(1, 400)
    cache = kvfold.FoldedCache(uneven.config, "kvfold-3")
    uneven(ids[:, :held], past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = kvfold.FoldedCache.load(tmp_path / "cache", uneven.config)
    copied = deepcopy(cache)
    for one in (cache, loaded, copied):
        if held == 262:
            one.crop(250)
        uneven(ids[:, one.get_seq_length() : 350], past_key_values=one)
    expected = uneven(ids[:, 350:], past_key_values=cache).logits
    for one in (loaded, copied):
        assert _bits(one) == _bits(cache)
        assert _formats(one) == _formats(cache)
        assert torch.equal(uneven(ids[:, 350:], past_key_values=one).logits, expected)
        one.reset()
        assert set(_formats(one)) == {"kvfold-3"}


def test_padded_sequences_have_bits_of_their_own(uneven: PreTrainedModel, random_ids: Ids) -> None:
    """Those that they have alone, whenever they come to the fit."""
    ids = random_ids(2, 400)
    ids[0] %= 16  # a text of another kind
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, :100] = 0
    alone = []
    for row, padding in ((1, 0), (0, 100)):
        cache = kvfold.FoldedCache(uneven.config, "kvfold-3")
        uneven(ids[row : row + 1, padding:], past_key_values=cache)
        alone.append(_bits(cache))
    assert alone[0] != alone[1]
    for chunks in ([400], [270, 130]):
        cache = kvfold.FoldedCache(uneven.config, "kvfold-3")
        first = 0
        for n in chunks:
            uneven(ids[:, first : first + n], attention_mask=mask[:, : first + n], past_key_values=cache)
            first += n
        for number, padding in enumerate((0, 100)):
            groups = [group for layer in cache.layers for group in layer.folded.groups if group.padding == padding]
            assert [tuple(group.bits.values()) for group in groups] == alone[number]
        assert _formats(cache) == _names(alone[0])  # those of the longest


def test_damaged_bits_are_refused() -> None:
    query, x = _random(1, 2, 300, 64), _random(1, 2, 300, 64, seed=1)
    layer = LayerCache(
        LayerConfig("kvfold-3:turboquant-4", budgets=PromptBudgets({0: "kvfold-3:turboquant-4", 1: "kvfold-3"}))
    )
    attend(query, layer.append(x, x), scaling=0.125, backend="reference")
    for bits in ([5], [0], [3, 3], [], None, [3.0]):
        saved = layer_to_saved(layer)
        assert saved.data["group0"]["bits"] == [layer.groups[0].rows.formats.keys.bits]
        saved.data["group0"]["bits"] = bits
        with pytest.raises(ValueError, match="bits"):
            layer_from_saved(saved)
    saved = layer_to_saved(layer)
    saved.data["budgets"] = False
    with pytest.raises(ValueError, match="which no tokens give"):
        layer_from_saved(saved)
    assert layer_from_saved(layer_to_saved(layer)).folded_as == layer.folded_as


def test_only_full_attention_takes_part(random_ids: Ids) -> None:
    model = tiny_model("gemma3", num_hidden_layers=2 * FEWEST)
    kvfold.attach(model)
    cache = kvfold.FoldedCache(model.config, "kvfold-3")
    model(random_ids(1, 300), past_key_values=cache)
    bits = _bits(cache)
    assert len(bits) == FEWEST
    assert sum(map(sum, bits)) == 6 * FEWEST
    assert all(layer.folded.config.budgets is not None for layer in cache.layers[1::2])
