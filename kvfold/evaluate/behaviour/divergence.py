"""Where a greedy continuation first differs from the dense one."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.behaviour.case import Case, Replies, Score, Task, Turn, chat_turn, plain
from kvfold.integrations.text import standard_text

FAMILIES = {
    "prose": (
        "The lighthouse keeper had not spoken to anyone for eleven days when",
        "In the winter of that year the river froze for the first time, and the town",
        "She opened the letter, read it twice, and put it back into",
    ),
    "code": (
        "def merge_sort(items):\n    \"\"\"Sort a list by merging sorted halves.\"\"\"\n",
        "class Stack:\n    \"\"\"A last-in, first-out stack.\"\"\"\n\n    def __init__(self):\n",
        "import csv\n\ndef read_table(path):\n    \"\"\"Return the rows of a CSV file as dictionaries.\"\"\"\n",
    ),
    "reasoning": (
        "Question: A train leaves at 9:40 and arrives at 13:05. How long does it travel?\nLet us think step by step.",
        "Question: Anna has three times as many apples as Ben. They have 24 in all. How many has Ben?\nAnswer: First,",
        "All cats are mammals. Some mammals can swim. Therefore",
    ),
    "dialogue": (
        "chat:How do I make a good cup of tea?",
        "chat:Why is the sky blue?",
        "chat:Tell me a joke about cats.",
    ),
    "French": (
        "La Révolution française est une période de bouleversements sociaux et politiques",
        "Il était une fois, dans un petit village au bord de la mer, un pêcheur qui",
        "Pour préparer une bonne soupe à l'oignon, il faut d'abord",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Divergence(Task):
    """Greedy continuations of several kinds of text, compared token by token with the dense cache's.

    Other text comes first. Without it, a conversation would end before most formats fold anything. Greedy text is
    chaotic: one changed token changes all that follow, right or wrong. So this shows how far caches differ, not how
    good the text is.
    """

    tokens: int = 200
    """Of the continuation."""
    filler: int = 500
    """Tokens of other text in front."""

    name = "divergence"
    summary = "share of a greedy continuation before its first different token"
    group_by = ("family",)
    compares = True

    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        hay, random = plain(tokenizer, standard_text()), np.random.RandomState(seed)
        cases = []
        for family, prompts in FAMILIES.items():
            for i, prompt in enumerate(prompts):
                start = random.randint(len(hay) - self.filler)
                other = tokenizer.decode(hay[start : start + self.filler])
                chat = prompt.removeprefix("chat:")
                whole = f"{other}\n\n{chat}"
                ids = chat_turn(tokenizer, whole) if chat != prompt else tuple(tokenizer(whole).input_ids)
                about = {"family": family, "filler": self.filler, "seed": seed}
                cases.append(Case(f"{family}/{i}/{seed}", (Turn(ids, self.tokens, forced=True),), "", about))
        return cases

    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        own, theirs = replies[-1], dense[-1]
        first = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b), len(own))
        return first / len(own), f"token {first}" if first < len(own) else "the same throughout"
