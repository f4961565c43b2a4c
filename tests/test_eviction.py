"""Eviction: scores are the paper's formula, what goes is gone, and what stays reads as before."""

import copy
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold import FoldedCache, QueryStatistics, SnapKV, StreamingLLM, TriAttention
from kvfold.cache.compaction import fill_holes
from kvfold.cache.rows import FoldedRows
from kvfold.evaluate import split_passages
from kvfold.eviction.policy import Candidates, Eviction, normalised
from kvfold.formats import Window, get_formats, pair
from kvfold.quant.importance import expected_queries, pair_scores

Ids = Callable[..., Tensor]
PUBLIC = Path(__file__).parents[2] / "shared" / "data" / "qwen3-1.7b.tria.bin"


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that are fitted fold here too, though prompts are short."""
    monkeypatch.setattr(pair, "FIT_TOKENS", 80)


def rows_of(cache: FoldedCache, layer: int = 0, group: int = 0) -> FoldedRows:
    rows: FoldedRows = cache.layers[layer].folded.groups[group].rows
    return rows


def statistics_of(model: PreTrainedModel, random_ids: Ids) -> QueryStatistics:
    return kvfold.measure_queries(model, [random_ids(1, 200, seed=9)])


def read(model: PreTrainedModel, ids: Tensor, cache: FoldedCache, chunk: int = 512) -> Tensor:
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunk, 1)], 1)


# The formula

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512,
    },
}  # fmt: skip
SHAPE = {
    "vocab_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 2048, "hidden_size": 96,
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def rope_model(rope: str, kind: str = "llama") -> PreTrainedModel:
    """A tiny random model: Llama, Qwen3 (which has a q_norm), or GLM-like partial rotation by Phi."""
    torch.manual_seed(0)
    options = {**SHAPE, "rope_parameters": dict(ROPES[rope])}
    if kind == "qwen3":
        config = transformers.Qwen3Config(**options, head_dim=64)
        model: PreTrainedModel = transformers.Qwen3ForCausalLM(config)
    elif kind == "partial":
        options["rope_parameters"]["partial_rotary_factor"] = 0.5
        config = transformers.StableLmConfig(**options)
        model = transformers.StableLmForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**options, head_dim=64)
        model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 2)
        elif weight.ndim > 1:
            weight.mul_(4)
    return model.eval()


class Before:
    """Queries and keys as they are before RoPE, seen where the model calls it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.module = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
        self.original = self.module.apply_rotary_pos_emb

    def __enter__(self) -> "Before":
        def see(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.layers.append((q.double(), k.double()))
            return self.original(q, k, *args, **kwargs)

        self.module.apply_rotary_pos_emb = see
        return self

    def __exit__(self, *error: object) -> None:
        self.module.apply_rotary_pos_emb = self.original


def formula(q: Tensor, k: Tensor, positions: Tensor, now: int, omega: Tensor) -> Tensor:
    """The paper's score of keys (T, D) before RoPE by queries (N, D) before RoPE, in a few lines and float64."""
    f = len(omega)
    qf, kf = (torch.complex(x[:, :f].double(), x[:, f : 2 * f].double()) for x in (q, k))
    rel = qf.mean(0) * kf.conj()
    trig = torch.zeros(len(k), dtype=torch.float64)
    for o in range(17):
        angle = (now - positions + 2**o).double()[:, None] * omega
        trig += (rel.real * angle.cos() - rel.imag * angle.sin()).sum(-1) / 17
    return trig + ((qf.abs().mean(0) - qf.mean(0).abs()).clamp_min(0) * kf.abs()).sum(-1)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "partial"])
@pytest.mark.parametrize("rope", list(ROPES))
def test_scores_are_the_formula(rope: str, kind: str, random_ids: Ids) -> None:
    """On the model's own queries and keys, taken before its RoPE, against the cache's keys, folded after it."""
    model, ids = rope_model(rope, kind), random_ids(1, 300)
    statistics = kvfold.measure_queries(model, [ids])
    with Before(model) as before:
        cache = FoldedCache(model.config, "float16", eviction=TriAttention(budget=400, statistics=statistics))
        model(ids, past_key_values=cache, use_cache=True)
    policy = cache.evictor.policy
    assert isinstance(policy, TriAttention)
    inverse = model.base_model.rotary_emb.inv_freq.double()
    assert torch.tensor(policy.frequencies) == pytest.approx(inverse, rel=1e-6)
    inverse = torch.tensor(policy.frequencies, dtype=torch.float64)  # float32's rounding counts 65,536 tokens ahead
    for layer, (q, k) in enumerate(before.layers):
        rows = rows_of(cache, layer)
        got = policy.raw_scores(Candidates(layer, rows, 256))
        turned = rows.unfold()[0]
        exact = pair_scores(turned[:, :, :256], *_series(policy, layer, rows.kv_heads, now=299))
        assert torch.equal(got, exact)
        for head in range(4):
            own = k[0, head // 2]
            truth = formula(q[0, head], own, torch.arange(300), 299, inverse)[:256]
            size = truth.abs().max()
            # Keys before RoPE, turned in float64 as the model turns them, score as the formula says.
            angle = torch.arange(300).double()[:, None] * inverse
            pairs = torch.complex(*own[:, : 2 * len(inverse)].chunk(2, -1))
            pairs = pairs * torch.polar(torch.ones_like(angle), angle) * policy.turned_by
            keys = torch.cat((pairs.real, pairs.imag, own[:, 2 * len(inverse) :]), -1)[None, None, :256].float()
            direction, spread = _series(policy, layer, rows.kv_heads, now=299)
            mine = pair_scores(keys, direction[head // 2][None], spread[head // 2][None])[0, 0, head % 2]
            assert (mine - truth).abs().max() < 1e-5 * size
            # What is held was rounded to float16.
            assert (got[0, head // 2, head % 2] - truth).abs().max() < 2e-3 * size


def _series(policy: TriAttention, layer: int, kv_heads: int, now: int) -> tuple[Tensor, Tensor]:
    omega = torch.tensor(policy.frequencies, dtype=torch.float64)
    mean, magnitude = policy.statistics.of_layer(layer)
    direction, spread = expected_queries(mean, magnitude, now, omega, policy.turned_by)
    return direction.unflatten(0, (kv_heads, -1)), spread.unflatten(0, (kv_heads, -1))


@pytest.mark.parametrize("shape", [(1, 1, 1, 16, 8), (2, 3, 3, 77, 64), (1, 2, 5, 130, 128), (1, 2, 1, 33, 80)])
@pytest.mark.parametrize("rotary", [1.0, 0.5])
def test_scores_of_pairs(shape: tuple[int, int, int, int, int], rotary: float) -> None:
    batch, heads, repeat, tokens, dim = shape
    pairs = int(dim * rotary) // 2
    torch.manual_seed(1)
    x, direction = torch.randn(batch, heads, tokens, dim), torch.randn(heads, repeat, 2 * pairs)
    spread = torch.rand(heads, repeat, pairs)
    truth = torch.empty(batch, heads, repeat, tokens, dtype=torch.float64)
    for h in range(heads):
        k = torch.complex(x[:, h, :, :pairs].double(), x[:, h, :, pairs : 2 * pairs].double())
        for r in range(repeat):
            d = torch.complex(direction[h, r, :pairs].double(), direction[h, r, pairs:].double())
            truth[:, h, r] = (d * k.conj()).real.sum(-1) + (spread[h, r].double() * k.abs()).sum(-1)
    assert torch.allclose(pair_scores(x, direction, spread).double(), truth, atol=1e-4, rtol=1e-5)


@pytest.mark.contract
def test_statistics_are_of_queries_before_rope(random_ids: Ids) -> None:
    model, ids = rope_model("yarn", "qwen3"), random_ids(1, 150)
    statistics = kvfold.measure_queries(model, [ids[:, :80], ids[:, 80:]], chunk=32)
    kvfold.detach(model)
    total, magnitude = 0, 0
    for part in (ids[:, :80], ids[:, 80:]):
        with Before(model) as before:
            model(part)
        q = torch.stack([layer[0][0] for layer in before.layers])
        pairs = torch.complex(*q.chunk(2, -1))
        total, magnitude = total + pairs.sum(2), magnitude + pairs.abs().sum(2)
    mean, size = map(torch.stack, zip(*(statistics.of_layer(i) for i in range(2)), strict=True))
    assert torch.allclose(mean, (total / 150).to(torch.complex64), atol=1e-3)
    assert torch.allclose(size, (magnitude / 150).float(), atol=1e-3)
    assert statistics.rope_theta == 10_000
    assert statistics.tables[:, :, 3].max() <= 1
    assert torch.tensor(statistics.budget_scales).mean() == pytest.approx(1)


def test_models_that_turn_keys_otherwise_are_refused() -> None:
    """Cohere turns neighbouring channels, and its config does not say so."""
    torch.manual_seed(0)
    model = transformers.CohereForCausalLM(
        transformers.CohereConfig(**SHAPE, rope_parameters=dict(ROPES["plain"]), bos_token_id=1, eos_token_id=2)
    ).eval()
    with pytest.raises(ValueError, match="turns its queries in another way"):
        kvfold.measure_queries(model, [torch.arange(3, 200)[None]])


def test_scores_of_the_real_models_keys(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor
) -> None:
    """SmolLM2's own, in float64: what the formula says of keys and queries before RoPE."""
    model, ids = demo[0], text_ids[:, 4_000:4_300]
    statistics = kvfold.measure_queries(model, [ids])
    with Before(model) as before:
        model(ids, past_key_values=FoldedCache(model.config, "float16"), use_cache=True)
    cache = FoldedCache(model.config, "turboquant-8", eviction=TriAttention(statistics, budget=512))
    model(ids, past_key_values=cache, use_cache=True)
    policy = cache.evictor.policy
    omega = torch.tensor(policy.frequencies, dtype=torch.float64)
    for layer in (0, 13, 29):
        q, k = before.layers[layer]
        direction, spread = _series(policy, layer, 3, now=299)
        for head in range(9):
            truth = formula(q[0, head], k[0, head // 3], torch.arange(300), 299, omega)
            angle = torch.arange(300).double()[:, None] * omega
            pairs = torch.complex(*k[0, head // 3].chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
            keys = torch.cat((pairs.real, pairs.imag), -1).float()[None, None]
            mine = pair_scores(keys, direction[head // 3][None], spread[head // 3][None])[0, 0, head % 3]
            assert (mine - truth).abs().max() < 1e-5 * truth.abs().max()
        folded = policy.raw_scores(Candidates(layer, rows_of(cache, layer), 192))[0].flatten(0, 1)
        for head in range(9):  # as the cache holds them, rotated and in 8 bits
            truth = formula(q[0, head], k[0, head // 3], torch.arange(300), 299, omega)[:192]
            assert torch.corrcoef(torch.stack((folded[head].double(), truth)))[0, 1] > 0.98


def test_rounded_frequencies_are_named(random_ids: Ids) -> None:
    """As model.to(torch.bfloat16) rounds them."""
    model = rope_model("plain").to(torch.bfloat16).to(torch.float32)
    with pytest.raises(ValueError, match="its RoPE's frequencies were rounded"):
        kvfold.measure_queries(model, [random_ids(1, 100)])


# Files


def test_public_file() -> None:
    """One that others wrote, of version 1; its header's rope_theta is not the model's."""
    if not PUBLIC.is_file():
        pytest.skip("the public file does not lie beside this checkout")
    statistics = QueryStatistics.load(PUBLIC)
    assert (statistics.layers, statistics.heads, statistics.kv_heads, statistics.head_dim, statistics.pairs) == (
        28, 16, 8, 128, 64,
    )  # fmt: skip
    assert statistics.budget_scales == ()
    assert statistics.to_bytes() == PUBLIC.read_bytes()
    config = transformers.Qwen3Config(
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"rope_theta = 10,000, the config 1,000,000.*with_rope_theta\(1000000\)"):
        FoldedCache(config, eviction=TriAttention(budget=512, statistics=statistics))
    FoldedCache(config, eviction=TriAttention(budget=512, statistics=statistics.with_rope_theta(1e6)))
    with pytest.raises(ValueError, match="version 1 and has no budget scales"):
        TriAttention(budget=512, statistics=statistics, layer_budgets=True)


def some_statistics(version: int) -> QueryStatistics:
    torch.manual_seed(version)
    mean, magnitude = torch.randn(3, 4, 8, dtype=torch.complex64), torch.rand(3, 4, 8) + 3
    statistics = QueryStatistics.of(mean, magnitude, 2, 16, 10_000.0, 0.25)
    return statistics if version == 2 else kvfold.QueryStatistics(2, 16, 10_000.0, 0.25, statistics.tables)


@pytest.mark.parametrize("version", [1, 2])
def test_files_come_back_byte_for_byte(version: int, tmp_path: Path) -> None:
    statistics = some_statistics(version)
    statistics.save(tmp_path / "one.tria")
    data = (tmp_path / "one.tria").read_bytes()
    assert struct.unpack_from("<7I2f", data) == (0x54524941, version, 3, 4, 2, 16, 8, 10_000.0, 0.25)
    assert data[36:64] == bytes(28)
    assert len(data) == 64 + (12 if version == 2 else 0) + 3 * 4 * 4 * 8 * 4
    if version == 2:
        assert struct.unpack_from("<3f", data, 64) == statistics.budget_scales
    assert struct.unpack_from("<f", data, len(data) - 4)[0] == statistics.tables[2, 3, 3, 7]
    loaded = QueryStatistics.load(tmp_path / "one.tria")
    assert loaded.to_bytes() == data
    assert torch.equal(loaded.tables, statistics.tables)


@pytest.mark.parametrize(
    ("at", "put", "says"),
    [
        (0, b"AIRX", "no TRIA file"),
        (4, struct.pack("<I", 3), "version 3"),
        (8, struct.pack("<I", 0), "0 layers"),
        (8, struct.pack("<I", 2**31), "damaged"),
        (16, struct.pack("<I", 3), "3 KV heads"),
        (8, struct.pack("<I", 4), "truncated or of another model"),
        (28, struct.pack("<f", float("nan")), "rope_theta = nan"),
        (28, struct.pack("<f", -1.0), "rope_theta = -1.0"),
        (40, b"\1", "not zero"),
        (200, struct.pack("<f", float("inf")), "a NaN or an infinity"),
    ],
)
def test_damaged_files_are_named(at: int, put: bytes, says: str, tmp_path: Path) -> None:
    data = bytearray(some_statistics(2).to_bytes())
    data[at : at + len(put)] = put
    (tmp_path / "x.tria").write_bytes(data)
    with pytest.raises(ValueError, match=says) as error:
        QueryStatistics.load(tmp_path / "x.tria")
    assert "x.tria" in str(error.value)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    data = some_statistics(2).to_bytes()
    for length in (0, 3, 63, 64, 80, len(data) - 1):
        with pytest.raises(ValueError, match=r"TRIA|truncated"):
            QueryStatistics.from_bytes(data[:length])
    with pytest.raises(ValueError, match="truncated"):
        QueryStatistics.from_bytes(data + b"\0")
    with pytest.raises(FileNotFoundError, match="kvfold calibrate --eviction"):
        QueryStatistics.load(tmp_path / "none.tria")


def test_statistics_of_another_model_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"3 layers, 4 heads.*the config has 4, 6, 2 of 64 and 32"):
        FoldedCache(llama.config, eviction=TriAttention(budget=512, statistics=some_statistics(2)))


# What goes is gone, and what stays reads as before


@given(st.integers(1, 40), st.integers(0, 5), st.data())
def test_nothing_moves_without_need(units: int, after: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, units))
    keep = torch.zeros(2, 2, units, dtype=torch.bool)
    for row in keep.flatten(0, 1):
        row[torch.tensor(data.draw(st.permutations(range(units)))[:kept], dtype=torch.long)] = True
    index = fill_holes(keep, after)
    for row, own in zip(keep.flatten(0, 1), index.flatten(0, 1), strict=True):
        assert sorted(own[:kept].tolist()) == row.nonzero()[:, 0].tolist()
        assert own[kept:].tolist() == list(range(units, units + after))
        moved = int((own[:kept] != torch.arange(kept)).sum())
        assert moved == int(row[kept:].sum())  # no fewer would do: they lie where nothing is held any more


FORMATS = [
    "float16", "turboquant-4", "hadamard-3", "centred-4", "kvfold-4", "kvfold-4:turboquant-3", "turboquant-3+qjl",
    "tbq3", "q8_0", "turboquant-3:kvfold-3",
]  # fmt: skip


@pytest.mark.parametrize("unit", ["token", "page"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_stays_is_what_was(format: str, unit: Any, random_ids: Ids) -> None:
    """Twice, with new tokens between: each head holds the tokens that were chosen, bit for bit unless folded again."""
    model = tiny_model("llama").float()
    kvfold.attach(model)
    cache = FoldedCache(model.config, format)
    ids = random_ids(2, 700)
    first = 0
    for stop in (450, 575, 700):
        read(model, ids[:, first:stop], cache)
        before = cache.held_bytes()
        for layer in range(4):
            rows = rows_of(cache, layer)
            old = [x.clone() for x in rows.unfold()]
            slots = rows.evictable(128)
            position = torch.cat((torch.arange(rows.window.sinks).expand(2, 2, -1), rows.folded_positions(slots)), -1)
            generator = torch.Generator().manual_seed(stop + layer)
            by_page = unit == "page"
            units = slots // 64 if by_page else slots
            kept = units // 2 // (1 if by_page or rows.formats.folds_by_token else 64)
            kept *= 1 if by_page or rows.formats.folds_by_token else 64
            chosen = torch.rand(2, 2, units, generator=generator).argsort(-1)[..., :kept]
            keep = torch.zeros(2, 2, units, dtype=torch.bool).scatter_(-1, chosen, True)
            again = not by_page and any(store.describes_pages for store in rows.stores)
            rows.evict(keep, by_page)
            gone = slots - kept * (64 if by_page else 1)
            assert rows.seen == stop
            assert rows.length == old[0].shape[2] - gone
            now = rows.slot_positions()
            assert now.shape == (2, 2, rows.length)
            assert (now.sort(-1).values.diff() > 0).all()
            expected = keep.repeat_interleave(64, -1) if by_page else keep
            new = rows.unfold()
            for b in range(2):
                for h in range(2):
                    left = set(position[b, h, rows.window.sinks :][expected[b, h]].tolist())
                    assert left == set(now[b, h, rows.window.sinks : rows.window.sinks + len(left)].tolist())
                    where = {int(p): i for i, p in enumerate(position[b, h])}
                    place = [where.get(int(p), int(p) - stop + old[0].shape[2]) for p in now[b, h]]
                    for x, y in zip(old, new, strict=True):
                        if again:
                            assert (x[b, h, place] - y[b, h]).norm() < 0.35 * x[b, h, place].norm()
                        else:
                            assert torch.equal(x[b, h, place], y[b, h])
        assert cache.held_bytes() < before
        first = stop


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("format", ["turboquant-4", "kvfold-4", "kvfold-4:turboquant-3", "float16"])
def test_attention_goes_over_what_is_left(format: str, random_ids: Ids) -> None:
    """Single tokens and chunks under a mask see what a softmax over the held keys sees; so does the CPU's kernel."""
    model = tiny_model("llama")
    kvfold.attach(model)
    cache = FoldedCache(
        model.config, format, eviction=TriAttention(budget=300, statistics=statistics_of(model, random_ids))
    )
    read(model, random_ids(1, 500), cache)
    assert rows_of(cache).evicted > 100
    cache.evictor = None
    more = random_ids(1, 30, seed=3)
    one, chunk, kernel = (copy.deepcopy(cache) for _ in range(3))
    layer, seen = model.model.layers[0], []
    handle = layer.self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    steps = read(model, more, one, 1)
    handle.remove()
    assert apart(read(model, more, chunk, 10), steps) < 1e-6

    # By hand, layer 0's last token: a plain softmax.
    hidden = layer.input_layernorm(model.model.embed_tokens(more))
    cos, sin = model.model.rotary_emb(hidden, torch.arange(500, 530)[None])
    q = layer.self_attn.q_proj(hidden).unflatten(-1, (6, 64)).transpose(1, 2)
    q, _ = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, q, cos, sin)
    keys, values = (x.double().repeat_interleave(3, 1) for x in rows_of(one).unfold())
    p = (q[:, :, -1:] @ keys.mT * 64**-0.5).softmax(-1)
    by_hand = layer.self_attn.o_proj((p @ values).transpose(1, 2).flatten(2))
    assert apart(seen[-1], by_hand) < 1e-5

    if format != "float16":
        kvfold.detach(model)
        kvfold.attach(model.float(), "cpu")
        assert apart(read(model, more, kernel, 10).double(), steps) < 0.05


def policies(model: PreTrainedModel, random_ids: Ids, **options: Any) -> dict[str, Eviction]:
    statistics = statistics_of(model, random_ids)
    own = {"unit": "token", "mode": "per_layer_per_head"}
    return {
        "pages": TriAttention(statistics=statistics, **options),
        "tokens": TriAttention(statistics=statistics, **own, **options),
        "segments": TriAttention(statistics=statistics, segments=4, **own, **options),
        "streaming": StreamingLLM(**own, **options),
        "snap": SnapKV(**own, **options),
    }


@pytest.mark.parametrize(
    ("name", "format"),
    [(name, "kvfold-3") for name in ("pages", "tokens", "segments", "streaming", "snap")]
    + [(name, "turboquant-4") for name in ("pages", "streaming")],
)
def test_over_a_long_text(name: str, format: str, llama: PreTrainedModel, random_ids: Ids) -> None:
    """Held tokens stay below budget + interval, first and newest stay, and what went does not come back."""
    policy = policies(llama, random_ids, budget=320, keep_first=20, recent=100, interval=64)[name]
    cache = FoldedCache(llama.config, format, eviction=policy)
    ids, gone = random_ids(2, 900), [set() for _ in range(4)]
    sizes = []
    for first in range(0, 900, 50):
        read(llama, ids[:, first : first + 50], cache, 50 if first < 800 else 1)
        seen = min(first + 50, 900)
        sizes.append(cache.held_bytes())
        for layer in range(4):
            rows = rows_of(cache, layer)
            assert rows.seen == seen == cache.get_seq_length()
            assert rows.length <= 320 + 64 + 50
            held = rows.slot_positions()[1, 1].tolist() if rows.positions is not None else list(range(seen))
            assert len(held) == len(set(held)) == rows.length
            assert set(held) >= {*range(min(20, seen)), *range(max(seen - 100, 0), seen)}
            assert not gone[layer] & set(held)
            gone[layer] = set(range(seen)) - set(held)
    assert len(gone[0]) > 400
    assert max(sizes[11:]) == max(sizes[8:11]) or max(sizes[11:]) < 1.1 * max(sizes[8:11])  # saws, but does not grow
    if name == "streaming" and format == "turboquant-4":
        left = sorted(rows_of(cache).slot_positions()[0, 0].tolist())
        assert left[:20] == list(range(20))
        assert left[20:] == list(range(900 - len(left) + 20, 900))


@pytest.mark.parametrize(
    ("mode", "unit", "format"),
    [*product(("per_layer_per_head", "per_head", "union"), ("page", "token"), ["kvfold-4"]),
     ("per_head", "token", "turboquant-4")],
)  # fmt: skip
def test_modes(mode: Any, unit: Any, format: str, llama: PreTrainedModel, random_ids: Ids) -> None:
    statistics = statistics_of(llama, random_ids)
    cache = FoldedCache(
        llama.config, format, eviction=TriAttention(budget=300, statistics=statistics, mode=mode, unit=unit)
    )
    read(llama, random_ids(1, 800), cache, 200)
    held = torch.stack([rows_of(cache, i).slot_positions()[0].sort(-1).values for i in range(4)])  # (layers, heads, T)
    same_in_heads = torch.equal(held[:, 0], held[:, 1])
    same_in_layers = all(torch.equal(held[0], other) for other in held[1:])
    assert (same_in_heads, same_in_layers) == {
        "per_layer_per_head": (False, False),
        "per_head": (False, True),
        "union": (True, True),
    }[mode]


def test_the_best_stay(llama: PreTrainedModel, random_ids: Ids) -> None:
    """The paper's policy keeps the top scores; the union of all heads' favourites is the top of the highest scores."""
    statistics = statistics_of(llama, random_ids)
    policy = TriAttention(budget=300, statistics=statistics, keep_first=4, unit="token", mode="per_layer_per_head")
    cache = FoldedCache(
        llama.config, "turboquant-4", eviction=TriAttention(statistics, budget=10_000, mode="per_layer_per_head")
    )
    read(llama, random_ids(1, 600), cache)
    bound = cache.evictor.policy
    assert isinstance(bound, TriAttention)
    slots = rows_of(cache).evictable(128)
    scores = [bound.scores(Candidates(i, rows_of(cache, i), slots)) for i in range(4)]
    raw = bound.raw_scores(Candidates(2, rows_of(cache, 2), slots))
    assert raw.shape == (1, 2, 3, slots)
    assert torch.allclose(normalised(raw).mean(-1), torch.zeros(1, 2, 3), atol=1e-4)
    assert torch.equal(scores[2], normalised(raw).amax(2))
    union, own = copy.deepcopy(cache), copy.deepcopy(cache)
    own.evict(policy)
    union.evict(TriAttention(budget=300, statistics=statistics, keep_first=4, unit="token", mode="union"))
    kept = 300 - (600 - slots)
    for layer in range(4):
        best = scores[layer].clone()
        best[..., :4] = torch.inf
        for head in range(2):
            assert set(rows_of(own, layer).positions[0, head].tolist()) == set(
                best[0, head].topk(kept).indices.tolist()
            )
    favourites = set()
    highest = torch.stack(scores).amax((0, 1, 2))
    for layer in range(4):
        for head in range(2):
            favourites |= set(scores[layer][0, head].topk(kept).indices.tolist())
    highest[:4] = torch.inf
    chosen = set(highest.topk(kept).indices.tolist())
    assert chosen <= favourites | set(range(4))
    assert set(rows_of(union).positions[0, 0].tolist()) == chosen


def test_segments_share(llama: PreTrainedModel, random_ids: Ids) -> None:
    statistics = statistics_of(llama, random_ids)
    options = {"unit": "token", "mode": "per_layer_per_head", "budget": 400, "keep_first": 64}
    policy = TriAttention(statistics=statistics, segments=4, **options)
    cache = FoldedCache(llama.config, "turboquant-4", eviction=policy)
    read(llama, random_ids(1, 1000), cache)
    positions = rows_of(cache).positions[0, 0]
    middle = positions[positions >= 64]
    shares = torch.histc(((middle - 64) * 4 // (1000 - 128 - 64)).clamp_max(3).float(), 4, 0, 3)
    assert shares.min() >= (len(positions) - 64) // 4
    assert shares.sum() == len(positions) - 64
    plain = FoldedCache(llama.config, "turboquant-4", eviction=TriAttention(statistics=statistics, **options))
    read(llama, random_ids(1, 1000), plain)
    assert not torch.equal(rows_of(plain).positions[0, 0].sort().values, positions.sort().values)


def test_layer_budgets(llama: PreTrainedModel, random_ids: Ids) -> None:
    statistics = statistics_of(llama, random_ids)
    scales = (0.5, 1.0, 1.5, 1.0)
    statistics = QueryStatistics(
        statistics.kv_heads,
        statistics.head_dim,
        statistics.rope_theta,
        statistics.attn_scale,
        statistics.tables,
        scales,
    )
    own = {"unit": "token", "mode": "per_layer_per_head"}
    policy = TriAttention(budget=400, statistics=statistics, layer_budgets=True, **own)
    cache = FoldedCache(llama.config, "turboquant-4", eviction=policy)
    read(llama, random_ids(1, 1000), cache)
    assert [rows_of(cache, i).length for i in range(4)] == [200, 400, 600, 400]
    read(llama, random_ids(1, 30, seed=1), cache, 10)  # layers of different lengths under one mask
    with pytest.raises(ValueError, match="lets all layers keep the same tokens"):
        TriAttention(budget=400, statistics=statistics, layer_budgets=True, mode="union")


def test_slack(llama: PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(
        llama.config, "turboquant-4", eviction=StreamingLLM(budget=300, interval=None, slack=50, unit="token")
    )
    read(llama, random_ids(1, 350), cache)
    assert rows_of(cache).evicted == 0
    read(llama, random_ids(1, 1), cache)
    assert rows_of(cache).length == 300
    assert cache.evictor.triggers == 1


def test_prompts_may_stay(llama: PreTrainedModel, random_ids: Ids) -> None:
    policy = StreamingLLM(budget=500 + 300, keep_first=500, interval=32)
    cache = FoldedCache(llama.config, "turboquant-4", eviction=policy)
    read(llama, random_ids(1, 1000), cache, 100)
    rows = rows_of(cache)
    assert rows.length <= 500 + 300 + 32
    assert set(rows.slot_positions()[0, 0].tolist()) >= set(range(500))


@given(st.data())
def test_slots_and_positions_agree(data: st.DataObject) -> None:
    """Keys that are their own positions, under any sequence of evictions, crops and new tokens."""
    window = data.draw(st.sampled_from([None, Window(8, 24, 16)]))
    rows = FoldedRows(get_formats("float16", 16, 16, window), kv_heads=2)
    for _ in range(data.draw(st.integers(1, 6))):
        n = data.draw(st.integers(1, 300) | st.integers(1, 5))
        tag = torch.arange(rows.seen, rows.seen + n).float()[:, None].expand(1, 2, n, 16)
        rows.append(tag, tag, (torch.float16, torch.float16))
        recent = data.draw(st.integers(1, 150))
        slots = rows.evictable(recent)
        by_page = data.draw(st.booleans())
        step = 64 if window and not by_page else 1
        units = slots // 64 if by_page else slots
        kept = data.draw(st.integers(0, units // step)) * step
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
        if slots and kept < units:
            keep = torch.rand(1, 2, units, generator=generator).argsort(-1) < kept
            rows.evict(keep, by_page)
        seen = rows.seen
        if data.draw(st.booleans()) and seen - rows.whole_from > 1:
            rows.crop(rows.length - data.draw(st.integers(1, min(seen - rows.whole_from - 1, 40))))
        if rows.evicted:
            held = rows.slot_positions()
            assert held.shape == (1, 2, rows.length)
            for side in rows.unfold():
                assert torch.equal(side[..., 3].long(), held)
            assert torch.equal(held[..., -1], torch.full((1, 2), rows.seen - 1))


# Batches, cropping, files, failures


@pytest.mark.parametrize(
    ("name", "format"),
    [("pages", "turboquant-4")]
    + [pytest.param(name, "kvfold-4", marks=pytest.mark.contract) for name in ("pages", "tokens", "snap")],
)
def test_a_row_in_a_batch_is_the_row_alone(name: str, format: str, llama: PreTrainedModel, random_ids: Ids) -> None:
    ids = random_ids(2, 700)
    mask = torch.ones_like(ids)
    ids[1, :90], mask[1, :90] = 0, 0
    policy = policies(llama, random_ids, budget=320, interval=32)[name]

    def answer(ids: Tensor, mask: Tensor) -> tuple[Tensor, FoldedCache]:
        cache = FoldedCache(llama.config, format, eviction=policy)
        out = llama.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=60, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return torch.stack(out.logits, 1), cache

    both, cache = answer(ids, mask)
    assert cache.evictor.triggers >= 2
    for row, skip in ((0, 0), (1, 90)):
        alone, own = answer(ids[row : row + 1, skip:], mask[row : row + 1, skip:])
        assert torch.allclose(both[row], alone[0], atol=1e-3 * alone.abs().max())
        assert torch.equal(rows_of(cache, 1, row).positions[0], rows_of(own, 1).positions[0])


@pytest.mark.contract
def test_beams_and_selected_rows(llama: PreTrainedModel, random_ids: Ids) -> None:
    policy = policies(llama, random_ids, budget=300)["snap"]
    cache = FoldedCache(llama.config, "turboquant-4", eviction=policy)
    read(llama, random_ids(3, 600), cache)
    alone = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    more = random_ids(3, 140, seed=4)
    one = read(llama, more[[2, 0, 2]], cache, 20)
    assert torch.allclose(one, read(llama, more, alone, 20)[[2, 0, 2]], atol=1e-6 * one.abs().max())


def test_crop(llama: PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(llama.config, "kvfold-4", eviction=StreamingLLM(budget=300))
    read(llama, random_ids(1, 600), cache)
    same, more = copy.deepcopy(cache), random_ids(1, 20, seed=5)
    read(llama, more, cache)
    cache.crop(-20)
    assert cache.get_seq_length() == 600
    assert torch.equal(read(llama, more, cache), read(llama, more, same))
    before = rows_of(cache).length
    with pytest.raises(ValueError, match=r"crop to 300 tokens, but tokens before .* were evicted"):
        cache.crop(300)
    assert (cache.get_seq_length(), rows_of(cache).length) == (620, before)
    cache.reset()
    read(llama, random_ids(1, 600), cache)
    assert rows_of(cache).evicted > 200


def test_crop_into_padding_without_evictions(llama: PreTrainedModel, random_ids: Ids) -> None:
    ids, mask = random_ids(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[1, :40] = 0
    cache = FoldedCache(llama.config, "turboquant-4", eviction=StreamingLLM(budget=300))
    llama(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-70)
    assert cache.get_seq_length() == 30


def test_a_crop_that_one_layer_refuses_crops_none(llama: PreTrainedModel, random_ids: Ids) -> None:
    known = statistics_of(llama, random_ids)
    statistics = replace(known, budget_scales=(1.6, 0.8, 0.8, 0.8))
    policy = TriAttention(statistics, budget=400, layer_budgets=True, mode="per_layer_per_head", unit="token")
    cache = FoldedCache(llama.config, "turboquant-4", eviction=policy)
    read(llama, random_ids(1, 500), cache)
    assert [rows_of(cache, i).evicted > 0 for i in range(4)] == [False, True, True, True]
    with pytest.raises(ValueError, match="layer 1: crop to 100"):
        cache.crop(100)
    assert [layer.folded.columns for layer in cache.layers] == [500] * 4


def test_a_policy_that_fails_leaves_all_as_it_is(llama: PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(llama.config, "kvfold-4", eviction=StreamingLLM(budget=300))
    read(llama, random_ids(1, 500), cache)
    policy, length = cache.evictor.policy, rows_of(cache).length

    class Broken(StreamingLLM):
        def scores(self, candidates: Candidates) -> Tensor:
            if candidates.layer == 2:
                raise MemoryError
            return super().scores(candidates)

    cache.evictor.policy = Broken(budget=300)
    with pytest.raises(MemoryError):
        read(llama, random_ids(1, 200, seed=1), cache)
    assert [layer.folded.columns for layer in cache.layers] == [500] * 4
    assert [rows_of(cache, i).length for i in range(4)] == [length] * 4
    cache.evictor.policy = policy
    read(llama, random_ids(1, 200, seed=2), cache)
    assert rows_of(cache).length <= 300


@pytest.mark.contract
def test_speculation(llama: PreTrainedModel, random_ids: Ids) -> None:
    """Prompt lookup proposes, and crops what is refused, while tokens go."""
    cache = FoldedCache(llama.config, "turboquant-4", eviction=StreamingLLM(budget=300, interval=16))
    ids = random_ids(1, 40).repeat(1, 12)
    out = llama.generate(ids, past_key_values=cache, max_new_tokens=60, do_sample=False, prompt_lookup_num_tokens=5)
    assert out.shape[1] == 540
    rows = rows_of(cache)
    assert rows.seen == cache.get_seq_length() >= 530
    assert rows.length <= 300 + 32
    assert torch.equal(rows.slot_positions()[0, 0, -100:], torch.arange(rows.seen - 100, rows.seen))


def test_latent_attention(random_ids: Ids) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=64, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, first_k_dense_replace=2, max_position_embeddings=2048,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval().double()
    kvfold.attach(model)
    cache = FoldedCache(config, "turboquant-4", eviction=StreamingLLM(budget=300))
    read(model, random_ids(1, 700), cache, 100)
    rows = rows_of(cache)
    assert rows.length <= 300 + 128
    assert len(rows.stores) == 1
    assert read(model, random_ids(1, 4), cache, 1).isfinite().all()
    for policy in (SnapKV(budget=300), TriAttention(some_statistics(2), budget=300)):
        with pytest.raises(ValueError, match="StreamingLLM"):
            FoldedCache(config, "turboquant-4", eviction=policy)


def test_files_that_tell_of_no_eviction_there_was(llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
    cache = FoldedCache(llama.config, "turboquant-4", eviction=StreamingLLM(budget=300))
    read(llama, random_ids(1, 600), cache)
    rows = rows_of(cache)
    good, path = rows.positions.clone(), tmp_path / "cache"
    for bad in (good.clone().fill_(3), good + 500, good - 5):
        rows.positions = bad
        cache.save(path)
        with pytest.raises(ValueError, match="positions are none that an eviction leaves"):
            FoldedCache.load(path)
    rows.positions, rows.evicted = None, rows.evicted
    cache.save(path)
    with pytest.raises(ValueError, match="there are no positions"):
        FoldedCache.load(path)


@pytest.mark.contract
@pytest.mark.parametrize("format", ["turboquant-4", "kvfold-4", "amx3:turboquant-4"])
def test_saved_and_loaded(format: str, random_ids: Ids, tmp_path: Path) -> None:
    model = tiny_model("qwen3" if "amx3" in format else "llama")
    kvfold.attach(model)
    policy = TriAttention(budget=300, statistics=statistics_of(model, random_ids), interval=32)
    cache = FoldedCache(model.config, format, eviction=policy)
    read(model, random_ids(1, 600), cache, 100)
    cache.save(tmp_path / "cache")
    loaded = FoldedCache.load(tmp_path / "cache", model.config, eviction=policy)
    cache.evictor.clear()  # both act first where a new cache would
    assert rows_of(loaded).evicted == rows_of(cache).evicted > 200
    more = random_ids(1, 100, seed=6)
    assert torch.equal(read(model, more, cache, 10), read(model, more, loaded, 10))
    assert torch.equal(rows_of(loaded).positions, rows_of(cache).positions)


def test_a_pass_that_fails_changes_nothing(llama: PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(llama.config, "kvfold-4", eviction=StreamingLLM(budget=300))
    read(llama, random_ids(1, 600), cache)
    before, good = copy.deepcopy(cache), random_ids(1, 200, seed=7)
    weight = llama.model.layers[2].self_attn.k_proj.weight
    kept = weight.clone()
    weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="layer 2"):
        read(llama, good, cache)
    weight.copy_(kept)
    assert cache.get_seq_length() == 600
    assert torch.equal(read(llama, good, cache), read(llama, good, before))
    assert torch.equal(rows_of(cache).positions, rows_of(before).positions)


def test_memory_is_given_back(llama: PreTrainedModel, random_ids: Ids) -> None:
    """Every storage is walked, capacity included: nothing of what went is left."""
    statistics = statistics_of(llama, random_ids)
    for format in ("kvfold-4", "float16"):
        full = FoldedCache(llama.config, format)
        read(llama, random_ids(1, 1900), full)
        half = FoldedCache(llama.config, format, eviction=TriAttention(budget=950, statistics=statistics))
        read(llama, random_ids(1, 1900), half)
        for layer in range(4):
            own, whole = rows_of(half, layer), rows_of(full, layer)
            pages, all_pages = (sum(store.storage.nbytes for store in rows.stores) for rows in (own, whole))
            assert pages == all_pages * own.keys.count / whole.keys.count  # no capacity beside
            assert own.keys.count <= 15
            assert own.positions.nbytes == own.positions.shape[-1] * 2 * 4
        assert half.held_bytes() < 0.65 * full.held_bytes()  # dense windows and tables stay
        assert {layer.evicted for layer in half.report().layers} <= set(range(950, 1015))


# Refusals


def test_arguments_are_checked(llama: PreTrainedModel, random_ids: Ids) -> None:
    for options, says in (
        ({"budget": 0}, "budget = 0"),
        ({"budget": 130}, "budget = 130 holds no more"),
        ({"budget": 512, "recent": 0}, "recent = 0"),
        ({"budget": 512, "keep_first": -1}, "keep_first = -1"),
        ({"budget": 512, "interval": None}, "interval = None and slack = None"),
        ({"budget": 512, "slack": 3}, "give one of them"),
        ({"budget": 512, "mode": "all"}, "mode = 'all'"),
        ({"budget": 512, "unit": "head"}, "unit = 'head'"),
        ({"budget": 512, "segments": -1}, "segments = -1"),
    ):
        with pytest.raises(ValueError, match=says):
            StreamingLLM(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel = 4"):
        SnapKV(budget=512, kernel=4)
    with pytest.raises(ValueError, match="recent = 16: the newest 32 tokens"):
        SnapKV(budget=512, recent=16)
    cache = FoldedCache(llama.config, "turboquant-4", eviction=StreamingLLM(budget=300, mode="union"))
    read(llama, random_ids(1, 300), cache)
    with pytest.raises(ValueError, match=r"eviction=SnapKV"):
        cache.evict(SnapKV(budget=300))
    with pytest.raises(ValueError, match="this cache's own eviction has the mode 'union'"):
        cache.evict(StreamingLLM(budget=300, mode="per_head"))
    mixed = kvfold.Policy("kvfold-4", exceptions=[(1, "turboquant-4")])
    with pytest.raises(ValueError, match="but they fold into kvfold-4, turboquant-4"):
        FoldedCache(llama.config, policy=mixed, eviction=StreamingLLM(budget=300))


def test_a_model_that_is_not_attached_is_refused(random_ids: Ids) -> None:
    model = tiny_model("llama")
    cache = FoldedCache(model.config, "turboquant-4", eviction=StreamingLLM(budget=300))
    with pytest.raises(ValueError, match=r"kvfold\.attach\(model\) first"):
        model(random_ids(1, 20), past_key_values=cache)


def test_formats_and_models_that_do_not_fit(random_ids: Ids) -> None:
    qwen = tiny_model("qwen3")
    with pytest.raises(ValueError, match="take amx3"):
        FoldedCache(qwen.config, "tbqx3:turboquant-4", eviction=StreamingLLM(budget=300))
    latent = transformers.DeepseekV3Config(num_hidden_layers=2)
    with pytest.raises(ValueError, match="StreamingLLM does"):
        FoldedCache(latent, eviction=TriAttention(budget=300, statistics=some_statistics(2)))


@pytest.mark.contract
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral", "phi3"])
def test_other_architectures(name: str, random_ids: Ids) -> None:
    """Layers with a sliding window stay as they are."""
    model = tiny_model(name)
    kvfold.attach(model)
    policy = TriAttention(budget=300, statistics=statistics_of(model, random_ids))
    cache = FoldedCache(model.config, "turboquant-4", eviction=policy)
    read(model, random_ids(1, 600), cache, 200)
    folded = [layer.folded.groups[0].rows for layer in cache.layers if hasattr(layer, "folded")]
    assert folded
    assert all(rows.length <= 300 for rows in folded)
    assert read(model, random_ids(1, 5, seed=1), cache, 1).isfinite().all()


def test_amx3_is_scored_by_its_polar_part(random_ids: Ids) -> None:
    model = tiny_model("qwen3")
    kvfold.attach(model)
    statistics = statistics_of(model, random_ids)
    scores = {}
    for format in ("amx3:turboquant-4", "float16:turboquant-4"):
        cache = FoldedCache(model.config, format, eviction=TriAttention(budget=1000, statistics=statistics))
        read(model, random_ids(1, 400), cache)
        scores[format] = cache.evictor.policy.raw_scores(Candidates(0, rows_of(cache), 256))
    polar, exact = scores.values()
    for a, b in zip(polar.flatten(0, -2), exact.flatten(0, -2), strict=True):
        assert torch.corrcoef(torch.stack((a, b)))[0, 1] > 0.9


# The real model


def test_the_real_model_remembers(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor, fixed_text: str
) -> None:
    """A number at the start, in the middle and at the end of a text of which every second token went.

    Which pages stay may be a matter of a hair, so exact numbers in the same pages say where the number is to be had.
    """
    model, tokenizer = demo
    statistics = kvfold.measure_queries(model, split_passages(text_ids, 512, 2))
    question = tokenizer("\n\nThe secret code of the library is", return_tensors="pt").input_ids
    needle = tokenizer("\n\nThe secret code of the library is 48213.\n\n", return_tensors="pt").input_ids

    hay = tokenizer(fixed_text, return_tensors="pt").input_ids[:, :1000]

    def with_needle(depth: int) -> Tensor:
        return torch.cat((hay[:, :depth], needle, hay[:, depth:]), 1)

    window = get_formats("kvfold-4", 64, 64).window
    caches = {
        (format, depth): FoldedCache(model.config, policy=kvfold.Policy(format, window=window))
        for format in ("kvfold-4", "float16")
        for depth in (100, 300, 500, 900)
    }
    for (_, depth), cache in caches.items():
        read(model, with_needle(depth), cache)

    def recalls(depth: int, policy: Eviction, format: str = "kvfold-4") -> bool:
        ids, cache = with_needle(depth), copy.deepcopy(caches[format, depth])
        full = cache.held_bytes()
        cache.evict(policy)
        assert rows_of(cache).length <= 520
        assert cache.held_bytes() < 0.68 * full  # pages of 256 tokens that are dense while they come take their share
        out = model.generate(
            torch.cat((ids, question), 1), past_key_values=cache, max_new_tokens=8, do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        return "48213" in tokenizer.decode(out[0, ids.shape[1] + question.shape[1] :])

    chosen, newest = TriAttention(budget=520, statistics=statistics, keep_first=64), StreamingLLM(budget=520)
    exact = [depth for depth in (100, 300, 500, 900) if recalls(depth, chosen, "float16")]
    assert {100, 500, 900} <= set(exact)
    assert all(recalls(depth, chosen) for depth in exact)
    assert not any(recalls(depth, newest) for depth in (100, 300))


@pytest.mark.contract
def test_generation_goes_on_in_a_fixed_memory(
    small: tuple[PreTrainedModel, PreTrainedTokenizerBase], small_ids: Tensor
) -> None:
    model, tokenizer = small
    statistics = kvfold.measure_queries(model, split_passages(small_ids, 256, 1))
    policy = TriAttention(budget=256, statistics=statistics, keep_first=32, recent=64, interval=32)
    cache = FoldedCache(model.config, "turboquant-4", eviction=policy)
    ids, sizes = small_ids[:, 6_000:6_200], []
    for _ in range(4):
        ids = model.generate(
            ids, past_key_values=cache, max_new_tokens=60, do_sample=False, pad_token_id=tokenizer.eos_token_id,
            eos_token_id=None,
        )  # fmt: skip
        sizes.append(cache.held_bytes())
    assert rows_of(cache).seen == 439
    assert max(sizes[1:]) < 1.15 * min(sizes[1:])
    assert torch.equal(ids[:, :200], small_ids[:, 6_000:6_200])
    assert all(a <= 1.5 * b for a, b in pairwise(reversed(sizes)))


def config_without_rope() -> PreTrainedConfig:
    return transformers.GPT2Config()


def test_a_model_without_rope() -> None:
    with pytest.raises(ValueError, match="not told simply"):
        FoldedCache(config_without_rope(), eviction=TriAttention(budget=300, statistics=some_statistics(2)))
