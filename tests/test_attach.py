"""What `attach` does to a model, and what becomes of a forward pass that does not end."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from conftest import ARCHITECTURES, model_that_computes_with_values, tiny_model
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

import kvfold
from kvfold import FoldedCache, Policy, StreamingLLM
from kvfold.attention import reference
from kvfold.cache.budgets import FEWEST
from kvfold.formats import pair

Ids = Callable[..., Tensor]
NAMES = ["past_key_values"]
if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters:
    NAMES.append("cache")

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that are fitted fold here too, though prompts are short."""
    monkeypatch.setattr(pair, "FIT_TOKENS", 70)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of queries that a backend attended with, call by call."""
    seen: list[int] = []

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(query.shape[2])
        return run(query, *args, **kwargs)

    run = reference.attend_rows
    monkeypatch.setattr(reference, "attend_rows", counted)
    return seen


def _padded(random_ids: Ids) -> dict[str, Tensor]:
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, :30] = 0
    return {"input_ids": random_ids(2, 90), "attention_mask": mask}


@pytest.mark.parametrize("name", NAMES)
class TestTheCacheIsFound:
    """By what it is, whatever a release of transformers calls it."""

    def test_forward(self, llama: PreTrainedModel, random_ids: Ids, reads: list[int], name: str) -> None:
        llama(random_ids(1, 100), **{name: FoldedCache(llama.config, "centred-4")})
        assert reads == 4 * [100]

    def test_generate(
        self, llama: PreTrainedModel, random_ids: Ids, reads: list[int], name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache, ids = FoldedCache(llama.config, "centred-4"), random_ids(1, 100)
        with caplog.at_level(logging.WARNING, "kvfold"):
            llama.generate(ids, attention_mask=torch.ones_like(ids), **{name: cache}, max_new_tokens=5, do_sample=False)
        assert reads == 4 * [100] + 16 * [1]
        assert not caplog.records

    def test_eviction_and_sharpening_come_about(self, llama: PreTrainedModel, random_ids: Ids, name: str) -> None:
        evicting = FoldedCache(llama.config, "turboquant-4", eviction=kvfold.StreamingLLM(budget=300))
        llama(random_ids(1, 600), **{name: evicting})
        assert evicting.report().layers[0].evicted > 0
        logits = [
            llama(random_ids(1, 100), **{name: FoldedCache(llama.config, "tbq3", sharpen=sharpen)}).logits
            for sharpen in (False, True)
        ]
        assert not torch.equal(*logits)


class TestWithoutAFoldedCache:
    """An attached model computes what it computed before, bit for bit."""

    @pytest.mark.parametrize("name", list(ARCHITECTURES))
    def test_logits(self, name: str, random_ids: Ids) -> None:
        model = tiny_model(name).float()

        def answers() -> list[Tensor]:
            cache = DynamicCache(config=model.config)
            return [
                model(random_ids(1, 90)).logits,
                model(**_padded(random_ids)).logits,
                model(random_ids(1, 90), past_key_values=cache).logits,
                model(random_ids(1, 1), past_key_values=cache).logits,
            ]

        before = answers()
        assert kvfold.attach(model)
        model(random_ids(1, 90), past_key_values=FoldedCache(model.config))
        assert all(torch.equal(one, other) for one, other in zip(before, answers(), strict=True))

    def test_attention_that_a_user_chose(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        model = llama.float()
        model.set_attn_implementation("eager")
        folded = model(random_ids(1, 90), past_key_values=FoldedCache(model.config)).logits
        attended = model(random_ids(1, 90), output_attentions=True).attentions
        assert attended[0].shape[-1] == 90
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(random_ids(1, 90), past_key_values=FoldedCache(model.config)).logits, folded)
        assert model.config._attn_implementation == "sdpa"


class TestAttaching:
    def test_is_idempotent_and_undone(self, llama: PreTrainedModel) -> None:
        guard = llama.forward
        assert kvfold.attach(llama)
        assert llama.forward == guard
        kvfold.detach(llama)
        kvfold.detach(llama)
        for module in (llama, llama.model):
            assert not [name for name in vars(module) if "kvfold" in name or name == "forward"]
        assert llama.config._attn_implementation == "sdpa"

    def test_another_backend(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="backend = 'cpu', but the model is attached with None"):
            kvfold.attach(llama, "cpu")
        kvfold.detach(llama)
        with pytest.raises(ValueError, match="backend = 'abacus': choose one of"):
            kvfold.attach(llama, "abacus")

    @pytest.mark.parametrize("set_to", ["sdpa", "eager"])
    def test_stays_whatever_attention_is_chosen_later(
        self, llama: PreTrainedModel, random_ids: Ids, reads: list[int], set_to: str
    ) -> None:
        llama.set_attn_implementation(set_to)
        llama(random_ids(1, 100), past_key_values=FoldedCache(llama.config))
        assert reads == 4 * [100]
        assert llama.config._attn_implementation == set_to

    def test_copies_are_attached(self, llama: PreTrainedModel, random_ids: Ids, reads: list[int]) -> None:
        twin = copy.deepcopy(llama)
        twin.lm_head.weight.zero_()
        out = twin(random_ids(1, 100), past_key_values=FoldedCache(twin.config))
        assert not out.logits.any()
        assert reads == 4 * [100]
        assert llama(random_ids(1, 100), past_key_values=FoldedCache(llama.config)).logits.any()

    def test_what_wraps_a_model_later_stays(self, llama: PreTrainedModel, random_ids: Ids, reads: list[int]) -> None:
        """As accelerate's hooks do."""
        guard, calls = llama.forward, []

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return guard(*args, **kwargs)

        llama.forward = wrapper
        llama(random_ids(1, 100), past_key_values=FoldedCache(llama.config))
        kvfold.detach(llama)
        llama(random_ids(1, 100), past_key_values=DynamicCache(config=llama.config))
        assert len(calls) == 2
        assert reads == 4 * [100]

    @pytest.mark.parametrize("wrapped", ["model", "decoder", "by accelerate", "compiled"])
    def test_attaches_again_to_what_was_wrapped(
        self, llama: PreTrainedModel, random_ids: Ids, reads: list[int], wrapped: str
    ) -> None:
        """A guard under a wrapper under a guard: a pass begins and ends once, and `detach` ends it."""
        module = llama.model if wrapped == "decoder" else llama
        guard, ids = module.forward, random_ids(1, 100)
        expected = llama(ids, past_key_values=FoldedCache(llama.config)).logits
        reads.clear()
        if wrapped == "by accelerate":
            add_hook_to_module(llama, ModelHook())
        elif wrapped == "compiled":
            module.forward = torch.compile(guard, backend="eager")
        else:
            module.forward = lambda *args, **kwargs: guard(*args, **kwargs)
        for _ in range(2):
            assert kvfold.attach(llama)
            cache = FoldedCache(llama.config)
            assert torch.equal(llama(ids, past_key_values=cache).logits, expected)
            assert cache.get_seq_length() == 100
        if wrapped != "compiled":
            assert reads == 8 * [100]
        kvfold.detach(llama)
        cache = FoldedCache(llama.config)
        dense = llama(ids, past_key_values=DynamicCache(config=llama.config)).logits
        assert torch.allclose(llama(ids, past_key_values=cache).logits, dense)  # unfolded, with a word in the log
        assert cache.forward_pass.warned

    def test_a_decoder_and_then_its_model(self, random_ids: Ids, reads: list[int]) -> None:
        model = tiny_model("llama")
        assert kvfold.attach(model.model)
        assert kvfold.attach(model)
        model(random_ids(1, 100), past_key_values=FoldedCache(model.config))
        assert reads == 4 * [100]
        kvfold.detach(model)
        for module in (model, model.model):
            assert not [name for name in vars(module) if "kvfold" in name or name == "forward"]

    def test_threads_do_not_change_the_attention_that_was_chosen(self, random_ids: Ids) -> None:
        """A model that is set to "eager" computes so, bit for bit, whatever other threads read folded."""
        model = tiny_model("llama").float()
        model.set_attn_implementation("eager")
        ids = random_ids(1, 90)
        expected = model(ids).logits
        kvfold.attach(model)
        folded = model(ids, past_key_values=FoldedCache(model.config)).logits
        amid: list[Tensor] = []

        def pass_amid_another(*_: object) -> None:
            hook.remove()
            amid.append(model(ids).logits)

        hook = model.model.layers[1].register_forward_hook(pass_amid_another)
        model(ids, past_key_values=FoldedCache(model.config))
        assert torch.equal(amid[0], expected)

        def read(turn: int) -> bool:
            if turn % 3 == 0:
                return torch.equal(model(ids).logits, expected)
            return torch.equal(model(ids, past_key_values=FoldedCache(model.config)).logits, folded)

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(read, range(30)))
        assert model.config._attn_implementation == "eager"
        assert torch.equal(model(ids).logits, expected)

    def test_models_do_not_wait_for_each_other(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """Nor does a copy wait for its original."""
        model = tiny_model("llama")
        model.set_attn_implementation("eager")
        kvfold.attach(model)
        ids, others = random_ids(1, 90), [llama, copy.deepcopy(model)]
        with ThreadPoolExecutor(1) as pool:

            def wait_for_others(*_: object) -> None:
                for other in others:
                    cache = FoldedCache(other.config)
                    pool.submit(lambda: other(ids, past_key_values=cache)).result(timeout=60)  # noqa: B023

            model.model.layers[1].register_forward_hook(wait_for_others)
            model(ids, past_key_values=FoldedCache(model.config))

    def test_a_cache_that_is_not_seen_is_refused(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """Nobody is to take the speed of unfolding for that of reading folded."""

        class Wrapped(DynamicCache):
            def __init__(self, inner: FoldedCache) -> None:
                super().__init__(config=llama.config)
                self.inner = inner

            def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
                return self.inner.update(*args, **kwargs)

        with pytest.raises(RuntimeError, match=r"attached.*did not find this cache among its arguments"):
            llama(random_ids(1, 100), past_key_values=Wrapped(FoldedCache(llama.config)))

    @pytest.mark.parametrize("keyword", ["indices", "sinks"])
    def test_keywords_that_folded_attention_does_not_know(self, random_ids: Ids, keyword: str) -> None:
        """Models that support no attention function of transformers may ask theirs for more than ours does."""
        model = tiny_model("gpt-oss")
        assert kvfold.attach(model)
        function = AttentionInterface._global_mapping["kvfold"]
        one = torch.zeros(1)
        with (
            _attention_is("kvfold", lambda *args, **kwargs: function(*args, **kwargs, **{keyword: one})),
            pytest.raises(ValueError, match=f"attention takes {keyword}, which folded attention does not know"),
        ):
            model(random_ids(1, 20), past_key_values=FoldedCache(model.config))


@contextmanager
def _attention_is(name: str, function: Callable[..., Any]) -> Iterator[None]:
    own = AttentionInterface._global_mapping[name]
    AttentionInterface.register(name, function)
    try:
        yield
    finally:
        AttentionInterface.register(name, own)


class TestFormatsThatWaitForQueries:
    """They fold, whether queries come or not."""

    @pytest.mark.parametrize("attached", [True, False])
    def test_do_not_wait_for_ever(self, random_ids: Ids, caplog: pytest.LogCaptureFixture, attached: bool) -> None:
        model = model_that_computes_with_values(layers=FEWEST)
        if attached:
            assert kvfold.attach(model)
        cache = FoldedCache(model.config, "kvfold-4")
        with caplog.at_level(logging.WARNING, "kvfold"):
            for part in random_ids(1, 400).split(200, 1):
                model(part, past_key_values=cache)
        pages = [layer.folded.groups[0].rows.keys.count for layer in cache.layers]
        assert pages == [5] * FEWEST  # of 400 tokens 8 are sinks and at least 55 recent
        said = "does not show its queries" if attached else "Nor does the cache see queries"
        assert sum(said in record.message for record in caplog.records) == 1


INTERRUPTS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, RuntimeError]


@contextmanager
def _interrupted(module: nn.Module, error: type[BaseException]) -> Iterator[None]:
    """Raise when `module` is called."""

    def raise_it(*_: object) -> None:
        raise error

    hook = module.register_forward_pre_hook(raise_it)
    try:
        with pytest.raises(error):
            yield
    finally:
        hook.remove()


class TestInterrupts:
    """A pass that does not end leaves no trace, whatever ends it."""

    @pytest.mark.parametrize("error", INTERRUPTS)
    @pytest.mark.parametrize("held", [0, 130])
    @pytest.mark.parametrize("name", ["llama", "llama with a dense layer", "gemma3"])
    def test_attached(self, random_ids: Ids, error: type[BaseException], held: int, name: str) -> None:
        model = tiny_model(name.split()[0])
        assert kvfold.attach(model)
        policy = Policy("kvfold-3", dense_first=int("dense" in name))
        cache, twin = (FoldedCache(model.config, policy=policy) for _ in range(2))
        for each in (cache, twin):
            if held:
                model(random_ids(1, held), past_key_values=each)
        for where in (model.model.layers[2].mlp, model.lm_head):
            with _interrupted(where, error):
                model(random_ids(1, 50, seed=1), past_key_values=cache)
            assert {layer.get_seq_length() for layer in cache.layers} == {held}
        more = random_ids(1, 60, seed=2)
        assert torch.equal(model(more, past_key_values=cache).logits, model(more, past_key_values=twin).logits)

    @pytest.mark.parametrize("error", INTERRUPTS)
    @pytest.mark.parametrize("held", [0, 130])
    def test_of_a_model_that_is_not_attached(
        self, llama: PreTrainedModel, random_ids: Ids, error: type[BaseException], held: int
    ) -> None:
        """Nobody sees it end, and the next pass has asked already how long the cache is: it is refused, once."""
        kvfold.detach(llama)
        cache, twin = FoldedCache(llama.config, "kvfold-3"), FoldedCache(llama.config, "kvfold-3")
        for each in (cache, twin):
            if held:
                llama(random_ids(1, held), past_key_values=each)
        with _interrupted(llama.model.layers[2].mlp, error):
            llama(random_ids(1, 50, seed=1), past_key_values=cache)
        for refused in (lambda: cache.save("never.kv"), lambda: copy.deepcopy(cache)):
            with pytest.raises(ValueError, match="is under way, or was interrupted"):
                refused()
        more = random_ids(1, 60, seed=2)
        with pytest.raises(RuntimeError, match="did not get to its last layer: its tokens are forgotten"):
            llama(more, past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {held}
        assert torch.equal(llama(more, past_key_values=cache).logits, llama(more, past_key_values=twin).logits)

    def test_a_pass_that_another_model_begins(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """What a model that was not attached yet left behind is not taken for a beginning."""
        kvfold.detach(llama)
        cache = FoldedCache(llama.config, "kvfold-3")
        with _interrupted(llama.model.layers[2].mlp, KeyboardInterrupt):
            llama(random_ids(1, 50), past_key_values=cache)
        kvfold.attach(llama)
        with pytest.raises(RuntimeError, match="did not get to its last layer"):
            llama(random_ids(1, 60), past_key_values=cache)
        expected = llama(random_ids(1, 60), past_key_values=FoldedCache(llama.config, "kvfold-3")).logits
        assert torch.equal(llama(random_ids(1, 60), past_key_values=cache).logits, expected)

    def test_a_fit_that_fails_when_a_pass_ends(self, random_ids: Ids) -> None:
        """A model that does not show its queries has its formats fitted then, and its values may be too large."""
        model = model_that_computes_with_values()
        assert kvfold.attach(model)
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
        cache = FoldedCache(model.config, "kvfold-4", dense_dtype=torch.float32)
        with pytest.raises(ValueError, match="layer 1: the scale of a page is beyond float16"):
            model(random_ids(1, 200), past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {0}
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e-6)
        assert model(random_ids(1, 200), past_key_values=cache).logits.isfinite().all()

    @pytest.mark.parametrize("error", INTERRUPTS)
    def test_while_it_is_chosen_what_to_evict(self, llama: PreTrainedModel, random_ids: Ids, error: Any) -> None:
        @dataclass(frozen=True)
        class Breaks(StreamingLLM):
            def scores(self, candidates: Any) -> Tensor:
                if fails:
                    raise error
                return super().scores(candidates)

        fails = False
        policy = Breaks(budget=280, interval=32)
        cache, twin = (FoldedCache(llama.config, "kvfold-3", eviction=policy) for _ in range(2))
        for each in (cache, twin):
            llama(random_ids(1, 400), past_key_values=each)
        more, held = random_ids(1, 100, seed=1), cache.report().layers
        assert held[0].evicted
        fails = True
        with pytest.raises(error):
            llama(more, past_key_values=cache)
        assert cache.get_seq_length() == 400
        assert cache.report().layers == held
        fails = False
        assert torch.equal(llama(more, past_key_values=cache).logits, llama(more, past_key_values=twin).logits)
        assert cache.report().layers == twin.report().layers

    def test_saving_and_copying_within_a_pass(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        cache = FoldedCache(llama.config, "kvfold-3")
        for act in (lambda: cache.save("never.kv"), lambda: copy.deepcopy(cache)):
            hook = llama.model.layers[1].register_forward_pre_hook(lambda *_, act=act: act())
            with pytest.raises(ValueError, match="is under way, or was interrupted"):
                llama(random_ids(1, 50), past_key_values=cache)
            hook.remove()


class TestCropping:
    """All layers are cropped, or none."""

    @pytest.mark.parametrize("keep", [390, -10])
    def test_dense_layers_beside_folded_ones(self, llama: PreTrainedModel, random_ids: Ids, keep: int) -> None:
        cache = FoldedCache(llama.config, policy=Policy("kvfold-3", dense_last=1))
        llama(random_ids(1, 400), past_key_values=cache)
        cache.crop(keep)
        assert {layer.get_seq_length() for layer in cache.layers} == {390}

    def test_windows_that_do_not_go_back(self, random_ids: Ids) -> None:
        model = tiny_model("gemma3")
        assert kvfold.attach(model)
        cache, twin = FoldedCache(model.config, "kvfold-3"), FoldedCache(model.config, "kvfold-3")
        for each in (cache, twin):
            model(random_ids(1, 400), past_key_values=each)
        with pytest.raises(RuntimeError, match="sliding window"):
            cache.crop(-10)
        assert {layer.get_seq_length() for layer in cache.layers} == {400}
        more = random_ids(1, 60, seed=2)
        assert torch.equal(model(more, past_key_values=cache).logits, model(more, past_key_values=twin).logits)

    def test_beyond_the_length(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        cache = FoldedCache(llama.config, policy=Policy("kvfold-3", dense_last=1))
        llama(random_ids(1, 100), past_key_values=cache)
        cache.crop(200)
        assert {layer.get_seq_length() for layer in cache.layers} == {100}
        cache.crop(-200)
        assert {layer.get_seq_length() for layer in cache.layers} == {0}


def test_windows_hold_no_more_than_they_need(random_ids: Ids) -> None:
    """Right after a prompt, a window is no view of all of it."""
    model = tiny_model("gemma3")
    assert kvfold.attach(model)
    cache = FoldedCache(model.config, "kvfold-4")
    model(random_ids(1, 599), past_key_values=cache)  # the next token finds room
    after_prompt = cache.held_bytes()
    held = copy.deepcopy(cache).held_bytes()
    model(random_ids(1, 1), past_key_values=cache)
    assert after_prompt == pytest.approx(cache.held_bytes(), rel=0.01)
    assert held == pytest.approx(after_prompt, rel=0.01)
