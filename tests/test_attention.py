"""Attention of the CPU's kernel and the reference against dense attention over the unfolded cache, query by query."""

from collections.abc import Sequence

import pytest
import torch
from backends import with_instruction_set
from torch import Tensor

from kvfold.attention import BACKENDS, attend, attend_dense, cpu, naive, reference
from kvfold.attention.reference import page_outputs, page_scores
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.formats import get_format, get_formats
from kvfold.formats.base import PAGE_WINDOW
from kvfold.formats.page import PageForm, TokenCodes, level_table
from kvfold.quant.transforms import Matrix

BATCH, KV_HEADS = 2, 2


FLOATS = next(isa for isa in cpu.INSTRUCTION_SETS if isa not in cpu.INTEGER_SETS)


@pytest.fixture(params=[with_instruction_set(FLOATS), reference], ids=["cpu", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend in turn, where it takes the call; the kernel in floats, as integers are not exact to 1e-5."""
    monkeypatch.setitem(BACKENDS, "cpu", request.param)


def _qkv(tokens: int, repeat: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tensors that float16 holds exactly, so that dense tokens are stored as they are."""
    torch.manual_seed(tokens + repeat + key_dim)
    key = torch.randn(BATCH, KV_HEADS, tokens, key_dim).half().float()
    value = torch.randn(BATCH, KV_HEADS, tokens, value_dim).half().float()
    return torch.randn(BATCH, KV_HEADS * repeat, tokens, key_dim), key, value


def _check(
    format: str, key_dim: int, repeat: int, *, value_dim: int | None = None, softcap: float | None = None,
    padding: Sequence[int] | None = None, sinks: bool = False,
    chunks: Sequence[int] = (150, 1, 1, 90, 1, 64, 1),
) -> None:  # fmt: skip
    """Chunked prefill and decode, each step against the truth; and whole prefill against the steps."""
    tokens, scaling = sum(chunks), key_dim**-0.5
    q, key, value = _qkv(tokens, repeat, key_dim, value_dim or key_dim)
    sink_logits = torch.randn(KV_HEADS * repeat) if sinks else None
    cache, done, steps = LayerCache(LayerConfig(format)), 0, []
    for n in chunks:
        part = slice(done, done + n)
        new = cache.append(key[:, :, part], value[:, :, part], padding)
        out = attend(q[:, :, part], new, scaling=scaling, softcap=softcap, sink_logits=sink_logits)
        for group, dense in zip(new.layer.groups, new.dense, strict=True):
            own = group.own(q[:, :, part], done)
            truth = naive.attend_rows(own, group.rows, dense, scaling=scaling, softcap=softcap, sink_logits=sink_logits)
            read, padded = out[group.batch_rows].split((n - own.shape[2], own.shape[2]), 2)[::-1]
            torch.testing.assert_close(read.double(), truth, atol=1e-5, rtol=0)
            assert not padded.any()
        steps.append(out)
        done += n
    whole = LayerCache(LayerConfig(format)).append(key, value, padding)
    at_once = attend(q, whole, scaling=scaling, softcap=softcap, sink_logits=sink_logits)
    torch.testing.assert_close(at_once, torch.cat(steps, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("repeat", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("format", ["centred-4", "turboquant-4"])
def test_equals_dense_attention_over_the_unfolded_cache(format: str, head_dim: int, repeat: int) -> None:
    _check(format, head_dim, repeat)


@pytest.mark.parametrize(
    "format",
    [
        "centred-4",
        "turboquant-3",
        "turboquant-4:centred-4",
        "centred-4:turboquant-2",
        "turboquant-4+qjl:centred-3+sign",
        "float16:turboquant-3",
        "kvarn-3:kvarn-4",
        "centred-4@128",
    ],
)
class TestOptions:
    def test_soft_cap(self, format: str) -> None:
        _check(format, 64, 3, softcap=5.0)

    def test_attention_sinks(self, format: str) -> None:
        _check(format, 64, 4, sinks=True)

    def test_padded_rows(self, format: str) -> None:
        _check(format, 64, 1, padding=[0, 37])

    def test_row_that_starts_in_a_later_chunk(self, format: str) -> None:
        _check(format, 64, 2, padding=[200, 3], sinks=True)

    def test_key_and_value_dims_apart(self, format: str) -> None:
        _check(format, 192, 2, value_dim=128)

    def test_one_token_at_a_time(self, format: str) -> None:
        _check(format, 64, 2, chunks=[1] * 140)


def test_prompts_longer_than_a_query_block_and_a_page_block() -> None:
    """Whole against chunks across every block boundary inside the reference."""
    q, key, value = _qkv(2500, 1, 64, 64)
    whole = attend(q, LayerCache(LayerConfig("centred-4")).append(key, value), scaling=0.3)
    cache, steps = LayerCache(LayerConfig("centred-4")), []
    for start in range(0, 2500, 700):
        part = slice(start, start + 700)
        steps.append(attend(q[:, :, part], cache.append(key[:, :, part], value[:, :, part]), scaling=0.3))
    torch.testing.assert_close(whole, torch.cat(steps, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("format", ["centred-4", "turboquant-4"])
def test_masks_decide_alone(format: str) -> None:
    """Bool and additive masks agree; a causal mask is no mask; a mask may allow the future and forbid the past."""
    q, key, value = _qkv(200, 2, 64, 64)
    new = LayerCache(LayerConfig(format)).append(key, value)
    causal = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()
    plain = attend(q, new, scaling=0.2)
    torch.testing.assert_close(attend(q, new, scaling=0.2, mask=causal), plain, atol=1e-5, rtol=0)

    mask = torch.rand(BATCH, 1, 200, 200) > 0.5
    mask[:, :, 7] = False
    added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    out = attend(q, new, scaling=0.2, mask=mask)
    torch.testing.assert_close(attend(q, new, scaling=0.2, mask=added), out, atol=1e-5, rtol=0)
    assert torch.equal(out[:, :, 7], torch.zeros_like(out[:, :, 7]))  # barred from every key
    assert out.isfinite().all()
    future = torch.zeros(1, 1, 200, 200, dtype=torch.bool)
    future[..., 199] = True
    only = attend(q, new, scaling=0.2, mask=future)
    torch.testing.assert_close(only[:, :, 0], only[:, :, 199], atol=1e-5, rtol=0)
    if not new.layer.groups[0].rows.formats.folds_by_token:
        torch.testing.assert_close(only[:, ::2, 0], value[:, :, 199], atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [(), ("offset",), ("centre", "channel_scale"), ("offset", "centre", "channel_scale")])
@pytest.mark.parametrize("groups", [1, 4])
def test_scores_and_outputs_on_codes_for_the_whole_page_form(groups: int, parts: tuple[str, ...]) -> None:
    """Every term of the form, mixed bits and an R that is not orthogonal, against the unfolded vectors."""
    d, bits = 64, (4, 2, 7, 3)
    matrix = torch.randn(d, d) + 8 * torch.eye(d)
    lut = level_table({b: tuple(torch.randn(2**b).tolist()) for b in bits}, bits)
    transform = Matrix(matrix, torch.linalg.inv(matrix))
    form = PageForm(d, 16, bits, lut, transform, groups=(d // groups,) * groups)
    shape = (BATCH, KV_HEADS, 3)
    code = (torch.rand(*shape, 16, d) * 2.0 ** torch.tensor(bits).repeat_interleave(16)).to(torch.uint8)
    optional = {
        "offset": torch.randn(*shape, 16, groups).half(),
        "centre": torch.randn(*shape, d).half(),
        "channel_scale": torch.randn(*shape, d).half(),
    }
    pages = form.pack(
        TokenCodes(code, torch.randn(*shape, 16, groups).half(), **{name: optional[name] for name in parts})
    )
    x = form.unfold(pages).unsqueeze(2)
    q, p = torch.randn(BATCH, KV_HEADS, 3, 5, d), torch.rand(BATCH, KV_HEADS, 3, 5, 48)
    scores = page_scores(form.transform.apply_to_query(q), pages, form)
    torch.testing.assert_close(scores, q @ x.mT, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(form.transform.invert(page_outputs(p, pages, form)), p @ x, atol=2e-3, rtol=1e-4)


def test_never_unpacks_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.attention import reference

    unpacked = []
    levels = PageForm.levels
    monkeypatch.setattr(PageForm, "levels", lambda form, pages: unpacked.append(pages.tokens) or levels(form, pages))
    q, key, value = _qkv(3000, 1, 64, 64)
    attend(q, LayerCache(LayerConfig("turboquant-4")).append(key, value), scaling=0.2, backend="reference")
    assert max(unpacked) <= reference.PAGE_BLOCK * 64 < 3000


def test_dense_attention_with_soft_cap_and_sinks() -> None:
    q, key, value = _qkv(50, 3, 64, 64)
    sinks = torch.randn(6)
    out = attend_dense(q, key, value, scaling=0.2, softcap=3.0, sink_logits=sinks)
    k, v = key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
    for t in (0, 20, 49):
        scores = 3.0 * torch.tanh((q[:, :, t : t + 1] @ k[:, :, : t + 1].mT) * 0.2 / 3.0)
        p = torch.cat((scores, sinks.view(1, 6, 1, 1).expand(BATCH, -1, -1, -1)), -1).softmax(-1)[..., :-1]
        torch.testing.assert_close(out[:, :, t : t + 1], p @ v[:, :, : t + 1], atol=1e-5, rtol=0)
    causal = torch.ones(1, 1, 50, 50, dtype=torch.bool).tril()
    masked = attend_dense(q, key, value, scaling=0.2, mask=causal, softcap=3.0, sink_logits=sinks)
    torch.testing.assert_close(masked, out, atol=1e-5, rtol=0)


def test_formats_reach_attention_unchanged() -> None:
    """The cache stores the very bytes that a format's own `fold` makes."""
    first = PAGE_WINDOW.sinks
    _, key, value = _qkv(first + 64 + PAGE_WINDOW.recent, 1, 64, 64)
    cache = LayerCache(LayerConfig("centred-4"))
    cache.append(key, value)
    rows = cache.groups[0].rows
    pair = get_formats("centred-4", 64, 64)
    for store, fmt, x in ((rows.keys, pair.keys, key), (rows.values, pair.values, value)):
        own = fmt.fold(x[:, :, first : first + 64])
        for (name, held), (_, fresh) in zip(store.pages().tensors(), own.tensors(), strict=True):
            assert torch.equal(held, fresh), name
    assert get_format("centred-4", 64) == pair.keys
