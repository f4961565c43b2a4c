"""Requests a minute when memory is short."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from client import Answer, client_of, in_turns, read_text
from figures import Advance, Row, percentile_95, reference
from rich.table import Table
from server import Server


@dataclass(frozen=True)
class Plan:
    users: int = 32
    requests: int = 96
    prompt: tuple[int, int] = (500, 1_500)
    new: tuple[int, int] = (128, 384)
    max_model_len: int = 4_096
    max_num_seqs: int = 32
    pool_mib: int = 256

    @property
    def steps(self) -> int:
        return self.requests


PLAN = Plan()
QUICK = Plan(users=12, requests=24, prompt=(300, 600), new=(32, 64), max_model_len=2_048, max_num_seqs=12, pool_mib=64)
CHOICES = ("requests", "pool_mib")
"""What the command line may change."""


def why_not(plan: Plan) -> str | None:
    """Why a plan cannot be carried out."""
    return None if plan.requests > 1 else f"requests = {plan.requests}: 2 or more"


async def measure(server: Server, plan: Plan, advance: Advance) -> list[Row]:
    draw = random.Random(0)
    answers: list[Answer] = []
    peaks: Counter[str] = Counter()

    async with client_of(server) as client:
        chat, text = await read_text(client)
        sizes = [(draw.randint(*plan.prompt), draw.randint(*plan.new)) for _ in range(plan.requests)]
        starts = draw.sample(range(len(text) - plan.prompt[1]), plan.requests)
        await client.complete([*chat, *text[:64]], 8)

        async def watch() -> None:
            while True:
                now = await client.metrics()
                for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                    peaks[name] = max(peaks[name], now[name])
                await asyncio.sleep(0.5)

        async def one(at: int, prompt: int, new: int) -> None:
            answers.append(await client.complete([*chat, *text[at : at + prompt - len(chat)]], new))
            advance()

        before = await client.preemptions()
        watcher = asyncio.create_task(watch())
        start = time.perf_counter()
        jobs = ((lambda at=at, size=size: one(at, *size)) for at, size in zip(starts, sizes, strict=True))
        await in_turns(plan.users, jobs)
        seconds = time.perf_counter() - start
        watcher.cancel()
        preempted = await client.preemptions() - before
    latency, first = [answer.latency for answer in answers], [answer.first for answer in answers]
    return [{
        "kind": server.kind, "pool_tokens": server.pool_tokens, "seconds": seconds,
        "requests_min": 60 * plan.requests / seconds, "tok_s": sum(answer.tokens for answer in answers) / seconds,
        "prompt_tokens": sum(prompt for prompt, _ in sizes), "preemptions": preempted,
        "peak_running": int(peaks["num_requests_running"]), "peak_waiting": int(peaks["num_requests_waiting"]),
        "peak_pool": peaks["kv_cache_usage_perc"],
        "latency_s": statistics.median(latency), "latency_s_p95": percentile_95(latency),
        "first_s": statistics.median(first), "first_s_p95": percentile_95(first),
    }]  # fmt: skip


def tables(rows: list[Row]) -> Iterator[Table]:
    base = reference(rows)
    dense = next(row for row in rows if row["kind"] == base)
    table = Table(title="load", caption="times in seconds: median, 95th percentile")
    columns = ("cache", "pool tokens", "req/min", f"× {base}", "tok/s", "preempted", "running", "waiting")
    for column in (*columns, "latency", "first token"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for row in rows:
        table.add_row(
            row["kind"], f"{row['pool_tokens']:,}", f"{row['requests_min']:.1f}",
            f"{row['requests_min'] / dense['requests_min']:.2f}", f"{row['tok_s']:.0f}", str(row["preemptions"]),
            str(row["peak_running"]), str(row["peak_waiting"]), f"{row['latency_s']:.1f}, {row['latency_s_p95']:.1f}",
            f"{row['first_s']:.1f}, {row['first_s_p95']:.1f}",
        )  # fmt: skip
    yield table
