"""A needle in a haystack."""

import re
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.behaviour.case import Case, Replies, Score, Task, Turn, plain
from kvfold.evaluate.passages import opening
from kvfold.formats.numbers import real, whole
from kvfold.integrations.text import standard_text

PLACES = ("lighthouse", "observatory", "archive", "greenhouse", "library", "harbour", "workshop", "museum")


@dataclass(frozen=True)
class Needle(Task):
    """A sentence with a number lies at some depth of a long text; the text ends by asking for it.

    After Kamradt's "needle in a haystack" (2023). The question is a sentence to complete, so that models without
    instruction tuning can answer, too.
    """

    lengths: tuple[int, ...] = (1_000, 2_000, 4_000, 7_900)
    """Tokens of the prompt."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where the needle lies, 0 at the start to 1 at the end."""
    repeats: int = 2
    """Needles and haystacks for each length and depth."""

    name = "needle"
    summary = "a number in a long text"
    group_by = ("length", "depth")

    def __post_init__(self) -> None:
        for length in self.lengths:
            whole("lengths", length, 1)
        for depth in self.depths:
            real("depths", depth, 0, 1)
        whole("repeats", self.repeats, 1)

    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        hay, start_of_prompt = plain(tokenizer, standard_text()), opening(tokenizer)
        if not self.lengths or not self.depths:
            raise ValueError("lengths or depths are empty: give at least one of each")
        cases = []
        for repeat in range(self.repeats):
            random = np.random.RandomState(seed + repeat)
            for length in self.lengths:
                for depth in self.depths:
                    place, number = PLACES[random.randint(len(PLACES))], str(random.randint(10_000, 100_000))
                    needle = plain(tokenizer, f"\n\nThe secret code of the {place} is {number}.\n\n")
                    question = plain(tokenizer, f"\n\nThe secret code of the {place} is")
                    room = length - len(start_of_prompt) - len(needle) - len(question)
                    if room < 1:
                        raise ValueError(f"length = {length}: too short for the needle and its question")
                    start = random.randint(max(len(hay) - room, 1))
                    text = hay[start : start + room]
                    if len(text) < room:
                        raise ValueError(f"length = {length}: the haystack has only {len(hay)} tokens")
                    at = round(depth * room)
                    ids = (*start_of_prompt, *text[:at], *needle, *text[at:], *question)
                    about = {"length": length, "depth": depth, "seed": seed + repeat}
                    cases.append(Case(f"{length}/{depth:g}/{seed + repeat}", (Turn(ids, 10),), number, about))
        return cases

    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        return float(re.match(rf"\s*{case.expected}(?!\d)", tokenizer.decode(replies[-1])) is not None), ""
