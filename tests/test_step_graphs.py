"""Decoding steps as graphs: CUDA's on a GPU, or recorded launches that are replayed in Triton's interpreter."""

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor

import kvfold

pytest.importorskip("triton")
from recorded_steps import RecordedLaunches

from kvfold.attention.triton import launch
from kvfold.cache.rows import FoldedRows
from kvfold.integrations.transformers import graphs, recorder
from kvfold.integrations.transformers.calls import cache_name

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = transformers.LlamaConfig(
    vocab_size=64, num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    intermediate_size=32, max_position_embeddings=1024,
)  # fmt: skip
NAME = cache_name(transformers.LlamaForCausalLM.forward) or ""
IDS = torch.randint(0, 64, (2, 400), generator=torch.Generator().manual_seed(0)).to(DEVICE)


class Counted(RecordedLaunches if DEVICE == "cpu" else recorder.CudaGraph):  # type: ignore[misc]
    """A recorder that counts."""

    made: ClassVar[list["Counted"]] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(recorder.RECORDERS, DEVICE, Counted)
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "WARPS", 4)  # fewer parts, which the interpreter takes one by one
    Counted.made.clear()
    yield
    Counted.made.clear()


def _model(dtype: torch.dtype = torch.float32, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**CONFIG.to_dict(), **changes})
    return transformers.LlamaForCausalLM(config).eval().to(DEVICE, dtype)


def _read(model: transformers.PreTrainedModel, format: str, prompt: int, batch: int = 1) -> kvfold.FoldedCache:
    """A cache that has read a prompt, by the fastest backend: the interpreter would take minutes."""
    cache = kvfold.FoldedCache(model.config, format)
    kvfold.attach(model)
    model(IDS[:batch, :prompt], **{NAME: cache})
    kvfold.detach(model)
    return cache


def _steps(
    model: transformers.PreTrainedModel, cache: kvfold.FoldedCache, count: int, graphs: bool, **options: Any
) -> list[Tensor]:
    """Logits of the next tokens, one by one."""
    kvfold.attach(model, "triton", cuda_graphs=graphs)
    first, batch = cache.get_seq_length(), cache.layers[0].folded.batch
    try:
        tokens = IDS[:batch, first : first + count].split(1, 1)
        return [model(token, **{NAME: cache}, **options).logits for token in tokens]
    finally:
        kvfold.detach(model)


def _decode(model: transformers.PreTrainedModel, cache: kvfold.FoldedCache, count: int) -> Tensor:
    """Logits of the next tokens, by a model that stays attached."""
    if not hasattr(model, "_kvfold_attachment"):
        kvfold.attach(model, "triton", cuda_graphs=True)
    first = cache.get_seq_length()
    return torch.cat([model(token, **{NAME: cache}).logits for token in IDS[:1, first : first + count].split(1, 1)])


def _replays() -> list[int]:
    """How often each graph was replayed, of those that were."""
    return [each.replays for each in Counted.made if each.replays]


def _check_held(cache: kvfold.FoldedCache, other: kvfold.FoldedCache) -> None:
    assert cache.get_seq_length() == other.get_seq_length()
    for own, same in zip(cache.layers, other.layers, strict=True):
        assert own.folded.groups[0].rows.keys.count == same.folded.groups[0].rows.keys.count
        assert all(map(torch.equal, own.folded.unfold(torch.float32), same.folded.unfold(torch.float32)))


@pytest.mark.parametrize(
    ("format", "prompt", "dtype", "batch"),
    [
        ("kvfold-4", 315, torch.float32, 1),
        ("kvfold-3@32", 283, torch.bfloat16, 1),
        ("centred-4", 187, torch.float32, 2),
        ("turboquant-4", 124, torch.float32, 2),
        ("turboquant-2@16:hadamard-3@16", 124, torch.bfloat16, 1),
    ],
)
def test_replays_are_steps(format: str, prompt: int, dtype: torch.dtype, batch: int) -> None:
    model = _model(dtype)
    cache = _read(model, format, prompt, batch)
    pages = cache.layers[0].folded.groups[0].rows.keys.count
    _steps(model, cache, 1, graphs=True)  # storage is as it will be
    other = copy.deepcopy(cache)
    found, expected = _steps(model, cache, 6, graphs=True), _steps(model, other, 6, graphs=False)
    assert cache.layers[0].folded.groups[0].rows.keys.count == pages + 1  # folded between two replays
    assert _replays() == [5]  # attached anew, the first step warms up again
    for one, same in zip(found, expected, strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert not torch.equal(found[0], found[1])
    _check_held(cache, other)


def _check_right(model: transformers.PreTrainedModel, format: str, prompt: int, count: int) -> None:
    """Compare steps with those of a cache without graphs."""
    cache = _read(model, format, prompt)
    other = copy.deepcopy(cache)
    found, expected = _steps(model, cache, count, graphs=True), _steps(model, other, count, graphs=False)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-4)
    _check_held(cache, other)


def test_a_graph_ends_where_its_storage_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PAGES", 1)
    _check_right(_model(), "turboquant-4@16", 30, 22)
    assert _replays() == [17, 3]  # room for 3 pages: tokens 32 to 48; each warms up with one


def test_a_model_that_computes_with_a_length_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(transformers.LlamaForCausalLM):
        def forward(
            self, input_ids: Tensor, position_ids: Tensor | None = None, cache: Any = None, **kwargs: Any
        ) -> Any:
            out = super().forward(input_ids, position_ids=position_ids, **{NAME: cache}, **kwargs)
            out.logits = out.logits * (1 + cache.get_seq_length())
            return out

    model = _model()
    model.__class__ = Counting
    _check_right(model, "turboquant-4@16", 20, 5)
    assert "must compute with the cache's length" in caplog.text


def test_a_model_with_positions_of_its_own_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    class FromOne(transformers.LlamaForCausalLM):
        def forward(
            self, input_ids: Tensor, position_ids: Tensor | None = None, cache: Any = None, **kwargs: Any
        ) -> Any:
            if position_ids is None:
                position_ids = 3 + 5 * (cache.get_seq_length() + torch.arange(input_ids.shape[1], device=DEVICE)[None])
            return super().forward(input_ids, position_ids=position_ids, **{NAME: cache}, **kwargs)

    model = _model(initializer_range=0.3)  # so that attention goes by positions
    model.__class__ = FromOne
    _check_right(model, "turboquant-4@16", 20, 5)
    assert "have positions of its own" in caplog.text


def test_a_fit_waits_for_queries() -> None:
    model = _model(head_dim=64, num_hidden_layers=1)
    cache = _read(model, "kvfold-4", 250)
    other = copy.deepcopy(cache)
    found, expected = _steps(model, cache, 11, graphs=True), _steps(model, other, 11, graphs=False)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-4)
    _check_held(cache, other)
    assert cache.layers[0].folded.folded_as == other.layers[0].folded.folded_as
    assert _replays() == [3]  # a token after the fit


def test_tokens_fold_by_themselves_on_devices_without_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FoldedRows, "token_folder", lambda rows: None)  # as on a GPU
    _check_right(_model(), "turboquant-4@16", 28, 7)
    assert _replays() == [6]


def test_a_saved_cache_goes_on(tmp_path: Path) -> None:
    model = _model()
    _read(model, "turboquant-4@16", 20).save(tmp_path / "cache")
    cache, other = (kvfold.FoldedCache.load(tmp_path / "cache") for _ in range(2))
    found, expected = _steps(model, cache, 5, graphs=True), _steps(model, other, 5, graphs=False)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert _replays() == [3]


def test_arguments(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    cache = _read(model, "turboquant-4@16", 20)
    other = copy.deepcopy(cache)

    def logits(cache: kvfold.FoldedCache, graphs: bool) -> Tensor:
        kvfold.attach(model, "triton", cuda_graphs=graphs)
        outs = [model(token, None, None, cache).logits for token in IDS[:1, 20:24].split(1, 1)]
        for token in IDS[:1, 24:28].split(1, 1):
            embeds = model.model.embed_tokens(token).requires_grad_()
            with torch.enable_grad():
                outs.append(model(inputs_embeds=embeds, position_ids=token * 0 + 5, **{NAME: cache}).logits.detach())
        for i, token in enumerate(IDS[:1, 28:36].split(1, 1)):
            outs.append(model(token, **{NAME: cache}, logits_to_keep=i + 1).logits)
        steps = list(getattr(model._kvfold_attachment.graphs, "_steps", {}).values())
        assert not any(x.requires_grad for own in steps for x in own._inputs.values())
        with pytest.raises(ValueError, match="training mode"):
            model.train()(IDS[:1, 36:37], **{NAME: cache})
        kvfold.detach(model.eval())
        return torch.cat(outs)

    torch.testing.assert_close(logits(cache, True), logits(other, False), rtol=1e-4, atol=1e-4)
    assert _replays() == [3, 3]
    assert "change from step to step" in caplog.text


def test_memory_is_freed_before_the_next_prompt() -> None:
    model = _model()
    cache = _read(model, "turboquant-4@16", 20)
    _decode(model, cache, 4)
    storage = weakref.ref(cache.layers[0].folded.groups[0].rows.pages()[0].code)
    cache.reset()
    Counted.made.clear()
    gone = []
    model.lm_head.register_forward_hook(lambda *_: gone.append(gc.collect() >= 0 and storage() is None))
    model(IDS[:1, :3], **{NAME: cache})
    assert gone == [True]


def test_what_waits_for_the_device_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    model.model.norm.register_forward_hook(lambda _, args, out: out * (2.0 if bool(out.sum() > 1e9) else 1.0))
    _check_right(model, "turboquant-4@16", 20, 4)
    assert "a step cannot be recorded" in caplog.text


def test_new_weights_are_seen() -> None:
    model = _model()
    cache = _read(model, "turboquant-4@16", 20)
    _decode(model, cache, 4)
    norm = model.model.norm
    norm.weight.data.mul_(2)  # in place: the same graph
    doubled = _decode(model, cache, 1)
    assert len(Counted.made) == 1
    norm.weight = torch.nn.Parameter(norm.weight / 2)
    other = copy.deepcopy(cache)
    after = _decode(model, cache, 1)
    kvfold.detach(model)
    expected = _steps(model, other, 1, graphs=False)[0]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(doubled, after, rtol=0.1)


def test_a_replay_that_breaks_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    cache = _read(model, "centred-4", 100)
    _decode(model, cache, 3)
    whole = Counted.replay

    def broken(own: Counted) -> None:
        whole(own)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Counted, "replay", broken)
        with pytest.raises(KeyboardInterrupt):
            _decode(model, cache, 1)
    assert cache.get_seq_length() == 103
    found = [_decode(model, cache, 3)]
    cache.crop(-1)
    found.append(_decode(model, cache, 3))
    kvfold.detach(model)
    expected = _steps(model, _read(model, "centred-4", 103), 5, graphs=False)
    torch.testing.assert_close(torch.cat(found), torch.cat(expected[:3] + expected[2:]), rtol=1e-4, atol=1e-4)


def test_graphs_go_with_their_cache() -> None:
    model = _model()
    cache = _read(model, "turboquant-4@16", 20)
    _decode(model, cache, 3)
    gone, storage = weakref.ref(cache), weakref.ref(cache.layers[0].folded.groups[0].rows.pages()[0].code)
    copied = copy.deepcopy(model)  # has graphs of its own
    del cache
    Counted.made.clear()
    gc.collect()
    assert gone() is storage() is None
    cache = _read(_model(), "turboquant-4@16", 20)
    copied(IDS[:1, 20:21], **{NAME: cache})


def test_generate_with_graphs() -> None:
    model, out = _model(), []
    for use in (True, False):
        kvfold.detach(model)
        kvfold.attach(model, "triton", cuda_graphs=use)
        cache = kvfold.FoldedCache(model.config, "turboquant-4@16")
        out.append(model.generate(IDS[:1, :20], **{NAME: cache}, max_new_tokens=8, min_new_tokens=8, do_sample=False))
    assert torch.equal(*out)
    assert Counted.made[0].replays == 6  # the first of 7 steps warms up


@pytest.mark.parametrize("mode", [torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16)])
def test_modes(mode: Any) -> None:
    model = _model()
    with mode:
        cache = _read(model, "centred-4", 100)
        other = copy.deepcopy(cache)
        found = torch.cat(_steps(model, cache, 4, graphs=True)).clone()
        expected = torch.cat(_steps(model, other, 4, graphs=False)).clone()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    _check_held(cache, other)
    if isinstance(mode, torch.inference_mode):
        _steps(model, cache, 3, graphs=True)
        _steps(model, other, 3, graphs=False)
        _check_held(cache, other)
    assert sum(each.replays for each in Counted.made) > 2


def test_weights_that_autocast_rounds_are_read_anew() -> None:
    model = _model()
    with torch.autocast(DEVICE, torch.bfloat16):
        cache = _read(model, "centred-4", 100)
    with torch.autocast(DEVICE, torch.bfloat16):
        _decode(model, cache, 5)
    model.lm_head.weight.mul_(3)  # in place
    other = copy.deepcopy(cache)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = _decode(model, cache, 1)
        kvfold.detach(model)
        expected = _steps(model, other, 1, graphs=False)[0]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert _replays() == [5]


def test_the_log_says_what_is_no_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()

    def said(given: dict[str, Any], format: str = "turboquant-4@16", backend: str = "triton", **options: Any) -> str:
        caplog.clear()
        cache = kvfold.FoldedCache(model.config, format, **options)
        kvfold.attach(model)
        model(IDS[:2, :20], **{NAME: cache}, attention_mask=given.get("attention_mask", IDS[:2, :21] + 1)[:, :20])
        kvfold.detach(model)
        kvfold.attach(model, backend, cuda_graphs=True)
        model(IDS[:2, 20:21], **{NAME: cache}, **given)
        kvfold.detach(model)
        assert cache.get_seq_length() == 21
        return caplog.text

    padded = torch.ones(2, 21, dtype=torch.int64, device=DEVICE)
    padded[1, :3] = 0
    assert "attention_mask hides tokens" in said({"attention_mask": padded})
    assert "backend 'reference'" in said({}, backend="reference")
    assert "no kernel does that alone" in said({}, "q8_0")
    dense = kvfold.Policy("turboquant-4@16", dense_first=1)
    assert "do not fold" in said({}, None, policy=dense)
    assert not said({"attention_mask": torch.ones_like(padded)})


def test_attaching() -> None:
    model = _model()
    kvfold.attach(model)
    with pytest.raises(ValueError, match=r"cuda_graphs = True.*detach it first"):
        kvfold.attach(model, cuda_graphs=True)
    kvfold.detach(model)
    with pytest.raises(ValueError, match="cuda_graphs = 1"):
        kvfold.attach(model, cuda_graphs=1)  # type: ignore[arg-type]
