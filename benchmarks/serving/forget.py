"""Long requests in little memory, with and without a budget of tokens."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import load
from figures import Row
from rich.progress import Progress
from rich.table import Table
from server import Server, kind_options, pool_options, served


@dataclass(frozen=True)
class Plan(load.Plan):
    users: int = 16
    requests: int = 32
    prompt: tuple[int, int] = (3_000, 7_000)
    new: tuple[int, int] = (128, 256)
    max_model_len: int = 8_192
    max_num_seqs: int = 16
    budget: int = 2_048


PLAN = Plan()
QUICK = Plan(users=6, requests=8, prompt=(1_000, 1_500), new=(32, 64), max_num_seqs=6, pool_mib=128, budget=512)
CHOICES = ("requests", "pool_mib")
"""What the command line may change."""
why_not = load.why_not


def run(progress: Progress, kind: str, plan: Plan, more: list[str], **server: Any) -> list[Row]:
    logs = server.pop("logs")
    rows = []
    for budget in (None,) if kind_options(kind)[0] == "dense" else (None, plan.budget):
        own = [] if budget is None else ["--eviction", "streaming", "--budget", str(budget)]
        log = logs / f"forget-{kind.replace(' ', '-')}-{budget}.log"
        note = "" if budget is None else f", {budget} tokens a request"
        with served(progress, Server(kind, [*pool_options(plan), *own, *more], log, **server), note) as ready:
            task = progress.add_task(f"forget, {kind}{note}", total=plan.steps)
            try:
                (row,) = asyncio.run(load.measure(ready, plan, lambda own=task: progress.advance(own)))
            finally:
                progress.remove_task(task)
        rows.append(row | {"budget": budget, "ready_s": ready.seconds, "others": ready.others})
    return rows


def tables(rows: list[Row]) -> Iterator[Table]:
    table = Table(title="forget: long requests", caption="times in seconds: median, 95th percentile")
    columns = ("cache", "tokens a request", "pool tokens", "req/min", "preempted", "running", "peak of pool")
    for column in (*columns, "latency", "first token"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for row in rows:
        table.add_row(
            row["kind"], "all" if row["budget"] is None else f"{row['budget']:,}", f"{row['pool_tokens']:,}",
            f"{row['requests_min']:.1f}", str(row["preemptions"]), str(row["peak_running"]),
            f"{row['peak_pool']:.0%}", f"{row['latency_s']:.1f}, {row['latency_s_p95']:.1f}",
            f"{row['first_s']:.1f}, {row['first_s_p95']:.1f}",
        )  # fmt: skip
    yield table
