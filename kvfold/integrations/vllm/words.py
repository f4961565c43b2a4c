"""Words of vLLM's command line, read as vLLM reads them."""

import json
from collections.abc import Sequence
from math import prod

CONFIG_OPTION = "--additional-config"
SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
WORKERS = tuple(SHORT.values())
"""Options by which an engine has several workers, of which each holds a cache."""


class Words:
    """The options that a user gives to vLLM, and what is left of them to pass on (`rest`)."""

    def __init__(self, rest: Sequence[str]) -> None:
        self.rest = list(rest)

    def names(self) -> list[str]:
        """The options that are given, with - in the place of _, which vLLM takes, too."""
        return [name for word in self.rest if (name := _option(word))]

    def given(self, option: str) -> bool:
        """Whether an option is there."""
        return option in self.names()

    def value(self, option: str) -> str | None:
        """What an option is set to, the last time that it is; None if it is not there, or has no value."""
        for i in reversed(range(len(self.rest))):
            if _option(self.rest[i]) == option:
                return self._value(i)
        return None

    def number(self, option: str) -> int | None:
        """A whole number that an option is set to, as in 2048, 4k or 1G; None if it is set to none."""
        text = self.value(option) or ""
        scale = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        digits = text[:-1] if scale > 1 else text
        return int(digits) * scale if digits.isdecimal() else None

    def workers(self) -> int:
        """Into how many processes of this machine the model is divided, or copied."""
        numbers = [self.number(option) or 1 for option in WORKERS]
        return max(1, prod(numbers) // (self.number("--nnodes") or 1))

    def take_config(self) -> dict[str, object]:
        """Take the additional config out of the words; ValueError if it is no JSON object."""
        for i in range(len(self.rest)):
            if _option(self.rest[i]) == CONFIG_OPTION:
                text = self._value(i) or ""
                del self.rest[i : i + (1 if "=" in self.rest[i] else 2)]
                try:
                    config = json.loads(text)
                except json.JSONDecodeError:
                    config = None
                if not isinstance(config, dict):
                    raise ValueError(f"{CONFIG_OPTION} {text!r} is no JSON object")
                return config
        return {}

    def _value(self, i: int) -> str | None:
        _, equals, value = self.rest[i].partition("=")
        return value if equals else (self.rest[i + 1] if i + 1 < len(self.rest) else None)


def _option(word: str) -> str:
    """The option that a word names; an empty text if it names none."""
    name = word.partition("=")[0]
    return SHORT.get(name, name.replace("_", "-") if name.startswith("--") else "")
