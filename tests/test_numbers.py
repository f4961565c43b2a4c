"""Numbers that ask for the impossible are refused where they are given, whatever asks for them."""

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

import kvfold
from kvfold import FoldedCache, Policy, QueryStatistics, SnapKV, StreamingLLM, TokenStore, TriAttention
from kvfold.cache.calibration import Calibration, Loss
from kvfold.cache.files.contents import Contents
from kvfold.evaluate.behaviour.needle import Needle
from kvfold.evaluate.compare import Executor
from kvfold.evaluate.sweep import Budgets, Steps
from kvfold.formats import KeyStatistics, Window, check_names, get_format
from kvfold.formats.base import LARGEST_PAGE
from kvfold.formats.before_rope import frequencies_of
from kvfold.formats.turboquant import TurboQuant

NO_NUMBERS = (nan, inf, True, "3", [3], 2**31, 10**400)
"""None of them is a number of anything, finite and of this world."""

STATISTICS = QueryStatistics(1, 4, 1e4, 1.0, torch.ones(2, 2, 4, 2))

WHOLE: list[tuple[Any, dict[str, Any], str, int]] = [
    *((Window, {}, name, 0) for name in ("sinks", "recent", "undo")),
    *((TurboQuant, {"head_dim": 64, "bits": 4}, name, least)
      for name, least in (("head_dim", 8), ("bits", 1), ("page_size", 16))),
    *((Policy, {"format": "kvfold-4"}, name, 0) for name in ("dense_first", "dense_last")),
    *((StreamingLLM, {"budget": 1000}, name, least)
      for name, least in (("budget", 261), ("keep_first", 0), ("recent", 1), ("interval", 1), ("segments", 0))),
    (StreamingLLM, {"budget": 1000, "interval": None}, "slack", 0),
    *((SnapKV, {"budget": 1000}, name, 1) for name in ("window", "kernel")),
    *((TokenStore, {"format": "turboquant-4", "layers": 1, "kv_heads": 1, "head_dim": 64}, name, 1)
      for name in ("layers", "kv_heads", "head_dim")),
    *((QueryStatistics, {"kv_heads": 1, "head_dim": 4, "rope_theta": 1e4, "attn_scale": 1.0,
                         "tables": STATISTICS.tables}, name, 1) for name in ("kv_heads", "head_dim")),
    (Needle, {}, "repeats", 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "others", "name", "least"), WHOLE)
def test_whole_numbers(kind: Any, others: dict[str, Any], name: str, least: int) -> None:
    for wrong in (*NO_NUMBERS, 2.5, float(least), least - 1, -(2**63)):
        with pytest.raises(ValueError, match=f"^{name} = "):
            kind(**{**others, name: wrong})


def test_numbers_of_numpy_are_kept_as_any(llama: Any, random_ids: Any, tmp_path: Any) -> None:
    """What takes them can be saved."""
    window = Window(np.int64(4), np.int32(24), np.uint8(24))
    assert {type(number) for number in (window.sinks, window.recent, window.undo)} == {int}
    policy = Policy("kvfold-3", dense_first=np.int64(1), exceptions=[(np.int64(2), "dense")], window=window)
    cache = FoldedCache(llama.config, policy=policy, eviction=StreamingLLM(budget=np.int64(300)))
    llama(random_ids(1, 330), past_key_values=cache)
    cache.save(tmp_path / "cache")
    assert FoldedCache.load(tmp_path / "cache").get_seq_length() == 330


@pytest.mark.parametrize("wrong", ["yes", "no", 1, 0, None, np.bool_(True)])
def test_true_or_false(llama: Any, wrong: Any) -> None:
    for name, make in {
        "sharpen": lambda: FoldedCache(llama.config, "tbq3", sharpen=wrong),
        "budgets": lambda: Policy("kvfold-4", budgets=wrong),
        "layer_budgets": lambda: TriAttention(STATISTICS, budget=1000, layer_budgets=wrong),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} = .*: give True or False"):
            make()


@pytest.mark.parametrize("wrong", [None, 5, "x", b"x", [[1.5]], {}])
def test_things_of_another_kind(llama: Any, random_ids: Any, tmp_path: Any, wrong: Any) -> None:
    cache = FoldedCache(llama.config, "kvfold-3")
    llama(random_ids(2, 100), past_key_values=cache)
    cache.save(tmp_path / "cache")
    calls: list[tuple[str, Any]] = [
        ("eviction = ", lambda: cache.evict(wrong)),
        ("indices", lambda: cache.batch_select_indices(wrong)),
        ("beam_idx", lambda: cache.reorder_cache(wrong)),
        ("tables", lambda: QueryStatistics(1, 4, 1e4, 1.0, wrong)),
    ]
    if wrong is not None:
        calls += [
            ("config is a", lambda: FoldedCache.load(tmp_path / "cache", config=wrong)),
            ("eviction = ", lambda: FoldedCache.load(tmp_path / "cache", eviction=wrong)),
            ("ids = ", lambda: cache.save(tmp_path / "cache", ids=wrong)),
        ]
    if not isinstance(wrong, str):
        calls += [("path = ", lambda: cache.save(wrong)), ("path = ", lambda: FoldedCache.load(wrong))]
        calls += [("calibration = ", lambda: FoldedCache(llama.config, calibration=wrong))] * (wrong is not None)
    for name, call in calls:
        with pytest.raises((TypeError, ValueError, IndexError), match=name):
            call()
    with pytest.raises(ValueError, match="tokens_to_remove = "):
        cache.crop(torch.tensor([1, 2]))
    for ids in (torch.ones(2, 100, dtype=torch.bool), -torch.ones(2, 100, dtype=torch.long)):
        with pytest.raises(ValueError, match="integers from 0 on"):
            cache.save(tmp_path / "cache", ids=ids)
    assert cache.get_seq_length() == 100


def test_calibrations_of_no_numbers() -> None:
    ones = torch.ones(3, 64)
    for wrong in (ones * nan, -ones, ones * inf):
        for name in ("query_energy", "key_variance", "energy"):
            statistics = KeyStatistics(**({"query_energy": ones, "key_variance": ones, "energy": ones} | {name: wrong}))
            with pytest.raises(ValueError, match=f"layer 0: {name} holds"):
                Calibration({0: statistics})
    for loss in (Loss(nan, 64), Loss(0.1, 0)):
        with pytest.raises(ValueError, match="layer 0: losses"):
            Calibration({0: KeyStatistics(ones, ones)}, losses={0: (loss, loss)})
    with pytest.raises(ValueError, match="about = "):
        Calibration({}, about={"tokens": 5})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: SnapKV(budget=1000, scaling=x), "scaling"),
        (frequencies_of, "rope_base"),
        *((lambda x, name=name: Budgets(**{name: x}), name) for name in Budgets.__dataclass_fields__),
        (lambda x: Needle(depths=(x,)), "depths"),
        (lambda x: Needle(lengths=(x,)), "lengths"),
        (lambda x: Steps(key_bits=(x,)), "key_bits"),
        (lambda x: Steps(page_sizes=(x,)), "page_sizes"),
        (lambda x: Policy("kvfold-4", exceptions=[(x, "dense")]), "exceptions: layer"),
        (lambda x: QueryStatistics(1, 4, x, 1.0, STATISTICS.tables), "rope_theta"),
        (lambda x: QueryStatistics(1, 4, 1e4, x, STATISTICS.tables), "attn_scale"),
        (lambda x: TriAttention(STATISTICS, budget=1000, frequencies=(x,)), "frequencies"),
        (lambda x: TriAttention(STATISTICS, budget=1000, turned_by=x), "turned_by"),
    ],
)
def test_other_numbers(make: Any, name: str) -> None:
    for wrong in (nan, -inf):
        with pytest.raises(ValueError, match=f"^{name}"):
            make(wrong)


@pytest.mark.parametrize(
    "name",
    [
        "kvfold-4@1000000000", "kvfold-4@9223372036854775808",
        f"turboquant-4@{LARGEST_PAGE + 16}", "float16@" + "9" * 5000,
        "kvfold-4@0", "kvfold-4@040", "kvfold-4@+64", "kvfold-4@٦٤", "kvfold-4@64.0", "kvfold-4@", "kvfold-4@6_4",
        "kvfold-04", "kvfold-٤", "kvfold-+4", "kvfold--4", "kvfold-4 ", " kvfold-4", "kvfold-4\n", "kvfold-0",
        "kvfold-9",
        "kvfold-" + "9" * 5000, "affine-04", "affine-٤", "affine-4g032", "affine-4g٣٢", "affine-4g" + "9" * 5000,
        "uniform-04", "uniform-٤", "turboquant-02.5", "tbq٣_1", "tbq3_٠", "", ":", "kvfold-4:", ":kvfold-4",
        "kvfold-4:kvfold-4@1000000000",
    ],
)  # fmt: skip
def test_names_of_formats(name: str, llama: Any) -> None:
    for refuse in (
        check_names,
        lambda name: FoldedCache(llama.config, name),
        lambda name: FoldedCache(llama.config, policy=Policy("kvfold-4", exceptions=[(0, name)])),
        lambda name: TokenStore(name, 1, 1, 64),
        lambda name: kvfold.get_formats(name, 64, 64),
    ):
        with pytest.raises(ValueError, match=r"format = |head_dim"):
            refuse(name)


@pytest.mark.parametrize("name", [None, 4, b"kvfold-4", ["kvfold-4"]])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(ValueError, match="format = "):
        Policy(name)


def test_the_longest_page_folds_and_is_read(random_ids: Any, llama: Any) -> None:
    name = f"turboquant-4@{LARGEST_PAGE}"
    cache = FoldedCache(llama.config, name)
    one = llama(random_ids(1, 40), past_key_values=cache).logits
    other = llama(random_ids(1, 40), past_key_values=FoldedCache(llama.config, "turboquant-4")).logits
    assert (one - other).abs().max() < 1e-3 * other.abs().max()
    assert get_format(name, 64).page_size == LARGEST_PAGE


def test_windows_of_files_are_bounded_as_others() -> None:
    with pytest.raises(ValueError, match="recent = 1048577"):
        Window(recent=2**20 + 1)
    with pytest.raises(ValueError, match="window is"):
        Contents({"window": [0, 2**31, 0]}).numbers("window", 3)


def test_what_is_no_executor() -> None:
    for wrong in ({"dtype": "int8"}, {"backend": "x"}):
        with pytest.raises(ValueError, match="choose one of"):
            Executor(**wrong)
