"""The folded cache of one layer: growth, cropping, rearranging, accounting."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cache.policy import Policy
from kvfold.cache.report import held_bytes, walk_tensors
from kvfold.cache.rows import FoldedRows
from kvfold.cache.store import PageStore
from kvfold.formats import get_format, get_formats
from kvfold.formats.base import PAGE_WINDOW

FORMATS = ["centred-4", "turboquant-4", "turboquant-4:centred-4"]


def _kv(batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, batch, 2, tokens, 64, generator=generator)
    return key.half().float(), value.half().float()


def _filled(format: str, key: Tensor, value: Tensor, steps: list[int] | None = None) -> LayerCache:
    cache, done = LayerCache(LayerConfig(format)), 0
    for n in steps or [key.shape[2]]:
        cache.append(key[:, :, done : done + n], value[:, :, done : done + n])
        done += n
    return cache


def _assert_same(a: LayerCache, b: LayerCache) -> None:
    assert a.columns == b.columns
    for x, y in zip(a.unfold(torch.float32), b.unfold(torch.float32), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=0)


@given(st.sampled_from(FORMATS), st.lists(st.integers(1, 150), min_size=1, max_size=8))
def test_how_tokens_come_does_not_matter(format: str, steps: list[int]) -> None:
    key, value = _kv(1, sum(steps))
    _assert_same(_filled(format, key, value, steps), _filled(format, key, value))


def test_dense_tokens_are_exact_and_folded_ones_are_not() -> None:
    sinks, stop = PAGE_WINDOW.sinks, PAGE_WINDOW.sinks + 4 * 64
    key, value = _kv(1, stop + PAGE_WINDOW.recent + 3)
    rows = _filled("centred-4", key, value).groups[0].rows
    # The last page is followed by enough tokens: folded, and dense still, as all came in one pass.
    assert (rows.keys.count, rows.folded_stop, rows.dense.tail_start) == (4, stop, stop - 64)
    for x, y in zip((key, value), rows.unfold(), strict=True):
        assert torch.equal(x[:, :, :sinks], y[:, :, :sinks])
        assert torch.equal(x[:, :, stop:], y[:, :, stop:])
        error = (x - y)[:, :, sinks:stop].square().mean() / x.square().mean()
        assert 0.005 < error < 0.02


def test_formats_that_fold_by_token_keep_nothing_dense() -> None:
    key, value = _kv(1, 70)
    rows = _filled("turboquant-4", key, value).groups[0].rows
    assert rows.dense.sinks is None
    assert rows.dense.tail is None
    assert rows.keys.count == 2
    fmt = get_format("turboquant-4", 64)
    torch.testing.assert_close(rows.unfold()[0], fmt.unfold(fmt.fold(key)))


@given(st.sampled_from(FORMATS), st.integers(1, 400), st.integers(0, 24), st.integers(0, 200))
def test_crop_and_go_on(format: str, tokens: int, cut: int, more: int) -> None:
    """Cropping up to 24 tokens leaves no trace."""
    key, value = _kv(1, tokens + more)
    keep = max(tokens - cut, 0)
    cache = _filled(format, key[:, :, :tokens], value[:, :, :tokens])
    assert cache.crop(keep) == 0
    assert cache.columns == keep
    if more:
        cache.append(key[:, :, keep : keep + more], value[:, :, keep : keep + more])
    if keep + more:
        _assert_same(cache, _filled(format, key[:, :, : keep + more], value[:, :, : keep + more]))


def test_crop_into_a_page_goes_on_from_folded_values() -> None:
    key, value = _kv(1, 300)
    cache = _filled("centred-4", key, value)
    before = cache.unfold(torch.float32)
    assert cache.crop(130) == 130 - PAGE_WINDOW.sinks - 64  # tokens of page 1; page 0 would be folded anyway
    after = cache.unfold(torch.float32)
    for x, y in zip(before, after, strict=True):
        torch.testing.assert_close(x[:, :, :130], y, atol=2e-3, rtol=1e-3)  # float16 of the unfolded
    cache.append(key[:, :, 130:], value[:, :, 130:])
    assert cache.columns == 300
    error = (cache.unfold(torch.float32)[0] - key).square().mean() / key.square().mean()
    assert error < 0.02


@pytest.mark.parametrize("format", FORMATS)
def test_rows_can_be_reordered_repeated_and_dropped(format: str) -> None:
    key, value = _kv(4, 150)
    more = _kv(5, 70, seed=1)
    rows = torch.tensor([2, 2, 0, 3, 2])
    cache = _filled(format, key, value)
    cache.select(rows)
    cache.append(*more)
    _assert_same(cache, _filled(format, torch.cat((key[rows], more[0]), 2), torch.cat((value[rows], more[1]), 2)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_padded_row_is_what_it_is_alone(format: str) -> None:
    key, value = _kv(3, 200)
    padding = [0, 61, 130]
    cache, done = LayerCache(LayerConfig(format)), 0
    for n in (100, 1, 99):
        cache.append(key[:, :, done : done + n], value[:, :, done : done + n], padding)
        done += n
    cache.select(torch.tensor([2, 1, 0]))
    together = cache.unfold(torch.float32)
    for row, p in enumerate(padding):
        alone = _filled(format, key[row : row + 1, :, p:], value[row : row + 1, :, p:]).unfold(torch.float32)
        for x, y in zip(together, alone, strict=True):
            torch.testing.assert_close(x[2 - row : 3 - row, :, p:], y, atol=1e-6, rtol=0)
            assert (x[2 - row, :, :p] == 0).all()


def test_storage_grows_ahead_but_not_far() -> None:
    store = PageStore(get_format("centred-4", 64).form)
    fmt = get_format("centred-4", 64)
    page = fmt.fold(torch.randn(1, 2, 64, 64))
    moves, where = 0, 0
    for _ in range(2000):
        store = store.with_pages(page)
        assert store.storage is not None
        moves += store.storage.code.data_ptr() != where
        where = store.storage.code.data_ptr()
        assert store.storage.code.shape[2] <= store.count * 65 / 64 + 1
    assert moves < 400  # 2,000 if every append copied
    store = store.first(10)
    assert store.storage is not None
    assert store.storage.code.shape[2] == 10  # given back


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4"])
def test_older_stores_keep_no_smaller_storage(format: str) -> None:
    """A forward pass can be undone without holding all pages twice."""
    fmt = get_format(format, 64)
    pages = [fmt.fold_from(torch.randn(1, 2, 5 * fmt.page_size, 64)) for _ in range(2)]
    older = PageStore(fmt.form).with_pages(pages[0])
    before = [t.clone() for _, t in older.pages().tensors()]
    newer = older.with_pages(pages[1])
    assert held_bytes(older, newer) == held_bytes(newer) > held_bytes(before)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, older.pages().tensors(), strict=True))
    assert held_bytes(older.trimmed().pages()) == held_bytes(before)
    assert newer.trimmed() is newer


@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4", "tbq3"])
def test_going_back_gives_back_the_room_of_later_tokens(format: str) -> None:
    key, value = torch.randn(2, 1, 2, 2000, 64)
    cache = _filled(format, key[:, :, :900], value[:, :, :900])
    state, bytes_before, before = cache.state(), held_bytes(cache), cache.unfold(torch.float32)
    cache.append(key[:, :, 900:], value[:, :, 900:])
    assert held_bytes(cache) > 1.5 * bytes_before
    cache.restore(state)
    assert held_bytes(cache) <= bytes_before
    assert all(map(torch.equal, before, cache.unfold(torch.float32)))


def test_held_bytes_walks_real_storages() -> None:
    base = torch.zeros(1000)
    table = torch.zeros(10)
    assert held_bytes([base[:1], base[500:]], {"t": table}, (table, table)) == 4000 + 40
    key, value = _kv(1, tokens := PAGE_WINDOW.sinks + 64 + 56)
    rows = FoldedRows(get_formats("centred-4", 64, 64), kv_heads=2)
    rows.append(key, value, (torch.float32, torch.float32))
    dense = 2 * 2 * tokens * 64 * 4  # keys and values, two heads, sinks and the tail, float32
    page = 2 * 2 * (64 * (32 + 2) + 128)  # codes and scale a token, a centre
    tables = 64 * 4 + 2 * 4 * 16 * 4  # the signs of one shared rotation; a level table each
    assert held_bytes(rows) == dense + page + tables
    assert all(isinstance(t, Tensor) for t in walk_tensors(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_graph_grows_with_the_cache(dtype: torch.dtype) -> None:
    key, value = (x.to(dtype).requires_grad_() for x in _kv(1, 120))
    cache = LayerCache(LayerConfig("centred-4"))
    for t in (slice(0, 110), *(slice(i, i + 1) for i in range(110, 120))):
        cache.append(key[:, :, t], value[:, :, t])
    assert not any(t.requires_grad for t in walk_tensors(cache))
    assert copy.deepcopy(cache).columns == 120


def test_tokens_that_are_no_plain_numbers_join_as_what_they_stand_for() -> None:
    key, value = _kv(1, 41)
    plain, other = LayerCache(LayerConfig("centred-4")), LayerCache(LayerConfig("centred-4"))
    for cache in (plain, other):
        cache.append(key[:, :, :40], value[:, :, :40])
    plain.append(key[:, :, 40:], value[:, :, 40:])
    imaginary = [torch.complex(torch.zeros_like(x), -x).conj().imag for x in (key[:, :, 40:], value[:, :, 40:])]
    assert imaginary[0].is_neg()  # its memory holds the opposite sign
    other.append(*imaginary)
    for a, b in zip(plain.groups[0].rows.dense.tail, other.groups[0].rows.dense.tail, strict=True):
        assert torch.equal(a, b)


def test_nothing_of_a_long_append_is_kept_alive() -> None:
    key, value = _kv(1, 2000)
    cache = _filled("centred-4", key, value)
    assert held_bytes(cache.groups) < (key.nbytes + value.nbytes) / 5
    assert not {t.untyped_storage().data_ptr() for t in walk_tensors(cache)} & {
        key.untyped_storage().data_ptr(),
        value.untyped_storage().data_ptr(),
    }


@pytest.mark.parametrize("format", FORMATS)
def test_a_refused_append_changes_nothing(format: str) -> None:
    key, value = _kv(2, 150)
    cache, twin = _filled(format, key, value), _filled(format, key, value)
    more_key, more_value = _kv(2, 130, seed=1)
    broken = more_value.clone()
    broken[1, 0, 77, 5] = float("nan")
    with pytest.raises(ValueError, match=r"layer 0: value at position 227 \(row 1, head 0, channel 5\) is nan"):
        cache.append(more_key, broken)
    huge = more_key.clone()
    huge[0, 1, 10] = 50_000.0  # each fits into float16, their norm does not
    with pytest.raises(ValueError, match="layer 0: the scale of a page is beyond float16"):
        cache.append(huge, more_value)
    _assert_same(cache, twin)
    cache.append(more_key, more_value)
    twin.append(more_key, more_value)
    _assert_same(cache, twin)


def test_errors() -> None:
    key, value = _kv(2, 20)
    cache = LayerCache(LayerConfig("centred-4", index=7))
    with pytest.raises(ValueError, match=r"layer 7: key \(2, 2, 20, 64\) and value \(2, 2, 19, 64\) must both"):
        cache.append(key, value[:, :, 1:])
    with pytest.raises(TypeError, match=r"key is torch\.int64"):
        cache.append(key.long(), value)
    with pytest.raises(ValueError, match=r"is -?inf: the model's own computation broke"):
        cache.append(key / 0, value)
    with pytest.raises(ValueError, match=r"is 1000000\.0: too large for torch.float16; pass dense_dtype=torch.float32"):
        cache.append(torch.full_like(key, 1e6), value)
    with pytest.raises(ValueError, match="padding has 3 entries for a batch of 2"):
        cache.append(key, value, [0, 0, 0])
    assert cache.columns == 0
    cache.append(key, value)
    with pytest.raises(ValueError, match="key has batch 1, the cache holds 2 rows"):
        cache.append(key[:1], value[:1])
    with pytest.raises(ValueError, match="1 heads of 64, the cache holds 2 heads of 64: was it filled by another"):
        cache.append(key[:, :1], value[:, :1])
    with pytest.raises(ValueError, match="key is on meta, the cache is on cpu"):
        cache.append(key.to("meta"), value.to("meta"))
    with pytest.raises(ValueError, match=r"key is torch.bfloat16, the cache keeps its dense tokens as torch.float16"):
        cache.append(key.bfloat16(), value.bfloat16())
    assert cache.columns == 20


def test_policies() -> None:
    policy = Policy("centred-4", dense_first=2, dense_last=1, exceptions=[(5, "turboquant-8"), (-2, "dense")])
    assert [policy.format_of(i, 10) for i in range(10)] == [
        None, None, "centred-4", "centred-4", "centred-4", "turboquant-8", "centred-4", "centred-4", None, None,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="dense_first = -1"):
        Policy("centred-4", dense_first=-1)
    with pytest.raises(ValueError, match="'nope' is not known"):
        Policy("centred-4", exceptions=[(0, "nope")])
    with pytest.raises(ValueError, match="exceptions name layer 12: the model has layers 0 to 9"):
        Policy("centred-4", exceptions=[(12, "dense")]).format_of(0, 10)
