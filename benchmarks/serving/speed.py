"""Decoding by several users at once, after prompts of several lengths."""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from client import Answer, client_of, read_text
from figures import Advance, Row, reference, spread
from rich.table import Table
from server import Server, ServingError, stderr

SUFFIX = 16
"""Tokens by which the prompts of users that share a document differ."""


@dataclass(frozen=True)
class Plan:
    contexts: tuple[int, ...] = (64, 512, 4_096, 7_900)
    users: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    new: int = 64
    new_of_many: int = 32  # tokens, from `many` users on
    many: int = 32
    max_model_len: int = 8_192
    max_num_seqs: int = 32
    pool_mib: int = 1_024
    apart: bool = False

    def new_tokens(self, users: int) -> int:
        return self.new_of_many if users >= self.many else self.new

    @property
    def steps(self) -> int:
        """How many cells are measured."""
        return self.rounds * len(self.contexts) * len(self.users)


PLAN, QUICK = Plan(), Plan(contexts=(64, 2_048), users=(1, 8), rounds=2, new=32, pool_mib=256)
CHOICES = ("contexts", "users", "rounds", "new", "pool_mib", "apart")
"""What the command line may change."""


def why_not(plan: Plan) -> str | None:
    """Why a plan cannot be carried out."""
    longest = max(plan.contexts) + max(map(plan.new_tokens, plan.users))
    if longest > plan.max_model_len or min(plan.contexts) < 2 * SUFFIX:
        return f"contexts go from {2 * SUFFIX} to {plan.max_model_len:,} tokens, answers included"
    if not 0 < max(plan.users) <= plan.max_num_seqs:
        return f"users = {max(plan.users)}: 1 to {plan.max_num_seqs}"
    return None


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens a second of users that decode together; see the top of this file."""
    start = max(answer.arrivals[0][0] for answer in answers)
    end = min(answer.arrivals[-1][0] for answer in answers)
    rate = 0.0
    for answer in answers:
        inside = [arrival for arrival in answer.arrivals if start <= arrival[0] <= end]
        if len(inside) < 2:
            raise ServingError(
                f"{len(answers)} users did not decode together: one was done before another began; ask for more tokens"
            )
        (t0, n0), (t1, n1) = inside[0], inside[-1]
        rate += (n1 - n0) / (t1 - t0)
    return rate


async def measure(server: Server, plan: Plan, advance: Advance) -> list[Row]:
    cells = [(context, users) for context in plan.contexts for users in plan.users]
    rates: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    reading: dict[int, list[float]] = {context: [] for context in plan.contexts}
    async with client_of(server) as client:
        chat, text = await read_text(client)
        for users in plan.users:  # first uses of a batch size prepare things that later ones find
            await asyncio.gather(*(client.complete([*chat, *text[i : i + 64]], 8) for i in range(users)))
        before = await client.preemptions()
        for i in range(plan.rounds):
            for j, context in enumerate(plan.contexts):
                # Every document starts at a place of its own, so the first to ask for it has it read. Those of users
                # apart are the same in each round, as reading them takes long.
                at, most = 100 + 997 * (j if plan.apart else i * len(plan.contexts) + j), max(plan.users)
                starts = (at + user * context * plan.apart for user in range(most))
                starts = [start % (len(text) - context - SUFFIX * most) for start in starts]
                long = context - len(chat) - SUFFIX
                documents = [[*chat, *text[start : start + long]] for start in starts]
                tails = [text[start + long + SUFFIX * user :][:SUFFIX] for user, start in enumerate(starts)]
                for document, tail in zip(documents, tails, strict=True) if plan.apart else [(documents[0], tails[0])]:
                    if not plan.apart or i == 0:
                        reading[context].append((await client.complete([*document, *tail], 1)).first)
                for users in plan.users:
                    answers = await asyncio.gather(
                        *(
                            client.complete([*documents[user], *tails[user]], plan.new_tokens(users))
                            for user in range(users)
                        )
                    )
                    rates[context, users].append(decode_rate(answers))
                    advance()
        preempted = await client.preemptions() - before
    return [
        {
            "kind": server.kind, "context": context, "users": users, "new_tokens": plan.new_tokens(users),
            "tok_s": statistics.median(rates[context, users]), "tok_s_all": rates[context, users],
            "ms_a_token": 1e3 * users / statistics.median(rates[context, users]),
            "reading_s": statistics.median(reading[context]), "reading_s_all": reading[context],
            "pool_tokens": server.pool_tokens, "preemptions": preempted,
        }
        for context, users in cells
    ]  # fmt: skip


def tables(rows: list[Row]) -> Iterator[Table]:
    base = reference(rows)
    by_cell = {(row["kind"], row["context"], row["users"]): row for row in rows}
    shortest = min(row["context"] for row in rows)
    for context in dict.fromkeys(row["context"] for row in rows):
        table = Table(title=f"speed after {context:,} tokens")
        for column in ("users", "cache", "tok/s", "a user", "ms a token", "context ms", f"× {base}"):
            table.add_column(column, justify="left" if column == "cache" else "right", no_wrap=True)
        group = [row for row in rows if row["context"] == context]
        for row in sorted(group, key=lambda row: row["users"]):
            dense, short = by_cell[base, context, row["users"]], by_cell[row["kind"], shortest, row["users"]]
            context_ms = row["ms_a_token"] - short["ms_a_token"]
            table.add_row(
                str(row["users"]), row["kind"], spread(row["tok_s_all"], ".1f"), f"{row['tok_s'] / row['users']:.1f}",
                f"{row['ms_a_token']:.1f}", "–" if context == shortest else f"{context_ms:.1f}",
                f"{row['tok_s'] / dense['tok_s']:.2f}",
                end_section=row is [each for each in group if each["users"] == row["users"]][-1],
            )  # fmt: skip
        yield table
    table = Table(title="reading a prompt that is not cached")
    for column in ("tokens", "cache", "seconds", "tok/s", f"× {base}"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for context in dict.fromkeys(row["context"] for row in rows):
        for row in {row["kind"]: row for row in rows if row["context"] == context}.values():
            dense = by_cell[base, context, row["users"]]
            table.add_row(
                f"{context:,}", row["kind"], spread(row["reading_s_all"], ".2f"), f"{context / row['reading_s']:,.0f}",
                f"{dense['reading_s'] / row['reading_s']:.2f}",
            )  # fmt: skip
    yield table
    if any(row["preemptions"] for row in rows):
        stderr.print("[bold yellow]requests were preempted: the pool is too small for these users and contexts")
