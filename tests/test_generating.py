"""transformers' own ways to a folded cache: `custom_generate`, pipelines, a default."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold import FoldedCache, Policy
from kvfold.formats import pair
from kvfold.integrations.transformers.calls import cache_argument

pytestmark = pytest.mark.contract
Ids = Callable[..., Tensor]
GREEDY = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "FIT_TOKENS", 70)


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    kvfold.make_default(None)


def _cache_of(out: Any) -> Any:
    return out["cache"] if "cache" in out else out["past_key_values"]


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"prompt_lookup_num_tokens": 3}], ids=str
)
@pytest.mark.parametrize("way", ["custom_generate", "default"])
def test_the_same_as_with_a_cache_of_ones_own(
    llama: PreTrainedModel, random_ids: Ids, how: dict[str, Any], way: str
) -> None:
    kvfold.detach(llama)  # it attaches the model by itself
    ids = random_ids(1, 300)
    options = GREEDY | how | {"return_dict_in_generate": True}
    if way == "default":
        kvfold.make_default("kvfold-3")
        torch.manual_seed(0)
        got = llama.generate(ids, **options)
    else:
        torch.manual_seed(0)
        got = llama.generate(ids, custom_generate=kvfold.generate, format="kvfold-3", **options)
    own = FoldedCache(llama.config, "kvfold-3")
    torch.manual_seed(0)
    right = llama.generate(ids, **cache_argument(llama, own), **options)
    assert torch.equal(got.sequences, right.sequences)
    cache = _cache_of(got)
    assert isinstance(cache, FoldedCache)
    assert cache.held_bytes() == own.held_bytes()
    assert cache.report().layers[0].format == "kvfold-3"


def test_a_padded_batch(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids, mask = random_ids(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[1, :30] = 0
    got = llama.generate(
        ids, attention_mask=mask, custom_generate=kvfold.generate, policy=Policy("turboquant-4"), **GREEDY
    )
    right = llama.generate(
        ids, attention_mask=mask, **cache_argument(llama, FoldedCache(llama.config, "turboquant-4")), **GREEDY
    )
    assert torch.equal(got, right)


def test_eviction_and_calibration_go_with_it(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids = random_ids(1, 400)
    calibration = kvfold.calibrate(llama, [random_ids(1, 300, seed=1)])
    out = llama.generate(
        ids, custom_generate=kvfold.generate, format="kvfold-4", calibration=calibration,
        eviction=kvfold.StreamingLLM(budget=300), return_dict_in_generate=True, **GREEDY,
    )  # fmt: skip
    assert all(layer.evicted for layer in _cache_of(out).report().layers)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"use_cache": False}, "makes the cache itself"),
        ({"cache_implementation": "static"}, "makes the cache itself"),
        ({"cache_implementation": "offloaded"}, "makes the cache itself"),
        ({"format": "nope"}, "format = 'nope'"),
        ({"policy": Policy("kvfold-3")}, "policy"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "code of its own"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_contradicts_it_is_refused(
    llama: PreTrainedModel, random_ids: Ids, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        llama.generate(random_ids(1, 80), custom_generate=kvfold.generate, **({"format": "kvfold-4"} | GREEDY | wrong))


def test_a_cache_beside_it_is_refused(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids = random_ids(1, 80)
    filled = DynamicCache(config=llama.config)
    llama(ids[:, :9], **cache_argument(llama, filled))
    for cache in (FoldedCache(llama.config), filled):
        with pytest.raises(ValueError, match="makes the cache itself"):
            llama.generate(ids, custom_generate=kvfold.generate, format="kvfold-4", **cache_argument(llama, cache))


@pytest.mark.parametrize(
    "given", [{"use_cache": False}, {"cache_implementation": "static"}, {"cache": None}], ids=lambda x: next(iter(x))
)
def test_a_default_respects_what_is_asked_for(llama: PreTrainedModel, random_ids: Ids, given: dict[str, Any]) -> None:
    ids = random_ids(1, 120)
    if "cache" in given:
        given = cache_argument(llama, DynamicCache(config=llama.config))
    before = llama.generate(ids, return_dict_in_generate=True, **GREEDY, **given)
    kvfold.make_default("turboquant-2")
    if isinstance(next(iter(given.values())), DynamicCache):
        given = cache_argument(llama, DynamicCache(config=llama.config))
    after = llama.generate(ids, return_dict_in_generate=True, **GREEDY, **given)
    assert torch.equal(before.sequences, after.sequences)
    assert not isinstance(after.get("past_key_values"), FoldedCache)


def test_a_default_ends(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids = random_ids(1, 120)
    dense = llama.generate(ids, **GREEDY)
    kvfold.make_default("turboquant-2")
    assert isinstance(_cache_of(llama.generate(ids, return_dict_in_generate=True, **GREEDY)), FoldedCache)
    kvfold.make_default(None)
    assert torch.equal(dense, llama.generate(ids, **GREEDY))


def test_a_wrong_default_is_refused_at_once(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="format = 'nope'"):
        kvfold.make_default("nope")
    with pytest.raises(ValueError, match="policy"):
        kvfold.make_default("kvfold-4", policy=Policy("kvfold-3"))
    with pytest.raises(FileNotFoundError):
        kvfold.make_default("kvfold-4", calibration="no-such-file")
    with pytest.raises(ValueError, match="no format"):
        kvfold.make_default(None, calibration="no-such-file")


def test_assistants_keep_dense_caches(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids = random_ids(1, 120)
    kvfold.make_default("kvfold-4")
    alone = llama.generate(ids, **GREEDY)
    assert torch.equal(alone, llama.generate(ids, assistant_model=llama, **GREEDY))


@pytest.mark.parametrize("way", ["custom_generate", "cache", "default"])
def test_a_pipeline(small: tuple[PreTrainedModel, PreTrainedTokenizerBase], way: str) -> None:
    model, tokenizer = small
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "The keeper of the light wrote down that it rained all day. " * 12
    options = {"return_full_text": False, **GREEDY}
    own = FoldedCache(model.config, "turboquant-2")
    kvfold.attach(model)
    if way == "default":
        kvfold.make_default("turboquant-2")
        given: dict[str, Any] = {}
    elif way == "cache":
        given = cache_argument(model, own)
    else:
        given = {"custom_generate": kvfold.generate, "format": "turboquant-2"}
    got = pipe(text, **options, **given)[0]["generated_text"]
    kvfold.make_default(None)
    ids = tokenizer(text, return_tensors="pt")
    out = model.generate(**ids, **cache_argument(model, FoldedCache(model.config, "turboquant-2")), **GREEDY)
    assert got == tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    if way == "cache":
        assert own.get_seq_length() > ids.input_ids.shape[1]
