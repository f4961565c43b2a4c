"""A cache under torch's modes, and numbers at the edge of what it holds."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import transformers
from conftest import latent_model, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache

import kvfold
from kvfold import FoldedCache, Policy
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.formats import get_formats, pair

Ids = Callable[..., Tensor]
FORMATS = ["turboquant-4", "turboquant-4+qjl", "turboquant-2.5", "centred-4", "kvfold-3", "float16", "q4_0", "tbq3"]
MODES = [
    (torch.inference_mode, torch.no_grad),
    (torch.inference_mode, torch.enable_grad),
    (torch.no_grad, torch.inference_mode),
]


@pytest.fixture(autouse=True)
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats that are fitted fold here too, though prompts are short."""
    monkeypatch.setattr(pair, "FIT_TOKENS", 70)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("first", "second"), MODES)
def test_a_cache_goes_from_mode_to_mode(
    format: str,
    first: Callable[[], AbstractContextManager[None]],
    second: Callable[[], AbstractContextManager[None]],
    random_ids: Ids,
) -> None:
    """A prompt is read in one of torch's modes and continued in another, with all that changes what is held."""
    model = tiny_model("llama").float()
    kvfold.attach(model)

    def last(*modes: Callable[[], AbstractContextManager[None]]) -> Tensor:
        cache = FoldedCache(model.config, format)
        with modes[0]():
            model(random_ids(1, 150), past_key_values=cache)
        with modes[1]():
            for token in random_ids(1, 20, seed=1).split(1, 1):
                model(token, past_key_values=cache)
            cache.crop(-5)
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([1, 0]))
            return model(random_ids(2, 90, seed=2), past_key_values=cache).logits.detach()

    assert torch.equal(last(first, second), last(torch.no_grad, torch.no_grad))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_the_model_and_not_the_cache(format: str, dtype: torch.dtype, random_ids: Ids) -> None:
    model = tiny_model("llama").float()
    kvfold.attach(model)

    def logits() -> Tensor:
        cache = FoldedCache(model.config, format)
        parts = random_ids(1, 160).split([150] + [1] * 10, 1)
        return torch.cat([model(part, past_key_values=cache).logits.float() for part in parts], 1)

    expected, dense = logits(), model(random_ids(1, 160)).logits
    with torch.autocast("cpu", dtype=dtype):
        got, rounded = logits(), model(random_ids(1, 160)).logits.float()
    assert (got - rounded).norm() < 2 * (expected - dense).norm() + 2 * (rounded - dense).norm()


@pytest.mark.parametrize("format", FORMATS)
def test_autocast_changes_no_code(format: str) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 2, 150, 64, generator=generator)
    query = torch.randn(1, 4, 150, 64, generator=generator)
    held = []
    for cast in (False, True):
        cache = LayerCache(LayerConfig(format))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            for at in (slice(0, 140), *(slice(t, t + 1) for t in range(140, 150))):
                cache.observe(query[:, :, at], cache.append(key[:, :, at], value[:, :, at]))
            held.append(cache.unfold(torch.float32))
    assert all(torch.equal(one, other) for one, other in zip(*held, strict=True))


BY_PAGE = ["turboquant-2.5", "turboquant-3.5", "kvfold-2", "centred-3", "turboquant-4:centred-3"]


@pytest.mark.parametrize("format", BY_PAGE)
def test_whatever_folds_by_page_takes_drafts_back(format: str) -> None:
    """At every place in a page, a draft that is refused leaves no trace."""
    assert not get_formats(format, 64, 64).folds_by_token
    generator = torch.Generator().manual_seed(0)
    key, value, wrong_key, wrong_value = torch.randn(4, 1, 2, 400, 64, generator=generator)
    query = torch.randn(1, 4, 400, 64, generator=generator)
    for length in range(190, 290, 7):
        caches = []
        for drafts in (0, 20):
            cache = LayerCache(LayerConfig(format))
            cache.observe(query[:, :, :length], cache.append(key[:, :, :length], value[:, :, :length]))
            if drafts:
                at = slice(length, length + drafts)
                cache.observe(query[:, :, at], cache.append(wrong_key[:, :, at], wrong_value[:, :, at]))
                assert cache.crop(length) == 0
            for token in range(length, length + 70):
                at = slice(token, token + 1)
                cache.observe(query[:, :, at], cache.append(key[:, :, at], value[:, :, at]))
            caches.append(cache)
        for one, other in zip(*(cache.unfold(torch.float32) for cache in caches), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("format", ["turboquant-4", "float16", "q4_0", "kvfold-4", "centred-4", "turboquant-2.5"])
def test_the_remedy_that_an_error_names_helps(format: str, random_ids: Ids) -> None:
    model = tiny_model("llama").float()
    kvfold.attach(model)
    model.model.layers[1].self_attn.v_proj.weight.mul_(1e7)
    with pytest.raises(ValueError, match=r"layer 1: value .* too large for torch.float16") as first:
        model(random_ids(1, 150), past_key_values=FoldedCache(model.config, format))
    said = str(first.value)
    if "dense_dtype=torch.float32" in said and format != "float16":
        with pytest.raises(ValueError, match="layer 1: the scale of a page is beyond float16's 65,504;") as second:
            model(random_ids(1, 150), past_key_values=FoldedCache(model.config, format, dense_dtype=torch.float32))
        assert said.endswith(str(second.value).partition("; ")[2])
    remedy = f"keep this layer dense: policy=Policy('{format}', exceptions=[(1, 'dense')])"
    assert remedy in said
    policy = eval(remedy.partition("policy=")[2], {"Policy": Policy})
    assert model(random_ids(1, 150), past_key_values=FoldedCache(model.config, policy=policy)).logits.isfinite().all()


class LowRank(nn.Module):
    """What LoRA puts in the place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def _hooked(linear: nn.Linear) -> nn.Module:
    """As accelerate leaves a layer whose weights lie elsewhere."""
    weight, own = linear.weight.clone(), linear.forward
    linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)

    def forward(x: Tensor) -> Tensor:
        away = linear.weight
        linear.weight = nn.Parameter(weight, requires_grad=False)
        try:
            return own(x)
        finally:
            linear.weight = away

    linear.forward = forward  # type: ignore[method-assign]
    return linear


@pytest.mark.parametrize("wrap", [LowRank, _hooked])
def test_latent_attention_calls_what_expands(wrap: Callable[[nn.Linear], nn.Module], random_ids: Ids) -> None:
    model = latent_model()
    plain = model(random_ids(1, 120)).logits
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = wrap(layer.self_attn.kv_b_proj)
    expected = model(random_ids(1, 120)).logits
    assert torch.equal(plain, expected) == (wrap is _hooked)
    kvfold.attach(model)
    torch.testing.assert_close(model(random_ids(1, 120)).logits, expected, atol=0, rtol=0)
    got = model(random_ids(1, 120), past_key_values=FoldedCache(model.config, "float16")).logits
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


def test_questions_are_answered_truly(llama: transformers.PreTrainedModel, random_ids: Ids) -> None:
    cache = FoldedCache(llama.config)
    assert not cache.is_initialized
    llama(random_ids(1, 50), past_key_values=cache)
    assert cache.is_initialized
    assert cache.get_seq_length() == 50
    assert copy.deepcopy(cache).is_initialized
    cache.reset()
    assert not cache.is_initialized


def test_attention_weights_are_refused(llama: transformers.PreTrainedModel, random_ids: Ids) -> None:
    with pytest.raises(ValueError, match="output_attentions = True, but folded attention gives no weights"):
        llama(random_ids(1, 50), past_key_values=FoldedCache(llama.config), output_attentions=True)


@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_layers_that_share_keys_may_ask_for_the_last_tokens_alone(random_ids: Ids, keep: int, padded: bool) -> None:
    """Gemma 4 computes its last layers, which read keys of earlier ones, for the tokens whose logits are wanted."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, global_head_dim=64, num_global_key_value_heads=2, sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=16, max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    model, ids = transformers.Gemma4ForCausalLM(config).eval(), random_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :60] = 1 - int(padded)
    call = {"attention_mask": mask} if padded else {}
    expected = model(ids, past_key_values=DynamicCache(config=config), logits_to_keep=keep, **call).logits
    kvfold.attach(model)
    dense = model(ids, past_key_values=DynamicCache(config=config), logits_to_keep=keep, **call).logits
    assert torch.equal(dense, expected)
    got = model(
        ids, past_key_values=FoldedCache(config, "float16", dense_dtype=torch.float32), logits_to_keep=keep, **call
    ).logits
    kept = slice(60, None) if keep == 0 else slice(None)
    torch.testing.assert_close(got[:, kept], expected[:, kept], atol=2e-3, rtol=2e-3)
    folded = FoldedCache(config, "kvfold-4")
    model(ids, past_key_values=folded, logits_to_keep=keep, **call)
    assert folded.layers[1].folded.groups[0].rows.keys.count > 0
