"""Tokens that fold one by one: straight into their pages, against pages folded whole."""

import copy
from itertools import count

import pytest
import torch
from interrupts import interrupted_at
from torch import Tensor

from kvfold.attention.cpu import INSTRUCTION_SETS
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.rows import FoldedRows
from kvfold.formats import get_format
from kvfold.formats.page import Pages
from kvfold.kernels.cpu.tokens import TokenFolder, TokenPages

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.float16)


def _empty(name: str, dim: int, lanes: str, pages: int = 2) -> tuple[TokenPages, Pages]:
    """Pages of 3 × 2 heads that hold nothing yet."""
    fmt = get_format(name, dim, lanes=lanes)
    held = fmt.fold_from(torch.zeros(3, 2, pages * fmt.page_size, dim))
    for _, tensor in held.tensors():
        tensor.zero_()
    how = fmt.token_code(torch.device("cpu"))
    assert how is not None
    assert held.scale is not None
    return TokenPages(how, fmt.lanes, held.code, held.scale), held


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize(
    ("name", "dim"), [("turboquant-4", 64), ("turboquant-1@16", 80), ("hadamard-3", 96), ("turboquant-8@32", 128)]
)
def test_token_by_token_is_page_by_page(name: str, dim: int, lanes: str, isa: str) -> None:
    generator = torch.Generator().manual_seed(0)
    fmt = get_format(name, dim, lanes=lanes)
    for dtype in DTYPES:
        for given in DTYPES:
            pages, held = _empty(name, dim, lanes)
            folder = TokenFolder([pages], isa)
            x = torch.randn(3, 2 * fmt.page_size, 2, dim, generator=generator).to(given).transpose(1, 2)
            order = torch.randperm(x.shape[2], generator=generator).tolist()
            for token in order:
                page, slot = divmod(token, fmt.page_size)
                assert folder.fold([x[:, :, token : token + 1]], [dtype], page, slot)
            expected = fmt.fold_from(x.to(dtype))
            if isa == INSTRUCTION_SETS[0]:  # others round rotations otherwise
                assert torch.equal(held.code, expected.code)
                assert torch.equal(held.scale, expected.scale)
            held.tokens = expected.tokens
            difference = fmt.form.unfold(held) - fmt.form.unfold(expected)
            assert difference.square().sum() < 1e-3 * fmt.form.unfold(expected).square().sum()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5, 3e4])
def test_what_cannot_be_folded_changes_nothing(bad: float, isa: str) -> None:
    """Neither the side that it is on nor the other: 1e5 leaves float16 itself, 64 of 3e4 leave it as a norm."""
    for wrong in (0, 1):
        sides = [_empty("turboquant-4", 64, lanes) for lanes in ("tokens", "channels")]
        folder = TokenFolder([pages for pages, _ in sides], isa)
        x = [torch.ones(3, 2, 1, 64), torch.ones(3, 2, 1, 64)]
        x[wrong][2, 1] = bad
        assert not folder.fold(x, HALVES, 1, 7)
        assert not any(tensor.any() for _, held in sides for _, tensor in held.tensors())
    with pytest.raises(ValueError, match="does not fit into pages"):
        folder.fold([torch.ones(3, 2, 2, 64), torch.ones(3, 2, 1, 64)], HALVES, 0, 0)
    with pytest.raises(ValueError, match="there are 2 pages of 64"):
        folder.fold([torch.ones(3, 2, 1, 64), torch.ones(3, 2, 1, 64)], HALVES, 2, 0)


def _rows(cache: LayerCache) -> list[Tensor]:
    return [
        tensor
        for group in cache.groups
        for pages in group.rows.pages()
        if pages is not None
        for name, tensor in pages.map(lambda t, n=group.rows.keys.count: t[:, :, :n]).tensors()
    ]


@pytest.mark.parametrize("format", ["turboquant-4", "turboquant-3@32:hadamard-2@32", "turboquant-4+qjl", "uniform-4"])
@pytest.mark.parametrize("dtypes", [*((dtype, dtype) for dtype in DTYPES), (torch.bfloat16, torch.float16)])
def test_a_cache_holds_the_same_bytes(
    format: str, dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its tokens take the short way or the long one, padded rows among them, through crops and copies."""
    generator = torch.Generator().manual_seed(0)
    short, long = LayerCache(LayerConfig(format)), LayerCache(LayerConfig(format))
    short_ways = 0

    def append(n: int) -> None:
        nonlocal short_ways
        key, value = (torch.randn(3, n, 2, 64, generator=generator).to(dtype).transpose(1, 2) for dtype in dtypes)
        short_ways += bool(short.groups) and all(group.rows.only_joins(n) for group in short.groups)
        short.append(key, value, [0, 5, 0])
        with monkeypatch.context() as patch:
            patch.setattr(FoldedRows, "token_folder", lambda *args: None)
            long.append(key, value, [0, 5, 0])

    append(40)
    for step in range(60):
        append(1)
        if step == 20:
            for cache in (short, long):
                cache.crop(cache.columns - 7)
        if step == 30:
            for cache in (short, long):
                cache.select(torch.tensor([2, 1, 1]))
        if step == 45:
            keep = torch.rand(3, 2, 64, generator=generator).argsort(-1) < 20
            for cache in (short, long):
                for group in cache.groups:
                    assert group.rows.evictable(0) == 64
                    group.rows.evict(keep[: group.count], by_page=False)
    assert all(torch.equal(a, b) for a, b in zip(_rows(short), _rows(long), strict=True))
    assert (short_ways > 50) == ("uniform" not in format and "qjl" not in format)


@pytest.mark.parametrize("row", [0, 1])
def test_a_token_that_is_refused_leaves_no_trace(row: int) -> None:
    """The other row, which is a group of its own, may have had its part before."""
    generator = torch.Generator().manual_seed(0)
    cache = LayerCache(LayerConfig("turboquant-4"))
    cache.append(*torch.randn(2, 2, 2, 40, 64, generator=generator), [0, 3])
    for bad, message in ((float("nan"), "is nan"), (3e4, "beyond float16")):
        before = [tensor.clone() for tensor in _rows(cache)]
        key, value = torch.randn(2, 2, 2, 1, 64, generator=generator)
        value[row, 1] = bad
        assert all(group.rows.only_joins(1) for group in cache.groups)
        with pytest.raises(ValueError, match=message):
            cache.append(key, value)
        assert cache.columns == 40
        assert all(torch.equal(a, b) for a, b in zip(before, _rows(cache), strict=True))


@pytest.mark.parametrize("tokens", [1, 3])
def test_tokens_that_are_interrupted_leave_no_trace(tokens: int) -> None:
    """Nor in slots that the next token takes; one takes the short way."""
    generator = torch.Generator().manual_seed(0)
    filled = LayerCache(LayerConfig("turboquant-4"))
    filled.append(*torch.randn(2, 2, 2, 40, 64, generator=generator), [0, 3])
    key, value = torch.randn(2, 2, 2, tokens, 64, generator=generator)
    for line in count():
        cache = copy.deepcopy(filled)
        if not interrupted_at(line, lambda cache=cache: cache.append(key, value)):  # type: ignore[misc]
            break
        assert cache.columns == 40
        assert all(torch.equal(a, b) for a, b in zip(_rows(filled), _rows(cache), strict=True))
    assert line > 20
    assert cache.columns == 40 + tokens


def test_memory_that_moves_is_noticed() -> None:
    cache = LayerCache(LayerConfig("turboquant-4"))
    generator = torch.Generator().manual_seed(0)
    cache.append(*torch.randn(2, 1, 2, 40, 64, generator=generator))
    cache.append(*torch.randn(2, 1, 2, 1, 64, generator=generator))
    for pages in cache.groups[0].rows.pages():
        assert pages is not None
        for _, tensor in pages.tensors():
            tensor.share_memory_()
    key, value = torch.randn(2, 1, 2, 1, 64, generator=generator)
    assert cache.groups[0].rows.only_joins(1)
    cache.append(key, value)
    got = cache.unfold(torch.float32)[0][:, :, -1:]
    assert (got - key).square().sum() < 0.05 * key.square().sum()
