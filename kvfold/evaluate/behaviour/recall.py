"""A passphrase, a long story, the passphrase."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.behaviour.case import Case, Replies, Score, Task, Turn, plain

ANIMALS = ("squirrel", "falcon", "otter", "badger", "heron", "lynx", "weasel", "puffin")
TOPICS = ("a lighthouse keeper", "a train to the north", "an old clock", "a lost letter", "a mountain village")


@dataclass(frozen=True)
class Recall(Task):
    """A passphrase, then a long story by the model itself, then the passphrase again.

    The story always runs to its full length, so the tokens in between are in the cache as decoding wrote them. The
    question is a sentence to complete, so that models without instruction tuning can answer, too.
    """

    between: tuple[int, ...] = (400, 600)
    """Tokens of the model's text."""
    repeats: int = 5

    name = "recall"
    summary = "a passphrase after a long reply"
    group_by = ("between",)

    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        cases = []
        for between in self.between:
            random = np.random.RandomState(seed)
            for i in range(self.repeats):
                owner, passphrase = ANIMALS[random.randint(len(ANIMALS))], str(random.randint(10_000, 100_000))
                topic = TOPICS[i % len(TOPICS)]
                text = (
                    f"The secret passphrase of the {owner} is {passphrase}.\n\nHere is a long story about {topic}.\n\n"
                )
                ask = plain(tokenizer, f"\n\nThe secret passphrase of the {owner} is")
                turns = (Turn(tuple(tokenizer(text).input_ids), between, forced=True), Turn(tuple(ask), 12))
                cases.append(Case(f"{between}/{i}/{seed}", turns, passphrase, {"between": between, "seed": seed}))
        return cases

    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        return float(case.expected in tokenizer.decode(replies[-1])), ""
