"""What drafts by n-grams bring: decoding text that copies its prompt, and text that does not."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from client import Client, client_of, read_text
from figures import Row, spread
from rich.progress import Progress
from rich.table import Table
from server import Server, pool_options, served
from speed import decode_rate

NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'
TEXTS = ("copied", "new")


@dataclass(frozen=True)
class Plan:
    users: tuple[int, ...] = (1, 8)
    rounds: int = 3
    new: int = 128
    passage: int = 400
    max_model_len: int = 2_048
    max_num_seqs: int = 8
    pool_mib: int = 256

    @property
    def steps(self) -> int:
        """How many cells are measured, of one server."""
        return self.rounds * len(TEXTS) * len(self.users)


PLAN, QUICK = Plan(), Plan(rounds=1, new=48)
CHOICES = ("rounds", "pool_mib")
"""What the command line may change."""


def why_not(plan: Plan) -> str | None:
    """Why a plan cannot be carried out."""
    return None if plan.rounds > 0 else f"rounds = {plan.rounds}: 1 or more"


def run(progress: Progress, kind: str, plan: Plan, more: list[str], **server: Any) -> list[Row]:
    logs = server.pop("logs")
    rows = []
    for drafts in (False, True):
        own = ["--speculative-config", NGRAM] if drafts else []
        note = ", with drafts" if drafts else ""
        log = logs / f"drafts-{kind.replace(' ', '-')}-{drafts}.log"
        with served(progress, Server(kind, [*pool_options(plan), *own, *more], log, **server), note) as ready:
            task = progress.add_task(f"drafts, {kind}{note}", total=plan.steps)
            try:
                cells = asyncio.run(_measure(ready, plan, lambda own=task: progress.advance(own)))
            finally:
                progress.remove_task(task)
        rows += [{"kind": kind, "drafts": drafts, "others": ready.others} | cell for cell in cells]
    return rows


async def _measure(server: Server, plan: Plan, advance: Any) -> list[Row]:
    cells: dict[tuple[str, int], Row] = {
        (text, users): {"text": text, "users": users, "tok_s": [], "drafted": 0, "accepted": 0}
        for text, users in product(TEXTS, plan.users)
    }
    async with client_of(server) as client:
        chat, source = await read_text(client)
        await client.complete([*chat, *source[-200:]], 8)  # first uses prepare things that later ones find
        at = 0
        for _, ((text, users), row) in product(range(plan.rounds), cells.items()):
            prompts = []
            for _ in range(users):
                passage = source[at : at + plan.passage]
                prompts.append([*chat, *passage, *(passage[: plan.passage // 4] if text == "copied" else ())])
                at += plan.passage
            before = await client.metrics()
            row["tok_s"].append(decode_rate(await _together(client, prompts, plan.new)))
            counted = await client.metrics() - before
            row["drafted"] += int(counted["spec_decode_num_draft_tokens_total"])
            row["accepted"] += int(counted["spec_decode_num_accepted_tokens_total"])
            advance()
    return list(cells.values())


async def _together(client: Client, prompts: list[list[int]], new: int) -> list[Any]:
    return await asyncio.gather(*(client.complete(prompt, new) for prompt in prompts))


def tables(rows: list[Row]) -> Iterator[Table]:
    table = Table(title="drafts by n-grams: tokens a second of all users", caption="median (least-most) of rounds")
    for column in ("cache", "text", "users", "plain", "with drafts", "× plain", "drafts that were right"):
        table.add_column(column, justify="left" if column in ("cache", "text") else "right")
    drafted = {(row["kind"], row["text"], row["users"]): row for row in rows if row["drafts"]}
    for row in (row for row in rows if not row["drafts"]):
        other = drafted.get((row["kind"], row["text"], row["users"]))
        if other is not None:
            ratios = [fast / slow for fast, slow in zip(other["tok_s"], row["tok_s"], strict=True)]
            table.add_row(
                row["kind"], row["text"], str(row["users"]), spread(row["tok_s"], ".1f"),
                spread(other["tok_s"], ".1f"), spread(ratios, ".2f"),
                f"{other['accepted'] / max(other['drafted'], 1):.0%} of {other['drafted']:,}",
            )  # fmt: skip
    yield table
