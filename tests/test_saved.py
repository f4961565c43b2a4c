"""Saved caches: they go on as if they had never been saved, and what is damaged or absurd is refused."""

import copy
import hashlib
import inspect
import json
import os
import pickle
import random
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import run_kvfold
from conftest import ARCHITECTURES, tiny_model
from measured import measured
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trials import trials

import kvfold
from kvfold import FoldedCache, Policy
from kvfold.attention import attend
from kvfold.cache.budgets import PromptBudgets
from kvfold.cache.config import LayerConfig
from kvfold.cache.files import contents
from kvfold.cache.files.contents import Contents, check, read, write
from kvfold.cache.files.layer import OLDER_WINDOW, layer_from_saved, layer_to_saved
from kvfold.cache.layer import LayerCache
from kvfold.cache.report import walk_tensors
from kvfold.formats import KeyStatistics, Window, pair
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.saving import KIND, VERSION

Ids = Callable[..., Tensor]
FORMATS = ["kvfold-4", "turboquant-3", "kvfold-4:turboquant-3", "float16"]
FITTED = ["kvfold-3", "turboquant-2.5", "turboquant-3.5", "turboquant-3.5q", "kvfold-3:turboquant-2.5", "kvfold-3@32"]


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that are fitted fold here too, though prompts are short."""
    monkeypatch.setattr(pair, "FIT_TOKENS", 80)


def _logits(model: PreTrainedModel, ids: Tensor, cache: FoldedCache, chunks: list[int] | None = None) -> Tensor:
    parts = ids.split(chunks or [ids.shape[1]], dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def _goes_on_alike(model: PreTrainedModel, cache: FoldedCache, path: Path, more: Tensor, **options: Any) -> FoldedCache:
    """Save, load, go on with both; return the loaded one."""
    cache.save(path)
    loaded = FoldedCache.load(path, **options)
    assert loaded.get_seq_length() == cache.get_seq_length()
    before, after = cache.report(), loaded.report()
    assert after.held_bytes <= before.held_bytes
    assert [(row.format, row.tokens, row.values) for row in after.layers] == [
        (row.format, row.tokens, row.values) for row in before.layers
    ]
    steps = [1, 1, more.shape[1] - 5, 1, 1, 1]
    assert torch.equal(_logits(model, more, cache, steps), _logits(model, more, loaded, steps))
    again = path.with_suffix(".again")
    cache.save(path)
    loaded.save(again)
    assert again.read_bytes() == path.read_bytes()
    return loaded


class TestGoingOn:
    @pytest.mark.contract
    @pytest.mark.parametrize("format", ["kvfold-4", "kvfold-4:turboquant-3"])
    def test_real_model(
        self, demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor, tmp_path: Path, format: str
    ) -> None:
        """Token for token, and bit for bit in the logits of every one."""
        model, ids = demo[0], text_ids[:, :240]
        cache = FoldedCache(model.config, format)
        model(ids[:, :-1], past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = FoldedCache.load(tmp_path / "cache")

        def go_on(cache: FoldedCache) -> Any:
            return model.generate(
                ids, past_key_values=cache, max_new_tokens=24, do_sample=False, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip

        one, other = go_on(cache), go_on(loaded)
        assert torch.equal(one.sequences, other.sequences)
        assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))

    @pytest.mark.parametrize(
        ("tiny", "format", "tokens"),
        [
            *(("llama", "kvfold-3", tokens) for tokens in (3, 60, 95)),  # before sinks are full, the fit, and after it
            *((name, "kvfold-3", 300) for name in ARCHITECTURES),
            *((name, "turboquant-4:float16", 60) for name in ("llama", "gemma2", "gpt-oss")),
        ],
        indirect=["tiny"],
    )
    def test_every_architecture(
        self, tiny: PreTrainedModel, random_ids: Ids, tmp_path: Path, format: str, tokens: int
    ) -> None:
        cache = FoldedCache(tiny.config, format)
        _logits(tiny, random_ids(2, tokens), cache)
        config = {} if tokens == 60 else {"config": tiny.config}
        _goes_on_alike(tiny, cache, tmp_path / "cache", random_ids(2, 100, seed=1), **config)

    @pytest.mark.parametrize(
        "format",
        [
            *FORMATS,
            "kvfold-2",
            "kvarn-4",
            "oscar-2",
            "kvfold-4:oscar-4",
            "centred-4",
            "hadamard-3+qjl",
            "turboquant-4+srht@32",
        ],
    )
    def test_every_format(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path, format: str) -> None:
        layers = {i: measured(2, 64, seed=i) for i in range(llama.config.num_hidden_layers)}
        calibration = kvfold.Calibration(layers) if "oscar" in format else None
        cache = FoldedCache(llama.config, format, calibration=calibration)
        _logits(llama, random_ids(1, 137), cache)
        _goes_on_alike(llama, cache, tmp_path / "cache", random_ids(1, 90, seed=1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_policy(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path, dtype: torch.dtype) -> None:
        model = llama.to(dtype)
        policy = Policy(
            "centred-4", dense_first=1, exceptions=[(3, "turboquant-4:kvfold-2")], window=Window(20, 40, 10)
        )
        cache = FoldedCache(model.config, policy=policy, dense_dtype=torch.float32)
        _logits(model, random_ids(2, 200), cache)
        loaded = _goes_on_alike(model, cache, tmp_path / "cache", random_ids(2, 90, seed=1))
        assert loaded.layers[1].folded.config.window == Window(20, 40, 10)
        assert loaded.layers[1].folded.groups[0].rows.dense.tail[0].dtype == torch.float32

    @pytest.mark.contract
    @pytest.mark.parametrize("tiny", ["llama", "gemma3", "gpt-oss"], indirect=True)
    def test_padded_batch(self, tiny: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        """Rows start at columns of their own, one of them only after the cache was saved."""
        ids, mask = random_ids(4, 330), torch.ones(4, 330, dtype=torch.long)
        mask[0, :17], mask[2, :190], mask[3, :220] = 0, 0, 0
        caches = [FoldedCache(tiny.config)]
        for start, stop in ((0, 200), (200, 230), (230, 231), (231, 330)):
            out = [
                tiny(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
                for cache in caches
            ]
            for other in out[1:]:
                torch.testing.assert_close(other, out[0], atol=0, rtol=0, equal_nan=True)
            caches[0].save(tmp_path / "cache")
            caches.append(FoldedCache.load(tmp_path / "cache", tiny.config))
        assert {cache.report().values for cache in caches} == {caches[0].report().values}

    def test_padding_that_was_told(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        kvfold.detach(llama)
        mask = torch.ones(2, 50, dtype=torch.long)
        mask[1, :40] = 0
        cache = FoldedCache(llama.config)
        cache.set_padding(mask)
        llama(random_ids(2, 30), attention_mask=mask[:, :30], past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = FoldedCache.load(tmp_path / "cache")
        for c in (cache, loaded):
            llama(random_ids(2, 20, seed=1), attention_mask=mask, past_key_values=c)
            assert c.report().values == 4 * 2 * 2 * 64 * (50 + 10)

    @pytest.mark.parametrize(("tokens", "back"), [(70, 5), (90, 20), (300, 24), (300, 150), (300, 290), (400, 304)])
    @pytest.mark.parametrize("format", ["kvfold-3", "turboquant-3"])
    def test_crops_before_and_after(
        self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path, format: str, tokens: int, back: int
    ) -> None:
        cache = FoldedCache(llama.config, format)
        _logits(llama, random_ids(1, tokens), cache)
        cache.save(tmp_path / "whole")
        loaded = FoldedCache.load(tmp_path / "whole")
        for c in (cache, loaded):
            c.crop(-back)
        again = _goes_on_alike(llama, cache, tmp_path / "cropped", random_ids(1, 90, seed=1))
        _logits(llama, random_ids(1, 90, seed=1), loaded, [1, 1, 85, 1, 1, 1])
        for c in (cache, loaded, again):
            c.crop(-100)
        more = random_ids(1, 150, seed=2)
        truth = _logits(llama, more, cache)
        assert torch.equal(_logits(llama, more, loaded), truth)
        assert torch.equal(_logits(llama, more, again), truth)

    def test_rows_moved(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        cache = FoldedCache(llama.config)
        _logits(llama, random_ids(3, 200), cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        loaded = _goes_on_alike(llama, cache, tmp_path / "cache", random_ids(3, 90, seed=1))
        for c in (cache, loaded):
            c.batch_select_indices(torch.tensor([1]))
        more = random_ids(1, 20, seed=2)
        assert torch.equal(_logits(llama, more, cache), _logits(llama, more, loaded))

    @pytest.mark.contract
    def test_speculation_over_sliding_windows(self, random_ids: Ids, tmp_path: Path) -> None:
        model = tiny_model("gemma3")
        kvfold.attach(model)
        ids = random_ids(1, 30).repeat(1, 4)
        cache = FoldedCache(model.config)
        model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=5)
        loaded = _goes_on_alike(model, cache, tmp_path / "cache", random_ids(1, 90, seed=1))
        for c in (cache, loaded):
            c.crop(-10)
        more = random_ids(1, 20, seed=2)
        assert torch.equal(_logits(model, more, cache), _logits(model, more, loaded))

    @pytest.mark.parametrize("format", ["kvfold-3", "kvfold-3:turboquant-2.5"])
    def test_calibrated(self, format: str, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        """Keys by the calibration; values perhaps by the prompt."""
        torch.manual_seed(0)
        layers = {i: KeyStatistics(*torch.rand(2, 2, 64)) for i in range(4)}
        cache = FoldedCache(llama.config, format, calibration=kvfold.Calibration(layers))
        cache.save(tmp_path / "empty")
        loaded = FoldedCache.load(tmp_path / "empty")
        ids = random_ids(2, 120)
        assert torch.equal(_logits(llama, ids, cache), _logits(llama, ids, loaded))
        loaded = _goes_on_alike(llama, cache, tmp_path / "cache", random_ids(2, 90, seed=1))
        held = loaded.layers[2].folded
        assert torch.equal(held.config.statistics.key_variance, layers[2].key_variance)
        assert torch.equal(held.groups[0].rows.formats.keys.order, layers[2].order())

    @pytest.mark.parametrize("format", FITTED)
    def test_calibrated_by_a_file(self, format: str, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        """What a calibration in memory serves, its file serves, and so does the file of a cache that goes by it."""
        calibration = kvfold.calibrate(llama, [random_ids(1, 320, seed=3)])
        calibration.save(tmp_path / "calibration")
        logits = []
        for given in (calibration, tmp_path / "calibration"):
            cache = FoldedCache(llama.config, format, calibration=given)
            logits.append(_logits(llama, random_ids(2, 120), cache))
            _goes_on_alike(llama, cache, tmp_path / "cache", random_ids(2, 90, seed=1))
        assert torch.equal(*logits)

    def test_calibrations_from_before_files_held_energies(self, llama: PreTrainedModel, tmp_path: Path) -> None:
        layers = {i: KeyStatistics(*torch.rand(2, 2, 64)) for i in range(4)}
        kvfold.Calibration(layers).save(tmp_path / "old")
        FoldedCache(llama.config, "kvfold-3", calibration=tmp_path / "old")
        with pytest.raises(ValueError, match="make it anew with kvfold calibrate"):
            FoldedCache(llama.config, "turboquant-2.5", calibration=tmp_path / "old")

    def test_empty(self, tiny: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        cache = FoldedCache(tiny.config, "kvfold-3")
        _logits(tiny, random_ids(2, 100), cache)
        cache.reset()
        loaded = _goes_on_alike(tiny, cache, tmp_path / "cache", random_ids(1, 100))
        assert loaded.layers[-1].folded.config.format == "kvfold-3"

    @pytest.mark.contract
    def test_without_attach(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        kvfold.detach(llama)
        cache = FoldedCache(llama.config, "kvfold-3")
        _logits(llama, random_ids(1, 200), cache)
        loaded = _goes_on_alike(llama, cache, tmp_path / "cache", random_ids(1, 90, seed=1))
        assert loaded.origin.fingerprint() is None

    @pytest.mark.parametrize("format", ["kvfold-3", "turboquant-4"])
    def test_latent_attention(self, random_ids: Ids, tmp_path: Path, format: str) -> None:
        torch.manual_seed(0)
        config = transformers.DeepseekV3Config(
            vocab_size=256, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, kv_lora_rank=64, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
            first_k_dense_replace=1, max_position_embeddings=512,
        )  # fmt: skip
        model = transformers.DeepseekV3ForCausalLM(config).eval()
        kvfold.attach(model)
        cache = FoldedCache(config, format)
        _logits(model, random_ids(2, 200), cache)
        loaded = _goes_on_alike(model, cache, tmp_path / "cache", random_ids(2, 90, seed=1))
        assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]

    def test_layers_that_do_not_see_the_text(self, random_ids: Ids, tmp_path: Path) -> None:
        """Mllama's cross-attention layers hold an image, or nothing."""
        torch.manual_seed(0)
        config = transformers.models.mllama.configuration_mllama.MllamaTextConfig(
            vocab_size=256, hidden_size=128, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, cross_attention_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.MllamaForCausalLM(config).eval()
        kvfold.attach(model)
        cache = FoldedCache(config)
        _logits(model, random_ids(1, 120), cache)
        cache.layers[1].update(torch.randn(1, 1, 33, 64), torch.randn(1, 1, 33, 64))
        cache.save(tmp_path / "cache")
        loaded = FoldedCache.load(tmp_path / "cache", config)
        assert torch.equal(loaded.layers[1].keys, cache.layers[1].keys)

    def test_other_layers_are_refused_by_name(self, tmp_path: Path) -> None:
        config = transformers.Qwen3NextConfig(
            num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
        cache = FoldedCache(config)
        with pytest.raises(ValueError, match=r"layer 0 is a Linear\w+: save knows folded layers, DynamicLayer"):
            cache.save(tmp_path / "cache")
        assert not list(tmp_path.iterdir())

    def test_in_the_midst_of_a_pass(self, llama: PreTrainedModel, tmp_path: Path) -> None:
        cache = FoldedCache(llama.config)
        cache.update(*torch.randn(2, 1, 2, 9, 64), 0)
        cache.update(*torch.randn(2, 1, 2, 9, 64), 1)
        cache.update(*torch.randn(2, 1, 2, 9, 64), 0)
        with pytest.raises(ValueError, match="layer 1 holds 1 rows of 9 tokens and layer 0 1 of 18: a cache is saved"):
            cache.save(tmp_path / "cache")


class TestFile:
    @pytest.mark.contract
    def test_is_a_safetensors_file_with_nothing_unused(
        self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path
    ) -> None:
        cache = FoldedCache(llama.config, "kvfold-3")
        _logits(llama, random_ids(2, 400), cache, [1] * 400)
        cache.save(tmp_path / "cache", ids=random_ids(2, 400))
        with safe_open(tmp_path / "cache", framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert (metadata["kind"], metadata["version"]) == ("kvfold-cache", str(VERSION))
        assert metadata["kvfold"] == kvfold.__version__
        data = json.loads(metadata["data"])
        assert data["config"]["model_type"] == "llama"
        assert data["layer3"]["format"] == "kvfold-3"
        rows = cache.layers[3].folded.groups[0].rows
        assert torch.equal(tensors["layer3.group0.keys.code"], rows.keys.pages().code)
        assert torch.equal(tensors["layer3.group0.tail.values"], rows.tail_span().value)
        assert torch.equal(tensors["layer3.group0.keys_fit.order"], rows.formats.keys.order)
        assert torch.equal(tensors["ids"], random_ids(2, 400))
        for name, tensor in read(tmp_path / "cache", KIND, VERSION).tensors.items():
            assert torch.equal(tensors[name], tensor)
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            if tensor.numel():
                assert tensor.data_ptr() % 64 == 0
        assert sum(t.nbytes for t in tensors.values()) < cache.held_bytes() + 8 * 800

    def test_keeps_all_that_a_layer_is_made_with(self) -> None:
        """Whoever adds a field to `LayerConfig` saves it too."""
        other = {
            "format": "kvfold-3", "index": 5, "dense_dtype": torch.float32, "window": Window(1, 2, 3),
            "statistics": KeyStatistics(*torch.rand(2, 2, 8)), "frequencies": (1.0, 0.5),
            "sliding": 7, "budgets": PromptBudgets({5: "kvfold-3"}),
        }  # fmt: skip
        parameters = inspect.signature(LayerConfig).parameters.values()
        given = {p.name: other.get(p.name, True if p.default is False else None) for p in parameters}
        assert None not in given.values(), "give the new field a value here"
        loaded = layer_from_saved(layer_to_saved(LayerCache(LayerConfig(**given))), 5)
        for name, value in given.items():
            own = getattr(loaded.config, name)
            if isinstance(value, KeyStatistics):
                own, value = own.importance.tolist(), value.importance.tolist()
            elif isinstance(value, PromptBudgets):
                own, value = own.formats, value.formats
            assert own == value, name

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_pages_of_other_bits(self, head_dim: int) -> None:
        """Pages are read with the bits that they were folded with, or not at all.

        Files did not name them when every head was cut into quarters.
        """

        def saved() -> Contents:
            layer = LayerCache(LayerConfig("kvfold-4"))
            x = torch.randn(1, 2, 400, head_dim, generator=torch.Generator().manual_seed(0))
            attend(x, layer.append(x, x), scaling=0.1)
            return layer_to_saved(layer)

        assert layer_from_saved(saved()).groups[0].rows.keys.count > 0
        other = saved()
        other.data["group0"]["keys_bits"][:2] = [5, 5]
        with pytest.raises(ValueError, match=r"group0.keys_bits are \[5, 5.*, and this kvfold reads"):
            layer_from_saved(other)
        old = saved()
        del old.data["group0"]["keys_bits"], old.data["group0"]["values_bits"]
        if head_dim == 64:
            assert layer_from_saved(old).groups[0].rows.keys.count > 0
        else:
            with pytest.raises(ValueError, match=r"group0.keys were folded by an older kvfold, with other bits"):
                layer_from_saved(old)

    def test_ids(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        cache, path = FoldedCache(llama.config), tmp_path / "cache"
        cache.save(path)
        assert FoldedCache.load(path).ids is None
        with pytest.raises(ValueError, match="give those of the 0 tokens that the cache holds"):
            cache.save(path, ids=random_ids(1, 40))
        _logits(llama, random_ids(1, 40), cache)
        for ids in (random_ids(1, 40), random_ids(1, 40)[0], random_ids(1, 40).int()):
            cache.save(path, ids=ids)
            assert torch.equal(FoldedCache.load(path).ids, random_ids(1, 40))
        for wrong in (random_ids(1, 41), random_ids(2, 40), random_ids(1, 40).float()):
            with pytest.raises(ValueError, match=r"give those of the 40 tokens that the cache holds, \(1, 40\)"):
                cache.save(path, ids=wrong)
        loaded = FoldedCache.load(path)
        assert loaded.held_bytes() == FoldedCache.load(path).report().held_bytes
        loaded.reset()
        assert loaded.ids is None


class TestCopies:
    @pytest.mark.parametrize(
        ("tiny", "format"),
        [("llama", "kvfold-3"), ("llama", "turboquant-3"), ("llama", "centred-4"), ("gemma3", "kvfold-3")],
        indirect=["tiny"],
    )
    def test_are_independent_and_share_tables(
        self, tiny: PreTrainedModel, random_ids: Ids, tmp_path: Path, format: str
    ) -> None:
        cache = FoldedCache(tiny.config, format)
        _logits(tiny, random_ids(2, 150), cache)
        cache.save(tmp_path / "cache")
        loaded = FoldedCache.load(tmp_path / "cache")
        more = [random_ids(2, 60, seed=seed) for seed in range(3)]
        truth = [_logits(tiny, part, FoldedCache.load(tmp_path / "cache")) for part in more]
        one, other = copy.deepcopy(loaded), copy.deepcopy(loaded)
        for c, part, expected in zip((one, other, loaded), more, truth, strict=True):
            assert torch.equal(_logits(tiny, part, c), expected)
        group = [c.layers[-1].folded.groups[0].rows for c in (one, other)]
        tables = [{t.data_ptr() for t in walk_tensors([rows.formats, rows.fit.formats])} for rows in group]
        assert tables[0] == tables[1]
        forms = [{t.data_ptr() for t in walk_tensors([rows.values.form])} for rows in group]
        assert forms[0] == forms[1]

    def test_of_an_unattached_models_cache(self, llama: PreTrainedModel, random_ids: Ids) -> None:
        kvfold.detach(llama)
        cache = FoldedCache(llama.config)
        _logits(llama, random_ids(1, 150), cache)
        twins = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        more = random_ids(1, 60, seed=1)
        truth = _logits(llama, more, cache)
        for twin in twins:
            assert torch.equal(_logits(llama, more, twin), truth)


class TestModel:
    def _saved(self, model: PreTrainedModel, random_ids: Ids, path: Path) -> FoldedCache:
        cache = FoldedCache(model.config)
        _logits(model, random_ids(1, 150), cache)
        cache.save(path)
        return FoldedCache.load(path)

    def test_of_other_weights(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        loaded = self._saved(llama, random_ids, tmp_path / "cache")
        other = tiny_model("llama")
        other.model.layers[3].mlp.down_proj.weight[5:9] += 1
        kvfold.attach(other)
        with pytest.raises(ValueError, match=r"saved by another model: its weights had the fingerprint \w{12}…"):
            _logits(other, random_ids(1, 5), loaded)
        with pytest.raises(ValueError, match="saved by another model"):  # and again, through its inner model too
            other.model(random_ids(1, 5), past_key_values=loaded)
        assert loaded.get_seq_length() == 150
        twin = tiny_model("llama")
        kvfold.attach(twin)
        twin.model(random_ids(1, 5), past_key_values=copy.deepcopy(loaded))
        assert _logits(twin, random_ids(1, 5), pickle.loads(pickle.dumps(loaded))).isfinite().all()
        assert _logits(twin, random_ids(1, 5), loaded).isfinite().all()
        loaded.reset()
        _logits(other, random_ids(1, 5), loaded)

    def test_in_another_dtype(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        loaded = self._saved(llama, random_ids, tmp_path / "cache")
        other = tiny_model("llama").float()
        kvfold.attach(other)
        message = "with float64 weights, this one's are float32: load the model with dtype=torch.float64"
        with pytest.raises(ValueError, match=message):
            _logits(other, random_ids(1, 5), loaded)

    def test_that_is_gone(self, random_ids: Ids, tmp_path: Path) -> None:
        model = tiny_model("llama")
        kvfold.attach(model)
        loaded = self._saved(model, random_ids, tmp_path / "cache")
        known = loaded.origin.fingerprint()
        assert known is not None
        _logits(model, random_ids(1, 5), loaded)
        del model
        assert loaded.origin.fingerprint() == known

    @pytest.mark.contract
    def test_by_its_config(self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path) -> None:
        cache = FoldedCache(llama.config)
        cache.save(tmp_path / "cache")
        for name, value in (
            ("num_hidden_layers", 3), ("num_key_value_heads", 6), ("head_dim", 32), ("hidden_size", 192),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 2e4}),
        ):  # fmt: skip
            other = transformers.LlamaConfig(**{**llama.config.to_dict(), name: value})
            with pytest.raises(ValueError, match=rf"path = .*config.{name} = .*, but the cache was saved with"):
                FoldedCache.load(tmp_path / "cache", other)
        with pytest.raises(ValueError, match=r"config\.model_type = 'qwen3', but the cache was saved with 'llama'"):
            FoldedCache.load(tmp_path / "cache", tiny_model("qwen3").config)
        gemma = tiny_model("gemma3").config
        FoldedCache(gemma).save(tmp_path / "cache")
        for name, value in (("sliding_window", 64), ("layer_types", ["full_attention"] * 4)):
            other = transformers.Gemma3TextConfig(**{**gemma.to_dict(), name: value})
            with pytest.raises(ValueError, match=rf"config.{name} = .* give the config of the model that filled it"):
                FoldedCache.load(tmp_path / "cache", other)

    @pytest.mark.contract
    def test_that_transformers_does_not_know(self, llama: PreTrainedModel, tmp_path: Path) -> None:
        cache = FoldedCache(llama.config)
        cache.save(tmp_path / "cache")
        saved = read(tmp_path / "cache", KIND, VERSION)
        saved.data["config"]["model_type"] = "somebodys-own"
        write(tmp_path / "cache", KIND, VERSION, saved)
        with pytest.raises(ValueError, match=r"model_type = 'somebodys-own' \(.*\): give config=model.config"):
            FoldedCache.load(tmp_path / "cache")


def _small_file(path: Path) -> bytes:
    """A saved cache of some kilobytes, with folded, dense and sliding layers."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, sliding_window=3, max_position_embeddings=256,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval().bfloat16()
    kvfold.attach(model)
    cache = FoldedCache(config, policy=Policy("kvfold-3@16", exceptions=[(2, "turboquant-2@16")]))
    ids, mask = torch.randint(3, 16, (2, 100)), torch.ones(2, 100, dtype=torch.long)
    mask[1, :30] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    cache.save(path, ids=ids)
    return path.read_bytes()


class TestRefused:
    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            FoldedCache.load(tmp_path / "none")
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            FoldedCache.load(tmp_path)

    def test_other_kinds_and_versions(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        for content in (b"", b"\0" * 8, b"not a file of tensors", b"\xff" * 100, b"\2" + b"\0" * 7 + b"{}"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"path = .*file'"):
                FoldedCache.load(path)
        save_file({"weight": torch.zeros(3)}, path)
        with pytest.raises(ValueError, match="the file is no kvfold-cache: its kind is None"):
            FoldedCache.load(path)
        kvfold.Calibration({0: KeyStatistics(*torch.rand(2, 1, 8))}).save(path)
        with pytest.raises(ValueError, match="its kind is 'kvfold-calibration-1'"):
            FoldedCache.load(path)
        write(path, KIND, VERSION + 1, Contents())
        with pytest.raises(ValueError, match=r"of version '5', this kvfold reads version 4: kvfold '[\d.]+' wrote it"):
            FoldedCache.load(path)
        save_file({"weight": torch.zeros(3)}, path, {"kind": KIND, "version": str(VERSION), "data": "{}"})
        with pytest.raises(ValueError, match="it has no checksum"):
            FoldedCache.load(path)

    @pytest.mark.drawn
    @pytest.mark.parametrize("format", ["turboquant-4", "kvfold-3"])
    @pytest.mark.parametrize(("name", "number"), [("heads", 2**17), ("heads", 2**20), ("columns", 2**31 - 1)])
    def test_sizes_that_no_tensor_has(
        self, llama: PreTrainedModel, random_ids: Ids, tmp_path: Path, format: str, name: str, number: int
    ) -> None:
        """Nothing of such a size is made before it is refused."""
        cache = FoldedCache(llama.config, format)
        _logits(llama, random_ids(1, 60), cache)
        cache.save(tmp_path / "cache")
        saved = read(tmp_path / "cache", KIND, VERSION)
        layer = saved.data["layer0"]
        if name == "heads":
            layer["shape"][1] = number
        else:
            layer["columns"] = number
        write(tmp_path / "large", KIND, VERSION, saved)
        says = f"shape is of {number} heads" if name == "heads" else r"in the place of .* of the shape|does not come to"
        with pytest.raises(ValueError, match=says):
            FoldedCache.load(tmp_path / "large")

    def test_random_damages(self, tmp_path: Path) -> None:
        """Flipped bits, truncations, splices and the like: each is noticed, unless the bytes come out the same."""
        whole = _small_file(tmp_path / "file")
        assert check(bytearray(whole), KIND, VERSION)
        rng = random.Random(0)
        header = 8 + int.from_bytes(whole[:8], "little")

        def place() -> int:
            """Anywhere, or in the header, or at one of the borders."""
            return rng.choice((rng.randrange(len(whole)), rng.randrange(header), rng.choice((0, 7, 8, header - 1))))

        def damaged() -> bytearray:
            raw, kind, at, to = bytearray(whole), rng.randrange(8), place(), place()
            n = rng.choice((1, 2, 8, rng.randrange(1, 200)))
            if kind <= 2:
                raw[at] ^= 1 << rng.randrange(8)
            elif kind == 3:
                del raw[at:]
            elif kind == 4:
                del raw[at : at + n]
            elif kind == 5:
                raw[at:at] = whole[to : to + n]
            elif kind == 6:
                raw[at : at + n] = whole[to : to + n]
            else:
                raw[at : at + n] = bytes([rng.choice((0, 32, 255, rng.randrange(256)))]) * n
            return raw

        noticed = 0
        tried = trials(10_000, 100_000)
        for _ in range(tried):
            raw = damaged()
            try:
                check(raw, KIND, VERSION)
            except ValueError:
                noticed += 1
            else:
                assert raw == whole
        assert noticed > 0.98 * tried

        for _ in range(trials(50, 200)):
            raw = damaged()
            (tmp_path / "file").write_bytes(raw)
            if raw != whole:
                with pytest.raises(ValueError, match=r"path = .*file'"):
                    FoldedCache.load(tmp_path / "file")

    def test_every_bit_of_the_header(self, tmp_path: Path) -> None:
        whole = _small_file(tmp_path / "file")
        for bit in range(8 * (8 + int.from_bytes(whole[:8], "little"))):
            raw = bytearray(whole)
            raw[bit // 8] ^= 1 << bit % 8
            with pytest.raises(ValueError, match=r"file"):
                check(raw, KIND, VERSION)

    @pytest.mark.drawn
    def test_damages_under_a_right_checksum(self, tmp_path: Path) -> None:
        """What safetensors, JSON or torch find wrong is told as what the checksum finds is."""
        path = tmp_path / "file"
        tensors = {"one": torch.rand(2, 3), "two": torch.arange(5), "no": torch.ones(0, 7)}
        write(path, KIND, VERSION, Contents({"a": 1}, tensors))
        whole = path.read_bytes()
        stop = 8 + int.from_bytes(whole[:8], "little")
        header = whole[8:stop].decode().rstrip()
        damaged = [header.replace("[0,7]", "[0,9223372036854775808]"), header.replace("F32", "F6_E2M3", 1)]
        rng = random.Random(0)
        texts = ["", " ", "0", "1", "-1", "1.0", "9" * 18, "null", "[]", "{}", "true", "[[" * 9999, '"', "é", "data",
                 "one", "F4", "F6_E2M3", "C64", "BOOL"]  # fmt: skip
        tried = trials(600, 5_000)
        for _ in range(tried):
            text = header
            for _ in range(rng.choice((1, 1, 2))):
                token = rng.choice(list(re.finditer(r"\w+|\W", text)))
                text = text[: token.start()] + rng.choice(texts) + text[token.end() :]
            damaged.append(text)
        messages = []
        for text in damaged:
            path.write_bytes(_summed(text.encode(), whole[stop:]))
            try:
                read(path, KIND, VERSION)
            except ValueError as error:
                messages.append(str(error).removeprefix(f"path = {str(path)!r}: ").split(": ")[0])
        assert messages[0].startswith("reshape()")
        assert {"Error while deserializing header", "Dtype not understood", "the file is damaged"} < set(messages)
        assert not any(message.startswith("path = ") for message in messages)
        assert len(messages) > 0.9 * tried

        path.write_bytes(_summed(header.replace("[0,7]", f"[0,{2**62},2,2]").encode(), whole[stop:]))
        with pytest.raises(ValueError, match=r"no is .*, in the place of torch"):
            read(path, KIND, VERSION).tensor("no", [torch.float32], [None] * 4)

    def test_replaced_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file"
        write(path, KIND, VERSION, Contents({"a": 1}))

        def replaced(*arguments: Any) -> dict[str, str]:
            metadata = check(*arguments)
            write(path, KIND, VERSION, Contents({"a": 2}))
            return metadata

        monkeypatch.setattr(contents, "check", replaced)
        with pytest.raises(ValueError, match="the file was replaced while it was read"):
            read(path, KIND, VERSION)


def _summed(header: bytes, body: bytes) -> bytes:
    """A file of `header` and `body`, with the checksum that they must have."""
    header = re.sub(rb'(?<="sha256":")\w{64}', b"0" * 64, header)
    whole = len(header).to_bytes(8, "little") + header + body
    return whole.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + hashlib.sha256(whole).hexdigest().encode())


def _leaves(data: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the values of nested dicts and lists are."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = [path for key, value in items for path in _leaves(value, (*where, key))]
    return [where, *found] if where else found


class TestAbsurd:
    """A checksum is no signature: what has a right one may still be nonsense."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda s: s.data["layer0"].update(columns=-5), r"layer0.columns is -5, which is not between 0 and"),
            (lambda s: s.data["layer0"].update(columns=101), r"layer0.group\d.* in the place of|pages is|holds 2 rows"),
            (lambda s: s.data["layer0"].update(columns=True), r"layer0.columns is True, which is no int"),
            (lambda s: s.data["layer0"].update(columns=2**70), r"layer0.columns is \d+"),
            (lambda s: s.data["layer0"].update(shape=[2, 1, 64]), r"layer0.shape is \[2, 1, 64\]"),
            (lambda s: s.data["layer0"].update(shape=[2**31, 1, 64, 64]), r"layer0.shape is 2147483648"),
            (lambda s: s.data["layer0"].update(shape=[2, 2, 64, 64]), "layer0.shape is of 2 heads, and no"),
            (lambda s: s.data["layer0"].update(shape=None), "layer0.shape is missing"),
            (lambda s: s.data["layer0"].update(format="kvfold-9"), "bits go from 1 to 8"),
            (lambda s: s.data["layer0"].update(format="kvfold-2@1048576"), "pages of over"),
            (lambda s: s.data["layer0"].update(format=7), "a layer's format is no name"),
            (lambda s: s.data["layer0"].update(format="turboquant-2@16"), "layer0.group0"),
            (lambda s: s.data["layer0"].update(window=[2**40, 0, 0]), "layer0.window is"),
            (lambda s: s.data["layer0"].update(window=[0, 0, 0]), "layer0.group0"),
            (lambda s: s.data["layer0"].update(dtype="float32"), "layer0.dtype is torch.float32, which dense_dtype"),
            (lambda s: s.data["layer0"].update(dtype="int8"), "layer0.dtype is 'int8', which is none of float64"),
            (lambda s: s.data["layer0"].update(groups=3), "layer0.group2 is None, which is no dict"),
            (lambda s: s.data["layer0"].update(groups=1), "layer0.group1 has no place here"),
            (lambda s: s.data["layer0"].update(more=1), "layer0.more has no place here"),
            (lambda s: s.data["layer0"]["group0"].update(pages=1), "layer0.group0.pages is 1 and tail_start"),
            (lambda s: s.data["layer0"]["group0"].update(tail_start=3), "layer0.group0.pages is . and tail_start 3"),
            (lambda s: s.data["layer0"]["group0"].update(padding=100), "layer0.group0.padding is 100, which is not"),
            (lambda s: s.data["layer0"]["group0"].update(batch_rows=[1]), "batch_rows name no row, or one twice"),
            (lambda s: s.data["layer0"]["group0"].update(batch_rows=[2]), "layer0.group0.batch_rows is 2"),
            (lambda s: s.data["layer0"]["group0"].update(batch_rows=[0, 0]), "batch_rows name no row, or one twice"),
            (lambda s: s.data["layer0"]["group0"].update(batch_rows=[]), "batch_rows name no row, or one twice"),
            (lambda s: s.data["layer0"]["group0"].update(queries=99), "layer0.group0.queries is 99"),
            (lambda s: s.data["layer1"].update(cumulative_length=0), "layer1.keys are of 2 tokens, but 0 came"),
            (lambda s: s.data["layer1"].update(cumulative_length=99), "layer 1 holds 2 rows of 99 tokens and layer 0"),
            (lambda s: s.data["layer1"].update({"class": "DynamicLayer"}), "layer 1 was a DynamicLayer, by this"),
            (lambda s: s.data.update(layers=2), "the file has 2 layers, a cache of its config 3"),
            (lambda s: s.data.update(layers=4), "layer3 is None"),
            (lambda s: s.data.update(model={"weights": 3}), "model.weights is 3, which is no str"),
            (lambda s: s.data["config"].update(num_hidden_layers=10**9), "config has num_hidden_layers = 10"),
            (lambda s: s.data["config"].update(head_dim=128), "made for a gemma2 config with 1 heads of 128"),
            (lambda s: s.data["config"].update(rope_parameters=7), "transformers makes no config"),
            (lambda s: s.tensors.update(extra=torch.zeros(2)), "extra has no place here"),
            (lambda s: s.tensors.pop("ids"), "ids is missing"),
            (lambda s: s.tensors.update(ids=torch.zeros(2, 99, dtype=torch.long)), "ids is torch.int64 of the shape"),
            (lambda s: s.tensors["layer0.group0.tail.keys"].fill_(torch.inf), "tail.keys holds a NaN or an infinity"),
            (lambda s: s.tensors["layer1.values"].fill_(torch.nan), "layer1.values holds a NaN or an infinity"),
            (lambda s: s.tensors["layer0.group0.keys_fit.order"].fill_(3), "order is no order of 64 channels"),
            (lambda s: s.tensors["layer2.group0.values.code"].fill_(255), "hold something after the last token"),
        ],
    )  # fmt: skip
    def test_is_refused(self, change: Callable[[Contents], Any], message: str, tmp_path: Path) -> None:
        path = tmp_path / "file"
        _small_file(path)
        saved = read(path, KIND, VERSION)
        change(saved)
        write(path, KIND, VERSION, saved)
        with pytest.raises(ValueError, match=message):
            FoldedCache.load(path)

    @pytest.mark.drawn
    def test_nothing_else_is_raised(self, tmp_path: Path) -> None:
        """Any value in any place: the file is refused, or what it says is taken at its word and can be read."""
        path = tmp_path / "file"
        _small_file(path)
        whole = read(path, KIND, VERSION)
        whole.data.pop("model")
        rng = random.Random(0)
        values = [None, True, False, -1, 0, 1, 2, 3, 16, 17, 64, 99, 100, 2**31, 2**80, 0.5, "", "float16", "dense", [],
                  [0], [0, 1], [2, 4, 4], [1, 2, 3, 4], {}, {"a": 1}]  # fmt: skip
        refused = taken = 0
        changes_tried = trials(300, 1_500)
        for _ in range(changes_tried):
            saved = Contents({**copy.deepcopy(whole.data), "model": None}, dict(whole.tensors))
            for _ in range(rng.choice((1, 1, 2))):
                if rng.random() < 0.7:
                    place = rng.choice(
                        [leaf for leaf in _leaves(saved.data) if leaf[0] != "config" or rng.random() < 0.2]
                    )
                    inside = saved.data
                    for key in place[:-1]:
                        inside = inside[key]
                    if rng.random() < 0.2 and isinstance(inside, dict):
                        del inside[place[-1]]
                    else:
                        inside[place[-1]] = rng.choice(values)
                else:
                    name = rng.choice(list(saved.tensors))
                    changes: list[Callable[[Tensor], Tensor]] = [
                        lambda t: t[:0], lambda t: torch.cat((t, t), -1), lambda t: torch.cat((t, t)),
                        lambda t: t[..., :1], lambda t: t.transpose(0, -1), torch.flatten, Tensor.float, Tensor.short,
                        lambda t: t.unsqueeze(0), lambda t: t.new_zeros(0, 2**31, 3), lambda t: t.new_zeros([1] * 8),
                        lambda t: t.new_zeros(()), lambda t: torch.randint_like(t, 256),
                    ]  # fmt: skip
                    tensor = saved.tensors[name]
                    saved.tensors[name] = rng.choice(changes if tensor.ndim else changes[5:])(tensor)
            write(path, KIND, VERSION, saved)
            try:
                cache = FoldedCache.load(path)
            except ValueError:
                refused += 1
            else:
                taken += 1
                self._read(cache)
        assert refused > changes_tried * 2 / 3
        assert taken > changes_tried / 75

    def _read(self, cache: FoldedCache) -> None:
        """Read what was loaded, and go on with it; the kernels must find all that they look for."""
        for layer in cache.layers:
            if isinstance(layer, FoldedLayer) and layer.folded.columns:
                assert all(x.isfinite().all() for x in layer.folded.unfold(torch.float32))
                batch, heads, key_dim, value_dim = layer.folded.shape
                try:
                    new = layer.folded.append(
                        torch.randn(batch, heads, 9, key_dim), torch.randn(batch, heads, 9, value_dim)
                    )
                except ValueError:  # it awaits keys of another dtype, or rows that have not started
                    continue
                assert attend(torch.randn(batch, 2, 9, key_dim), new, scaling=0.1).shape == (batch, 2, 9, value_dim)


class TestWriting:
    def test_full_disk(self, tmp_path: Path) -> None:
        """A real limit of the kernel's on the size of files, in another process: the old file stays, no other does."""
        path = tmp_path / "file"
        whole = _small_file(path)
        script = f"""
import resource, signal
import torch
from kvfold import Calibration
from kvfold.cache.files.contents import Contents, write
from kvfold.formats import KeyStatistics
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
many = torch.rand(2, 100_000)
for tensors in (
    {{"a": many}}, {{str(i): torch.zeros(1_000) for i in range(50)}}, {{str(i): torch.zeros(0) for i in range(999)}}
):
    try:
        write({str(path)!r}, "kvfold-cache", 1, Contents({{}}, tensors))
    except OSError as error:
        print(error.errno, error)
try:
    Calibration({{0: KeyStatistics(many, many)}}).save({str(path)!r})
except OSError as error:
    print(error.errno, error)
"""
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        lines = run.stdout.splitlines()
        assert len(lines) == 4
        for line, number in zip(lines, (5, 5, 5, 27), strict=True):  # safetensors tells no number
            assert line.startswith(f"{number} [Errno {number}] path = ")
            assert re.search("was not written, and what was there is as it was: .*File too large", line)
        assert path.read_bytes() == whole
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    def test_broken_off(self, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "file"
        whole = _small_file(path)

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            FoldedCache(llama.config).save(path)
        assert path.read_bytes() == whole
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    def test_nowhere(self, llama: PreTrainedModel, tmp_path: Path) -> None:
        cache = FoldedCache(llama.config)
        with pytest.raises(FileNotFoundError, match="there is no such folder"):
            cache.save(tmp_path / "none" / "file")
        with pytest.raises(IsADirectoryError, match="was not written"):
            cache.save(tmp_path)

    def test_links_and_permissions_stay(self, llama: PreTrainedModel, tmp_path: Path) -> None:
        path, link = tmp_path / "file", tmp_path / "link"
        path.write_bytes(b"old")
        path.chmod(0o600)
        link.symlink_to(path)
        FoldedCache(llama.config).save(link)
        assert link.is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert FoldedCache.load(path).get_seq_length() == 0

    def test_permissions_of_a_new_file(self, tmp_path: Path) -> None:
        """Those that `open` gives, though safetensors gives others."""
        other, path = tmp_path / "other", tmp_path / "file"
        other.touch()
        write(path, KIND, VERSION, Contents({}, {"a": torch.zeros(3)}))
        assert path.stat().st_mode == other.stat().st_mode

    def test_tensors_of_any_layout(self, tmp_path: Path) -> None:
        path, x = tmp_path / "file", torch.randn(6, 4)
        tensors = {
            "a": x, "b": x, "c": x[1:], "d": x.t(), "e": x[:1].expand(3, 4), "f": x[0, 0], "g": x[:0],
            "h": torch.nn.Parameter(x), "i": x[:, :2].bfloat16(),
        }  # fmt: skip
        write(path, KIND, VERSION, Contents({}, tensors))
        back = read(path, KIND, VERSION).tensors
        assert back.keys() == tensors.keys()
        with open(path, "r+b") as file:  # what was read does not hang on the file
            file.write(b"\0" * os.path.getsize(path))
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
        with pytest.raises(ValueError, match=r"a is torch\.float8_e5m2: a file holds float64, .* and integers"):
            write(path, KIND, VERSION, Contents({}, {"a": x.to(torch.float8_e5m2)}))


def _generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_kvfold("generate", "--max-new-tokens", "8", *arguments)


def test_generate_reads_what_its_file_does_not_hold(small_folder: Path, tmp_path: Path) -> None:
    document, kept = tmp_path / "doc.txt", str(tmp_path / "doc.kv")
    document.write_text("Mary's favourite fruit is the mango. " + "It rained all day. " * 80, encoding="utf-8")
    read = ("--model", str(small_folder), "--file", str(document))
    asked = (*read, "--prompt", "What is Mary's favourite fruit?")
    plain, first, again, other, wrong = (
        _generate(*arguments, "--json", *(("--cache", kept) if use else ()))
        for arguments, use in (
            (asked, False), (asked, True), (asked, True),
            ((*read, "--prompt", "What was the weather like?"), True),
            ((*asked, "--format", "kvfold-3"), True),
        )
    )  # fmt: skip
    rows = [json.loads(run.stdout) for run in (plain, first, again, other)]
    assert rows[0]["text"] == rows[1]["text"] == rows[2]["text"]
    prompt = rows[0]["prompt_tokens"]
    assert [row["reused_tokens"] for row in rows[:3]] == [0, 0, prompt - 1]
    assert 300 < rows[3]["reused_tokens"] < prompt - 5
    held = prompt + rows[1]["new_tokens"] - 1
    assert (
        f"doc.kv holds {held} tokens; the prompt starts with the first {prompt} of them: {prompt - 1} are reused"
        in (again.stderr)
    )
    assert wrong.returncode == 1
    assert "is folded as kvfold-4, and format = 'kvfold-3'" in wrong.stderr
    loaded = FoldedCache.load(kept)
    assert loaded.ids.shape == (1, loaded.get_seq_length())
    raw = bytearray(Path(kept).read_bytes())
    raw[-1] ^= 1
    Path(kept).write_bytes(raw)
    damaged = _generate(*asked, "--cache", kept)
    assert damaged.returncode == 1
    assert "the file is damaged" in damaged.stderr
    assert "Traceback" not in damaged.stderr
    assert "--cache" in _generate("--help").stdout


@pytest.mark.parametrize("format", ["kvfold-4", "centred-4", "kvfold-4:turboquant-4", "turboquant-4"])
def test_a_file_that_does_not_tell_its_window(format: str, tmp_path: Path) -> None:
    """Older files do not. Then pages lie behind 16 first tokens; formats that fold by token have no window."""
    key, value = torch.randn(2, 1, 2, 500, 64)
    layer = LayerCache(LayerConfig(format, window=None if format == "turboquant-4" else OLDER_WINDOW))
    for part in (slice(0, 450), slice(450, 500)):
        layer.observe(None, layer.append(key[:, :, part], value[:, :, part]))
    saved = layer_to_saved(layer)
    assert (saved.data["window"] is None) == (format == "turboquant-4")
    saved.data["window"] = None
    loaded = layer_from_saved(saved)
    for one, other in zip(loaded.unfold(torch.float32), layer.unfold(torch.float32), strict=True):
        assert torch.equal(one, other)
    new = torch.randn(1, 2, 100, 64)
    for each in (layer, loaded):
        each.observe(None, each.append(new, new))
    assert torch.equal(loaded.unfold(torch.float32)[0], layer.unfold(torch.float32)[0])
    saved = layer_to_saved(loaded)
    assert saved.data["window"] == (None if format == "turboquant-4" else [16, 47, 24])
