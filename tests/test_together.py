"""Layers of a cache change together, whatever interrupts a pass or a change, and whenever."""

import copy
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from conftest import tiny_model
from interrupts import interrupted_at
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from trials import trials

import kvfold
from kvfold import FoldedCache, Policy, SnapKV, StreamingLLM
from kvfold.integrations.transformers.calls import cache_argument

Ids = Callable[..., Tensor]


def _logits(model: PreTrainedModel, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    return model(ids, **cache_argument(model, cache), use_cache=True, **options).logits


def _again(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Logits after an interrupt, which a model that is not attached may learn of by an error first."""
    try:
        return _logits(model, ids, cache)
    except RuntimeError as error:
        if "call the model again" not in str(error):
            raise
    return _logits(model, ids, cache)


def _stop_before(layer: torch.nn.Module, error: type[BaseException]) -> Any:
    def stop(*_: object) -> None:
        raise error

    return layer.register_forward_pre_hook(stop)


def _goes_on_after_stops(model: PreTrainedModel, ids: Tensor, filled: FoldedCache, error: type[BaseException]) -> None:
    """Stop a pass before each layer in turn: what is asked once more is answered as if nothing had been."""
    expected = _logits(model, ids, copy.deepcopy(filled))
    for layer in model.model.layers:
        cache = copy.deepcopy(filled)
        hook = _stop_before(layer, error)
        with pytest.raises(error):
            _logits(model, ids, cache)
        hook.remove()
        assert torch.equal(_again(model, ids, cache), expected)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "bamba", "falcon_h1"])
def test_a_pass_over_linear_attention_is_forgotten(name: str, error: type[BaseException], attached: bool) -> None:
    """States of linear attention are written in place, by layers before the first that folds, too."""
    model = tiny_models.tiny_model(name)
    if attached:
        assert kvfold.attach(model)
    logging.disable(logging.WARNING)
    ids = torch.randint(3, 60, (1, 300), generator=torch.Generator().manual_seed(1))
    filled = FoldedCache(model.config, "turboquant-8")
    _logits(model, ids[:, :298], filled)
    _goes_on_after_stops(model, ids[:, 298:299], filled, error)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "policy", [Policy("turboquant-8", dense_last=1), Policy("kvfold-4", dense_first=1, dense_last=2)]
)
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_pass_that_dense_layers_end(policy: Policy, tokens: int, random_ids: Ids) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 340)
    filled = FoldedCache(model.config, policy=policy)
    _logits(model, ids[:, :300], filled)
    expected = _logits(model, ids[:, 300 : 300 + tokens], copy.deepcopy(filled))
    for layer in model.model.layers[1:]:
        cache = copy.deepcopy(filled)
        hook = _stop_before(layer, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            _logits(model, ids[:, 300 : 300 + tokens], cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="call the model again"):
            _logits(model, ids[:, 300 : 300 + tokens], cache)
        assert {each.get_seq_length() for each in cache.layers} == {300}
        assert torch.equal(_logits(model, ids[:, 300 : 300 + tokens], cache), expected)


CHANGES: dict[str, Callable[[FoldedCache], object]] = {
    "crop": lambda cache: cache.crop(-70),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([-1])),
    "evict": lambda cache: cache.evict(StreamingLLM(budget=270)),
}


@pytest.mark.drawn
@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4", "tbq3"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_whole_wherever_it_is_interrupted(change: str, format: str, random_ids: Ids) -> None:
    """Before any line of it: the cache is then as it was, or as if nothing had come."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=1, head_dim=64,
        num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().double()
    kvfold.attach(model)
    dense = 0 if change == "evict" else 1
    filled = FoldedCache(config, policy=Policy(format, dense_last=dense))
    _logits(model, random_ids(2, 380), filled)

    def after(cache: FoldedCache) -> Tensor:
        rows = cache.layers[0].folded.batch
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        return _logits(model, random_ids(1, 3, seed=1).expand(rows, -1), cache)

    whole = copy.deepcopy(filled)
    CHANGES[change](whole)
    answers = [after(copy.deepcopy(filled)), after(whole)]
    assert answers[0].shape != answers[1].shape or not torch.equal(*answers)
    stopped = 0
    for line in count(0, trials(17 if change == "evict" else 3, 1)):
        cache = copy.deepcopy(filled)
        if not interrupted_at(line, lambda cache=cache: CHANGES[change](cache)):  # type: ignore[misc]
            break
        stopped += 1
        got = after(cache)
        assert any(got.shape == each.shape and torch.equal(got, each) for each in answers), line
    assert stopped > 12


@pytest.mark.drawn
@pytest.mark.parametrize("attached", [True, False])
def test_a_token_is_whole_wherever_it_is_interrupted(attached: bool, random_ids: Ids) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=1, head_dim=64,
        num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().double()
    if attached:
        kvfold.attach(model)
    ids = random_ids(1, 300)
    for format in ("kvfold-4", "tbq3"):
        filled = FoldedCache(config, format)
        _logits(model, ids[:, :298], filled)
        whole = copy.deepcopy(filled)
        _logits(model, ids[:, 298:299], whole)
        expected = _logits(model, ids[:, 299:], whole)
        for line in count(0, trials(7, 1)):
            cache = copy.deepcopy(filled)
            if not interrupted_at(line, lambda cache=cache: _logits(model, ids[:, 298:299], cache)):  # type: ignore[misc]
                break
            if cache.get_seq_length() == 298 or cache.passes.is_under_way:
                _again(model, ids[:, 298:299], cache)
            got = _logits(model, ids[:, 299:], cache)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("indices", [[5], [2, 0], [-3], [[0]], [True, False, True], [0.0]])
def test_rows_that_are_not_there(llama: PreTrainedModel, random_ids: Ids, indices: list[Any]) -> None:
    cache = FoldedCache(llama.config, policy=Policy("turboquant-4", dense_last=1))
    _logits(llama, random_ids(2, 100), cache)
    expected = _logits(llama, random_ids(2, 3), copy.deepcopy(cache))
    with pytest.raises(IndexError, match=r"indices = \[|indices is "):
        cache.batch_select_indices(torch.tensor(indices))
    if indices != [True, False, True]:
        with pytest.raises(IndexError):
            cache.reorder_cache(torch.tensor(indices))
    with pytest.raises(IndexError):
        cache.reorder_cache(torch.tensor([-1, 0]))
    assert torch.equal(_logits(llama, random_ids(2, 3), cache), expected)


def test_rows_from_the_end_and_by_a_mask(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids = random_ids(2, 100)
    for indices in ([-1], [False, True]):
        cache, dense = FoldedCache(llama.config, "float16"), DynamicCache(config=llama.config)
        for each in (cache, dense):
            _logits(llama, ids, each)
            each.batch_select_indices(torch.tensor(indices))
        got, expected = (_logits(llama, ids[1:, :3], each) for each in (cache, dense))
        torch.testing.assert_close(got, expected, rtol=0.01, atol=0.05)


@pytest.mark.parametrize("tokens", [1.7, True, "3", None, 2**40])
def test_no_number_of_tokens_to_crop(llama: PreTrainedModel, random_ids: Ids, tokens: Any) -> None:
    cache = FoldedCache(llama.config, "turboquant-4")
    _logits(llama, random_ids(1, 100), cache)
    with pytest.raises(ValueError, match=r"tokens_to_remove = "):
        cache.crop(tokens)
    assert cache.get_seq_length() == 100


MIDDLE: dict[str, Callable[[FoldedCache], object]] = {
    **CHANGES,
    "reset": lambda cache: cache.reset(),
    "save": lambda cache: cache.save("never"),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("attached", [True, False])
def test_nothing_else_happens_in_the_middle_of_a_pass(name: str, attached: bool, random_ids: Ids) -> None:
    model = tiny_model("llama")
    if attached:
        kvfold.attach(model)
    cache, ids = FoldedCache(model.config, "turboquant-4"), random_ids(2, 340)
    _logits(model, ids[:, :300], cache)
    expected = _logits(model, ids[:, 300:], copy.deepcopy(cache))
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: MIDDLE[name](cache))
    with pytest.raises(ValueError, match="a forward pass over this cache is under way"):
        _logits(model, ids[:, 300:], cache)
    hook.remove()
    if not attached:
        with pytest.raises(RuntimeError, match="call the model again"):
            _logits(model, ids[:, 300:], cache)
    assert torch.equal(_logits(model, ids[:, 300:], cache), expected)


def test_a_cache_is_reset_after_an_interrupt(random_ids: Ids) -> None:
    model, ids = tiny_model("llama"), random_ids(1, 100)
    for change, left in ((lambda cache: cache.reset(), 0), (lambda cache: cache.crop(-10), 70)):
        cache = FoldedCache(model.config, "turboquant-4")
        _logits(model, ids[:, :80], cache)
        hook = _stop_before(model.model.layers[1], KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            _logits(model, ids[:, 80:], cache)
        hook.remove()
        change(cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {left}
        fresh = FoldedCache(model.config, "turboquant-4")
        if left:
            _logits(model, ids[:, :left], fresh)
        torch.testing.assert_close(_logits(model, ids[:, :9], cache), _logits(model, ids[:, :9], fresh))


@pytest.mark.parametrize("inference", [True, False])
def test_a_mask_that_is_written_to(llama: PreTrainedModel, random_ids: Ids, inference: bool) -> None:
    """As tree drafting does: one tensor, filled anew for each pass."""
    ids, lowest = random_ids(1, 300), torch.finfo(torch.float64).min
    with torch.inference_mode(inference):
        cache = FoldedCache(llama.config, "turboquant-8")
        _logits(llama, ids[:, :290], cache)
        mask = torch.zeros(1, 1, 10, 300, dtype=torch.float64)
        mask[..., 290:] = torch.full((10, 10), lowest, dtype=torch.float64).triu(1)
        before = _logits(llama, ids[:, 290:], cache, attention_mask=mask)
        cache.crop(-10)
        mask[..., :90] = lowest
        after = _logits(llama, ids[:, 290:], cache, attention_mask=mask)
        cache.crop(-10)
        expected = _logits(llama, ids[:, 290:], cache, attention_mask=mask.clone())
        assert not torch.equal(before, after)
        assert torch.equal(after, expected)


@pytest.mark.contract
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_argument(llama: PreTrainedModel, random_ids: Ids, name: str) -> None:
    cache, ids = FoldedCache(llama.config, "turboquant-4"), random_ids(1, 100)
    assert torch.equal(
        llama(ids, **{name: cache}).logits, _logits(llama, ids, FoldedCache(llama.config, "turboquant-4"))
    )
    assert cache.get_seq_length() == 100
    assert cache.bits_per_value() < 8


@pytest.mark.contract
def test_a_cache_that_is_not_used_is_an_error(llama: PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(llama.config, "turboquant-4")
    with pytest.raises((ValueError, TypeError), match=r"did not use it|unexpected keyword"):
        llama(random_ids(1, 100), past_key_value=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.complex64, "float32", 4]
)
def test_dtypes_that_no_token_is_kept_in(llama: PreTrainedModel, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dense_dtype = .*give one of torch.float64, .*or None"):
        FoldedCache(llama.config, dense_dtype=dtype)


def test_arguments_of_another_kind(llama: PreTrainedModel) -> None:
    for arguments, says in (
        ((llama,), "config is a LlamaForCausalLM: give a model's config"),
        ((None,), "config is a NoneType"),
        ((llama.config, None, {"policy": "kvfold-4"}), "policy = 'kvfold-4': give a kvfold.Policy"),
        ((llama.config, None, {"eviction": "x"}), "eviction = 'x': give a policy"),
    ):
        *given, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
        with pytest.raises(TypeError, match=says):
            FoldedCache(*given, **options)
    for exceptions in (5, [0], {0: "dense"}, [(0,)], ["dense"]):
        with pytest.raises(ValueError, match=r"exceptions = .*give pairs of a layer and a format"):
            Policy("kvfold-4", exceptions=exceptions)
    with pytest.raises(ValueError, match="budgets = 'no'"):
        Policy("kvfold-4", budgets="no")
    kvfold.get_format("turboquant-5", 64)
    for head_dim in (64.0, True):  # equal to others that are known already
        with pytest.raises(ValueError, match="head_dim = "):
            kvfold.get_format("turboquant-5", head_dim)  # type: ignore[arg-type]


def test_many_sinks_take_no_room_before_they_come(llama: PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(llama.config, policy=Policy("kvfold-4", window=kvfold.formats.Window(sinks=10**6)))
    for part in random_ids(1, 100).split([3, 50, 1, 46], 1):
        _logits(llama, part, cache)
    assert cache.bits_per_value() < 20
    dense = DynamicCache(config=llama.config)
    _logits(llama, random_ids(1, 100), dense)
    got, expected = (_logits(llama, random_ids(1, 5, seed=1), each) for each in (cache, dense))
    torch.testing.assert_close(got, expected, rtol=0.01, atol=0.05)


def test_snapkv_forgets_in_all_layers_or_none(llama: PreTrainedModel, random_ids: Ids) -> None:
    """In the middle of a pass's end: what a user interrupts leaves layers alike."""
    ids = random_ids(1, 420)
    for line in range(0, 8_000, 211):
        cache = FoldedCache(llama.config, "turboquant-4", eviction=SnapKV(budget=300, interval=16))
        _logits(llama, ids[:, :280], cache)
        if not interrupted_at(line, lambda cache=cache: _logits(llama, ids[:, 280:400], cache)):  # type: ignore[misc]
            break
        assert len({row.evicted for row in cache.report().layers}) == 1
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        _logits(llama, ids[:, 400:], cache)


def test_passes_that_end_with_linear_attention(random_ids: Ids) -> None:
    """What comes after the last layer that folds is of the same pass, the first time, too."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        num_experts=2, num_experts_per_tok=1, shared_expert_intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    )  # fmt: skip
    model, ids = transformers.Qwen3NextForCausalLM(config).eval(), random_ids(1, 120)
    filled = FoldedCache(config, "turboquant-8")
    for part in ids[:, :114].split([100, 1, 1, 1, 10, 1], 1):
        _logits(model, part, filled)
    _goes_on_after_stops(model, ids[:, 114:115], filled, KeyboardInterrupt)
