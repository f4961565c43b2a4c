"""The cache contract of transformers, on tiny random models of seven architectures and on the real one."""

import copy
import logging
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, latent_model, model_that_computes_with_values, tiny_model
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

import kvfold
from kvfold import FoldedCache, Policy
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.formats import pair
from kvfold.integrations.transformers.handle import FoldedHandle
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.operator import append_and_attend

Ids = Callable[..., Tensor]
FORMATS = ["centred-4", "turboquant-4", pytest.param("kvfold-3", marks=pytest.mark.contract)]
EACH = [
    *(pytest.param(name, "kvfold-3", marks=pytest.mark.contract) for name in ARCHITECTURES),
    ("llama", "centred-4"), ("llama", "turboquant-4"), ("gemma2", "turboquant-4"), ("gpt-oss", "centred-4"),
]  # fmt: skip
"""Each architecture, and each format."""


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that are fitted fold here too, though prompts are short."""
    monkeypatch.setattr(pair, "FIT_TOKENS", 70)


def _logits(model: PreTrainedModel, ids: Tensor, cache: transformers.Cache, chunks: list[int] | None = None) -> Tensor:
    """Logits of `ids`, read in chunks."""
    parts = ids.split(chunks or [ids.shape[1]], dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def _greedy(model: PreTrainedModel, ids: Tensor, cache: transformers.Cache, n: int = 24, **options: object) -> Tensor:
    """New tokens of a greedy continuation."""
    options.setdefault("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, past_key_values=cache, max_new_tokens=n, do_sample=False, **options)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize(("tiny", "format"), EACH, indirect=["tiny"])
class TestEveryArchitecture:
    def test_logits_change_and_stay_close(self, tiny: PreTrainedModel, random_ids: Ids, format: str) -> None:
        ids = random_ids(1, 300)
        dense = _logits(tiny, ids, DynamicCache(config=tiny.config)).log_softmax(-1)
        coarse, fine = (
            _logits(tiny, ids, FoldedCache(tiny.config, name)).log_softmax(-1) for name in (format, "turboquant-8")
        )
        coarse_kl, fine_kl = ((dense.exp() * (dense - x)).sum(-1).mean() for x in (coarse, fine))
        assert coarse_kl > 1e-5  # it is not dense attention
        assert fine_kl < 0.1 * coarse_kl + 1e-4  # and becomes it as bits grow
        assert fine_kl < 0.01

    def test_chunked_prefill_equals_whole(self, tiny: PreTrainedModel, random_ids: Ids, format: str) -> None:
        ids = random_ids(2, 260)
        whole = _logits(tiny, ids, FoldedCache(tiny.config, format))
        chunks = _logits(tiny, ids, FoldedCache(tiny.config, format), [100, 1, 1, 97, 61])
        torch.testing.assert_close(whole, chunks, atol=1e-6, rtol=0)
        chunked = _greedy(tiny, ids, FoldedCache(tiny.config, format), prefill_chunk_size=48)
        assert torch.equal(chunked, _greedy(tiny, ids, FoldedCache(tiny.config, format)))

    def test_padded_rows_get_what_they_get_alone(self, tiny: PreTrainedModel, random_ids: Ids, format: str) -> None:
        prompts = [random_ids(1, n, seed=n) for n in (150, 40, 97)]
        ids, mask = torch.zeros(2, 3, 150, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, -prompt.shape[1] :] = prompt
            mask[row, -prompt.shape[1] :] = 1
        together = _greedy(tiny, ids, FoldedCache(tiny.config, format), 40, attention_mask=mask)
        for row, prompt in enumerate(prompts):
            alone = _greedy(tiny, prompt, FoldedCache(tiny.config, format), 40)
            assert torch.equal(together[row : row + 1], alone)

    def test_beams(self, tiny: PreTrainedModel, random_ids: Ids, format: str) -> None:
        """The score that beam search reports is the one that a fresh read of its sequence gives."""
        ids = random_ids(2, 90)
        out = tiny.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=FoldedCache(tiny.config, format),
            num_beams=3, num_return_sequences=2, max_new_tokens=40, do_sample=False, length_penalty=0.0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        log_p = _logits(tiny, out.sequences, FoldedCache(tiny.config, format)).log_softmax(-1)
        token_scores = log_p[:, 89:-1].gather(-1, out.sequences[:, 90:, None]).squeeze(-1)
        torch.testing.assert_close(token_scores.sum(-1).float(), out.sequences_scores, atol=1e-4, rtol=0)
        assert out.sequences_scores[0] >= out.sequences_scores[1]

    def test_speculation_leaves_no_trace(self, tiny: PreTrainedModel, random_ids: Ids, format: str) -> None:
        """Prompt-lookup drafts, mostly refused and cropped away, and the tokens are those without drafts."""
        ids = random_ids(1, 30).repeat(1, 4)
        plain = _greedy(tiny, ids, FoldedCache(tiny.config, format), 50)
        cache = FoldedCache(tiny.config, format)
        assert torch.equal(_greedy(tiny, ids, cache, 50, prompt_lookup_num_tokens=8), plain)
        assert torch.equal(_greedy(tiny, ids, FoldedCache(tiny.config, format), 50, assistant_model=tiny), plain)


@pytest.mark.parametrize("format", FORMATS)
class TestContract:
    def test_sampling(self, llama: PreTrainedModel, random_ids: Ids, format: str) -> None:
        """The same seed samples the same tokens from whole and from chunked prompts, and others from a dense cache."""
        ids = random_ids(2, 150)

        def sample(cache: transformers.Cache, **options: int) -> Tensor:
            torch.manual_seed(5)
            return llama.generate(ids, past_key_values=cache, do_sample=True, max_new_tokens=60, **options)

        whole = sample(FoldedCache(llama.config, format))
        assert torch.equal(whole, sample(FoldedCache(llama.config, format), prefill_chunk_size=40))
        assert not torch.equal(whole, sample(DynamicCache(config=llama.config)))

    def test_crop_then_go_on(self, llama: PreTrainedModel, random_ids: Ids, format: str) -> None:
        ids = random_ids(1, 260)
        whole = _logits(llama, ids, FoldedCache(llama.config, format))
        cache = FoldedCache(llama.config, format)
        _logits(llama, torch.cat((ids[:, :200], random_ids(1, 20, seed=9)), 1), cache)
        cache.crop(-20)
        assert cache.get_seq_length() == 200
        torch.testing.assert_close(_logits(llama, ids[:, 200:], cache), whole[:, 200:], atol=1e-6, rtol=0)

    def test_rows_follow_the_batch(self, llama: PreTrainedModel, random_ids: Ids, format: str) -> None:
        ids, more = random_ids(3, 130), random_ids(6, 40, seed=1)

        def moved(change: Callable[[FoldedCache], None], rows: list[int]) -> None:
            cache = FoldedCache(llama.config, format)
            _logits(llama, ids, cache)
            change(cache)
            new = more[: len(rows)]
            fresh = _logits(llama, torch.cat((ids[rows], new), 1), FoldedCache(llama.config, format))
            torch.testing.assert_close(_logits(llama, new, cache), fresh[:, 130:], atol=1e-6, rtol=0)

        moved(lambda c: c.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0])
        moved(lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
        moved(lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0])
        moved(lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2])

    def test_reset(self, llama: PreTrainedModel, random_ids: Ids, format: str) -> None:
        cache = FoldedCache(llama.config, format)
        first = _logits(llama, random_ids(2, 130), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.held_bytes() == 0
        assert torch.equal(_logits(llama, random_ids(2, 130), cache), first)

    def test_a_conversation_goes_on(self, llama: PreTrainedModel, random_ids: Ids, format: str) -> None:
        """A second `generate` reads only what is new."""
        cache, ids = FoldedCache(llama.config, format), random_ids(1, 100)
        ids = torch.cat((ids, _greedy(llama, ids, cache, 30), random_ids(1, 50, seed=3)), 1)
        again = _greedy(llama, ids, cache, 30)
        assert torch.equal(again, _greedy(llama, ids, FoldedCache(llama.config, format), 30))

    def test_without_attach_it_is_unfolded_and_says_so_once(
        self, llama: PreTrainedModel, random_ids: Ids, format: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids = random_ids(1, 260)
        attached = _logits(llama, ids, FoldedCache(llama.config, format), [200] + [1] * 60)
        kvfold.detach(llama)
        assert llama.config._attn_implementation == "sdpa"
        dense = _logits(llama, ids, DynamicCache(config=llama.config)).log_softmax(-1)
        with caplog.at_level(logging.WARNING, "kvfold"):
            unfolded = _logits(llama, ids, FoldedCache(llama.config, format), [200] + [1] * 60)
        assert sum("does not read the folded cache" in r.message for r in caplog.records) == 1
        kl = [(dense.exp() * (dense - x.log_softmax(-1)))[:, 200:].sum(-1).mean() for x in (attached, unfolded)]
        assert 1e-5 < kl[1] < 2 * kl[0]  # folded just the same; its prompt was read dense, so it may be closer


class TestLayers:
    @pytest.mark.contract
    @pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
    def test_sliding_layers_stay_dense(self, name: str, random_ids: Ids) -> None:
        model = tiny_model(name)
        kvfold.attach(model)
        cache = FoldedCache(model.config, "centred-4")
        _logits(model, random_ids(1, 300), cache)
        formats = [layer.format for layer in cache.report().layers]
        assert [f == "dense" for f in formats] == [kind == "sliding_attention" for kind in model.config.layer_types]
        assert formats.count("centred-4") == 2
        sliding = cache.report().layers[model.config.layer_types.index("sliding_attention")]
        heads, dim = model.config.num_key_value_heads, model.config.head_dim
        assert sliding.values == 2 * heads * dim * (model.config.sliding_window - 1)

    @pytest.mark.contract
    @pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
    @pytest.mark.parametrize(
        ("dtype", "dense_dtype", "held"),
        [
            (torch.float32, None, torch.float16), (torch.float32, torch.float32, torch.float32),
            (torch.bfloat16, None, torch.bfloat16), (torch.bfloat16, torch.float16, torch.float16),
        ],
    )  # fmt: skip
    def test_windows_are_held_as_dense_tokens_are(
        self, name: str, dtype: torch.dtype, dense_dtype: torch.dtype | None, held: torch.dtype, random_ids: Ids
    ) -> None:
        model = tiny_model(name).to(dtype)
        kvfold.attach(model)
        assert model.config.layer_types[0] == "sliding_attention"
        ids, logits, windows = random_ids(2, 340), [], []
        caches = [FoldedCache(model.config, "centred-4", dense_dtype=own) for own in (dense_dtype, torch.float32)]
        for cache in (*caches, DynamicCache(config=model.config)):
            for start in range(0, 340, 68):
                last = _logits(model, ids[:, start : start + 68], cache)
            windows.append(cache.layers[0].keys)
            logits.append(last)
        assert windows[0].dtype == held
        assert windows[0].shape[2] == model.config.sliding_window - 1
        assert windows[0].untyped_storage().nbytes() == windows[0].nbytes  # no prompt is kept alive behind it
        assert torch.equal(windows[0], windows[2].to(held))
        if name != "gpt-oss":  # its experts are chosen by a hair
            rounded, folded = ((x - logits[1]).abs().mean() for x in (logits[0], logits[2]))
            assert rounded < 0.2 * folded

    def test_windows_do_not_fold(self) -> None:
        """A policy that folds one is refused; one that keeps it dense says what is so anyway."""
        config = tiny_model("gemma2").config
        sliding = config.layer_types.index("sliding_attention")
        for index in (sliding, sliding - config.num_hidden_layers):
            with pytest.raises(ValueError, match=f"layer {sliding} the format 'kvfold-3', but it has a sliding window"):
                FoldedCache(config, policy=Policy("kvfold-4", exceptions=[(index, "kvfold-3")]))
        FoldedCache(config, policy=Policy("kvfold-4", exceptions=[(sliding, "dense")]))

    def test_windows_too_large_for_16_bits(self, random_ids: Ids) -> None:
        """No number becomes infinite: the pass is refused, and the cache holds what it held."""
        model = tiny_model("gemma2").float()
        kvfold.attach(model)
        cache = FoldedCache(model.config, "centred-4")
        _logits(model, random_ids(1, 50), cache)
        index = model.config.layer_types.index("sliding_attention")
        model.model.layers[index].self_attn.v_proj.weight.mul_(1e7)
        with pytest.raises(
            ValueError, match=rf"layer {index}: values of its sliding window are too large for torch.flo"
        ):
            _logits(model, random_ids(1, 5), cache)
        assert cache.get_seq_length() == cache.layers[index].get_seq_length() == 50
        cache = FoldedCache(model.config, "centred-4", dense_dtype=torch.float32)
        _logits(model, random_ids(1, 50), cache)

    def test_a_pass_that_has_ended_keeps_nothing_alive(self, random_ids: Ids) -> None:
        """What would undo it is no longer there when bytes are counted, though nothing says that it has ended."""
        model = tiny_model("gemma3")
        cache = FoldedCache(model.config, "turboquant-4")
        _logits(model, random_ids(1, 60), cache)
        window = weakref.ref(cache.layers[0].keys)
        _logits(model, random_ids(1, 60), cache)
        cache.held_bytes()
        assert window() is None

    @pytest.mark.contract
    def test_policy(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        policy = Policy("centred-4", dense_first=1, exceptions=[(3, "turboquant-4:turboquant-2")])
        cache = FoldedCache(llama.config, policy=policy)
        _logits(llama, random_ids(1, 200), cache)
        report = cache.report()
        assert [row.format for row in report.layers] == ["dense", "centred-4", "centred-4", "turboquant-4:turboquant-2"]
        assert report.layers[0].held_bytes == 8 * report.layers[0].values  # float64
        assert report.layers[3].held_bytes < report.layers[1].held_bytes < report.layers[0].held_bytes

    @pytest.mark.parametrize("tokens", [60, 85, 500])
    @pytest.mark.parametrize("format", FORMATS)
    def test_report_adds_up(self, llama: PreTrainedModel, random_ids: Ids, format: str, tokens: int) -> None:
        cache = FoldedCache(llama.config, format)
        assert cache.held_bytes() == 0
        _logits(llama, random_ids(2, tokens), cache)
        report = cache.report()
        assert report.values == 4 * 2 * 2 * 2 * 64 * tokens  # layers, keys and values, rows, heads, dim, tokens
        own = sum(row.held_bytes for row in report.layers)
        assert own + report.shared_bytes == report.held_bytes == cache.held_bytes()
        assert cache.bits_per_value() == 8 * report.held_bytes / report.values
        assert report.to_json()["layers"][0]["held_bytes"] == report.layers[0].held_bytes
        assert report.folded_bits_per_value == report.bits_per_value  # every layer folds
        assert report.to_json()["ratio_to_bf16"] == pytest.approx(16 / report.bits_per_value)

    def test_windows_do_not_hide_what_folding_does(self, random_ids: Ids) -> None:
        """Layers with windows count as windows in the whole, and not where layers fold."""
        model = tiny_model("gpt-oss")
        kvfold.attach(model)
        cache = FoldedCache(model.config, "turboquant-4")
        _logits(model, random_ids(1, 640), cache)
        report = cache.report()
        dense = [row for row in report.layers if row.format == "dense"]
        assert [row.values for row in dense] == [2 * 2 * 64 * 47] * 2  # keys and values, heads, dim, the window
        folded = report.held_bytes - sum(row.held_bytes for row in dense)
        assert report.folded_bits_per_value == pytest.approx(8 * folded / (2 * 2 * 2 * 64 * 640))
        assert 4 < report.folded_bits_per_value < 5.4 < report.bits_per_value
        assert math.isnan(FoldedCache(model.config, "dense").report().folded_bits_per_value)

    @pytest.mark.parametrize(
        ("format", "tokens", "dense"),
        [("kvfold-4", 69, 69), ("kvfold-4", 330, 330 - 4 * 64), ("centred-4", 50, 50), ("turboquant-4", 50, 0)],
    )
    def test_how_much_is_not_folded(self, random_ids: Ids, format: str, tokens: int, dense: int) -> None:
        """Of the layers that fold alone: 16 and 48 tokens or more at both ends, and all until a prompt is fitted."""
        model = tiny_model("gemma3")
        kvfold.attach(model)
        cache = FoldedCache(model.config, format)
        assert math.isnan(cache.report().dense_share)
        for ids in random_ids(2, tokens).split([tokens - 1, 1], dim=1):
            _logits(model, ids, cache)
        report = cache.report()
        assert report.dense_share == dense / tokens
        assert [row.dense_values for row in report.layers][1::2] == [2 * 2 * 256 * dense] * 2  # rows, both sides, dim
        assert all(row.dense_values == row.values for row in report.layers[::2])

    def test_states_are_what_a_dense_cache_holds_too(self, random_ids: Ids) -> None:
        """They are no tokens, and take most of a short text's cache, folded or not."""
        config = transformers.JambaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1,
            use_mamba_kernels=False, pad_token_id=0,
        )  # fmt: skip
        model = transformers.JambaForCausalLM(config).eval()
        kvfold.attach(model)
        cache = FoldedCache(config, "turboquant-4")
        _logits(model, random_ids(1, 20), cache)
        states, folded = cache.report().layers
        assert (states.format, folded.format) == ("dense", "turboquant-4")
        assert states.held_bytes == pytest.approx(4 * states.values, rel=0.01)  # float32
        assert states.values == 2 * folded.values
        assert cache.report().bits_per_value < 40

    @pytest.mark.contract
    def test_padding_takes_no_room(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        ids, mask = random_ids(2, 400), torch.ones(2, 400, dtype=torch.long)
        mask[1, :270] = 0
        full, half = FoldedCache(llama.config), FoldedCache(llama.config)
        llama(ids, past_key_values=full)
        llama(ids, attention_mask=mask, past_key_values=half)
        assert half.report().values == full.report().values * 530 / 800
        pages = [
            sum(len(group.batch_rows) * group.rows.keys.count for group in cache.layers[0].folded.groups)
            for cache in (full, half)
        ]
        assert pages == [2 * 5, 5 + 1]  # of 400 tokens 16 are sinks and 48 recent; of 130 likewise


class TestErrors:
    def test_unknown_format(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="format = 'nope-5' is not known: choose one of"):
            FoldedCache(llama.config, "nope-5")

    def test_head_dim(self) -> None:
        config = transformers.LlamaConfig(hidden_size=120, num_attention_heads=10, num_hidden_layers=1)
        with pytest.raises(ValueError, match=r"head_dim = 12: .* multiples of 8"):
            FoldedCache(config)

    def test_encoder_decoder(self) -> None:
        with pytest.raises(ValueError, match="encoder-decoder"):
            FoldedCache(transformers.T5Config())

    @pytest.mark.contract
    def test_another_config(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        other = tiny_model("qwen3")
        cache = FoldedCache(other.config)
        with pytest.raises(ValueError, match="made for a qwen3 config with 4 layers, the model is a llama with 4"):
            llama(random_ids(1, 5), past_key_values=cache)
        kvfold.detach(llama)
        with pytest.raises(ValueError, match="keys have 2 heads of 64, but this cache was made for a qwen3 config"):
            llama(random_ids(1, 5), past_key_values=cache)
        short = transformers.LlamaConfig(**{**llama.config.to_dict(), "num_hidden_layers": 2})
        with pytest.raises(ValueError, match="layer_idx = 2, but this cache was made for a config with 2 layers"):
            llama(random_ids(1, 5), past_key_values=FoldedCache(short))

    @pytest.mark.contract
    def test_dtype(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        cache = FoldedCache(llama.config)
        llama(random_ids(1, 50), past_key_values=cache)
        llama.to(torch.bfloat16)
        with pytest.raises(ValueError, match=r"layer 0: key is torch.bfloat16, the cache keeps its dense tokens as"):
            llama(random_ids(1, 5), past_key_values=cache)

    @pytest.mark.parametrize("n", [1, 200])
    @pytest.mark.parametrize("name", ["llama", "llama with a dense layer", "gemma2", "gpt-oss"])
    @pytest.mark.parametrize("format", FORMATS)
    def test_a_broken_pass_leaves_no_trace(self, format: str, name: str, n: int, random_ids: Ids) -> None:
        """Layer 2 fails: all layers forget the pass, and the cache goes on as if it had not been."""
        model = tiny_model(name.split()[0])
        kvfold.attach(model)
        policy = Policy(format, dense_first=int("dense" in name), exceptions=[(2, format)] if "llama" in name else ())
        cache, twin = (FoldedCache(model.config, policy=policy) for _ in range(2))
        for c in (cache, twin):
            model(random_ids(2, 130), past_key_values=c)
        weight = model.model.layers[2].self_attn.v_proj.weight
        kept = weight.clone()
        weight[0, 0] = float("nan")
        failure = r"layer 2: value at position 130 \(row 0, head 0, channel 0\) is nan"
        if name in ("gemma2", "gpt-oss"):  # layer 2 slides; the next layer that folds tells
            failure = "layer 3: key at position 130"
        with pytest.raises(ValueError, match=failure):
            model(random_ids(2, n), past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {130}
        weight.copy_(kept)
        more = random_ids(2, 90, seed=4)
        assert torch.equal(_logits(model, more, cache), _logits(model, more, twin))

    def test_a_pass_that_breaks_outside_the_cache(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        cache, twin = FoldedCache(llama.config), FoldedCache(llama.config)
        for c in (cache, twin):
            llama(random_ids(1, 130), past_key_values=c)

        def fail(*_: object) -> None:
            raise RuntimeError("out of luck")

        hook = llama.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            llama(random_ids(1, 70), past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 130
        more = random_ids(1, 90, seed=4)
        assert torch.equal(_logits(llama, more, cache), _logits(llama, more, twin))

    def test_first_pass_broken_then_another_batch(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        cache = FoldedCache(llama.config)
        weight = llama.model.layers[2].self_attn.v_proj.weight
        kept = weight.clone()
        weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match="layer 2"):
            llama(random_ids(2, 50), past_key_values=cache)
        weight.copy_(kept)
        assert llama(random_ids(1, 50), past_key_values=cache).logits.isfinite().all()

    def test_format_and_policy(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="format = 'turboquant-2' and a policy: give one of them"):
            FoldedCache(llama.config, "turboquant-2", policy=Policy("centred-4"))

    def test_training(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        llama.train()
        with pytest.raises(ValueError, match=r"training mode.*call model\.eval\(\)"):
            llama(random_ids(1, 5), past_key_values=FoldedCache(llama.config))

    def test_deep_crop_says_so_once(
        self, llama: PreTrainedModel, random_ids: Ids, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = FoldedCache(llama.config, "centred-4")
        llama(random_ids(1, 400), past_key_values=cache)
        with caplog.at_level(logging.WARNING, "kvfold"):
            cache.crop(-250)
        said = "crop to 150 tokens goes back further than what leaves no trace, up to 24 of the newest pass"
        assert [r.message for r in caplog.records if said in r.message]
        assert len(caplog.records) == 1
        assert llama(random_ids(1, 5), past_key_values=cache).logits.isfinite().all()


@pytest.mark.contract
class TestPadding:
    """Padding belongs to the rows that it came with, however a call spells it."""

    def _batch(self, random_ids: Ids) -> tuple[Tensor, Tensor]:
        mask = torch.ones(2, 100, dtype=torch.long)
        mask[1, :40] = 0
        return random_ids(2, 100), mask

    @pytest.mark.parametrize("empty", [lambda cache: cache.crop(-100), lambda cache: cache.reset()])
    def test_does_not_outlive_its_prompt(
        self, llama: PreTrainedModel, random_ids: Ids, empty: Callable[[FoldedCache], None]
    ) -> None:
        ids, mask = self._batch(random_ids)
        cache = FoldedCache(llama.config)
        llama(ids, attention_mask=mask, past_key_values=cache)
        empty(cache)
        assert cache.get_seq_length() == 0
        new = random_ids(2, 80, seed=1)
        assert torch.equal(_logits(llama, new, cache), _logits(llama, new, FoldedCache(llama.config)))

    def test_rows_selected_after_padding(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        ids, mask = self._batch(random_ids)
        cache = FoldedCache(llama.config)
        llama(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1).repeat_interleave(2, 0)
        assert llama(random_ids(4, 1), attention_mask=mask, past_key_values=cache).logits.isfinite().all()
        assert llama(random_ids(4, 1), past_key_values=cache).logits.isfinite().all()

    def test_by_position_and_through_the_base_model(
        self, llama: PreTrainedModel, random_ids: Ids, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids, mask = self._batch(random_ids)
        caches = [FoldedCache(llama.config) for _ in range(4)]
        named = llama(ids, attention_mask=mask, past_key_values=caches[0]).logits
        assert torch.equal(llama(ids, mask, None, caches[1]).logits, named)
        assert torch.equal(llama(ids, mask, past_key_values=caches[2]).logits, named)
        hidden = llama.model(ids, attention_mask=mask, past_key_values=caches[3]).last_hidden_state
        assert torch.equal(llama.lm_head(hidden), named)
        assert {cache.report().values for cache in caches} == {4 * 2 * 2 * 64 * 160}
        assert not caplog.records

    def test_may_hold_anything(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        cache = FoldedCache(llama.config)
        cache.set_padding(self._batch(random_ids)[1])
        key, value = torch.randn(2, 2, 2, 100, 64)
        key[1, :, 7] = float("nan")
        cache.update(key, value, 0)
        assert cache.layers[0].folded.value_count == 2 * 2 * 64 * 160


@pytest.mark.contract
class TestOtherModels:
    def test_nothing_folds(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "kvfold"):
            FoldedCache(transformers.MistralConfig(num_hidden_layers=2, sliding_window=64))
        assert any(
            "no layer of this mistral config folds (its layers are DynamicSliding" in r.message for r in caplog.records
        )

    def test_attention_that_computes_with_cached_keys(self, random_ids: Ids, caplog: pytest.LogCaptureFixture) -> None:
        """DiffLlama splits cached values itself: they are unfolded there, and the log says so once a cache."""
        model = model_that_computes_with_values()
        kvfold.attach(model)
        ids = random_ids(1, 120)
        dense = _logits(model, ids, DynamicCache(config=model.config))
        with caplog.at_level(logging.WARNING, "kvfold"):
            folded = _logits(model, ids, FoldedCache(model.config, "turboquant-8"), [100] + [1] * 20)
        torch.testing.assert_close(folded, dense, atol=0.02, rtol=0.02)
        assert not torch.equal(folded, dense)
        assert sum("before its attention function" in r.message for r in caplog.records) == 1
        assert len(caplog.records) == len({r.message for r in caplog.records})

    def test_layers_that_do_not_see_the_text(self, random_ids: Ids) -> None:
        """Mllama's cross-attention layers hold an image, or nothing, while the others grow."""
        torch.manual_seed(0)
        config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
            vocab_size=256, hidden_size=128, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, cross_attention_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.MllamaForCausalLM(config).eval()
        kvfold.attach(model)
        cache = FoldedCache(config, "turboquant-8")
        ids = random_ids(1, 100)
        logits = _logits(model, ids, cache, [80] + [1] * 20)
        torch.testing.assert_close(logits, _logits(model, ids, DynamicCache(config=config)), atol=0.02, rtol=0.02)
        assert [layer.get_seq_length() for layer in cache.layers] == [100, 0, 100]

    def test_one_head_by_another_name(self, random_ids: Ids) -> None:
        """Falcon's multi-query attention does not call its one KV head num_key_value_heads."""
        torch.manual_seed(0)
        config = transformers.FalconConfig(
            vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, multi_query=True
        )
        model = transformers.FalconForCausalLM(config).eval()
        kvfold.attach(model)
        cache = FoldedCache(config, "turboquant-8")
        ids = random_ids(1, 100)
        torch.testing.assert_close(
            _logits(model, ids, cache, [80] + [1] * 20),
            _logits(model, ids, DynamicCache(config=config)),
            atol=0.02,
            rtol=0.02,
        )
        assert cache.layers[0].folded.value_count == 2 * 64 * 100


@pytest.mark.contract
def test_a_prefix_is_read_once_and_continued_often(llama: PreTrainedModel, random_ids: Ids) -> None:
    """Deep and pickled copies of a filled cache go on like the original, which stays as it was."""
    prefix = FoldedCache(llama.config)
    _logits(llama, random_ids(1, 150), prefix)
    held = prefix.held_bytes()
    for seed in (1, 2):
        tail = random_ids(1, 90, seed=seed)
        whole = torch.cat((random_ids(1, 150), tail), 1)
        truth = _logits(llama, whole, FoldedCache(llama.config))[:, 150:]
        for twin in (copy.deepcopy(prefix), pickle.loads(pickle.dumps(prefix))):
            assert twin.held_bytes() == held
            torch.testing.assert_close(_logits(llama, tail, twin), truth, atol=1e-6, rtol=0)
    assert prefix.get_seq_length() == 150
    assert prefix.held_bytes() == held


@pytest.mark.contract
def test_own_attention_code_falls_back_and_says_so(caplog: pytest.LogCaptureFixture, random_ids: Ids) -> None:
    """BLOOM computes attention itself: it cannot be attached, and runs on the unfolded cache."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=256, hidden_size=128, n_layer=2, n_head=2)
    model = transformers.BloomForCausalLM(config).eval()
    with caplog.at_level(logging.WARNING, "kvfold"):
        assert not kvfold.attach(model)
    assert any("has its own attention code" in r.message for r in caplog.records)
    ids = random_ids(1, 200)
    cache = FoldedCache(config, "turboquant-8")
    folded = _logits(model, ids, cache, [150] + [1] * 50)
    dense = _logits(model, ids, DynamicCache(config=config))
    assert isinstance(cache.layers[0], FoldedLayer)
    assert not torch.equal(folded[:, 150:], dense[:, 150:])
    torch.testing.assert_close(folded, dense, atol=0.02, rtol=0.02)


class TestCompiled:
    """Models under torch.compile."""

    CHUNKS = (100, 1, 1, 30, *[1] * 18)

    @pytest.fixture(autouse=True)
    def nothing_is_compiled_yet(self) -> None:
        torch._dynamo.reset()

    @pytest.fixture
    def llama(self) -> PreTrainedModel:
        """Two layers, as each takes its time to compile."""
        model = tiny_model("llama")
        del model.model.layers[2:]
        model.config.num_hidden_layers = 2
        assert kvfold.attach(model)
        return model

    @pytest.mark.contract
    @pytest.mark.parametrize("policy", [Policy("kvfold-3"), Policy("kvfold-3", dense_first=1)], ids=["folded", "mixed"])
    def test_reads_what_an_eager_model_reads(self, llama: PreTrainedModel, random_ids: Ids, policy: Policy) -> None:
        """Whether all layers are in one graph, or graphs end where dense and folded ones grow."""
        model, ids = llama.float(), random_ids(2, 150)
        expected = _logits(model, ids, FoldedCache(model.config, policy=policy), [*self.CHUNKS])
        compiled = torch.compile(model, backend="eager")
        got = _logits(compiled, ids, FoldedCache(model.config, policy=policy), [*self.CHUNKS])
        torch.testing.assert_close(got, expected)

    def test_latents_leave_graphs(self, random_ids: Ids) -> None:
        model, ids = latent_model(), random_ids(1, 160)
        kvfold.attach(model)
        compiled = torch.compile(model, backend="eager")
        expected, got = (
            _logits(run, ids, FoldedCache(model.config, "turboquant-4"), [150, 10]) for run in (model, compiled)
        )
        torch.testing.assert_close(got, expected)

    @pytest.mark.contract
    def test_all_layers_are_in_one_graph(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """One for the prompt, one for the first step, one for steps at any length; and no more for another cache."""
        model, ids = llama.float(), random_ids(2, 150)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter)
        with torch.no_grad():
            expected = _logits(model, ids, FoldedCache(model.config, "kvfold-3"), [*self.CHUNKS])
            for _ in range(2):
                got = _logits(compiled, ids, FoldedCache(model.config, "kvfold-3"), [*self.CHUNKS])
                torch.testing.assert_close(got, expected)
        reads = [
            sum(node.target is torch.ops.kvfold.append_and_attend.default for node in graph.graph.nodes)
            for graph in counter.graphs
        ]
        assert [count for count in reads if count] == 3 * [model.config.num_hidden_layers]

    def test_generates_with_padding_and_inductor(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        model, ids = llama.float(), random_ids(2, 90)
        mask = torch.ones_like(ids)
        mask[0, :20] = 0
        eager = FoldedCache(model.config, "kvfold-3")
        expected = _greedy(model, ids, eager, 6, attention_mask=mask)
        model.forward = torch.compile(model.forward, dynamic=True)  # type: ignore[method-assign]
        cache = FoldedCache(model.config, "kvfold-3")
        assert torch.equal(_greedy(model, ids, cache, 6, attention_mask=mask), expected)
        assert cache.held_bytes() == eager.held_bytes()

    @pytest.mark.contract
    def test_copies_are_read_apart(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """A graph names a cache by a number, and no copy has that of another."""
        model, ids = llama.float(), random_ids(1, 120)
        compiled = torch.compile(model, backend="eager")
        cache = FoldedCache(model.config, "kvfold-3")
        _logits(compiled, ids[:, :100], cache)
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            _logits(compiled, ids[:, 100:], twin)
            assert (cache.get_seq_length(), twin.get_seq_length()) == (100, 120)

    @pytest.mark.contract
    def test_a_pass_that_breaks_leaves_nothing(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        model, ids = llama.float(), random_ids(1, 120)
        compiled, cache = torch.compile(model, backend="eager"), FoldedCache(model.config, "kvfold-3")
        _logits(compiled, ids[:, :100], cache)
        weight = model.model.layers[1].self_attn.v_proj.weight.data
        kept = weight[0, 0].clone()
        weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match="layer 1: value at position 100"):
            _logits(compiled, ids[:, 100:], cache)
        weight[0, 0] = kept
        assert [layer.get_seq_length() for layer in cache.layers] == 2 * [100]
        got = _logits(compiled, ids[:, 100:], cache)
        torch.testing.assert_close(got, _logits(model, ids, FoldedCache(model.config, "kvfold-3"))[:, 100:])

    @pytest.mark.parametrize(("reads", "layer"), [("handed on", 0), ("beside", 1)])
    def test_other_uses_of_keys_are_refused(
        self, llama: PreTrainedModel, random_ids: Ids, layer: int, reads: str
    ) -> None:
        """In a graph there is nothing but the new ones to compute with; outside of it there is."""

        class Meddling(FoldedCache):
            def update(self, key: Tensor, value: Tensor, index: int, **kwargs: object) -> tuple[Tensor, Tensor]:
                key, value = super().update(key, value, index, **kwargs)
                if index == layer and reads == "handed on":
                    return key * 1, value
                if index == layer and value.mean() > 0:
                    return value, key
                return key, value

        model, cache, ids = llama.float(), Meddling(llama.config, "kvfold-3"), random_ids(1, 120)
        compiled = torch.compile(model, backend="eager")
        with pytest.raises((RuntimeError, TorchRuntimeError), match=r"this model does something else|on meta tensors"):
            _logits(compiled, ids[:, :100], cache)
        assert [each.get_seq_length() for each in cache.layers] == 2 * [0]
        assert cache.forward_pass.awaited is None
        cache.update = torch.compiler.disable(cache.update)  # type: ignore[method-assign]
        expected = _logits(model, ids, Meddling(model.config, "kvfold-3"), [100, 20])
        torch.testing.assert_close(_logits(compiled, ids, cache, [100, 20]), expected)

    @pytest.mark.contract
    def test_models_may_ask_for_the_shape_of_all_keys(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        seen: list[int] = []

        class Asking(FoldedCache):
            def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
                key, value = super().update(*args, **kwargs)
                seen.append(key.shape[2])
                return key, value

        compiled, ids = torch.compile(llama.float(), backend="eager"), random_ids(1, 102)
        _logits(compiled, ids, Asking(llama.config, "kvfold-3"), [100, 1, 1])
        assert seen == [*2 * [100], *2 * [101], *2 * [102]]

    @pytest.mark.contract
    def test_what_a_subclass_does_is_done_once(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        class Doubling(FoldedCache):
            def update(self, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
                return super().update(2 * key, *args, **kwargs)

        model, ids = llama.float(), random_ids(1, 120)
        expected = _logits(model, ids, Doubling(model.config, "kvfold-3"), [100, 20])
        got = _logits(torch.compile(model, backend="eager"), ids, Doubling(model.config, "kvfold-3"), [100, 20])
        torch.testing.assert_close(got, expected)

    @pytest.mark.contract
    def test_gradients_flow_around_it(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """As in an eager model: what is read from the cache counts as given."""
        model, ids = llama.float(), random_ids(1, 100)
        grads = []
        for run in (model, torch.compile(model, backend="aot_eager")):
            model.zero_grad()
            with torch.enable_grad():
                run(ids, past_key_values=FoldedCache(model.config, "kvfold-3")).logits.square().mean().backward()
            layer = model.model.layers[0]
            assert layer.self_attn.v_proj.weight.grad is None
            grads.append((layer.mlp.up_proj.weight.grad, layer.self_attn.o_proj.weight.grad))
        torch.testing.assert_close(*grads)

    @pytest.mark.contract
    def test_beams(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        model, ids = llama.float(), random_ids(1, 90)
        expected = _greedy(model, ids, FoldedCache(model.config, "kvfold-3"), 6, num_beams=3)
        model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
        assert torch.equal(_greedy(model, ids, FoldedCache(model.config, "kvfold-3"), 6, num_beams=3), expected)

    @pytest.mark.contract
    def test_keys_that_are_attended_to_twice_are_refused(
        self, llama: PreTrainedModel, random_ids: Ids, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second time would append them again."""
        once = AttentionInterface._global_mapping["sdpa"]

        def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            once(*args, **kwargs)
            return once(*args, **kwargs)

        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attention)
        compiled = torch.compile(llama.float(), backend="eager")
        with pytest.raises(RuntimeError, match="layer 0: this model does something else"):
            _logits(compiled, random_ids(1, 100), FoldedCache(llama.config, "kvfold-3"))

    @pytest.mark.contract
    def test_a_cache_goes_from_one_grad_mode_to_another(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        model, ids = llama.float(), random_ids(1, 120)
        compiled = torch.compile(model, backend="aot_eager")
        with torch.inference_mode():
            cache = FoldedCache(model.config, "kvfold-3")
            _logits(compiled, ids[:, :100], cache)
        with torch.no_grad():
            got = _logits(compiled, ids[:, 100:], cache)
            expected = _logits(model, ids, FoldedCache(model.config, "kvfold-3"))[:, 100:]
        torch.testing.assert_close(got, expected)

    @pytest.mark.contract
    def test_the_operator_is_sound(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        """Its schema and its fake implementation, as torch itself checks them (other checks compare two calls)."""
        cache = FoldedCache(llama.config, "kvfold-3")
        _logits(llama, random_ids(2, 90), cache)
        cache.forward_pass.reads_folded = True
        query, key, value = torch.randn(2, 6, 3, 64), *torch.randn(2, 2, 2, 3, 64)
        call = (cache.number, 0, query, key, value, None, 0.125, None, None, None)
        torch.library.opcheck(append_and_attend, call, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.contract
@pytest.mark.parametrize("format", ["centred-4", "turboquant-4"])  # folded by page, and token by token
def test_handles_that_come_back_are_unfolded(format: str) -> None:
    """A model that appends to another layer what it read."""
    key, value = torch.randn(2, 1, 2, 1, 64)
    one, other, expected = (
        LayerCache(LayerConfig("centred-4")),
        LayerCache(LayerConfig(format)),
        LayerCache(LayerConfig(format)),
    )
    before = torch.randn(2, 1, 2, 40, 64)
    other.append(*before), expected.append(*before)
    new = one.append(key, value)
    said: list[str] = []
    other.append(FoldedHandle(new, key, 0, said.append), FoldedHandle(new, value, 1, said.append))
    expected.append(key.half().float(), value.half().float())
    assert any("unfolded" in word for word in said)
    for got, right in zip(other.unfold(torch.float32), expected.unfold(torch.float32), strict=True):
        assert got.shape[2] == 41
        assert torch.equal(got, right)
