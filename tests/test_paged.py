"""Pages in an engine's pool: kernel and reference, and the same answers as a cache of one sequence."""

import numpy as np
import pytest
import torch
from backends import with_instruction_set
from measured import measured
from torch import Tensor

from kvfold.attention import BACKENDS, cpu, naive
from kvfold.attention.pool import PagedAttention
from kvfold.cache.pool.firsts import FirstTokens
from kvfold.cache.pool.layer import PagedLayer
from kvfold.cache.pool.layout import PageLayout, PagePool, why_not_paged
from kvfold.cache.pool.plan import Slots, plan
from kvfold.formats import get_formats

FORMATS = (
    "kvfold-5", "kvfold-4", "kvfold-2", "kvfold-3@32", "turboquant-4", "turboquant-3+qjl", "centred-4", "affine-4g32",
    "uniform-4", "q8_0", "polar4", "kvarn-3", "oscar-4", "oscar-2",
    "float16",
)  # fmt: skip


def _fitted(name: str, dim: int, kv_heads: int):
    pair = get_formats(name, dim, dim)
    if not pair.awaits_fit and not pair.needs_calibration:
        return pair, None
    statistics = measured(kv_heads, dim, seed=5)
    return pair.calibrated(statistics), statistics


class Engine:
    """A few sequences in a pool of blocks, as an engine would hold them: blocks in any order, freed and used again."""

    def __init__(
        self, name, dim=64, kv_heads=2, repeat=3, dtype=torch.float32, blocks=40, per_block=1, slots=4, device="cpu",
        drafts=0, **options,
    ):  # fmt: skip
        self.formats, self.statistics = _fitted(name, dim, kv_heads)
        layout = PageLayout(get_formats(name, dim, dim))
        self.size, self.per_block, self.dtype = layout.page_size, per_block, dtype
        slot = layout.slot_bytes(dtype.itemsize)
        pool = torch.zeros(blocks, kv_heads, per_block * self.size, slot // dtype.itemsize, dtype=dtype, device=device)
        self.slots, self.drafts = Slots(slots, drafts), drafts
        self.layer = PagedLayer(self.formats, PagePool(pool, layout), slots, dtype, drafts)
        self.attention = PagedAttention(self.layer, kv_heads * repeat, scaling=dim**-0.5, **options)
        self.free = np.random.default_rng(0).permutation(np.arange(1, blocks)).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def step(self, new: dict[str, tuple[Tensor, Tensor, Tensor]]) -> dict[str, Tensor]:
        """Queries, keys and values (tokens, heads, dim) of some sequences; what attention returns for each."""
        starts, lengths = [0], []
        for who, (query, _, _) in new.items():
            self.length[who] = self.length.get(who, 0) + len(query)
            held = self.blocks.setdefault(who, [])
            while len(held) * self.size * self.per_block < self.length[who]:
                held.append(self.free.pop())
            starts.append(starts[-1] + len(query))
            lengths.append(self.length[who])
        table = np.zeros((len(new), max(len(self.blocks[who]) for who in new)), dtype=np.int32)
        for row, who in zip(table, new, strict=True):
            row[: len(self.blocks[who])] = self.blocks[who]
        step = plan(starts, lengths, table, self.slots, self.per_block, self.size, self.drafts)
        query, key, value = (
            torch.cat(parts).to(self.layer.pool.pages.device, self.dtype) for parts in zip(*new.values(), strict=True)
        )
        out = self.attention(query, key, value, step)
        return {who: out[a:b] for who, a, b in zip(new, starts, starts[1:], strict=False)}

    def take_back(self, who: str, tokens: int) -> None:
        """The newest tokens were drafts, and wrong."""
        self.length[who] -= tokens

    def finish(self, who: str) -> None:
        blocks = self.blocks.pop(who)
        self.slots.release(b * self.per_block + i for b in blocks for i in range(self.per_block))
        self.free += blocks
        del self.length[who]


def _tokens(count: int, seed: int, dim=64, kv_heads=2, repeat=3) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, heads, dim, generator=g) for heads in (kv_heads * repeat, kv_heads, kv_heads))


def _in_steps(engine: Engine, tokens: dict[str, tuple[Tensor, ...]], sizes: dict[str, list[int]]) -> dict[str, Tensor]:
    """Feed each sequence by its own list of sizes, as many sequences at a time as have something left."""
    done = dict.fromkeys(tokens, 0)
    outs: dict[str, list[Tensor]] = {who: [] for who in tokens}
    for turn in range(max(map(len, sizes.values()))):
        new = {}
        for who, parts in sizes.items():
            if turn < len(parts):
                new[who] = tuple(x[done[who] : done[who] + parts[turn]] for x in tokens[who])
                done[who] += parts[turn]
        for who, out in engine.step(new).items():
            outs[who].append(out)
    return {who: torch.cat(parts) for who, parts in outs.items()}


SIZES = {"a": [70, 1, 1, 56, 1, 130], "b": [1] * 6, "c": [64, 64, 1, 3], "d": [200, 57]}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("instruction_set", cpu.INSTRUCTION_SETS)
def test_kernel_agrees_with_reference(name: str, instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dim = 128 if name == "polar4" else 64
    tokens = {who: _tokens(sum(sizes), seed, dim) for seed, (who, sizes) in enumerate(SIZES.items())}
    monkeypatch.setitem(BACKENDS, "cpu", with_instruction_set(instruction_set))
    fast = _in_steps(Engine(name, dim), tokens, SIZES)
    true = _in_steps(Engine(name, dim, backend="reference"), tokens, SIZES)
    for who in SIZES:
        error = (fast[who] - true[who]).norm() / true[who].norm()
        assert error < (0.02 if instruction_set in cpu.INTEGER_SETS else 1e-5), (who, error)


@pytest.mark.parametrize("name", ["kvfold-4", "turboquant-3", "centred-4@32", "oscar-3", "float16"])
def test_answers_are_those_of_the_formula(name: str) -> None:
    tokens = {who: _tokens(sum(sizes), seed) for seed, (who, sizes) in enumerate(SIZES.items())}
    options = {"softcap": 4.0, "sink_logits": torch.arange(6.0) / 6}
    engine = Engine(name, backend="reference", **options)
    together = _in_steps(engine, tokens, SIZES)
    for who, own in tokens.items():
        by_head = (x.transpose(0, 1)[None] for x in own)
        alone = naive.attend_sequence(*by_head, engine.formats, scaling=64**-0.5, **options)[0].transpose(0, 1)
        torch.testing.assert_close(together[who].double(), alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_first_tokens_stay_dense(backend: str) -> None:
    """Where attention reads hardly anything else, and folding would show: in pages that others share, too."""
    query, key, value = _tokens(200, 0)
    key[0], query[64:] = 6.0, 2.0
    exact = value[0].repeat_interleave(3, 0)
    engine = Engine("turboquant-2", backend=backend)
    out = engine.step({"a": (query, key, value)})["a"][64:]
    torch.testing.assert_close(out, exact.expand_as(out), rtol=0, atol=1e-3)
    engine.blocks["b"], engine.length["b"] = engine.blocks["a"][:2], 128
    again = engine.step({"b": tuple(x[128:] for x in (query, key, value))})["b"]
    torch.testing.assert_close(again, out[64:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_who_shares_a_page_in_the_step_that_begins_it_reads_its_first_token(backend: str) -> None:
    query, key, value = _tokens(130, 0)
    engine = Engine("turboquant-2", backend=backend)
    engine.blocks["b"], engine.length["b"] = engine.free[-3:-1][::-1], 128  # those that "a" is going to get
    new = tuple(x[128:] for x in (query, key, value))
    out = engine.step({"b": new, "a": tuple(x[:128] for x in (query, key, value))})
    alone = Engine("turboquant-2", backend=backend).step({"a": (query, key, value)})["a"]
    torch.testing.assert_close(out["b"], alone[128:], rtol=0, atol=1e-5)


def test_places_of_first_tokens() -> None:
    firsts = FirstTokens(1)
    places = [firsts.begin(page) for page in (10, 20, 30, 40)]
    assert sorted(places) == list(range(firsts.count))
    assert firsts.of(10) == places[0]
    assert firsts.begin(50) == places[1]  # that of the page that was used longest ago
    assert (firsts.of(20), firsts.missed) == (-1, True)
    assert firsts.begin(10) == places[0]  # begun again
    firsts.forget([10, 99])  # goes on in a sequence
    assert firsts.of(10) == -1
    assert firsts.begin(60) == places[0]


def test_a_page_that_has_lost_its_place_is_read_as_it_was_folded() -> None:
    tokens = _tokens(200, 0)
    engine = Engine("kvfold-4", slots=1, blocks=60)
    out = engine.step({"a": tokens})["a"]
    shared = engine.blocks["a"][:3]
    engine.finish("a")
    engine.free = engine.free[:-4]
    for turn in range(engine.slots.firsts.count):
        engine.step({f"other-{turn}": _tokens(3, turn)})
        engine.finish(f"other-{turn}")
        engine.free.insert(0, engine.free.pop())  # the next one gets another
    engine.blocks["b"], engine.length["b"] = shared, 192
    again = engine.step({"b": tuple(x[192:] for x in tokens)})["b"]
    assert engine.slots.firsts.missed
    assert 0 < (again - out[192:]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("dtype", "per_block", "dim"), [(torch.bfloat16, 2, 128), (torch.float16, 3, 80), (torch.float32, 1, 256)]
)
def test_what_a_sequence_reads_depends_on_nothing_else(dtype: torch.dtype, per_block: int, dim: int) -> None:
    """Chunks, company, block order and blocks that others used before: bit for bit the same."""
    shape = {"dim": dim, "kv_heads": 1, "repeat": 2}
    tokens = {who: _tokens(sum(sizes), seed, **shape) for seed, (who, sizes) in enumerate(SIZES.items())}
    engine = Engine("kvfold-3", dtype=dtype, per_block=per_block, **shape)
    together = _in_steps(engine, tokens, SIZES)
    for who in SIZES:
        engine.finish(who)
    assert len(engine.slots) == 0
    alone = _in_steps(engine, {"a": tokens["a"]}, {"a": SIZES["a"]})
    assert torch.equal(alone["a"], together["a"])
    engine.finish("a")
    total = sum(SIZES["a"])
    whole = _in_steps(engine, {"a": tokens["a"]}, {"a": [total]})
    torch.testing.assert_close(whole["a"], together["a"], rtol=0.03, atol=0.03)


def test_shared_pages_are_read_where_they_are() -> None:
    """A second sequence starts behind two full pages of a first one."""
    engine = Engine("kvfold-4")
    first = _tokens(140, 1)
    out = engine.step({"a": first})["a"]
    engine.blocks["b"], engine.length["b"] = engine.blocks["a"][:2], 128
    again = engine.step({"b": tuple(x[128:] for x in first)})["b"]
    torch.testing.assert_close(again, out[128:], rtol=0, atol=1e-5)


def test_slots_are_bounded_and_never_guessed() -> None:
    engine = Engine("turboquant-4", slots=2)
    engine.step({who: _tokens(10, 0) for who in "ab"})
    with pytest.raises(RuntimeError, match="all 2 slots"):
        engine.step({"c": _tokens(10, 0)})
    engine.finish("a")
    engine.length["b"] += 1  # a token that was never given
    engine.slots.release(engine.blocks["b"])  # blocks have one page here
    with pytest.raises(RuntimeError, match="are lost"):
        engine.step({"b": _tokens(1, 0)})


def test_stale_page_passes_to_its_new_owner() -> None:
    """An engine that frees blocks without a word: who begins the page owns it."""
    engine = Engine("turboquant-4", slots=1)
    engine.step({"a": _tokens(10, 0)})
    engine.free.append(engine.blocks["a"][0])
    tokens = _tokens(70, 1)
    out = _in_steps(engine, {"b": tokens}, {"b": [30, 40]})["b"]
    true = _in_steps(Engine("turboquant-4", slots=1), {"b": tokens}, {"b": [30, 40]})["b"]
    assert torch.equal(out, true)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("what", ["key", "value", "query", "scale"])
@pytest.mark.parametrize("at", [3, 68])  # in a page that becomes full at once, and in one that does not
def test_a_broken_number_stays_in_its_sequence(backend: str, what: str, at: int) -> None:
    tokens = {who: _tokens(140, seed) for seed, who in enumerate("abc")}
    sizes = {who: [70, 1, 30, 39] for who in tokens}
    true = _in_steps(Engine("kvfold-4", backend=backend), tokens, sizes)
    query, key, value = (x.clone() for x in tokens["b"])
    if what == "scale":
        key[at] *= 1e6  # finite, and its norm is beyond float16
    else:
        {"key": key, "value": value, "query": query}[what][at, 1, 5] = torch.nan if at == 3 else -torch.inf
    engine = Engine("kvfold-4", backend=backend)
    out = _in_steps(engine, tokens | {"b": (query, key, value)}, sizes)
    for who in "ac":
        assert torch.equal(out[who], true[who])
    if what == "query":
        assert out["b"][at, 1].isnan().all()
        assert out["b"][70:].isfinite().all()
        return
    first = 101 if what == "scale" and at == 68 else 0  # until the page folds, such a key is as good as others
    assert out["b"][first:].isnan().all()
    assert out["b"][:first].isfinite().all()
    assert engine.layer.broken
    engine.blocks["d"], engine.length["d"] = engine.blocks["b"][:2], 128  # finds the same pages in the cache
    assert engine.step({"d": _tokens(5, 9)})["d"].isnan().all()
    engine.finish("b")
    assert torch.equal(_in_steps(engine, {"e": tokens["a"]}, {"e": sizes["a"]})["e"], true["a"])  # in the same blocks


def test_a_page_may_break_beside_one_that_shares_it_in_the_same_step() -> None:
    engine = Engine("kvfold-4")
    query, key, value = _tokens(64, 0)
    key[3, 0, 5] = torch.nan
    engine.blocks["b"], engine.length["b"] = [engine.free[-1]], 64
    out = engine.step({"a": (query, key, value), "b": _tokens(2, 1), "c": _tokens(70, 2)})
    assert out["a"].isnan().all()
    assert out["b"].isnan().all()
    assert out["c"].isfinite().all()


@pytest.mark.parametrize(("name", "per_block"), [("kvfold-4", 1), ("turboquant-3@16", 2), ("float16", 1)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.drawn
def test_drafts_that_are_taken_back_leave_no_trace(name: str, per_block: int, backend: str) -> None:
    """Bit for bit what a sequence answers that never drafted, over many pages' borders."""
    rng, drafts, total = np.random.default_rng(0), 5, 300
    tokens = {who: _tokens(total, seed) for seed, who in enumerate("ab")}
    true = _in_steps(Engine(name, per_block=per_block, backend=backend), tokens, {who: [1] * total for who in tokens})
    engine = Engine(name, per_block=per_block, backend=backend, slots=2, drafts=drafts)
    done, crossed = {"a": 0, "b": 0}, 0
    prompt = {who: tuple(x[:40] for x in parts) for who, parts in tokens.items()}
    assert set(engine.step(prompt)) == set(done)
    done = dict.fromkeys(done, 40)
    while min(done.values()) < total:
        new, right = {}, {}
        for who, at in done.items():
            if at == total:
                continue
            count = min(int(rng.integers(0, drafts + 1)), total - at - 1)
            right[who] = int(rng.integers(0, count + 1))
            wrong = _tokens(count - right[who], at)
            new[who] = tuple(
                torch.cat((x[at : at + 1 + right[who]], other)) for x, other in zip(tokens[who], wrong, strict=True)
            )
        for who, out in engine.step(new).items():
            at, kept = done[who], 1 + right[who]
            torch.testing.assert_close(out[:kept], true[who][at : at + kept], rtol=0, atol=1e-5)
            engine.take_back(who, len(out) - kept)
            crossed += (at + kept) // engine.size < (at + len(out)) // engine.size
            done[who] += kept
    assert crossed > (2 if engine.size > 16 else 10)
    for who in tokens:
        engine.finish(who)
    assert not len(engine.slots)


def test_bad_input_is_refused() -> None:
    engine = Engine("kvfold-4")
    query, key, value = _tokens(3, 0)
    with pytest.raises(ValueError, match="query is torch"):
        engine.attention(query.half(), key, value, plan([0, 3], [3], np.array([[1]]), engine.slots, 1, engine.size))
    assert "turns each key" in (why_not_paged(get_formats("tbqx3", 128, 128)) or "")
    assert "fitted to each prompt" in (why_not_paged(get_formats("turboquant-3.5", 64, 64)) or "")
    assert "before RoPE" in (why_not_paged(get_formats("amx3", 128, 128)) or "")
    pair = get_formats("kvfold-4", 64, 64)
    with pytest.raises(ValueError, match="must be fitted"):
        PagedLayer(pair, engine.layer.pool, 1, torch.float32)


def test_layers_may_share_a_step_and_not_the_shape_of_their_pools() -> None:
    """One KV head and two, pages of 16 tokens: each layer finds its own."""
    layout = PageLayout(get_formats("turboquant-4@16", 64, 64))
    table, counts = np.array([[3, 4, 5]]), (33, 2)
    for backend in ("cpu", "reference"):
        slots, outs = Slots(1), {}
        layers = {}
        for kv_heads in (1, 2):
            pool = PagePool(torch.zeros(6, kv_heads, 16, layout.slot_bytes(4) // 4), layout)
            layer = PagedLayer(get_formats("turboquant-4@16", 64, 64), pool, 1, torch.float32)
            layers[kv_heads] = PagedAttention(layer, 2, scaling=0.1, backend=backend)
        length = 0
        for count in counts:
            length += count
            step = plan([0, count], [length], table, slots, 1, 16)
            for kv_heads, attention in layers.items():
                query, key, value = _tokens(count, kv_heads + length, 64, kv_heads, 2 // kv_heads)
                outs[kv_heads] = attention(query, key, value, step)
        if backend == "cpu":
            fast = outs
    for kv_heads in (1, 2):
        torch.testing.assert_close(fast[kv_heads], outs[kv_heads], rtol=0, atol=0.02)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_without_tokens(backend: str) -> None:
    engine = Engine("turboquant-4", backend=backend)
    step = plan([0], [], np.zeros((0, 3), dtype=np.int32), engine.slots, 1, engine.size)
    nothing = torch.zeros(0, 6, 64), torch.zeros(0, 2, 64), torch.zeros(0, 2, 64)
    assert engine.attention(*nothing, step).shape == (0, 6, 64)


def test_a_page_takes_the_bytes_that_formats_say() -> None:
    for dim, slot in ((64, 70), (128, 138)):
        layout = PageLayout(get_formats("kvfold-4", dim, dim))
        assert layout.slot_bytes(2) == slot
        assert layout.used == 64 * slot
    assert PageLayout(get_formats("kvfold-4@128", 128, 128)).slot_bytes(2) == 134
