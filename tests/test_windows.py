"""Layers with a sliding window that fold: what they read, hold, forget, and go back to."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from commands import run_kvfold
from conftest import tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from kvfold import FoldedCache, Policy, StreamingLLM
from kvfold.attention import attend, attend_dense
from kvfold.cache.batch import Appended
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.integrations.transformers.layer import FoldedSlidingLayer
from kvfold.integrations.transformers.shapes import layer_shapes
from kvfold.planning import held_bytes

Ids = Callable[..., Tensor]

WIDTH = 150
NAMES = ["gemma2", "gemma3", "gpt-oss"]


def windowed(name: str = "gemma3", width: int = WIDTH, attached: bool = True) -> PreTrainedModel:
    model = tiny_model(name, sliding_window=width)
    if attached:
        assert kvfold.attach(model)
    return model


def folded(model: PreTrainedModel, format: str = "kvfold-4", **own: object) -> FoldedCache:
    cache = FoldedCache(model.config, policy=Policy(format, sliding=True, **own))
    assert any(type(layer) is FoldedSlidingLayer for layer in cache.layers)
    return cache


def read(
    model: PreTrainedModel, ids: Tensor, cache: FoldedCache, parts: Sequence[int], mask: Tensor | None = None
) -> Tensor:
    """Logits of all of `ids`, read in passes of these many tokens."""
    assert sum(parts) == ids.shape[1]
    logits, held = [], cache.get_seq_length()
    for part in ids.split(list(parts), 1):
        held += part.shape[1]
        own = None if mask is None else mask[:, :held]
        logits.append(model(part, attention_mask=own, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def windows(cache: FoldedCache) -> list[LayerCache]:
    return [layer.folded for layer in cache.layers if isinstance(layer, FoldedSlidingLayer)]


PARTS = [100, 1, 1, 70, 1, 1, 150, *[1] * 76]
"""A prompt within the window, one across its edge, one longer than it, and steps."""


@pytest.mark.contract
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize(("padding", "attached"), [(0, True), (13, True), (0, False)])
def test_reads_what_a_dense_window_holds(name: str, padding: int, attached: bool, random_ids: Ids) -> None:
    _compare_with_dense_windows(name, padding, attached, random_ids)


@pytest.mark.parametrize("padding", [0, 13])
def test_soft_caps_in_windows(padding: int, random_ids: Ids) -> None:
    """Not in the oldest transformers, whose "sdpa" reads the dense windows of Gemma 2 without them."""
    _compare_with_dense_windows("gemma2", padding, True, random_ids)


def _compare_with_dense_windows(name: str, padding: int, attached: bool, random_ids: Ids) -> None:
    """With codes that lose nothing, the logits are those of a cache whose windows stay dense."""
    model, ids = windowed(name, attached=attached), random_ids(2, sum(PARTS))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    cache = folded(model, "float16")
    expected = read(model, ids, FoldedCache(model.config, "float16"), PARTS, mask)
    got = read(model, ids, cache, PARTS, mask)
    # A model that is not attached reads its newest tokens before they are rounded to 16 bits.
    close = {"atol": 1e-4, "rtol": 1e-4} if attached else {"atol": 0.02, "rtol": 0}
    torch.testing.assert_close(got[0], expected[0], **close)
    torch.testing.assert_close(got[1, padding:], expected[1, padding:], **close)
    for layer in windows(cache):
        for group in layer.groups:
            assert group.rows.keys.count  # something folded
            assert WIDTH - 1 <= group.rows.length < WIDTH + group.rows.window.undo + 64


def test_exceptions_keep_single_windows_dense(random_ids: Ids) -> None:
    """A dense window and a folded one get the same mask."""
    model, ids = windowed(), random_ids(1, sum(PARTS))
    mixed = folded(model, "float16", exceptions=[(0, "dense")])
    assert [type(layer) is FoldedSlidingLayer for layer in mixed.layers] == [False, False, True, False]
    expected = read(model, ids, FoldedCache(model.config, "float16"), PARTS)
    torch.testing.assert_close(read(model, ids, mixed, PARTS), expected, atol=1e-4, rtol=1e-4)


def test_every_layer_may_have_a_window(random_ids: Ids) -> None:
    config = transformers.MistralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, sliding_window=WIDTH,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.MistralForCausalLM(config).eval().double(), random_ids(1, sum(PARTS))
    kvfold.attach(model)
    expected = read(model, ids, transformers.DynamicCache(config=config), PARTS)
    torch.testing.assert_close(read(model, ids, folded(model, "float16"), PARTS), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3", "kvarn-4", "turboquant-4:kvfold-2"])
def test_reads_the_same_however_tokens_come(format: str, random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 500)
    whole = read(model, ids, folded(model, format), [500])
    single = read(model, ids, folded(model, format), [300, *[1] * 200])
    torch.testing.assert_close(single, whole, atol=1e-4, rtol=1e-4)
    dense = read(model, ids, FoldedCache(model.config, format), [500])
    assert (whole - dense)[:, 300:].abs().max() > 1e-3  # the windows are read folded


def test_holds_less_and_stops_growing(random_ids: Ids) -> None:
    model = windowed(width=600)
    ids = random_ids(1, 1600)
    dense, cache = FoldedCache(model.config, "kvfold-4"), folded(model)
    sizes = []
    for tokens in (1000, 64, 472, 64):
        part, ids = ids[:, :tokens], ids[:, tokens:]
        for own in (dense, cache):
            model(part, past_key_values=own)
        sizes.append(cache.report().layers[0].held_bytes)
        window = dense.report().layers[0]
        assert cache.report().layers[0].values == window.values
        assert sizes[-1] < 0.5 * window.held_bytes
    assert max(sizes) < 1.15 * min(sizes)
    report = cache.report()
    assert {row.format for row in report.layers} == {"kvfold-4"}
    assert not any(row.evicted for row in report.layers)
    assert report.ratio_to_bf16 > 1.3 * dense.report().ratio_to_bf16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3", "centred-4"])
@pytest.mark.parametrize("tokens", [200, 700, 1333])
def test_plan_agrees(name: str, format: str, tokens: int, random_ids: Ids) -> None:
    model = windowed(name, width=600)
    cache = folded(model, format)
    for part in random_ids(1, tokens).split([tokens - 1, 1], dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    projected = held_bytes(layer_shapes(model.config), format, tokens, model.dtype.itemsize, sliding=True)
    tables = 10_000 if format == "kvfold-4" and tokens > 256 else 0  # layers' bits may have levels of their own
    assert abs(projected - cache.held_bytes()) < 0.01 * cache.held_bytes() + tables


# Going back


def test_a_short_crop_leaves_no_trace(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 520)
    cache, never = folded(model), folded(model)
    read(model, ids[:, :400], cache, [400])
    read(model, ids[:, :400], never, [400])
    read(model, random_ids(1, 24, seed=5), cache, [24])
    cache.crop(-24)
    assert cache.get_seq_length() == 400
    after = [1] * 120
    assert torch.equal(read(model, ids[:, 400:], cache, after), read(model, ids[:, 400:], never, after))


def test_a_crop_into_what_the_window_left_is_refused(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 500)
    cache, never = folded(model), folded(model)
    for each in (cache, never):
        read(model, ids, each, [400, 100])
    with pytest.raises(RuntimeError, match=r"sliding window has left those before .* behind"):
        cache.crop(-100)
    more = random_ids(1, 3, seed=2)
    assert torch.equal(read(model, more, cache, [3]), read(model, more, never, [3]))  # nothing has changed


def test_drafts_of_any_length_are_cropped_if_the_past_is_recorded(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 500)
    cache, never = folded(model, "float16"), folded(model, "float16")
    cache.activate_past_recording()
    read(model, ids[:, :400], cache, [400])
    cache.crop(0)
    held = [layer.groups[0].rows.length for layer in windows(cache)]
    read(model, random_ids(1, 90, seed=5), cache, [90])
    cache.crop(-90)
    assert [layer.groups[0].rows.length for layer in windows(cache)] == held
    read(model, ids[:, :400], never, [400])
    got, expected = (read(model, ids[:, 400:], each, [100]) for each in (cache, never))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.contract
def test_assisted_generation(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 300)
    options = {"max_new_tokens": 60, "do_sample": False}
    plain = model.generate(ids, past_key_values=folded(model, "float16"), **options)
    drafted = model.generate(ids, past_key_values=folded(model, "float16"), prompt_lookup_num_tokens=5, **options)
    assert torch.equal(plain, drafted)


def test_a_broken_pass_leaves_windows_as_they_were(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 500)
    cache, never = folded(model), folded(model)
    for each in (cache, never):
        read(model, ids[:, :400], each, [400])
    hook = model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, 400:], past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 400
    assert torch.equal(read(model, ids[:, 400:], cache, [100]), read(model, ids[:, 400:], never, [100]))


def test_rows_are_selected(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(2, 300)
    cache, other = folded(model), folded(model)
    read(model, ids, cache, [300])
    read(model, ids.flip(0), other, [300])
    cache.reorder_cache(torch.tensor([1, 0]))
    more = random_ids(2, 80, seed=3)
    torch.testing.assert_close(read(model, more, cache, [80]), read(model, more, other, [80]))


# Files


@pytest.mark.parametrize("recording", [False, True])
def test_a_loaded_cache_goes_on(recording: bool, random_ids: Ids, tmp_path: Path) -> None:
    model, ids = windowed(), random_ids(1, 520)
    cache = folded(model, exceptions=[(0, "dense"), (1, "turboquant-3")])
    if recording:
        cache.activate_past_recording()
    read(model, ids[:, :400], cache, [400])
    cache.save(tmp_path / "a.kv")
    loaded = FoldedCache.load(tmp_path / "a.kv", model.config)
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert loaded.layers[2].record_past == recording
    parts = [60, *[1] * 60]
    assert torch.equal(read(model, ids[:, 400:], loaded, parts), read(model, ids[:, 400:], cache, parts))


def test_a_file_without_tokens_of_the_window_is_refused(random_ids: Ids, tmp_path: Path) -> None:
    model = windowed()
    cache = folded(model, "turboquant-3")
    read(model, random_ids(1, 400), cache, [400])
    rows = cache.layers[0].folded.groups[0].rows
    rows.evict(torch.zeros(rows.batch, rows.kv_heads, 1, dtype=torch.bool), by_page=True)
    cache.save(tmp_path / "a.kv")
    with pytest.raises(ValueError, match="of tokens in a window of 150"):
        FoldedCache.load(tmp_path / "a.kv", model.config)


# What it is refused for, and beside


def test_an_exception_needs_the_option() -> None:
    config = windowed(attached=False).config
    with pytest.raises(ValueError, match=r"layer 0 .* a sliding window, .* sliding=True"):
        FoldedCache(config, policy=Policy("kvfold-4", exceptions=[(0, "turboquant-4")]))
    cache = FoldedCache(config, policy=Policy("dense", exceptions=[(0, "turboquant-4")], sliding=True))
    assert [type(layer) is FoldedSlidingLayer for layer in cache.layers] == [True, False, False, False]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding = 1"):
        Policy("kvfold-4", sliding=1)
    config = transformers.Gemma3TextConfig(head_dim=128, num_hidden_layers=2)
    with pytest.raises(ValueError, match="turns keys back by their places"):
        FoldedCache(config, policy=Policy("tbqx3:turboquant-4", sliding=True))


def test_eviction_leaves_windows_alone(random_ids: Ids) -> None:
    model, ids = windowed(), random_ids(1, 700)
    cache = FoldedCache(model.config, policy=Policy("kvfold-4", sliding=True), eviction=StreamingLLM(budget=300))
    untouched = folded(model)
    for each in (cache, untouched):
        read(model, ids, each, [600, 100])
    for own, other in zip(windows(cache), windows(untouched), strict=True):
        assert own.groups[0].rows.length == other.groups[0].rows.length
    assert [row.evicted > 0 for row in cache.report().layers] == [False, True, False, True]


def test_attention_without_a_mask_reads_the_window() -> None:
    """`attend` by itself, at the edge of the window: all tokens at once, some, and one."""
    torch.manual_seed(0)
    layer = LayerCache(LayerConfig("float16", sliding=70))
    key, value = torch.randn(2, 1, 2, 260, 64).half().double()
    held = 0
    for n in (60, 9, 1, 1, 1, 100, 87, 1):
        stop = held + n
        query = torch.randn(1, 4, n, 64, dtype=torch.float64)
        new = layer.append(key[:, :, held:stop], value[:, :, held:stop])
        assert isinstance(new, Appended)
        out = attend(query, new, scaling=0.125)
        at = torch.arange(stop)
        own = at[held:, None]
        mask = ((at <= own) & (at > own - 70))[None, None]
        expected = attend_dense(query, key[:, :, :stop], value[:, :, :stop], scaling=0.125, mask=mask)
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)
        layer.forget_outside()
        held = stop
    assert layer.groups[0].rows.evicted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Gemma 3 whose first layer has a window, with SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("windowed")
    _, tokenizer = kvfold.demo_model()
    tokenizer.save_pretrained(folder)
    config = transformers.Gemma3TextConfig(
        vocab_size=len(tokenizer), num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, sliding_window=600, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "asked",
    [
        ("plan", "--context", "1000", "--formats", "kvfold-4"),
        ("eval", "--passage", "1000", "--passages", "1", "--formats", "kvfold-4"),
        ("generate", "--raw", "--prompt", "word " * 1000, "--max-new-tokens", "2", "--format", "kvfold-4"),
    ],
)
def test_commands(folder: str, asked: tuple[str, ...]) -> None:
    held = []
    for more in ((), ("--sliding",)):
        out = json.loads(run_kvfold(*asked, "--model", folder, "--json", *more).stdout)
        row = out[0] if isinstance(out, list) else out.get("rows", [out])[0]
        held.append(row["held_bytes"])
    assert held[1] < 0.75 * held[0]


@pytest.mark.parametrize("command", [("eval",), ("generate", "--prompt", "x")])
def test_mlx_does_not_fold_windows(command: tuple[str, ...]) -> None:
    """Said before a model is looked for."""
    pytest.importorskip("mlx_lm")
    refused = run_kvfold(*command, "--model", "nowhere", "--runtime", "mlx", "--sliding")
    assert refused.returncode != 0
    assert "sliding" in refused.stderr
    assert "torch" in refused.stderr


def test_windows_that_hold_more_are_refused_by_the_plan_too() -> None:
    """Those of latents, here."""
    config = transformers.Gemma3TextConfig(num_hidden_layers=2, head_dim=64)
    config.kv_lora_rank, config.qk_rope_head_dim = 64, 16
    for make in (
        lambda: FoldedCache(config, policy=Policy("kvfold-4", sliding=True)),
        lambda: held_bytes(layer_shapes(config), "kvfold-4", 100, sliding=True),
    ):
        with pytest.raises(ValueError, match=r"window of layer 0 holds latents.* exceptions=\[\(0, 'dense'\)\]"):
            make()
