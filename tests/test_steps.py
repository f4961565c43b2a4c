"""Steps of decoding that one kernel appends and another answers, against the way that every token can go."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.attention import attend
from kvfold.cache.batch import Appended
from kvfold.cache.config import LayerConfig
from kvfold.cache.files.layer import layer_from_saved, layer_to_saved
from kvfold.cache.layer import LayerCache
from kvfold.cache.report import held_bytes
from kvfold.formats import Window

FORMATS = ("kvfold-4", "centred-4:turboquant-3", "turboquant-4", "turboquant-3@32:hadamard-2@32")


def without_steps(query: Tensor, new: Appended, **options: Any) -> Tensor:
    """`attend` in a cache whose tokens never go by steps."""
    answer = attend(query, new, scaling=1 / 8, **options)
    for group in new.layer.groups:
        group.rows.step = None
    return answer


class Pair:
    """One cache whose tokens go by steps where they can, and one whose tokens never do."""

    def __init__(self, format: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        config = LayerConfig(format, **options)
        self.stepping, self.plain = LayerCache(config), LayerCache(config)
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(0)
        self.steps = 0

    def random(self, *shape: int) -> Tensor:
        """As models give it: heads side by side."""
        batch, heads, n, dim = shape
        return torch.randn(batch, n, heads, dim, generator=self.generator).to(self.dtype).transpose(1, 2)

    def token(self, batch: int = 2, n: int = 1, **options: object) -> None:
        """Append and attend with both, and compare what comes out and what is held."""
        key, value, query = self.random(batch, 2, n, 64), self.random(batch, 2, n, 64), self.random(batch, 6, n, 64)
        new = self.stepping.append(key, value)
        self.steps += new.spans is None
        got = attend(query, new, scaling=1 / 8, **options)  # type: ignore[arg-type]
        expected = without_steps(query, self.plain.append(key, value), **options)
        assert got.dtype == self.dtype
        assert torch.equal(got, expected)
        self.compare()

    def compare(self) -> None:
        assert self.stepping.columns == self.plain.columns
        assert all(map(torch.equal, self.stepping.unfold(torch.float32), self.plain.unfold(torch.float32)))

    def both(self, change: Callable[[LayerCache], object]) -> None:
        change(self.stepping)
        change(self.plain)
        self.compare()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_steps_answer_as_others_do(format: str, dtype: torch.dtype) -> None:
    pair = Pair(format, dtype)
    pair.token(n=300)
    for _ in range(150):
        pair.token()
    assert pair.steps > 120
    pair.token(softcap=20.0)
    pair.token(mask=torch.rand(1, 1, 1, pair.plain.columns + 1, generator=pair.generator) < 0.7)
    pair.token(sink_logits=torch.ones(6))
    pair.token(n=3)
    pair.token()
    assert held_bytes(pair.stepping) == held_bytes(pair.plain)


@pytest.mark.parametrize(
    ("format", "dtype", "options", "steps"),
    [
        ("tbq3", torch.float32, {"window": Window(4, 24, 24)}, True),
        ("tbq3", torch.float32, {"window": Window(4, 24, 24), "sharpen": True}, False),  # it changes queries first
        ("kvfold-4", torch.float32, {"dense_dtype": torch.float32}, True),
        ("kvfold-4", torch.bfloat16, {"dense_dtype": torch.bfloat16}, True),
        ("kvfold-4", torch.float32, {"dense_dtype": torch.bfloat16}, False),
    ],
)
def test_steps_heed_options(format: str, dtype: torch.dtype, options: dict[str, Any], steps: bool) -> None:
    pair = Pair(format, dtype, **options)
    pair.token(n=300 if format == "tbq3" else 320)  # no page folds in what follows
    for _ in range(20):
        pair.token()
    assert pair.steps == 17 * steps  # all but two tokens, which make a step and a place for it, and one more place


@pytest.mark.parametrize("format", FORMATS)
def test_what_else_changes_is_noticed(format: str) -> None:
    pair = Pair(format)
    pair.token(n=300)

    def evict(cache: LayerCache) -> None:
        rows = cache.groups[0].rows
        keep = torch.arange(rows.evictable(0) // rows.page_size).expand(rows.batch, 2, -1) > 0
        rows.evict(keep, by_page=True)

    def move(cache: LayerCache) -> None:
        rows = cache.groups[0].rows
        for pages in rows.pages():
            assert pages is not None
            for _, tensor in pages.tensors():
                tensor.share_memory_()
        for tensor in (*(rows.dense.sinks or ()), *(rows.dense.tail or ())):
            tensor.share_memory_()

    def undo(cache: LayerCache) -> None:
        state = cache.state()
        attend(torch.ones(2, 6, 1, 64), cache.append(*torch.ones(2, 2, 2, 1, 64)), scaling=1 / 8)
        cache.restore(state)

    changes: list[Callable[[LayerCache], object]] = [
        lambda cache: cache.crop(cache.columns - 3),
        lambda cache: cache.crop(200),
        lambda cache: cache.select(torch.tensor([1, 0])),
        lambda cache: cache.select(torch.tensor([1, 1])),
        undo,
        move,
    ]
    for change in changes:
        for _ in range(5):
            pair.token()
        assert pair.stepping.groups[0].rows.step is not None
        pair.both(change)
        for _ in range(5):
            pair.token()
    pair.stepping, kept = copy.deepcopy(pair.stepping), pair.stepping
    pair.token()
    kept.append(*torch.zeros(2, 2, 2, 1, 64))  # which its copy must not see
    pair.token()
    for cache in (pair.stepping, pair.plain):
        evict(cache)
    key, value, query = pair.random(2, 2, 1, 64), pair.random(2, 2, 1, 64), pair.random(2, 6, 1, 64)
    answers = [without_steps(query, cache.append(key, value)) for cache in (pair.stepping, pair.plain)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("format", FORMATS)
def test_a_step_refuses_what_others_refuse(format: str) -> None:
    pair = Pair(format)
    pair.token(n=300)
    for _ in range(3):
        pair.token()
    good = torch.ones(2, 2, 1, 64)
    for bad, message in (
        (good * float("nan"), "is nan"),
        (good * 1e5, "too large for torch.float16"),
        (good[:1], "has batch 1|must both have the shape"),
        (good[..., :32], "has 2 heads of 32"),
        (good.double()[:, :1], "must both have the shape|has 1 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.stepping.append(bad, good)
        pair.compare()
        pair.token()
    new = pair.stepping.append(good, good)
    for query, message in (
        (torch.full((2, 6, 1, 64), float("inf")), "query holds a NaN or an infinity"),
        (torch.ones(2, 5, 1, 64), "query has shape"),
        (torch.ones(1, 6, 1, 64), "query has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(query, new, scaling=1 / 8)
    double = attend(torch.ones(2, 6, 1, 64, dtype=torch.float64), new, scaling=1 / 8)
    torch.testing.assert_close(
        attend(torch.ones(2, 6, 1, 64), new, scaling=1 / 8), double.float(), rtol=0.05, atol=0.02
    )


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4"])
def test_an_interrupted_step_leaves_no_trace(format: str) -> None:
    pair = Pair(format)
    pair.token(n=300)
    pair.token()
    rows = pair.stepping.groups[0].rows
    step = rows.step
    assert step is not None

    class Interrupted:
        def append(self, *args: object) -> bool:
            assert step.append(*args)  # type: ignore[arg-type]
            raise KeyboardInterrupt

    rows.step = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        pair.stepping.append(*torch.ones(2, 2, 2, 1, 64))
    pair.compare()
    for _ in range(3):
        pair.token()


def test_tokens_that_are_refused_once_the_tail_has_room_for_them() -> None:
    """The room that was made for them is given back: the step's tail is the rows' again."""
    pair = Pair("kvfold-4")
    pair.token(n=300)
    rows = pair.stepping.groups[0].rows
    for _ in range(200):
        assert rows.dense.tail is not None
        room = rows.dense.room_left - rows.length
        if rows.step is not None and 0 < room < 5 and rows.only_joins(5):
            break
        pair.token()
    many = torch.ones(2, 2, 5, 64)
    many[0, 0, 4, 0] = float("nan")
    with pytest.raises(ValueError, match="is nan"):
        pair.stepping.append(many, many)
    assert rows.dense.room_left - rows.length == room
    for _ in range(6):
        pair.token()


def test_rows_that_have_not_started_keep_steps_away() -> None:
    """A batch of the wrong size is no step of those that have."""
    cache = LayerCache(LayerConfig("turboquant-4"))
    for n in (40, 1, 1):
        new = cache.append(*torch.ones(2, 2, 2, n, 64), [0, 60])
        attend(torch.ones(2, 6, n, 64), new, scaling=1 / 8)
    with pytest.raises(ValueError, match="has batch 1"):
        cache.append(*torch.ones(2, 1, 2, 1, 64))
    padding = LayerCache(LayerConfig("turboquant-4"))
    new = padding.append(*torch.ones(2, 1, 2, 1, 64), [5])
    for _ in range(2):
        assert not attend(torch.ones(1, 6, 1, 64), new, scaling=1 / 8).any()


def test_layers_that_share_a_cache_attend_twice() -> None:
    pair = Pair("kvfold-4")
    pair.token(n=300)
    for _ in range(30):
        key, value, query, other = (pair.random(2, heads, 1, 64) for heads in (2, 2, 6, 6))
        new, plain = pair.stepping.append(key, value), pair.plain.append(key, value)
        for q in (query, other):
            expected = without_steps(q, plain)
            assert torch.equal(attend(q, new, scaling=1 / 8), expected)


def test_queries_that_are_kept_are_seen() -> None:
    """As policies ask for them: from when they ask on."""
    pair = Pair("kvfold-4")
    pair.token(n=300)
    pair.token()
    for cache in (pair.stepping, pair.plain):
        cache.keeps_queries = 4
    for _ in range(3):
        pair.token()
    assert pair.stepping.newest_queries is not None
    assert pair.plain.newest_queries is not None
    assert torch.equal(pair.stepping.newest_queries, pair.plain.newest_queries)


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4"])
def test_a_loaded_cache_goes_on(format: str) -> None:
    pair = Pair(format)
    pair.token(n=300)
    pair.token()
    pair.stepping = layer_from_saved(layer_to_saved(pair.stepping))
    before = pair.steps
    for _ in range(100):
        pair.token()
    assert pair.steps > before + 30
