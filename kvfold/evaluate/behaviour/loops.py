"""Does a long conversation fall into a loop?"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.behaviour.case import Case, Replies, Score, Task, Turn, chat_turn, next_chat_turn

DIALOGUES = {
    "garden": (
        "I want to plant a small garden. Where do I start?",
        "Which vegetables are easy for beginners?",
        "How often do I water tomatoes?",
        "What can I do against snails?",
        "And what grows well in the shade?",
        "Please sum up what we said.",
    ),
    "travel": (
        "Tell me about the city of Lisbon.",
        "What should I eat there?",
        "How do I get around without a car?",
        "Is there a good day trip from it?",
        "What is the weather like in autumn?",
        "Write a short plan for three days.",
    ),
    "code": (
        "What is a Python dictionary?",
        "How does it differ from a list?",
        "Show how to count words with one.",
        "What happens if a key is missing?",
        "How do I sort one by its values?",
        "When should I use something else?",
    ),
}


@dataclass(frozen=True)
class Loops(Task):
    """Conversations of six turns; a reply that ends in the same words over and over is a failure."""

    reply: int = 100
    """Most tokens of a reply."""

    name = "loops"
    summary = "conversations of six turns that do not fall into a loop"

    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        return [
            Case(
                name,
                (
                    Turn(chat_turn(tokenizer, first), self.reply),
                    *(Turn(next_chat_turn(tokenizer, text), self.reply) for text in later),
                ),
                "no loop",
            )
            for name, (first, *later) in DIALOGUES.items()
        ]

    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        for i, reply in enumerate(replies):
            loop = find_loop(reply)
            if loop is not None:
                return 0.0, f"turn {i + 1}: from token {loop.start}, {loop.period} tokens {loop.repeats} times"
        return 1.0, ""


@dataclass(frozen=True)
class Loop:
    """Tokens that repeat to the end: from `start`, `period` of them, `repeats` whole times."""

    start: int
    period: int
    repeats: int


def find_loop(tokens: Sequence[int], repeats: int = 4, longest: int = 64, at_least: int = 12) -> Loop | None:
    """The loop that a reply ends in, or None: a period of up to `longest` tokens comes `repeats` times or more.

    Its repeats cover `at_least` tokens together, so that "ha ha ha ha" is no loop.
    """
    n = len(tokens)
    for period in range(1, min(longest, n // repeats) + 1):
        same = 0
        while same < n - period and tokens[n - 1 - same] == tokens[n - 1 - same - period]:
            same += 1
        covered = same + period
        if covered >= repeats * period and covered >= at_least:
            return Loop(n - covered, period, covered // period)
    return None
