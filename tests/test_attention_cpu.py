"""The CPU kernel against attention as its formula has it."""

import copy
from itertools import product
from weakref import ref

import pytest
import torch
from measured import measured
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvfold import FoldedCache, attach, detach
from kvfold.attention import attend, cpu, dispatch, naive, reference
from kvfold.attention.cpu.sides import side_of
from kvfold.cache.batch import Appended
from kvfold.cache.budgets import MOST
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.store import PageStore
from kvfold.formats import get_formats
from kvfold.formats.page import PageForm, TokenCodes
from kvfold.kernels.cpu import module

FORMATS = (
    "kvfold-4",
    "kvfold-2:kvfold-1",
    "centred-4",
    "turboquant-3",
    "centred-1:turboquant-2",
    "centred-5:turboquant-6",
    "turboquant-7:centred-8",
    "kvfold-5",
    "kvarn-4",
    "kvarn-7:kvarn-2",
    "oscar-4",
    "oscar-2:oscar-5",
    "affine-6:affine-5",
    "turboquant-4+qjl:centred-3+sign",
    "float16:turboquant-3",
    "centred-4@128",
    "turboquant-2@16",
)


def _both(new: Appended, q: Tensor, isa: str = cpu.INSTRUCTION_SETS[0], **options: object) -> tuple[Tensor, Tensor]:
    rows, dense = new.layer.groups[0].rows, new.dense[0]
    assert cpu.why_not(q, rows, options.get("mask")) is None
    options = {"scaling": q.shape[-1] ** -0.5, **options}
    got = cpu.attend_rows(q, rows, dense, instruction_set=isa, **options)
    return got, naive.attend_rows(q, rows, dense, **options).float()


def _fill(
    format: str, tokens: int, n: int, *, batch: int = 2, kv_heads: int = 2, dims: tuple[int, int] = (64, 64)
) -> Appended:
    """A cache of `tokens` tokens whose last `n` came together."""
    generator = torch.Generator().manual_seed(tokens)
    cache = LayerCache(LayerConfig(format, statistics=measured(kv_heads, *dims)))
    key, value = (torch.randn(batch, kv_heads, tokens, dim, generator=generator) + 0.5 for dim in dims)
    if tokens > n:
        cache.append(key[:, :, :-n], value[:, :, :-n])
    return cache.append(key[:, :, -n:], value[:, :, -n:])


def _close(got: Tensor, expected: Tensor, isa: str = cpu.INSTRUCTION_SETS[0]) -> None:
    """Up to rounding; integer products up to a small part of what the codes lose (`test_its_own_error_…`)."""
    if isa in cpu.INTEGER_SETS:
        assert (got - expected).square().sum() <= 1e-3 * expected.square().sum()
    else:
        torch.testing.assert_close(got, expected, atol=2e-5 * expected.abs().max().item(), rtol=2e-5)


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_decode(format: str, isa: str) -> None:
    for tokens in (1, 15, 16, 17, 100, 700):
        new = _fill(format, tokens, 1)
        q = 3 * torch.randn(2, 6, 1, 64, generator=torch.Generator().manual_seed(0))
        _close(*_both(new, q, isa), isa)


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_prompts_in_chunks(format: str, isa: str) -> None:
    for tokens, n in ((300, 300), (300, 77), (130, 129), (5, 5)):
        new = _fill(format, tokens, n)
        q = 3 * torch.randn(2, 6, n, 64, generator=torch.Generator().manual_seed(0))
        _close(*_both(new, q, isa), isa)


@pytest.mark.parametrize("repeat", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (40, 24), (576, 512)])
def test_shapes(dims: tuple[int, int], repeat: int) -> None:
    for n, format in product((1, 50), ("centred-4", "kvfold-5", "oscar-4")):
        new = _fill(format, 250, n, dims=dims)
        q = 3 * torch.randn(2, 2 * repeat, n, dims[0], generator=torch.Generator().manual_seed(0))
        _close(*_both(new, q))


@pytest.mark.parametrize("format", ["centred-4", "turboquant-3"])
def test_masks_caps_and_sinks(format: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for n in (1, 60):
        new = _fill(format, 260, n)
        q = 3 * torch.randn(2, 6, n, 64, generator=generator)
        for shape in ((1, 1, n, 260), (2, 1, n, 260), (2, 6, n, 260)):
            mask = torch.rand(shape, generator=generator) < 0.7
            mask[..., :1, :] = False  # a query that may look nowhere
            _close(*_both(new, q, mask=mask))
            _close(*_both(new, q, mask=mask.transpose(2, 3).contiguous().transpose(2, 3)))
        got, expected = _both(new, q, mask=torch.zeros(1, 1, n, 260, dtype=torch.bool))
        assert not got.any()
        assert not expected.any()
        _close(*_both(new, q, softcap=2.0))
        _close(*_both(new, q, sink_logits=torch.randn(6, generator=generator)))


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-3"])
def test_masks_that_only_say_where_to_stop(format: str, isa: str) -> None:
    """As causal ones do, for all heads or for each, they cost nothing; one that hides more, anywhere, is looked at."""
    generator = torch.Generator().manual_seed(0)
    for n in (1, 90):
        new = _fill(format, 400, n)
        q = 3 * torch.randn(2, 6, n, 64, generator=generator)
        causal = torch.ones(n, 400, dtype=torch.bool).tril(400 - n)
        expected, _ = _both(new, q, isa)
        for mask in (causal[None, None], causal.expand(2, 6, n, 400), causal.expand(2, 6, n, 400).contiguous()):
            got, _ = _both(new, q, isa, mask=mask)
            assert torch.equal(got, expected)
        for hidden in ((1, 4, -1, 9), (0, 0, 0, slice(0, 200)), (1, 5, 0, slice(300, 400))):
            mask = causal.repeat(2, 6, 1, 1)
            mask[hidden] = False
            got, expected_then = _both(new, q, isa, mask=mask)
            _close(got, expected_then)
            assert not torch.equal(got[hidden[:2]], expected[hidden[:2]])
        short = causal[None, None, :, :350]  # positions beyond a mask are hidden
        got, expected_then = _both(new, q, isa, mask=torch.cat((short, torch.zeros(1, 1, n, 50, dtype=torch.bool)), -1))
        _close(got, expected_then)


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (80, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_of_what_stays_dense(dtype: torch.dtype, dims: tuple[int, int], isa: str) -> None:
    """Few query rows and many, over dense tokens alone and beside folded ones; whole vectors of channels, or parts."""
    generator = torch.Generator().manual_seed(0)
    for tokens, n, repeat in ((61, 1, 1), (61, 1, 7), (61, 3, 2), (61, 1, 9), (150, 1, 8), (150, 1, 9), (150, 150, 2)):
        key, value = (torch.randn(1, 2, tokens, dim, generator=generator).to(dtype) for dim in dims)
        cache = LayerCache(LayerConfig("centred-4", dense_dtype=dtype))
        if tokens > n:
            cache.append(key[:, :, :-n], value[:, :, :-n])
        new = cache.append(key[:, :, -n:], value[:, :, -n:])
        folded = cache.groups[0].rows.keys.count
        assert bool(folded) == (tokens > 61)
        got, expected = _both(new, torch.randn(1, 2 * repeat, n, dims[0], generator=generator), isa)
        _close(got, expected, isa if folded else "")  # dense tokens are multiplied as floats


def test_views_of_any_stride() -> None:
    """Keys as models give them: (batch, tokens, heads, dim) transposed."""
    key, value = torch.randn(2, 2, 90, 3, 64, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    new = LayerCache(LayerConfig("centred-4")).append(key, value)
    q = torch.randn(2, 90, 6, 64).transpose(1, 2)
    _close(*_both(new, q))


def test_one_thread_and_many_agree() -> None:
    new = _fill("centred-4", 3000, 1)
    q = torch.randn(2, 6, 1, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _both(new, q)[0]
        torch.set_num_threads(4)
        _close(_both(new, q)[0], alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
def test_its_own_error_is_invisible_beside_the_codec(isa: str) -> None:
    """At most 1 % of the power of the codec's error, for every format, 8 bits included."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 2, 1000, 64, generator=generator)
    q = torch.randn(1, 6, 1, 64, generator=generator)
    scores = q.double() @ key.double().repeat_interleave(3, 1).mT / 8
    dense = scores.softmax(-1) @ value.double().repeat_interleave(3, 1)
    formats = "turboquant-8 centred-8 kvfold-5 centred-5 turboquant-4 centred-4 centred-3 turboquant-2 centred-1"
    for format in formats.split():
        new = LayerCache(LayerConfig(format)).append(key, value)
        rows, span = new.layer.groups[0].rows, new.dense[0]
        fast = cpu.attend_rows(q, rows, span, scaling=1 / 8, instruction_set=isa).double()
        exact = reference.attend_rows(q.double(), new.layer.groups[0].rows, new.dense[0], scaling=1 / 8)
        own, codec = (fast - exact).square().sum(), (exact - dense).square().sum()
        assert own < 0.01 * codec, (format, (own / codec).item())


@pytest.mark.parametrize("isa", cpu.INTEGER_SETS)
@pytest.mark.parametrize(
    "format",
    [
        "kvfold-5",
        "kvfold-4",
        "kvfold-3",
        "kvfold-2",
        "kvfold-1",
        "kvfold-3:float16",
        "centred-5",
        "centred-4",
        "turboquant-4",
        "turboquant-3",
        "q4_0:q8_0",
        "tbqp4:tbq4",
        "tbq4:tbq3",
        "affine-4g32",
        "affine-5g32",
        "uniform-4",
        "uniform-3r",
        "turboquant-4+qjl:turboquant-3+sign",
        "turboquant-2.5",
    ],
)
def test_its_own_error_on_real_heads(format: str, isa: str, real_heads: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Again at most 1 %, over the last 100 queries, where outliers and channels of all sizes are what they are."""
    if isa not in cpu.INSTRUCTION_SETS:
        pytest.skip(f"this machine does not run {isa}")
    own = codec = 0.0
    for query, key, value in real_heads:
        cache = LayerCache(LayerConfig(format))
        cache.observe(query[:, :, :900], cache.append(key[:, :, :900], value[:, :, :900]))
        new = cache.append(key[:, :, 900:], value[:, :, 900:])
        rows, span, q = new.layer.groups[0].rows, new.dense[0], query[:, :, 900:]
        fast = cpu.attend_rows(q, rows, span, scaling=1 / 8, instruction_set=isa).double()
        exact = reference.attend_rows(q.double(), rows, span, scaling=1 / 8)
        full = torch.ones(100, 1000, dtype=torch.bool).tril(900)
        dense = scaled_dot_product_attention(
            q.double(), key.double(), value.double(), attn_mask=full, scale=1 / 8, enable_gqa=True
        )
        own += (fast - exact).square().sum().item()
        codec += (exact - dense).square().sum().item()
    assert own < 0.01 * codec, own / codec


@torch.no_grad()
def test_kl_of_a_model_is_that_of_the_reference(
    small: tuple[PreTrainedModel, PreTrainedTokenizerBase], fixed_text: str
) -> None:
    """Within 2 %, over the same pages: each part is read by both, from one cache (benchmarks/kernel_error.py)."""
    model, tokenizer = small
    detach(model)
    ids = tokenizer(fixed_text, return_tensors="pt").input_ids[:, :872]
    cache, dense = FoldedCache(model.config, "kvfold-2"), DynamicCache(config=model.config)
    kl: dict[str, list[Tensor]] = {"reference": [], "cpu": []}

    def log_p(part: Tensor, held: Cache, backend: str | None = None) -> Tensor:
        attach(model, backend)
        out = model(part, past_key_values=held, use_cache=True).logits[0].log_softmax(-1)
        detach(model)
        return out

    for part in (ids[:, :40], *ids[:, 40:].split(64, 1)):
        expected = log_p(part, dense)
        for backend, held in (("reference", copy.deepcopy(cache)), ("cpu", cache)):
            kl[backend].append((expected.exp() * (expected - log_p(part, held, backend))).sum(-1))
    exact, fast = (torch.cat(own).mean().item() for own in kl.values())
    assert exact > 1e-4
    assert fast == pytest.approx(exact, rel=0.02)


def test_a_call_that_it_does_not_take_says_why() -> None:
    new = _fill("centred-4", 20, 1)
    q = torch.randn(2, 6, 1, 64)
    rows = new.layer.groups[0].rows
    assert cpu.why_not(q, rows, torch.zeros(1, 1, 1, 20)) == (
        "the CPU kernel takes masks of bool, and this is one of torch.float32"
    )
    assert "no queries of torch.float64" in cpu.why_not(q.double(), rows, None)
    with pytest.raises(ValueError, match="this machine does not run nope"):
        _both(new, q, "nope")


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("parts", [(), ("offset",), ("centre", "channel_scale"), ("offset", "centre", "channel_scale")])
@pytest.mark.parametrize("widths", ["narrow", "wide", "any"])
def test_every_term_of_the_page_form(parts: tuple[str, ...], groups: int, isa: str, widths: str) -> None:
    """Pages that no format of today makes: offsets, channel scales, groups of channels, bits that differ.

    Narrow and wide ones are read as integers, if the value has no channel scales; wide ones, whose queries and weights
    have two bytes and whose levels are exact, with hardly an error.
    """
    generator = torch.Generator().manual_seed(0)
    new = _fill("centred-4", 300, 1)
    rows = new.layer.groups[0].rows
    stores = []
    for name, old in (("keys", rows.keys), ("values", rows.values)):
        wide = (7, 6, 5, 7) if name == "keys" else (5, 4, 1, 2)
        bits = {"narrow": (4, 3, 1, 2), "wide": wide, "any": (8, 5, 3, 6)}[widths]
        lut = torch.randn(4, 256, generator=generator)
        if widths == "wide":  # even levels, and others on a grid of eight bits
            for row, width in zip(lut, bits, strict=True):
                numbers = torch.randint(-126, 127, (2**width,), generator=generator).sort().values
                numbers[0], numbers[-1] = -127, 127
                row[: 2**width] = (torch.linspace(-127, 127, 128) if width == 7 else numbers) / 40
        form = PageForm(64, 64, bits, lut, old.form.transform, old.form.lanes, (64 // groups,) * groups)
        shape = (2, 2, old.count, 64)
        code = torch.rand(*shape, 64, generator=generator) * 2.0 ** torch.tensor(bits).repeat_interleave(16)
        optional = {
            "offset": torch.randn(*shape, groups, generator=generator).half(),
            "centre": torch.randn(2, 2, old.count, 64, generator=generator).half(),
            "channel_scale": torch.rand(2, 2, old.count, 64, generator=generator).half(),
        }
        scale = torch.rand(*shape, groups, generator=generator).half()
        codes = TokenCodes(code.to(torch.uint8), scale, **{part: optional[part] for part in parts})
        store = PageStore(form).with_pages(form.pack(codes))
        stores.append(store)
        fits = isa in cpu.INTEGER_SETS and widths != "any" and not (name == "values" and "channel_scale" in parts)
        assert module.in_integers(isa, side_of(store)) == fits
    rows.stores = tuple(stores)
    for heads in (6, 14):  # a block of rows that is not full, and one after a full one
        q = 0.3 * torch.randn(2, heads, 1, 64, generator=generator)
        got, expected = _both(new, q, isa)
        _close(got, expected, "" if widths == "any" else isa)
        if widths == "wide":
            assert (got - expected).square().sum() <= 1e-8 * expected.square().sum()


def test_calls_that_would_read_astray_are_refused() -> None:
    new = _fill("centred-4", 100, 4)
    rows, dense = new.layer.groups[0].rows, new.dense[0]
    q = torch.randn(2, 6, 4, 64)
    for bad in (q[:, :5], q[:, :1], q[:, :, :0], q.repeat(1, 1, 30, 1), q[:1], q[..., :32], q.repeat(1, 1, 1, 2)):
        with pytest.raises(ValueError, match="query has shape"):
            cpu.attend_rows(bad, rows, dense, scaling=1.0)
    with pytest.raises(ValueError, match=r"sink_logits has shape \(2,\): give one for each of the 6 heads"):
        cpu.attend_rows(q, rows, dense, scaling=1.0, sink_logits=torch.zeros(2))
    for shape in ((3, 1, 4, 100), (2, 2, 4, 100), (2, 6, 3, 100), (4, 100)):
        with pytest.raises(ValueError, match="mask has shape"):
            cpu.attend_rows(q, rows, dense, scaling=1.0, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="NaN or an infinity"):
        cpu.attend_rows(q / 0, rows, dense, scaling=1.0)
    with pytest.raises(ValueError, match=r"backend = 'cpu', but the CPU kernel takes no queries of torch.float64"):
        attend(q.double(), new, scaling=1.0, backend="cpu")


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_that_are_not_finite_are_refused(dtype: torch.dtype, isa: str) -> None:
    new = _fill("centred-4", 100, 1)
    for bad in (float("nan"), float("inf"), -float("inf")):
        q = torch.zeros(2, 6, 1, 64, dtype=dtype)
        q[1, 3, 0, 5] = bad
        with pytest.raises(ValueError, match="NaN or an infinity"):
            cpu.attend_rows(q, new.layer.groups[0].rows, new.dense[0], scaling=1.0, instruction_set=isa)


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
def test_a_query_in_one_channel_of_many(isa: str) -> None:
    """Rotated it is all of one sign and size, the most that sums of integers must hold."""
    for format in ("hadamard-5", "centred-6", "hadamard-4"):
        new = _fill(format, 200, 1, dims=(1024, 64))
        q = torch.zeros(2, 6, 1, 1024)
        q[..., 0] = 20
        _close(*_both(new, q, isa), isa)


def test_memory_that_moves_is_found_again() -> None:
    """As `share_memory_` and multiprocessing move it."""
    new = _fill("kvfold-4:turboquant-4", 300, 1)
    q = torch.randn(2, 6, 1, 64, generator=torch.Generator().manual_seed(0))
    before = _both(new, q)[0]
    rows = new.layer.groups[0].rows
    for form in (rows.keys.form, rows.values.form):
        for tensor in (form.lut, *form.transform.tensors()):
            tensor.untyped_storage().share_memory_()
    for store in (rows.keys, rows.values):
        for _, tensor in store.storage.tensors():
            tensor.untyped_storage().share_memory_()
    for tensor in (*rows.dense.sinks, *rows.dense.tail):
        tensor.untyped_storage().share_memory_()
    assert torch.equal(_both(new, q)[0], before)


def test_a_query_whose_memory_holds_the_opposite_sign() -> None:
    new = _fill("centred-4", 300, 1)
    q = torch.randn(2, 6, 1, 64, generator=torch.Generator().manual_seed(0))
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg()
    assert torch.equal(_both(new, negative)[0], _both(new, q)[0])


@pytest.mark.parametrize("isa", cpu.INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [64, 40])
def test_results_have_the_dtype_of_queries_rounded_once(dtype: torch.dtype, value_dim: int, isa: str) -> None:
    new = _fill("turboquant-4:centred-3", 200, 3, dims=(64, value_dim))
    q = torch.randn(2, 6, 3, 64).to(dtype)
    rows, dense = new.layer.groups[0].rows, new.dense[0]
    for query in (q, q[:, :, -1:], q.transpose(1, 2).contiguous().transpose(1, 2), -3e3 * q):
        exact, rounded = (
            cpu.attend_rows(x, rows, dense, scaling=1 / 8, instruction_set=isa) for x in (query.float(), query)
        )
        assert rounded.dtype == dtype
        assert rounded.shape == exact.shape == (2, 6, query.shape[2], value_dim)
        assert torch.equal(rounded, exact.to(dtype))
        assert rounded.transpose(1, 2).is_contiguous()  # as models want it


def test_results_lie_where_queries_do() -> None:
    new, q = _fill("centred-4", 200, 1), torch.randn(2, 6, 1, 64)
    rows, dense = new.layer.groups[0].rows, new.dense[0]
    expected = cpu.attend_rows(q, rows, dense, scaling=1 / 8)
    with torch.device("meta"):
        assert torch.equal(cpu.attend_rows(q, rows, dense, scaling=1 / 8), expected)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float16), (torch.float64, torch.float64)])
def test_sinks_that_the_kernel_takes_as_a_copy_are_copied_anew(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(0)
    dense_dtype = torch.float64 if dtypes[0] == torch.float64 else None
    layer = LayerCache(LayerConfig("centred-4", dense_dtype=dense_dtype))
    for crop in (None, 4, 4):
        if crop:
            layer.crop(crop)
        key, value = (torch.randn(1, 2, 30, 64, generator=generator).to(dtype) for dtype in dtypes)
        new = layer.append(key, value)
        _close(*_both(new, torch.randn(1, 4, 30, 64, generator=generator)))


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4"])
def test_memory_that_is_given_back_is_free(format: str) -> None:
    """Whatever is remembered of where pages lie."""
    new = _fill(format, 700, 1)
    q = torch.randn(2, 6, 1, 64, generator=torch.Generator().manual_seed(0))
    _both(new, q)
    rows = new.layer.groups[0].rows
    held = [ref(tensor) for pages in rows.pages() for _, tensor in pages.tensors()]
    new.layer.crop(200)
    assert not any(tensor() is not None for tensor in held)
    new.layer.append(torch.ones(2, 2, 1, 64), torch.ones(2, 2, 1, 64))
    _close(*_both(new.layer.append(torch.ones(2, 2, 1, 64), torch.ones(2, 2, 1, 64)), q))


def test_what_layers_get_is_read_as_integers() -> None:
    for bits, dim in product(range(1, MOST + 1), (40, 64, 80, 96, 128, 256)):
        formats = get_formats(f"kvfold-{bits}", dim, dim)
        read = [cpu.reads_as(side, isa) for side in (formats.keys, formats.values) for isa in cpu.INSTRUCTION_SETS]
        assert read == ["integers" if isa in cpu.INTEGER_SETS else "floats" for isa in cpu.INSTRUCTION_SETS] * 2


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4+qjl", "turboquant-8", "float16:hadamard-3"])
def test_what_it_says_of_a_format(format: str) -> None:
    formats = get_formats(format, 64, 64)
    best = cpu.INSTRUCTION_SETS[0]
    integers = best in cpu.INTEGER_SETS
    keys, values = {
        "kvfold-4": (True, True), "turboquant-4+qjl": (True, True), "turboquant-8": (False, False),
        "float16:hadamard-3": (False, True),
    }[format]  # fmt: skip
    assert cpu.reads_as(formats.keys) == ("integers" if integers and keys else "floats")
    assert cpu.reads_as(formats.values) == ("integers" if integers and values else "floats")


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    new = _fill("centred-4", 20, 1)
    q = torch.randn(2, 6, 1, 64)
    dispatch.warn_once.cache_clear()
    for _ in range(3):
        attend(q, new, scaling=0.1, mask=torch.zeros(1, 1, 1, 20))
        attend(q.double(), new, scaling=0.1)  # the reference by right: it alone computes in float64
    assert [record.message for record in caplog.records] == [
        "attention runs in the reference implementation, which is slow: the CPU kernel takes masks of bool, and this "
        "is one of torch.float32"
    ]
    with pytest.raises(ValueError, match="backend = 'nope': choose one of cpu, triton, reference"):
        attend(q, new, scaling=0.1, backend="nope")
