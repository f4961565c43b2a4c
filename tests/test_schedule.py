"""When tokens fold and what is read folded, in whole numbers, against rows that grow token by token."""

from hypothesis import given
from hypothesis import strategies as st

from kvfold.cache.schedule import Schedule
from kvfold.formats import Window

SCHEDULES = st.builds(
    Schedule,
    window=st.builds(Window, st.integers(0, 20), st.integers(0, 40), st.integers(0, 40)),
    page_size=st.sampled_from([16, 64]),
    fit_tokens=st.sampled_from([0, 100]),
    by_token=st.just(False),
)


@given(SCHEDULES, st.integers(1, 400))
def test_a_page_is_read_folded_from_the_moment_it_folds(schedule: Schedule, length: int) -> None:
    folded, stop = schedule.reads(length, length, evicted=0, dense_start=0, causal=True)
    for held in range(1, length + 1):
        assert folded[held - 1] == schedule.page_start(schedule.ripe(held))
        assert stop[held - 1] == held
        young = held - folded[held - 1]
        assert schedule.ripe(held) == 0 or young >= schedule.window.recent


@given(SCHEDULES, st.integers(1, 400), st.integers(1, 100), st.integers(1, 100), st.booleans())
def test_tokens_only_join_unless_something_folds_or_leaves(
    schedule: Schedule, length: int, n: int, before: int, at_once: bool
) -> None:
    """`n` tokens that come at once or one by one, after a pass of `before` tokens."""
    pages = schedule.ripe(length)
    start = schedule.tail_start(length, 0, pages, min(before, length))
    folds = schedule.ripe(length + n) > pages
    newest = n if at_once else 1
    leaves = schedule.tail_start(length + n, 0, pages, newest) > start
    joins = schedule.only_joins(n, length, 0, pages, start, False, None if at_once else 1)
    assert joins == (length >= schedule.window.sinks and not folds and not leaves)


@given(SCHEDULES, st.integers(1, 400), st.integers(0, 400), st.integers(1, 400))
def test_a_crop_within_the_newest_pass_leaves_what_a_shorter_text_holds(
    schedule: Schedule, length: int, cut: int, newest: int
) -> None:
    kept, newest = max(length - cut, 0), min(newest, length)
    pages = schedule.ripe(length)
    start = schedule.tail_start(length, 0, pages, newest)
    left = schedule.crop(kept, 0, pages, start)
    assert left.pages * schedule.page_size <= max(kept - schedule.window.sinks, 0)
    assert left.tail_start <= max(start, schedule.window.sinks)
    assert 0 <= left.reopened < schedule.page_size
    if cut <= min(newest, schedule.window.undo):
        assert (left.lost, left.reopened) == (0, 0)
        assert left.pages == schedule.ripe(kept)


def test_pages_of_kvfold_4() -> None:
    """Pages begin at slots 16, 80, 144, 208, 272: numbers that are counted by hand."""
    schedule = Schedule(Window(sinks=16, recent=48, undo=24), 64, 256, by_token=False)
    assert [schedule.ripe(length) for length in (255, 256, 319, 320)] == [0, 3, 3, 4]
    assert [schedule.ripe(length, evicted=100) for length in (155, 156)] == [0, 1]
    assert [schedule.tail_start(length, 0, 4, 1) for length in (320, 321)] == [208, 272]
    assert [schedule.tail_start(length, 0, 4, 100) for length in (343, 344)] == [208, 272]
    assert [schedule.only_joins(1, length, 0, 3, 208, False) for length in (318, 319)] == [True, False]
    assert schedule.reads(3, 321, 0, 0, causal=True) == ([208, 272, 272], [319, 320, 321])
    assert schedule.reads(3, 321, 0, 250, causal=False) == ([250, 272, 272], [321, 321, 321])
    assert schedule.reads(2, 156, 100, 0, causal=True) == ([16, 80], [155, 156])


def test_tokens_that_fold_one_by_one() -> None:
    schedule = Schedule(Window(sinks=4), 16, 0, by_token=True)
    assert [schedule.pages(length) for length in (0, 4, 5, 20, 21)] == [0, 0, 1, 1, 2]
    assert schedule.folded_stop(10, 1) == 10
    assert [schedule.only_joins(1, length, 0, 1, 4, False) for length in (4, 5, 19, 20)] == [False, True, True, False]
    assert schedule.reads(2, 30, 0, 30, causal=True) == ([30, 30], [29, 30])
