"""What SmolLM2 answers in vLLM's engine with a folded cache."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import rounding
import torch
from engines import Answer, alone, ask, differences, engine, slots_in_use
from rounding import LIKELIEST, Disturbed
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.attention.backend import FASTEST

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]
FINE = "kvfold-6"
"""The same pages and kernels as kvfold-4, with an error of a sixteenth: answers can be compared token by token."""
ALONE = (0, 6, 8, 11)
NEW = 28
"""New tokens of each answer."""


@dataclass(frozen=True)
class Run:
    """What an engine answered: to all prompts together, to all again, and to some of them each by itself."""

    first: list[Answer]
    again: list[Answer]
    alone: list[Answer]
    slots: int


def _run(model: Path, prompts: list[list[int]], format: str, calibration: Path | None = None) -> Run:
    # In a process of its own requests come to the scheduler one by one, and which ones share a step, and so how sums
    # round, would differ from run to run.
    with engine(model, format, calibration, in_process=True) as llm:
        first = ask(llm, prompts, NEW, read=LIKELIEST)
        again = ask(llm, prompts, NEW)
        return Run(first, again, alone(llm, [prompts[i] for i in ALONE], NEW), slots_in_use(llm))


@pytest.fixture(scope="module")
def stock(smollm2: Path, prompts: list[list[int]]) -> list[Answer]:
    """Answers of vLLM as it comes."""
    with engine(smollm2, in_process=True) as llm:
        return ask(llm, prompts, NEW, read=LIKELIEST)


@pytest.fixture(scope="module")
def lossless(smollm2: Path, prompts: list[list[int]]) -> Run:
    """Everything as with codes, but for the codes."""
    return _run(smollm2, prompts, "float16")


@pytest.fixture(scope="module")
def folded(smollm2: Path, prompts: list[list[int]], calibration: Path) -> Run:
    return _run(smollm2, prompts, "kvfold-4", calibration)


@pytest.fixture(scope="module")
def fine(smollm2: Path, prompts: list[list[int]], calibration: Path) -> list[Answer]:
    """Answers to every second prompt, with codes so fine that rounding to another one hardly moves a prediction."""
    with engine(smollm2, FINE, calibration, in_process=True) as llm:
        return ask(llm, prompts[::2], NEW, read=LIKELIEST)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process attend by the reference, without the rounding of the CPU's products in integers."""
    monkeypatch.setitem(FASTEST, "cpu", "reference")


@dataclass(frozen=True)
class Reading:
    """Log-probabilities of a model in transformers at each token of prompts and the engine's answers, (T, vocab).

    By the formula of a pool (`rounding.by_formula`); and again with embeddings that differ by rounding.
    """

    folded: list[Tensor]
    disturbed: list[Disturbed]

    @property
    def tie(self) -> float:
        return rounding.tie(self.disturbed)


@pytest.fixture(scope="module")
def reading(demo_model: Demo, prompts: list[list[int]], folded: Run, calibration: Path) -> Reading:
    return _reading(demo_model[0], prompts, folded.first, "kvfold-4", calibration)


@pytest.fixture(scope="module")
def ties(demo_model: Demo, prompts: list[list[int]], lossless: Run, reading: Reading) -> dict[str, float]:
    """Leads that rounding may turn, with codes and without."""
    some, answers = ([each[i] for i in ALONE] for each in (prompts, lossless.first))
    return {"lossless": _reading(demo_model[0], some, answers, "float16").tie, "folded": reading.tie}


def _reading(
    model: PreTrainedModel,
    prompts: list[list[int]],
    answers: list[Answer],
    format: str,
    calibration: Path | None = None,
) -> Reading:
    texts = [ids + answer.tokens for ids, answer in zip(prompts, answers, strict=True)]
    with rounding.by_formula(model, format, calibration):
        folded = [rounding.log_probabilities(model, ids) for ids in texts]
        return Reading(folded, list(rounding.disturbed(model, texts, folded)))


def _divergence(said: list[dict[int, float]], other: Tensor) -> float:
    """Mean KL of what an engine said of its likeliest tokens, all others as one, from full log-probabilities."""
    total = 0.0
    for at, row in zip(said, other, strict=True):
        p = torch.tensor(list(at.values()), dtype=torch.float64).exp()
        q = row[list(at)].double().exp()
        p, q = (torch.cat((x, (1 - x.sum()).clamp_min(1e-12)[None])) for x in (p, q))
        total += (p * (p / q).log()).sum().item()
    return total / len(said)


def _mean_divergence(answers: list[Answer], others: list[Tensor]) -> float:
    parts = [(_divergence(a.read, x[: len(a.read)]), len(a.read)) for a, x in zip(answers, others, strict=True)]
    return sum(kl * count for kl, count in parts) / sum(count for _, count in parts)


def test_without_codes_every_answer_is_that_of_the_stock_engine(stock: list[Answer], lossless: Run) -> None:
    """Pool, tails, shared pages and attention are those of folded pages; only the numbers are float16's."""
    off = torch.tensor(
        [
            abs(one[token] - other[token])
            for a, b in zip(lossless.first, stock, strict=True)
            for one, other in zip(a.read, b.read, strict=True)
            for token in one.keys() & other.keys()
        ]
    )
    print(f"\nfloat16 beside stock: log-probabilities differ by {off.mean():.1e}, at most {off.max():.1e}")
    # float16 has 11 bits, and log-probabilities are differences of logits of about 20.
    assert off.mean() < 1e-3
    assert off.max() < 0.05
    assert all(gap < 2 * off.max() for _, _, gap in differences(lossless.first, stock))


def _part_as_if_disturbed(
    name: str, prompts: list[list[int]], answers: list[Answer], reading: Reading, stock: list[Answer]
) -> None:
    """The engine takes another next token than the formula, given the engine's own before it, no more often than
    the formula itself does after a disturbance by rounding, and only where two are about equally likely."""

    def elsewhere(taken: list[list[int]]) -> list[tuple[int, int, float]]:
        """Where another token than the formula's is taken, and by how much the formula finds it less likely."""
        found = []
        for number, (ids, tokens, rows) in enumerate(zip(prompts, taken, reading.folded, strict=True)):
            rows = rows[len(ids) - 1 : -1]
            behind = rows.amax(-1) - rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            found += [(number, at, round(gap, 4)) for at, gap in enumerate(behind.tolist()) if gap > 0]
        return found

    parted = elsewhere([answer.tokens for answer in answers])
    itself = [
        elsewhere([
            [max(at, key=at.__getitem__) for at in said[len(ids) - 1 : -1]]
            for ids, said in zip(prompts, again.likeliest, strict=True)
        ])
        for again in reading.disturbed
    ]  # fmt: skip
    to_stock = differences(answers, stock)
    print(f"\n{name}, engine beside the formula: {len(parted)} tokens differ: {parted}; a tie is {reading.tie:.3f}")
    print(f"the formula beside itself: {list(map(len, itself))}: {itself}")
    print(f"engine beside stock: {len(to_stock)} answers part: {to_stock}")
    assert all(gap < reading.tie for _, _, gap in parted)
    # Few enough that chance alone may double them.
    assert len(parted) <= 2 * max(map(len, itself)) + 3


def test_answers_are_those_of_the_formula_in_transformers(
    folded: Run, reading: Reading, stock: list[Answer], prompts: list[list[int]]
) -> None:
    _part_as_if_disturbed("kvfold-4", prompts, folded.first, reading, stock)


def test_with_fine_codes_hardly_an_answer_parts(
    demo_model: Demo, prompts: list[list[int]], fine: list[Answer], stock: list[Answer], reading: Reading,
    calibration: Path,
) -> None:  # fmt: skip
    """The same where the codec's noise makes no wide ties."""
    own = _reading(demo_model[0], prompts[::2], fine, FINE, calibration)
    _part_as_if_disturbed(FINE, prompts[::2], fine, own, stock[::2])
    assert own.tie < reading.tie


@pytest.mark.parametrize("measured", ["by a file", "at the start"])
def test_rotations_of_a_calibration_are_those_of_the_formula(
    demo_model: Demo, smollm2: Path, prompts: list[list[int]], calibration: Path, measured: str, reference: None
) -> None:
    """`oscar`: no prompt can fit it. What the engine reads at its start is another text than the file's."""
    some = [prompts[i] for i in (7, 8, 11)]  # of more than a page
    file = calibration if measured == "by a file" else None
    with engine(smollm2, "oscar-4", file, in_process=True) as llm:
        answers = ask(llm, some, NEW, read=LIKELIEST)
    own = _reading(demo_model[0], some, answers, "oscar-4", calibration)
    dense = [rounding.log_probabilities(demo_model[0], ids) for ids in some]
    far, loss = _mean_divergence(answers, own.folded), _mean_divergence(answers, dense)
    print(f"\noscar-4 measured {measured}: KL from the formula {far:.1e}, from dense {loss:.1e}")
    assert loss < 0.02
    if file is not None:
        assert far < loss / 10


def test_reading_prompts_differs_from_transformers_by_rounding_alone(
    demo_model: Demo, smollm2: Path, prompts: list[list[int]], calibration: Path, folded: Run, reading: Reading,
    stock: list[Answer], reference: None,
) -> None:  # fmt: skip
    """By the reference. The CPU kernel's products in integers round, too, and codes behind them then fall on other
    sides of their ties: that moves predictions by less than folding does, and no further from the dense model's."""
    with engine(smollm2, "kvfold-4", calibration, in_process=True) as llm:
        exact = ask(llm, prompts, 1, read=LIKELIEST)
    unfolded = [rounding.log_probabilities(demo_model[0], ids) for ids in prompts]
    theirs, dense = (_mean_divergence(exact, x) for x in (reading.folded, unfolded))

    def far(said: list[list[dict[int, float]]], others: list[Tensor]) -> float:
        known = [Answer([], [], each[: len(a.read)], 0) for a, each in zip(exact, said, strict=True)]
        return _mean_divergence(known, others)

    itself = max(far(again.likeliest, reading.folded) for again in reading.disturbed)
    formula, harness = far(list(map(rounding.likeliest, reading.folded)), unfolded), _mean_divergence(stock, unfolded)
    kernel, kernels = (_mean_divergence(folded.first, x) for x in (reading.folded, unfolded))
    print(
        f"\nKL of the engine from the formula {theirs:.1e}, from dense {dense:.1e}; of the formula from itself, "
        f"disturbed, {itself:.1e}; of stock from dense {harness:.1e}. By the CPU kernel {kernel:.1e} from the "
        f"formula and {kernels:.1e} from dense, the formula {formula:.1e}"
    )
    assert harness < theirs / 1000  # without codes, float32 is all that differs
    assert theirs < 2 * itself
    assert theirs < dense / 10
    assert kernel < formula / 5
    assert abs(kernels / formula - 1) < 0.1


def test_decoding_in_transformers_token_by_token_says_the_same(
    demo_model: Demo, prompts: list[list[int]], folded: Run, reading: Reading, calibration: Path
) -> None:
    """The readings above stand for decoding."""
    model = demo_model[0]
    for number in (0, 4, 6, 9):
        ids, length = prompts[number], len(prompts[number])
        expected = reading.folded[number][length - 1 : -1]
        given = torch.tensor([ids])
        with rounding.by_formula(model, "kvfold-4", calibration):
            out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False)
        out = out[0, length:].tolist()
        for token, engines, rows in zip(out, folded.first[number].tokens, expected, strict=False):
            assert rows.max() - rows[token] < reading.tie
            if token != engines:  # what comes next follows upon something else
                break


@pytest.mark.parametrize("name", ["lossless", "folded"])
def test_what_is_found_in_the_cache_answers_as_what_is_computed(
    name: str, prompts: list[list[int]], ties: dict[str, float], request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(name)
    assert [a.cached for a in run.again] == [(len(ids) - 1) // 64 * 64 for ids in prompts]
    differ = differences(run.first, run.again)
    print(f"\n{name}, from the cache: {differ}")
    assert all(gap < ties[name] for _, _, gap in differ)


@pytest.mark.parametrize("name", ["lossless", "folded"])
def test_company_does_not_change_answers(name: str, ties: dict[str, float], request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    assert not any(answer.cached for answer in run.alone)
    differ = differences([run.first[i] for i in ALONE], run.alone)
    print(f"\n{name}, alone: {differ}")
    assert all(gap < ties[name] for _, _, gap in differ)
    assert run.slots == 0
