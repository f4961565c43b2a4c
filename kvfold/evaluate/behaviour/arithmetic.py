"""Sums, products, and products of matrices, with text in front."""

import re
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.behaviour.case import Case, Replies, Score, Task, Turn, plain
from kvfold.evaluate.passages import opening
from kvfold.integrations.text import standard_text


@dataclass(frozen=True)
class Arithmetic(Task):
    """10 products of 2×2 matrices, 10 of 3×3, and 15 of numbers, after 0 to 2,000 tokens of other text.

    Three solved examples come first, so that a model need not be tuned on instructions. The text comes before them:
    between the examples and the question, it would only make the examples hard to find.
    """

    fillers: tuple[int, ...] = (0, 500, 1_000, 2_000)

    name = "arithmetic"
    summary = "sums and products of numbers and matrices"
    group_by = ("kind", "filler")

    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        hay, start_of_prompt = plain(tokenizer, standard_text()), opening(tokenizer)
        cases = []
        for filler in self.fillers:
            random = np.random.RandomState(seed)
            for kind, count in (("2x2", 10), ("3x3", 10), ("scalar", 15)):
                for i in range(count):
                    shown = [_question(kind, random) for _ in range(3)]
                    question, answer = _question(kind, random)
                    prompt = "".join(f"{q} = {a}\n" for q, a in shown) + f"{question} ="
                    start = random.randint(len(hay) - 2_000)
                    ids = (*start_of_prompt, *hay[start : start + filler], *plain(tokenizer, f"\n\n{prompt}"))
                    budget = len(plain(tokenizer, answer)) + 6
                    about = {"kind": kind, "filler": filler, "seed": seed}
                    cases.append(Case(f"{kind}/{filler}/{i}/{seed}", (Turn(ids, budget),), answer, about))
        return cases

    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        line = tokenizer.decode(replies[-1]).strip().split("\n")[0]
        return float(re.findall(r"-?\d+", line) == re.findall(r"-?\d+", case.expected)), ""


def _question(kind: str, random: np.random.RandomState) -> tuple[str, str]:
    if kind == "scalar":
        a, b, sign = random.randint(2, 13), random.randint(2, 13), "+-*"[random.randint(3)]
        return f"{a} {sign} {b}", str({"+": a + b, "-": a - b, "*": a * b}[sign])
    n = int(kind[0])
    x, y = random.randint(0, 6, (n, n)), random.randint(0, 6, (n, n))
    return f"{x.tolist()} * {y.tolist()}", str((x @ y).tolist())
