"""polar4 and polar4-u8 against pypto-lib: its forward pass, its roundings, its stacked cache and its rotations."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import golden_forward
import pytest
import torch
import transformers
from golden_forward import Golden, Stream
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import DynamicCache, PreTrainedModel, Qwen3ForCausalLM

import kvfold
from kvfold import FoldedCache, Policy
from kvfold.attention import attend
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.rows import FoldedRows
from kvfold.formats import Format
from kvfold.formats.polar4 import Polar4
from kvfold.quant.transforms import Transform

FORMATS = ["polar4-u8", "polar4"]
LAYERS = 3
PROMPT, STEPS = 150, 20
IN_STEPS = [PROMPT, *[1] * STEPS]


def polar(name: str, layer: int = 0) -> Polar4:
    """The format `name` in a layer."""
    fmt = kvfold.get_format(name, 128).at(layer, None)
    assert isinstance(fmt, Polar4)
    return fmt


def rotation_of(fmt: Format) -> Tensor:
    """R, which multiplies vectors from the right there."""
    transform = fmt.form.transform
    assert isinstance(transform, Transform)
    return transform.matrix.mT


def indices_of(blocks: Tensor) -> Tensor:
    """Indices, uint8 (…, 128), of rows (…, 132 or 68) or of their index bytes (…, 128 or 64)."""
    code = blocks[..., : blocks.shape[-1] // 64 * 64]
    return code if code.shape[-1] == 128 else torch.cat((code & 15, code >> 4), -1)


# ---------------------------------------------------------------- the forward pass


@dataclass
class Run:
    """What a model made of the tokens: logits (tokens, vocabulary), and the residual stream after each layer."""

    logits: Tensor
    hidden: list[Tensor]

    def parts(self) -> Iterator[Tensor]:
        """The residual stream after each layer, and the logits."""
        yield from (*self.hidden, self.logits)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A random Qwen3 in which layers add to the residual stream little by little, as they do in trained models."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.copy_(1 + 0.3 * torch.randn_like(weight))
        elif "embed_tokens" in name:
            weight.normal_()
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Random tokens, (1, tokens)."""
    return torch.randint(1, 256, (1, PROMPT + STEPS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def golden(model: PreTrainedModel, ids: Tensor) -> tuple[Golden, Run]:
    """The golden forward, its cache full, and what it made."""
    forward = Golden.of(model, PROMPT + STEPS)
    parts = []
    for chunk in ids[0].split(IN_STEPS):
        parts.append((forward.forward(chunk), *forward.hidden))
    logits, *hidden = map(torch.cat, zip(*parts, strict=True))
    return forward, Run(logits, hidden)


def run(model: PreTrainedModel, ids: Tensor, cache: transformers.Cache, chunks: list[int]) -> Run:
    """The model itself, with a cache of its own."""
    hidden: list[list[Tensor]] = [[] for _ in model.model.layers]

    def keep(layer: int, module: object, args: object, output: Tensor) -> None:
        hidden[layer].append(output[0])

    hooks = [layer.register_forward_hook(partial(keep, i)) for i, layer in enumerate(model.model.layers)]
    logits = [model(chunk, past_key_values=cache).logits[0] for chunk in ids.split(chunks, dim=1)]
    for hook in hooks:
        hook.remove()
    return Run(torch.cat(logits), [torch.cat(own) for own in hidden])


@pytest.fixture(scope="module")
def dense(model: PreTrainedModel, ids: Tensor) -> Run:
    """The model with a cache that is not compressed."""
    return run(model, ids, DynamicCache(config=model.config), IN_STEPS)


@pytest.fixture(scope="module", params=[None, "reference"], ids=["fastest", "reference"])
def backend(request: pytest.FixtureRequest, model: PreTrainedModel) -> Iterator[str | None]:
    """The model attached, by each backend in turn."""
    assert kvfold.attach(model, request.param)
    yield request.param
    kvfold.detach(model)


@pytest.fixture(scope="module", params=FORMATS)
def folded(
    request: pytest.FixtureRequest, model: PreTrainedModel, ids: Tensor, dense: Run, backend: str | None
) -> tuple[FoldedCache, Run]:
    """A folded cache, full, and what the attached model made with it."""
    cache = FoldedCache(model.config, request.param)
    return cache, run(model, ids, cache, IN_STEPS)


def rows_of(cache: FoldedCache, layer: int) -> FoldedRows:
    """What a layer holds."""
    return cache.layers[layer].folded.groups[0].rows


def worst_cosine(ours: Run, theirs: Run, tokens: slice) -> float:
    """The least cosine of any token, after any layer or in the logits."""
    pairs = zip(ours.parts(), theirs.parts(), strict=True)
    return min(cosine_similarity(a[tokens], b[tokens], dim=-1).min().item() for a, b in pairs)


class TestForward:
    """The seed's own validation; its cosines are of a whole pass, these of its worst token."""

    def test_prefill(self, folded: tuple[FoldedCache, Run], golden: tuple[Golden, Run], dense: Run) -> None:
        prompt = slice(PROMPT)
        assert worst_cosine(folded[1], golden[1], prompt) >= 0.9999
        assert worst_cosine(dense, golden[1], prompt) < 0.9999  # which so asks for the compressed prompt

    def test_decode(self, folded: tuple[FoldedCache, Run], golden: tuple[Golden, Run]) -> None:
        assert worst_cosine(folded[1], golden[1], slice(PROMPT, None)) >= 0.999

    @pytest.mark.parametrize("tokens", [slice(PROMPT), slice(PROMPT, None)], ids=["prefill", "decode"])
    def test_it_is_not_dense_attention(
        self, folded: tuple[FoldedCache, Run], golden: tuple[Golden, Run], dense: Run, tokens: slice
    ) -> None:
        """A prompt's queries read the compressed prompt too: what compression does to logits, it does in both."""
        ours, theirs, plain = (x.logits[tokens] for x in (folded[1], golden[1], dense))
        effect = (theirs - plain).norm()
        assert effect > 1e-3 * plain.norm()
        assert (ours - plain).norm() > 0.5 * effect
        assert (ours - theirs).norm() < 0.5 * effect

    @pytest.mark.parametrize("layer", range(LAYERS))
    def test_indices(self, folded: tuple[FoldedCache, Run], golden: tuple[Golden, Run], layer: int) -> None:
        rows = rows_of(folded[0], layer)
        sides = (
            (rows.keys, rows.formats.keys, golden[0].keys[layer]),
            (rows.values, rows.formats.values, golden[0].values[layer]),
        )
        for store, fmt, stream in sides:
            blocks = fmt.to_bytes(store.pages())[0, :, : PROMPT + STEPS]
            match = (indices_of(blocks) == stream.indices()).float().mean((0, 2))
            assert match[:PROMPT].mean() >= 0.976
            assert match[PROMPT:].mean() >= 0.976

    def test_bytes(self, folded: tuple[FoldedCache, Run]) -> None:
        """132 bytes a vector, 1.94 times less than bfloat16; 68 with two indices a byte."""
        rows = rows_of(folded[0], 0)
        for fmt, store in ((rows.formats.keys, rows.keys), (rows.formats.values, rows.values)):
            assert fmt.block_bytes == {8: 132, 4: 68}[fmt.bits]
            assert fmt.bytes_per_vector == fmt.block_bytes
            assert store.pages().nbytes == 2 * 3 * 64 * fmt.block_bytes  # heads, pages, tokens

    def test_a_prompt_in_chunks(
        self, model: PreTrainedModel, ids: Tensor, backend: str | None, golden: tuple[Golden, Run]
    ) -> None:
        chunks = run(model, ids, FoldedCache(model.config, "polar4"), [100, 1, 49, 20])
        assert worst_cosine(chunks, golden[1], slice(None)) >= 0.9999


def test_golden_forward_is_the_model(
    model: PreTrainedModel, ids: Tensor, dense: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache that keeps vectors as they are, it is the model's own forward pass."""
    streams: dict[int, list[Tensor]] = {}

    def append(self: Stream, x: Tensor) -> None:
        streams.setdefault(id(self), []).append(x)
        self.tokens += x.shape[1]

    monkeypatch.setattr(Stream, "append", append)
    monkeypatch.setattr(Stream, "read", lambda self: torch.cat(streams[id(self)], 1))
    forward = Golden.of(model, PROMPT + STEPS)
    logits = torch.cat([forward.forward(chunk) for chunk in ids[0].split(IN_STEPS)])
    torch.testing.assert_close(logits, dense.logits, atol=1e-4, rtol=0)


# ---------------------------------------------------------------- roundings


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_as_there(name: str) -> None:
    """`unfold_bfloat16` ends in a rounding that the golden numbers do not have; `unfold` rounds nowhere."""
    entry = json.loads(Path(__file__).with_name("golden_blocks.json").read_text())[name.replace("-", "_")]
    blocks = torch.tensor([[*bytes.fromhex(row)] for row in entry["blocks"]], dtype=torch.uint8)
    decoded = torch.tensor([[*bytes.fromhex(row)] for row in entry["decoded"]], dtype=torch.uint8).view(torch.float32)
    fmt = polar(name, entry["layer"])
    for row, x in zip(blocks, decoded, strict=True):
        pages = fmt.from_bytes(row[None])
        largest = x.abs().max().item()
        rounded = fmt.unfold_bfloat16(pages)[0]
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), x, atol=2e-4 * largest, rtol=2**-8)  # half an ulp
        assert (rounded == x.bfloat16()).float().mean() > 0.98
        torch.testing.assert_close(fmt.unfold(pages)[0], x, atol=4e-3 * largest, rtol=0)
        assert not torch.equal(fmt.unfold(pages)[0], rounded.float())


# ---------------------------------------------------------------- the stacked layout


def some_keys(kv_heads: int, tokens: int) -> Tensor:
    """Gaussian vectors of lengths from 2 to 100 that bfloat16 holds exactly, (kv_heads, tokens, 128)."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(kv_heads, tokens, 128, generator=generator)
    scale = torch.randn(kv_heads, tokens, 1, generator=generator).exp().clamp(0.2, 8)
    return (x * scale).bfloat16().float()


@pytest.mark.parametrize("tokens", [1, 128, 300])
@pytest.mark.parametrize("name", FORMATS)
class TestStacked:
    def test_rows_are_those_of_the_golden_forward(self, name: str, tokens: int) -> None:
        x = some_keys(3, tokens)
        stream = Stream.empty(golden_forward.rotation(2), 3, tokens)
        stream.append(x)
        fmt = polar(name, layer=2)
        pages = fmt.fold(x)
        codes, norms = fmt.to_stacked(pages)
        assert codes.shape == (-(-tokens // 128) * 3 * 128, fmt.block_bytes - 4)
        assert (indices_of(codes) == stream.codes).float().mean() >= 0.99
        assert ((indices_of(codes) > 0) & (stream.norms == 0)).sum() == 0  # nothing where there is no token
        torch.testing.assert_close(norms, stream.norms, rtol=1e-6, atol=0)
        read = fmt.unfold_bfloat16(pages).float()
        assert torch.isclose(read, stream.read(), rtol=2**-7).float().mean() >= 0.98  # where indices agree

    def test_there_and_back(self, name: str, tokens: int) -> None:
        fmt = polar(name, layer=1)
        pages = fmt.fold(some_keys(3, tokens))
        codes, norms = fmt.to_stacked(pages)
        used = (norms != 0).squeeze(-1)
        assert used.sum() == 3 * tokens
        codes[~used], norms[~used] = 255, torch.nan  # rows without a token may hold anything
        back = fmt.from_stacked(codes, norms, 3, tokens)
        assert back.tokens == tokens
        for (_, ours), (_, theirs) in zip(pages.tensors(), back.tensors(), strict=True):
            assert torch.equal(ours, theirs)

    def test_the_first_tokens_of_more(self, name: str, tokens: int) -> None:
        fmt = polar(name)
        x = some_keys(3, 300)
        codes, norms = fmt.to_stacked(fmt.fold(x))
        back = fmt.from_stacked(codes, norms, 3, tokens)
        assert torch.equal(fmt.to_bytes(back), fmt.to_bytes(fmt.fold(x))[:, :tokens])

    def test_wrong_shapes(self, name: str, tokens: int) -> None:
        fmt = polar(name)
        x = some_keys(3, tokens)
        codes, norms = fmt.to_stacked(fmt.fold(x))
        room = codes.shape[0] // 3
        for kv_heads, asked in ((3, room + 1), (3, 0), (3, -1), (7, 1)):
            with pytest.raises(ValueError, match="rows of both, norms float32, enough for tokens = "):
                fmt.from_stacked(codes, norms, kv_heads, asked)
        for bad in (norms[:-1], norms.squeeze(-1), norms.expand(-1, 2)):
            with pytest.raises(ValueError, match=r"norms are torch.float32 of the shape"):
                fmt.from_stacked(codes, bad, 3, tokens)
        with pytest.raises(ValueError, match=r"norms are torch.float32 of the shape"):
            fmt.from_stacked(codes[:-128], norms[:-128], 3, tokens)
        with pytest.raises(ValueError, match="blocks has shape"):
            fmt.from_stacked(codes[:, :-1], norms, 3, tokens)
        with pytest.raises(ValueError, match="pages have 2 leading dimensions"):
            fmt.to_stacked(fmt.fold(x[None]))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_over_the_same_vectors(name: str, backend: str) -> None:
    """Without the roundings of x̂ to bfloat16, of which there are two there."""
    key, value = some_keys(4, 300).split(2)
    q = 0.3 * torch.randn(4, 300, 128, generator=torch.Generator().manual_seed(3))
    keys, values = (Stream.empty(golden_forward.rotation(2), 2, 300) for _ in ("keys", "values"))
    keys.append(key)
    values.append(value)
    expected = golden_forward.attention(q, keys.read(), values.read(), torch.arange(300))
    appended = LayerCache(LayerConfig(name, index=2, dense_dtype=torch.bfloat16)).append(key[None], value[None])
    got = attend(q[None], appended, scaling=128**-0.5, backend=backend)[0]
    assert (got - expected).norm() < 0.006 * expected.norm()


def test_two_indices_a_byte() -> None:
    """Byte c = idx[c + 64] << 4 | idx[c]."""
    x = some_keys(2, 200)
    whole, _ = polar("polar4-u8").to_stacked(polar("polar4-u8").fold(x))
    packed, _ = polar("polar4").to_stacked(polar("polar4").fold(x))
    assert torch.equal(packed, whole[:, 64:] << 4 | whole[:, :64])
    with pytest.raises(ValueError, match="an index is 16, polar4-u8 has 16 levels"):
        polar("polar4-u8").from_stacked(torch.full((128, 128), 16, dtype=torch.uint8), torch.ones(128, 1), 1, 1)


# ---------------------------------------------------------------- rotations


def test_rotation_is_that_of_the_layer() -> None:
    """x·R there is Rᵀ·x here."""
    for layer in (0, 1, 39):
        r = golden_forward.rotation(layer)
        transform = polar("polar4", layer).form.transform
        assert torch.equal(rotation_of(polar("polar4", layer)), r)
        x = some_keys(1, 5)
        torch.testing.assert_close(transform.apply(x), x @ r)
        torch.testing.assert_close(transform.apply(x).norm(dim=-1), x.norm(dim=-1), rtol=0.01, atol=0)
        generator = torch.Generator().manual_seed(42 + 1000 * layer)
        in_float32, upper = torch.linalg.qr(torch.randn(128, 128, generator=generator))
        theirs = (in_float32 * upper.diagonal().sign()).bfloat16()
        assert (theirs != r).sum() < 64  # of 16,384: the last bit of bfloat16, where float32 was close to a tie
        torch.testing.assert_close(theirs.float(), r, rtol=2**-7, atol=1e-6)


def test_two_layers_differ() -> None:
    first, second = (rotation_of(polar("polar4", layer)) for layer in (0, 1))
    assert (first - second).abs().mean() > 0.05
    assert polar("polar4", 1) != polar("polar4", 0)


def rotations_of(cache: FoldedCache, layer: int) -> list[Tensor]:
    """R of keys and of values in a layer that holds tokens."""
    formats = rows_of(cache, layer).formats
    return [rotation_of(formats.keys), rotation_of(formats.values)]


@pytest.mark.parametrize("name", FORMATS)
def test_layer_numbers_reach_the_format(name: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Keys and values of a layer share its rotation, in a cache that was saved and loaded too."""
    cache = FoldedCache(model.config, name)
    for layer in range(LAYERS):
        cache.update(torch.ones(1, 2, 3, 128), torch.ones(1, 2, 3, 128), layer)
    cache.save(tmp_path / "cache.safetensors")
    for held in (cache, FoldedCache.load(tmp_path / "cache.safetensors")):
        for layer in range(LAYERS):
            for r in rotations_of(held, layer):
                assert torch.equal(r, golden_forward.rotation(layer))


def test_layer_numbers_are_the_models(model: PreTrainedModel) -> None:
    """A layer that stays dense, or has another format, keeps its number."""
    cache = FoldedCache(model.config, policy=Policy("polar4", dense_first=1, exceptions=[(1, "tq4:polar4")]))
    for layer in range(LAYERS):
        cache.update(torch.ones(1, 2, 3, 128), torch.ones(1, 2, 3, 128), layer)
    assert torch.equal(rotations_of(cache, 1)[1], golden_forward.rotation(1))
    assert torch.equal(rotations_of(cache, 2)[0], golden_forward.rotation(2))


def test_what_it_is_not() -> None:
    with pytest.raises(ValueError, match="head_dim = 64: polar4 rows are of 128"):
        Polar4(64, bits=4)
    with pytest.raises(ValueError, match="bits = 5: polar4 has 4, polar4-u8 has 8"):
        Polar4(128, bits=5)
