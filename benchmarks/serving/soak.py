"""Resident memory over many short requests."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from client import client_of, in_turns, read_text
from figures import Advance, Row
from rich.table import Table
from server import Server, ServingError


@dataclass(frozen=True)
class Plan:
    users: int = 16
    requests: int = 1_000
    every: int = 100
    settled: int = 200  # requests after which memory should not grow any more
    prompt: tuple[int, int] = (5, 300)
    new: tuple[int, int] = (1, 16)
    abandoned: float = 0.1
    """Share of requests whose connection is closed after the first token of many."""
    twofold: float = 0.1
    """Share of requests with n = 2."""
    max_model_len: int = 2_048
    max_num_seqs: int = 16
    pool_mib: int = 96  # small, so that every block of it has been used long before `settled`

    @property
    def steps(self) -> int:
        return self.requests


PLAN, QUICK = Plan(), Plan(requests=200, every=20, settled=40)
CHOICES = ("requests", "pool_mib")
"""What the command line may change."""


def why_not(plan: Plan) -> str | None:
    """Why a plan cannot be carried out."""
    if plan.requests > plan.settled:
        return None
    return f"requests = {plan.requests}: memory is compared with what it is after {plan.settled}, so ask for more"


async def measure(server: Server, plan: Plan, advance: Advance) -> list[Row]:
    draw = random.Random(0)
    done: Counter[str] = Counter()
    samples: list[Row] = []
    start = time.perf_counter()

    async with client_of(server) as client:
        chat, text = await read_text(client)

        async def one() -> None:
            fate = draw.random()
            prompt, new = draw.randint(*plan.prompt), draw.randint(*plan.new)
            at = draw.randrange(len(text) - prompt)
            ids = [*chat, *text[at : at + prompt]][:prompt]
            if fate < plan.abandoned:
                await client.complete(ids, plan.max_model_len // 4, abandon=True)
                done["abandoned"] += 1
            else:
                twofold = fate < plan.abandoned + plan.twofold
                await client.complete(ids, new, n=2 if twofold else 1)
                done["twofold" if twofold else "plain"] += 1
            advance()

        for count in range(plan.every, plan.requests + 1, plan.every):
            await in_turns(plan.users, [one] * plan.every)
            for _ in range(300):  # abandoned requests end a step later
                now = await client.metrics()
                if not now["num_requests_running"] + now["num_requests_waiting"]:
                    break
                await asyncio.sleep(0.1)
            else:
                raise ServingError("requests still ran 30 s after the last had been answered or abandoned")
            sizes: Counter[str] = Counter()
            for process in server.processes():
                try:
                    sizes[process.name()] += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            samples.append({
                "requests": count, "rss_bytes": sizes.total(), "processes": dict(sizes),
                "worker_bytes": sum(size for name, size in sizes.items() if name.startswith("VLLM::Worker")),
                "pool_in_use": now["kv_cache_usage_perc"],
            })  # fmt: skip
    settled, last = next(each for each in samples if each["requests"] >= plan.settled), samples[-1]
    return [{
        "kind": server.kind, "pool_tokens": server.pool_tokens, "seconds": time.perf_counter() - start, **done,
        "settled": settled["requests"], "requests": last["requests"], "samples": samples,
        "growth": last["rss_bytes"] / settled["rss_bytes"] - 1,
        "growth_bytes": last["rss_bytes"] - settled["rss_bytes"],
        "worker_growth_bytes": last["worker_bytes"] - settled["worker_bytes"],
    }]  # fmt: skip


def tables(rows: list[Row]) -> Iterator[Table]:
    table = Table(title="soak: resident MB of all processes")
    table.add_column("after")
    for row in rows:
        table.add_column(row["kind"], justify="right")
    for samples in zip(*(row["samples"] for row in rows), strict=True):
        table.add_row(f"{samples[0]['requests']:,}", *(f"{each['rss_bytes'] / 1e6:,.1f}" for each in samples))
    table.add_section()
    growths = (f"{row['growth_bytes'] / 1e6:+.1f} ({row['growth']:+.2%})" for row in rows)
    table.add_row(f"growth since {rows[0]['settled']:,}", *growths)
    table.add_row("… of the worker", *(f"{row['worker_growth_bytes'] / 1e6:+.1f}" for row in rows))
    table.add_row("abandoned", *(str(row.get("abandoned", 0)) for row in rows))
    table.add_row("n = 2", *(str(row.get("twofold", 0)) for row in rows))
    table.add_row("pool in use at the end", *(f"{row['samples'][-1]['pool_in_use']:.1%}" for row in rows))
    yield table
