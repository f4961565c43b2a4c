"""What a behaviour task asks, and what came back."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

Replies = Sequence[Sequence[int]]
"""Tokens of each turn's reply, without the end-of-text token."""
Score = tuple[float, str]
"""In [0, 1], and a detail."""


@dataclass(frozen=True)
class Turn:
    """Tokens to append to a conversation, and how long the reply may be.

    Attributes
    ----------
    ids
        Tokens; those of later turns close the reply before them.
    max_new_tokens
        Length of the reply.
    forced
        Whether the reply goes on to that length even if the model would end it.
    """

    ids: tuple[int, ...]
    max_new_tokens: int
    forced: bool = False


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes
    ----------
    name
        Tells cases of a task apart; stable from run to run.
    turns
        The conversation.
    expected
        The right answer, where there is one.
    about
        What figures are grouped by: depth, filler, ….
    """

    name: str
    turns: tuple[Turn, ...]
    expected: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The most tokens that the conversation can have."""
        return sum(len(turn.ids) + turn.max_new_tokens for turn in self.turns)


@dataclass(frozen=True)
class Outcome:
    """The result of one case with one cache.

    Attributes
    ----------
    task, case, about, expected
        The question.
    format
        A format, or "dense".
    answer
        The last reply.
    score
        In [0, 1]: 1 for a right answer. In the task "divergence": the share of tokens before the first that differs.
    detail
        A note on the score, such as where a loop began.
    tokens
        Tokens of the whole conversation.
    folded
        The share of them that layers which fold held folded at the end. With 0, the cache was dense throughout, and the
        outcome says nothing about the format.
    """

    task: str
    case: str
    about: dict[str, Any]
    format: str
    expected: str
    answer: str
    score: float
    detail: str
    tokens: int
    folded: float

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


class Task(ABC):
    """A kind of question: makes cases, and scores replies. Subclasses are frozen dataclasses of their options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    group_by: ClassVar[tuple[str, ...]] = ()
    """Keys of `Case.about` that figures are grouped by."""
    compares: ClassVar[bool] = False
    """Whether a score tells how close a reply is to that of the dense cache, rather than whether it is right."""

    @abstractmethod
    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        """Cases; the same for the same arguments."""

    @abstractmethod
    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        """The score of a conversation's replies, beside those of the dense cache."""


def plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of a text by itself, without what a tokenizer puts in front of or behind a whole prompt."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def chat_turn(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokens that open a conversation with a user's message, in the chat template if there is one."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer(text + "\n\n").input_ids)
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(rendered, add_special_tokens=False).input_ids)


def next_chat_turn(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Tokens that end the model's reply and go on with another message of the user."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer("\n\n" + text + "\n\n", add_special_tokens=False).input_ids)
    mark = "kvfold-mark"
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": mark},
        {"role": "user", "content": text},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(rendered.split(mark, 1)[1], add_special_tokens=False).input_ids)
