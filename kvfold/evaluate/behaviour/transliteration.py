"""Names in another script, each with one official spelling."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from kvfold.evaluate.behaviour.case import Case, Replies, Score, Task, Turn

OFFICIAL = {
    "Albert Einstein": "알베르트 아인슈타인",
    "Max Planck": "막스 플랑크",
    "Werner Heisenberg": "베르너 하이젠베르크",
    "Johannes Kepler": "요하네스 케플러",
    "Alexander von Humboldt": "알렉산더 폰 훔볼트",
    "Wilhelm Röntgen": "빌헬름 뢴트겐",
    "Heinrich Hertz": "하인리히 헤르츠",
    "Robert Koch": "로베르트 코흐",
    "Otto Hahn": "오토 한",
    "Max Born": "막스 보른",
    "Fritz Haber": "프리츠 하버",
    "Georg Ohm": "게오르크 옴",
}
"""German scientists in the Korean spelling that the rules for foreign words (외래어 표기법) give."""


@dataclass(frozen=True)
class Transliteration(Task):
    """A German scientist's name to its Korean spelling: rare tokens, one right answer, exact match.

    Asked twice: from memory, and from a table that stands earlier in the prompt. The second needs no knowledge, only
    that rare tokens can still be read from the cache.
    """

    name = "transliteration"
    summary = "official spellings of names in another script"
    group_by = ("kind",)

    def cases(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[Case]:
        names = list(OFFICIAL)
        np.random.RandomState(seed).shuffle(names)
        table = "".join(f"{name} = {OFFICIAL[name]}\n" for name in names)
        cases = []
        for name, spelling in OFFICIAL.items():
            others = [other for other in names if other != name][:3]
            shown = "".join(f"{other} = {OFFICIAL[other]}\n" for other in others)
            budget = len(tokenizer(spelling).input_ids) + 4
            for kind, text in (("memory", shown), ("table", f"{table}\nThe same names again:\n\n{shown}")):
                ids = tuple(tokenizer(f"German scientists in Korean.\n\n{text}{name} =").input_ids)
                about = {"kind": kind, "seed": seed}
                cases.append(Case(f"{kind}/{name}/{seed}", (Turn(ids, budget),), spelling, about))
        return cases

    def score(self, case: Case, replies: Replies, dense: Replies, tokenizer: PreTrainedTokenizerBase) -> Score:
        return float(tokenizer.decode(replies[-1]).strip().split("\n")[0].strip() == case.expected), ""
