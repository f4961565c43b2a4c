"""Behaviour tasks: cases, scores, conversations, sums."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run_kvfold
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.evaluate.behaviour import TASKS, Case, Outcome, Task, Turn, notes_on, run_task, sum_up, table_of
from kvfold.evaluate.behaviour.arithmetic import Arithmetic
from kvfold.evaluate.behaviour.case import chat_turn, next_chat_turn
from kvfold.evaluate.behaviour.conversation import BATCH_TOKENS, batches, converse
from kvfold.evaluate.behaviour.divergence import Divergence
from kvfold.evaluate.behaviour.loops import Loop, find_loop
from kvfold.evaluate.behaviour.needle import Needle
from kvfold.evaluate.behaviour.recall import Recall
from kvfold.evaluate.behaviour.transliteration import Transliteration

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.mark.parametrize("name", TASKS)
def test_cases_are_the_same_each_time_and_their_names_differ(demo: Demo, name: str) -> None:
    task = TASKS[name]()
    cases = task.cases(demo[1], seed=3)
    assert cases == task.cases(demo[1], seed=3)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert set(task.group_by) <= set(case.about)


def test_needles_lie_where_they_are_said_to(demo: Demo) -> None:
    tokenizer = demo[1]
    task = Needle(lengths=(300, 900), depths=(0.0, 0.5, 1.0), repeats=2)
    cases = task.cases(tokenizer, seed=0)
    assert len(cases) == 12
    assert len({case.expected for case in cases}) == 12
    for case in cases:
        (turn,) = case.turns
        assert len(turn.ids) == case.about["length"]
        text = tokenizer.decode(turn.ids)
        at = len(tokenizer(text[: text.index(case.expected)]).input_ids)
        assert at / case.about["length"] == pytest.approx(case.about["depth"], abs=0.12)
        assert text.count(case.expected) == 1
        assert text.endswith(" is")
    with pytest.raises(ValueError, match="length = 10: too short"):
        Needle(lengths=(10,)).cases(tokenizer, seed=0)


def test_arithmetic_is_right(demo: Demo) -> None:
    for case in Arithmetic(fillers=(0, 500)).cases(demo[1], seed=1):
        lines = demo[1].decode(case.turns[0].ids).split("\n")[-4:]
        for line in [*lines[:-1], f"{lines[-1]} {case.expected}"]:
            question, answer = line.split(" = ")
            if case.about["kind"] == "scalar":
                assert eval(question) == int(answer)
            else:
                x, y = (np.array(json.loads(side)) for side in question.split(" * "))
                assert (x @ y).tolist() == json.loads(answer)
        assert len(case.turns[0].ids) >= case.about["filler"]
    counts = [case.about["kind"] for case in Arithmetic(fillers=(0,)).cases(demo[1], seed=1)]
    assert [counts.count(kind) for kind in ("2x2", "3x3", "scalar")] == [10, 10, 15]


@pytest.mark.parametrize(
    ("task", "expected", "answer", "score"),
    [
        (Needle(), "12345", " 12345.\n\nThe", 1),
        (Needle(), "12345", " 1234", 0),
        (Needle(), "12345", " 54321, not 12345", 0),
        (Arithmetic(), "[[1, 2], [3, 4]]", " [[1,2],[3,4]]\n[[9", 1),
        (Arithmetic(), "[[1, 2], [3, 4]]", " [[1, 2], [3, 5]]", 0),
        (Arithmetic(), "-4", " -4\n", 1),
        (Arithmetic(), "4", " -4\n", 0),
        (Recall(), "12345", " called 12345!", 1),
        (Recall(), "12345", " lost", 0),
        (Transliteration(), "막스 보른", " 막스 보른\nMax Planck =", 1),
        (Transliteration(), "막스 보른", " 막스 본", 0),
    ],
)
def test_scores(demo: Demo, task: Task, expected: str, answer: str, score: float) -> None:
    reply = demo[1](answer, add_special_tokens=False).input_ids
    assert task.score(Case("x", (), expected), [reply], [reply], demo[1])[0] == score


def test_divergence_counts_to_the_first_different_token(demo: Demo) -> None:
    case = Case("x", ())
    for own, share, detail in (
        ([1, 2, 3, 4], 1.0, "the same"),
        ([1, 2, 9, 4], 0.5, "token 2"),
        ([9, 2, 3, 4], 0, "token 0"),
    ):
        score, said = Divergence().score(case, [own], [[1, 2, 3, 4]], demo[1])
        assert score == share
        assert detail in said


def test_divergence_is_of_folded_text(demo: Demo) -> None:
    """It asks about prompts that are long enough to fold: most of each is folded when its continuation ends."""
    model, tokenizer = demo
    task = Divergence(tokens=24)
    asked = [case for case in task.cases(tokenizer, seed=0) if case.name in ("code/0/0", "dialogue/1/0")]
    assert len(asked) == 2
    folded: dict[str, float] = {}
    converse(model, tokenizer, asked, "kvfold-4", lambda case, _, share: folded.update({case.name: share}))
    assert all(0.7 < share < 0.95 for share in folded.values()), folded
    converse(model, tokenizer, asked, None, lambda case, _, share: folded.update({case.name: share}))
    assert set(folded.values()) == {0}


def test_a_row_of_a_batch_counts_its_own_folded_tokens(demo: Demo) -> None:
    """Of two conversations in one batch, the short one ends before anything is folded, and says so."""
    model, tokenizer = demo
    cases = [Case(str(n), (Turn(tuple(tokenizer("word " * n).input_ids), 8, forced=True),)) for n in (100, 500)]
    folded: dict[str, float] = {}
    converse(model, tokenizer, cases, "kvfold-4", lambda case, _, share: folded.update({case.name: share}))
    assert folded["100"] == 0
    assert folded["500"] > 0.7


def test_a_format_that_folded_nothing_gets_no_figure() -> None:
    def outcome(case: int, format: str, folded: float) -> Outcome:
        about = {"family": "prose" if case < 2 else "code"}
        return Outcome("divergence", str(case), about, format, "", "", 1.0, "", 1, folded)

    outcomes = [outcome(i, "dense", 0) for i in range(4)] + [outcome(i, "kvfold-4", 0.5 * (i > 1)) for i in range(4)]
    rows = sum_up(Divergence(), outcomes)
    _, lines = table_of(Divergence(), rows)
    assert [line[-1] for line in lines] == ["unfolded", "100%", "100%"]
    assert [row.unfolded for row in rows] == [2, 0, 2]
    (note,) = notes_on(Divergence(), rows)
    assert "2 of 4" in note


def test_loops_are_found_and_prose_is_none() -> None:
    assert find_loop([7, 8, *[1, 2, 3] * 5]) == Loop(2, 3, 5)
    assert find_loop([7, 8, *[1, 2, 3] * 5, 1]) == Loop(2, 3, 5)  # cut off in the middle of a period
    assert find_loop([5] * 20) == Loop(0, 1, 20)
    assert find_loop([*[1, 2, 3] * 5, 9]) is None  # it got out
    assert find_loop([1, 2, 3] * 3) is None  # three times is no loop yet
    assert find_loop([5] * 8) is None  # nor is "ha ha ha"
    assert find_loop([]) is None
    period = list(range(40))
    assert find_loop([99, *period * 4]) == Loop(1, 40, 4)
    assert find_loop(np.random.RandomState(0).randint(0, 1000, 500).tolist()) is None


def test_chat_turns_make_the_template(demo: Demo) -> None:
    tokenizer = demo[1]
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    parts = [*chat_turn(tokenizer, "Hello"), *tokenizer("Hi.").input_ids, *next_chat_turn(tokenizer, "Bye")]
    assert tokenizer.decode(parts) == whole


def test_batches_hold_what_can_go_together() -> None:
    def case(name: str, length: int, *turns: Turn) -> Case:
        return Case(name, (Turn((1,) * length, 10, forced=True), *turns))

    single = [case(f"s{i}", 100 + i) for i in range(5)]
    long = [case(f"l{i}", BATCH_TOKENS - 100) for i in range(2)]
    asked = [case(f"q{i}", 50, Turn((2,) * 4, 5)) for i in range(3)]
    chats = [Case(f"c{i}", (Turn((1,) * 9, 10), Turn((2,) * 4, 5))) for i in range(2)]
    cases = [*long, *chats, *asked, *single]
    out = [[case.name for case in batch] for batch in batches(cases)]
    assert sorted(map(sorted, out)) == [
        ["c0"], ["c1"], ["l0"], ["l1"], ["q0", "q1", "q2"], ["s0", "s1", "s2", "s3", "s4"]
    ]  # fmt: skip


@pytest.mark.parametrize("format", [None, "kvfold-4"])
def test_a_batch_says_what_each_conversation_says_alone(demo: Demo, format: str | None) -> None:
    """Forced replies, then a question: the cache goes on from turn to turn."""
    model, tokenizer = demo
    ask = tuple(tokenizer("\n\nThe code is", add_special_tokens=False).input_ids)
    cases = [
        Case(str(i), (Turn(tuple(tokenizer(text).input_ids), 12, forced=True), Turn(ask, 6)))
        for i, text in enumerate(["The code is 4711.\n\nOnce", "The code is 90210. " * 8 + "\n\nThen", "No code."])
    ]

    def run(chosen: Sequence[Case]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        converse(model, tokenizer, chosen, format, lambda case, replies, _: said.update({case.name: replies}))
        return said

    together = run(cases)
    assert [len(reply) for replies in together.values() for reply in replies[:1]] == [12] * 3
    for case in cases:
        assert run([case])[case.name] == together[case.name]
    assert "4711" in tokenizer.decode(together["0"][1])


def test_dense_and_folded_side_by_side(demo: Demo, fixed_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo
    monkeypatch.setattr("kvfold.evaluate.behaviour.needle.standard_text", lambda: fixed_text)
    task = Needle(lengths=(400,), depths=(0.2, 0.8), repeats=1)
    outcomes = run_task(model, tokenizer, task, ["kvfold-4", "turboquant-2"], seed=0)
    rows = {(row.format, row.group.get("depth")): row for row in sum_up(task, outcomes)}
    assert rows["kvfold-4", None].cases == 2
    assert rows["kvfold-4", None].dense == rows["turboquant-2", None].dense == 1
    assert rows["kvfold-4", None].kept == 1
    assert rows["turboquant-2", None].kept < 1  # 2 bits lose a number in a few hundred tokens
    assert all(row.able for row in rows.values())


def test_known_outcomes_are_not_asked_again(demo: Demo) -> None:
    from kvfold.evaluate.behaviour.run import outcome_row

    model, tokenizer = demo
    task = Needle(lengths=(120,), depths=(0.5,), repeats=2)
    known: list[dict[str, Any]] = []
    first = run_task(model, tokenizer, task, ["kvfold-4"], 0, done=lambda o, r: known.append(outcome_row(o, r)))
    assert len(known) == 4

    def refuse(*arguments: object) -> None:
        raise AssertionError("asked again")

    again = run_task(model, tokenizer, task, ["kvfold-4"], 0, json.loads(json.dumps(known)), refuse)
    assert again == first


def test_a_task_that_dense_cannot_do_gives_no_figure() -> None:
    def outcome(case: int, format: str, score: float) -> Outcome:
        return Outcome("needle", str(case), {"length": 1, "depth": 0}, format, "", "", score, "", 1, 0.5)

    cannot = [outcome(i, format, float(i == 0)) for format in ("dense", "x") for i in range(10)]
    can = [outcome(i, format, float(i < 5)) for format in ("dense", "x") for i in range(10)]
    assert [row.able for row in sum_up(Needle(), cannot)] == [False]
    assert [(row.able, row.kept) for row in sum_up(Needle(), can)] == [(True, 1.0)]


def test_a_case_longer_than_the_model_is_refused(demo: Demo) -> None:
    with pytest.raises(ValueError, match="a case of 9010 tokens, but the model takes 8192"):
        run_task(*demo, Needle(lengths=(9_000,)), [], 0)


def test_command(small_folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "tasks.jsonl", tmp_path / "needle.png"
    arguments = (
        "tasks", "--tasks", "needle", "--lengths", "150,300", "--repeats", "1", "--formats", "kvfold-4",
        "--model", str(small_folder), "--out", str(out), "--plot", str(plot),
    )  # fmt: skip
    run = run_kvfold(*arguments, "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert len(document["outcomes"]) == len(out.read_text().splitlines()) == 20
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = run_kvfold(*arguments)  # from the file alone
    assert "length 300, depth 0.5" in table.stdout
    assert len(out.read_text().splitlines()) == 20
    for bad, message in (
        (("--tasks", "nope"), "tasks = 'nope': choose among needle"),
        (("--lengths", "x"), "lengths = 'x': give whole numbers"),
        (("--plot", "x.nope"), "give a file that ends in .png"),
    ):
        run = run_kvfold("tasks", *bad)
        assert run.returncode == 1
        assert message in run.stderr
