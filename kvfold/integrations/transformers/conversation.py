"""A conversation whose cache goes on from turn to turn."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

from kvfold.cache.files.paths import replacing
from kvfold.integrations.text import read_text
from kvfold.integrations.transformers.cache import FoldedCache
from kvfold.integrations.transformers.prompt import Answer, answer, common, read_prompt

ROLES = ("system", "user", "assistant")


class _Spoken(TextStreamer):  # type: ignore[misc]
    """Passes text on as it comes, and keeps the tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tokens: list[Tensor] = []
        self.text = ""
        self._say = say

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens.append(value.reshape(-1).cpu())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._say(text)


@dataclass
class Conversation:
    """Messages so far, and a folded cache of the tokens that they are in the model's chat template.

    Each turn reads only what the cache does not hold. A template may render earlier messages anew, as those do that
    drop a model's thoughts, and the tokenizer may cut an answer into other tokens than the model did. Then the cache
    goes back to where the tokens part.

    Attributes
    ----------
    model, tokenizer
        What answers. The model is attached; the tokenizer has a chat template.
    make_cache
        Gives an empty cache.
    messages
        Dictionaries with "role" ("system", "user" or "assistant") and "content".

    Raises
    ------
    ValueError
        If the tokenizer has no chat template.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    make_cache: Callable[[], FoldedCache]
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: give one that was made for conversations")
        self.forget(self.messages)

    def forget(self, messages: list[dict[str, str]]) -> None:
        """Go on from `messages` with an empty cache, which reads them at the next turn."""
        self.messages = [*messages]
        self.cache = self.make_cache()
        self._ids = torch.zeros(1, 0, dtype=torch.long)  # what the cache holds

    def ask(
        self,
        text: str,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        say: Callable[[str], None] = lambda text: None,
        reading: Callable[[int], AbstractContextManager[Callable[[int], None]]] = lambda tokens: nullcontext(_pass),
    ) -> Answer:
        """The model's answer to what a user says.

        If that is interrupted, what was said until then is the answer, and KeyboardInterrupt is raised.

        Parameters
        ----------
        text
            What the user says.
        max_new_tokens
            Longest answer.
        temperature
            0 decodes greedily; above, samples.
        say
            Gets the answer's text as it comes.
        reading
            Entered, with the number of tokens to read, while they are read; gives what to call with numbers of them.

        Returns
        -------
        Answer
            With `text`, `tokens` (how many), `seconds`, and `ids` of the whole conversation, (1, T).
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._rendered(asked)
        self._go_back(ids)
        spoken = _Spoken(self.tokenizer, say)
        try:
            with reading(ids.shape[1] - 1 - self.cache.get_seq_length()) as progress:
                read_prompt(self.model, ids, self.cache, progress=progress)
            said = answer(self.model, self.tokenizer, ids, self.cache, max_new_tokens, temperature, spoken)
        except KeyboardInterrupt:
            if spoken.text:
                self.messages = [*asked, {"role": "assistant", "content": spoken.text}]
            raise
        finally:
            tokens = torch.cat((ids.cpu(), *(some[None] for some in spoken.tokens)), 1)
            self._ids = tokens[:, : self.cache.get_seq_length()]
        self.messages = [*asked, {"role": "assistant", "content": said.text}]
        return said

    def _rendered(self, messages: list[dict[str, str]]) -> Tensor:
        ids: Tensor = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        return ids

    def _go_back(self, ids: Tensor) -> None:
        """Let the cache hold the first tokens of `ids`, and not all of them: the last one is read to be answered."""
        held = self._ids.shape[1]
        alike = common(self._ids[0], ids[0, :-1])
        if alike < held:
            try:
                self.cache.crop(alike - held)
            except RuntimeError:  # sliding windows do not go back
                self.forget(self.messages)
        self._ids = self._ids[:, : self.cache.get_seq_length()]

    def save(self, path: Path) -> None:
        """Write the messages, as JSON, to `path`, and the cache to `path` with .kv at its end."""
        if self.cache.get_seq_length():
            self.cache.save(_beside(path), ids=self._ids)
        with replacing(path, "file") as file:
            file.write(json.dumps(self.messages, ensure_ascii=False, indent=1).encode())

    def load(self, path: Path) -> None:
        """Go on with the conversation in a file; its cache is read again from its text if that is not beside it.

        Raises ValueError if the file holds no messages, or the cache beside it is damaged or another model's.
        """
        try:
            messages: Any = json.loads(read_text(path, "file"))
        except json.JSONDecodeError as error:
            raise ValueError(f"file = {str(path)!r} holds no conversation: {error}") from None
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in messages
        ):
            raise ValueError(f"file = {str(path)!r} holds no conversation: give one that /save wrote")
        loaded = None
        if _beside(path).is_file():
            loaded = FoldedCache.load(_beside(path), self.model.config)
            if loaded.ids is None or loaded.ids.shape[0] != 1:
                raise ValueError(f"file = {str(_beside(path))!r} holds no tokens of one text")
        self.forget([{"role": m["role"], "content": m["content"]} for m in messages])
        if loaded is not None and loaded.ids is not None:
            self.cache, self._ids = loaded, loaded.ids


def _pass(tokens: int) -> None:
    """Nobody wants to know."""


def _beside(path: Path) -> Path:
    """Where the cache of a conversation in `path` is."""
    return path.with_name(path.name + ".kv")
