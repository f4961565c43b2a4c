"""Which block a name gets, and every combination of blocks in a model."""

import logging
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold import FoldedCache, get_format, get_formats
from kvfold.attention import attend, cpu, reference
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.evaluate import evaluate_formats
from kvfold.formats.amx3 import AMX3
from kvfold.formats.base import Format
from kvfold.formats.float16 import Float16
from kvfold.formats.ggml import Ggml
from kvfold.formats.names import get_format as fresh
from kvfold.formats.rules import log_stand_in
from kvfold.formats.tbq import TBQ
from kvfold.quant.polar import from_pairs

KEYS = ("f16", "q8_0", "q4_0", "tbq3", "tbq4", "tbqp3", "tbqp4")
VALUES = ("f16", "q8_0", "q4_0", "tbq3", "tbq4")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log, with nothing said or made before."""
    log_stand_in.cache_clear()
    fresh.cache_clear()
    caplog.set_level(logging.WARNING, "kvfold")
    return caplog


@pytest.mark.parametrize(
    ("name", "head_dim", "lanes", "expected", "word"),
    [
        ("tbqp3", 128, "channels", TBQ(128, 3, lanes="channels"), "tbqp3 becomes tbq3_1: what it adds is for scores"),
        ("tbqp4", 256, "channels", TBQ(256, 4, lanes="channels"), "tbqp4 becomes tbq4_0"),
        ("amx3", 128, "channels", TBQ(128, 3, lanes="channels"), "amx3 becomes tbq3_1"),
        ("tbq3_0", 128, "tokens", TBQ(128, 3), "tbq3_0 becomes tbq3_1: that is no block of head_dim 128"),
        ("tbqp4_1", 256, "tokens", TBQ(256, 4, signs=True), "tbqp4_1 becomes tbqp4_0"),
        ("tbq3", 64, "tokens", TBQ(64, 3, signs=True, double=True), "tbq3 becomes tbqp3_3: 3-bit keys of 64"),
        ("tbq3", 80, "tokens", Float16(80), "tbq3 becomes float16: it has no block for keys of 80"),
        ("tbq4", 96, "tokens", Ggml(96, 8), "tbq4 becomes q8_0: it has no block for keys of 96"),
        ("q4_0", 512, "channels", Float16(512, lanes="channels"), "q4_0 becomes float16: values of 512"),
        ("q8_0", 80, "tokens", Float16(80), "q8_0 becomes float16: its blocks are of 32"),
        ("tbqp3_0", 64, "tokens", TBQ(64, 3, signs=True, double=True), "tbqp3_0 becomes tbqp3_3: that is no block"),
        ("tbq3_1", 64, "tokens", TBQ(64, 3, signs=True, double=True), "tbq3_1 becomes tbqp3_3: that is no block"),
        ("tbq4", 576, "channels", Ggml(576, 8, lanes="channels"), "tbq4 becomes q8_0: it has no block for values"),
        ("amx3", 256, "tokens", TBQ(256, 3), "amx3 becomes tbq3_0: its blocks are of 128"),
    ],
)  # fmt: skip
def test_each_rule_changes_the_format_and_is_told_once(
    name: str, head_dim: int, lanes: str, expected: Format, word: str, told: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        fresh.cache_clear()
        fmt = fresh(name, head_dim, lanes=lanes)  # type: ignore[arg-type]
        assert (type(fmt), fmt) == (type(expected), expected)
    assert [record.getMessage() for record in told.records if word in record.getMessage()] == [
        record.getMessage() for record in told.records
    ]
    assert len(told.records) == 1


@pytest.mark.parametrize(
    ("name", "head_dim", "lanes", "expected"),
    [
        ("tbq3_2", 64, "tokens", TBQ(64, 3)),
        ("tbq3_3", 64, "tokens", TBQ(64, 3, double=True)),
        ("tbqp3", 64, "tokens", TBQ(64, 3, signs=True, double=True)),
        ("tbqp3_2", 64, "tokens", TBQ(64, 3, signs=True)),
        ("tbq4", 64, "tokens", TBQ(64, 4)),
        ("tbq3", 64, "channels", TBQ(64, 3, lanes="channels")),
        ("tbq4", 512, "channels", TBQ(512, 4, lanes="channels")),
        ("tbqp4", 576, "tokens", TBQ(576, 4, signs=True)),
        ("amx3_1", 128, "tokens", AMX3(128)),
    ],
)
def test_what_fits_is_left_alone(
    name: str, head_dim: int, lanes: str, expected: Format, told: pytest.LogCaptureFixture
) -> None:
    fmt = get_format(name, head_dim, lanes=lanes)  # type: ignore[arg-type]
    assert (type(fmt), fmt) == (type(expected), expected)
    assert not told.records


def test_names_that_are_none() -> None:
    for name in (
        "tbq5",
        "tbq3_5",
        "q8_0_1",
        "tq3_1",
        "affine-4g33",
        "uniform-5",
        "turboquant-4.5",
        "affine-9",
        "bold@64",
    ):
        with pytest.raises(ValueError, match=r"is not known|bits go from|group = 33|bits = 5"):
            get_formats(name, 128, 128)


def _llama(head_dim: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def _generate(model: PreTrainedModel, cache: transformers.Cache, ids: Tensor) -> Tensor:
    """Logits of the first of five new tokens; later ones depend on which were chosen."""
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=5, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    ).logits[0]  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_every_combination_generates(head_dim: int) -> None:
    """Logits change as little as the codes' distortion says, and memory falls."""
    lost = {"f16": 1e-6, "q8_0": 1e-4, "q4_0": 0.02, "tbq4": 0.02, "tbqp4": 0.04, "tbq3": 0.08, "tbqp3": 0.15}
    model, ids = _llama(head_dim), torch.randint(0, 256, (1, 150), generator=torch.Generator().manual_seed(0))
    dense = _generate(model, DynamicCache(config=model.config), ids)
    assert kvfold.attach(model)
    # Another dimension says nothing of how sides go together.
    pairs = product(KEYS, VALUES) if head_dim == 64 else zip(KEYS, cycle(VALUES[::-1]), strict=False)
    for keys, values in pairs:
        cache = FoldedCache(model.config, f"{keys}:{values}")
        logits = _generate(model, cache, ids)
        error = ((logits - dense).square().sum() / dense.square().sum()).item()
        assert 0 < error < lost[keys] + lost[values], (keys, values, error)
        pair = get_formats(f"{keys}:{values}", head_dim, head_dim)
        layer = cache.report().layers[0]
        assert layer.tokens == 154
        assert layer.held_bytes == 192 * 2 * (pair.keys.bytes_per_vector + pair.values.bytes_per_vector) + 8


def test_a_head_of_576_is_no_latent() -> None:
    """Its values are whole, q8_0, and the kernel reads what the reference does."""
    generator = torch.Generator().manual_seed(0)
    key, value, q = torch.randn(3, 1, 2, 100, 576, generator=generator)
    cache = LayerCache(LayerConfig("tbq4"))
    new = cache.append(key, value)
    rows = new.layer.groups[0].rows
    fast, exact = (way.attend_rows(q[:, :, 99:], rows, None, scaling=0.05) for way in (cpu, reference))
    torch.testing.assert_close(fast, exact, atol=1e-5, rtol=1e-4)
    assert (exact[..., 512:] != 0).all()


# MLA


def _deepseek(rank: int = 512, rope: int = 64) -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=4, n_group=1,
        topk_group=1, kv_lora_rank=rank, q_lora_rank=32, qk_rope_head_dim=rope, qk_nope_head_dim=32, v_head_dim=32,
        first_k_dense_replace=1, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).eval()


@torch.no_grad()
def _logits(model: PreTrainedModel, cache: transformers.Cache, ids: Tensor) -> Tensor:
    """Of a prompt in chunks, the last 20 tokens one by one."""
    length = ids.shape[1]
    parts = ids.split([90, length - 98, *[1] * 8], dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("format", "bound"),
    [("tbq3", 0.1), ("tbq4", 0.03), ("tbqp3", 0.3), ("tbqp4", 0.1), ("q8_0", 1e-4), ("kvfold-4", 1e-4),
     ("turboquant-4", 0.03), ("turboquant-2.5", 0.3), ("centred-4", 0.03), ("float16", 1e-6)],
)  # fmt: skip
def test_latent_attention_folds(format: str, bound: float) -> None:
    """A DeepSeek-V3-shaped model, 512 + 64: kernel, reference and what unfolds are all near the dense."""
    model, ids = _deepseek(), torch.randint(0, 256, (2, 300), generator=torch.Generator().manual_seed(0))
    dense = _logits(model, DynamicCache(config=model.config), ids)
    for backend in ("cpu", "reference") if format != "float16" else ("reference",):
        assert kvfold.attach(model, backend)
        got = _logits(model, FoldedCache(model.config, format), ids)
        kvfold.detach(model)
        error = (got - dense).square().mean() / dense.square().mean()
        assert 0 < error.item() < bound, backend
    unfolded = _logits(model, FoldedCache(model.config, format), ids)  # not attached
    assert 0 < ((unfolded - dense).square().mean() / dense.square().mean()).item() < bound


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("format", ["tbq3", "tbqp4", "q4_0", "kvfold-4", "turboquant-4+qjl", "turboquant-2.5"])
def test_the_kernel_reads_latents_as_the_reference_does(format: str, isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    key, q = torch.randn(2, 1, 400, 576, generator=generator), torch.randn(2, 4, 400, 576, generator=generator)
    cache = LayerCache(LayerConfig(format, values_of_keys=True))
    cache.observe(q[:, :, :390], cache.append(key[:, :, :390], key[:, :, :390, :512]))
    new = cache.append(key[:, :, 390:], key[:, :, 390:, :512])
    rows, dense = new.layer.groups[0].rows, new.dense[0]
    fast = cpu.attend_rows(q[:, :, 390:], rows, dense, scaling=0.05, instruction_set=isa)
    exact = reference.attend_rows(q[:, :, 390:], rows, dense, scaling=0.05)
    torch.testing.assert_close(fast, exact, atol=2e-5 * exact.abs().max().item(), rtol=2e-5)


def test_the_rotary_part_of_a_latent_key_is_exact() -> None:
    """And values are the latent again: held once, 324 bytes a token for tbq3."""
    model, ids = _deepseek(), torch.randint(0, 256, (1, 128), generator=torch.Generator().manual_seed(0))
    kvfold.attach(model)
    dense, cache = DynamicCache(config=model.config), FoldedCache(model.config, "tbq3")
    _logits(model, dense, ids[:, :120])
    _logits(model, cache, ids[:, :120])
    rows = cache.layers[0].folded.groups[0].rows  # type: ignore[attr-defined]
    key, value = rows.unfold()
    assert torch.equal(key[..., 512:], dense.layers[0].values.half().float())
    assert torch.equal(key[..., :512], value)
    assert not torch.equal(value, dense.layers[0].keys)
    assert cache.report().layers[0].held_bytes == 128 * 324 + cache.layers[0].folded.groups[0].batch_rows.nbytes  # type: ignore[attr-defined]
    assert cache.report().layers[0].values == 120 * 576  # what a dense cache would hold


@pytest.mark.parametrize("format", ["kvfold-4", "tbq3", "centred-4"])
def test_a_latent_cache_crops_and_selects(format: str) -> None:
    """As a cache that never saw the other tokens and rows: with folded pages, short and long crops, and going back."""
    model, ids = _deepseek(), torch.randint(0, 256, (2, 460), generator=torch.Generator().manual_seed(0))
    kvfold.attach(model)
    for length in (445, 340):
        cache, other = FoldedCache(model.config, format), FoldedCache(model.config, format)
        _logits(model, cache, ids[:, :440])
        model(ids[:, 440:], past_key_values=cache)  # a page folds, which a short crop takes back
        assert cache.layers[0].folded.groups[0].rows.keys.count  # type: ignore[attr-defined]
        cache.crop(length - 460)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([0]))
        _logits(model, other, ids[1:, :length])
        state = cache.layers[0].folded.state()  # type: ignore[attr-defined]
        with torch.no_grad():
            a, b = (model(ids[1:, length:], past_key_values=c).logits for c in (cache, other))
        # A crop beyond the newest pass goes on from folded values.
        atol = 1e-4 if length == 445 or format == "tbq3" else 0.05
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)
        cache.layers[0].folded.restore(state)  # type: ignore[attr-defined]
        assert cache.layers[0].get_seq_length() == length


@pytest.mark.parametrize(("format", "bound"), [("q8_0", 1e-3), ("tbq3", 1e-6), ("amx3", 0.1)])
def test_latents_that_a_format_does_not_take(format: str, bound: float, told: pytest.LogCaptureFixture) -> None:
    """The rotary part stays whatever the latent becomes: float16 at 40, tbq3 in the place of amx3 at 128."""
    rank = 128 if format == "amx3" else 40
    model, ids = _deepseek(rank, 24), torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(0))
    dense = _logits(model, DynamicCache(config=model.config), ids)
    kvfold.attach(model)
    error = (_logits(model, FoldedCache(model.config, format), ids) - dense).square().mean() / dense.square().mean()
    assert error < bound
    assert any(f"format {format} becomes" in record.getMessage() for record in told.records)


# Sharpening


@pytest.mark.contract
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "format"), [(256, "tbqp3:tbq3"), (64, "tbq4:tbq3")])
def test_scores_are_sharpened_by_the_number_of_tokens(head_dim: int, format: str, dtype: torch.dtype) -> None:
    """α(N)·q in the place of q, for each query its own N, in padded rows too, however they come, in any dtype."""
    generator = torch.Generator().manual_seed(0)
    key, value, query = ((2 * torch.randn(2, 2, 90, head_dim, generator=generator)).to(dtype) for _ in range(3))
    plain, sharp = LayerCache(LayerConfig(format)), LayerCache(LayerConfig(format, sharpen=True))
    counts = torch.stack([torch.arange(90) + 1, (torch.arange(90) - 20).clamp_min(1)])
    for part in (slice(0, 60), slice(60, 90)):
        news = [cache.append(key[:, :, part], value[:, :, part], padding=[0, 21]) for cache in (plain, sharp)]
        alpha = get_format(format.split(":")[0], head_dim).sharpness(counts[:, part])
        assert alpha is not None
        scaled = query[:, :, part].double() * alpha[:, None, :, None]
        expected = attend(scaled, news[0], scaling=head_dim**-0.5, backend="reference")
        got = attend(query[:, :, part], news[1], scaling=head_dim**-0.5, backend="reference").double()
        own = torch.ones(2, 90, dtype=torch.bool)
        own[1, :21] = False
        mask = own[:, None, part, None].expand_as(got)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2  # of what comes out
        torch.testing.assert_close(got[mask], expected[mask], atol=tolerance, rtol=tolerance)
        bare = attend(query[:, :, part].double(), news[0], scaling=head_dim**-0.5, backend="reference")
        if dtype == torch.float32:
            assert (bare[mask] - expected[mask]).abs().max() > 5 * (got[mask] - expected[mask]).abs().max()


def test_where_sharpening_cannot_be() -> None:
    model, ids = _llama(64), torch.randint(0, 256, (1, 30))
    with pytest.raises(ValueError, match="sharpen = True, but this model does not read folded caches"):
        model(ids, past_key_values=FoldedCache(model.config, "tbq4", sharpen=True))
    with pytest.raises(ValueError, match="sharpen = True, but there is no rule for keys of 64 in 'kvfold-4'"):
        FoldedCache(model.config, "kvfold-4", sharpen=True)


def test_the_rule_of_sharpening() -> None:
    n = torch.tensor([1, 2048, 262144])
    torch.testing.assert_close(  # computed by hand
        TBQ(256, 3, signs=True).sharpness(n),
        torch.tensor([1.0108565, 1.0360070, 1.0460603], dtype=torch.float64),
        atol=1e-6,
        rtol=0,
    )
    torch.testing.assert_close(
        TBQ(64, 4).sharpness(n), torch.tensor([1.0, 14.05 / 15.05, 0.916576], dtype=torch.float64), atol=1e-4, rtol=0
    )
    assert TBQ(128, 3).sharpness(n) is None


def test_sliding_windows_stay_dense(told: pytest.LogCaptureFixture) -> None:
    config: PreTrainedConfig = transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    cache = FoldedCache(config, "tbq3")
    assert [row.format for row in cache.report().layers] == ["dense", "tbq3"]


def test_qjl_hurts_keys_of_3_and_4_bits(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor
) -> None:
    """On SmolLM2, with heads of 64, a bit of QJL signs is worse than one of codes; sanctum-mlx found it better at 3."""
    model, _ = demo
    assert kvfold.attach(model)
    bits = ("3", "3+qjl", "4", "4+qjl")
    rows = evaluate_formats(model, [text_ids[:, :300]], [f"turboquant-{b}:affine-8g32" for b in bits])
    three, three_qjl, four, four_qjl = (row.kl_mean for row in rows)
    assert three_qjl > 2 * three
    assert four_qjl > 2 * four
    assert four < three


def test_amx3_holds_keys_as_they_were_before_rope() -> None:
    """With the model's own frequencies, row by row from each row's first token, as eviction will ask for them."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=512,
        rope_parameters={"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    kvfold.attach(model)
    ids, padding = torch.randint(0, 256, (2, 150)), 30
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    seen: list[Tensor] = []
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    cache = FoldedCache(config, "amx3:tbq3")
    with torch.no_grad():
        for part in (slice(0, 100), slice(100, 150)):
            model(
                ids[:, part],
                attention_mask=mask[:, : part.stop],
                position_ids=positions[:, part],
                past_key_values=cache,
            )
    before = torch.cat(seen, 1).unflatten(-1, (2, 128)).transpose(1, 2)  # (batch, kv_heads, tokens, 128)
    for row, first in ((0, 0), (1, padding)):
        (group,) = (group for group in cache.layers[1].folded.groups if row in group.batch_rows.tolist())  # type: ignore[attr-defined]
        keys = group.rows.formats.keys
        assert isinstance(keys, AMX3)
        pages = replace(group.rows.keys.pages(), tokens=150 - first)
        got = from_pairs(keys.before_rope(pages))[0]
        own = before[row, :, first:]
        cosine = torch.nn.functional.cosine_similarity(got, own, dim=-1)
        assert cosine.mean() > 0.96
        assert torch.nn.functional.cosine_similarity(got[:, 20:], own[:, :-20], dim=-1).mean() < 0.5


def test_rope_that_is_not_told_simply_is_refused() -> None:
    """And so is one that turns some channels only: the polar part would be wrong."""
    own = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 128,
           "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}  # fmt: skip
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="format = 'amx3' turns RoPE back, but by which frequencies"):
        FoldedCache(transformers.LlamaConfig(**own, rope_parameters=dynamic), "amx3")
    partial = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    with pytest.raises(ValueError, match="frequencies = 16 of them: amx3 takes 64"):
        FoldedCache(transformers.LlamaConfig(**own, rope_parameters=partial), "amx3")
    FoldedCache(transformers.LlamaConfig(**own, rope_parameters=dynamic), "tbq3")
