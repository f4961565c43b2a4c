"""What a restart costs: the time to the first token of a long prompt that an engine before has read."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client import client_of, read_text
from figures import Row
from rich.progress import Progress
from rich.table import Table
from server import Server, kind_options, pool_options, served


@dataclass(frozen=True)
class Plan:
    prompt: int = 4_000
    max_model_len: int = 8_192
    max_num_seqs: int = 8
    pool_mib: int = 512


PLAN, QUICK = Plan(), Plan(prompt=1_000)
CHOICES = ("pool_mib",)
"""What the command line may change."""


def why_not(plan: Plan) -> str | None:
    """Why a plan cannot be carried out."""
    return None if plan.pool_mib > 0 else f"pool_mib = {plan.pool_mib}: 1 or more"


def run(progress: Progress, kind: str, plan: Plan, more: list[str], **server: Any) -> list[Row]:
    logs = server.pop("logs")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        keep = [] if kind_options(kind)[0] == "dense" else ["--keep", folder]
        for start in ("first", "second"):
            log = logs / f"kept-{kind.replace(' ', '-')}-{start}.log"
            with served(
                progress, Server(kind, [*pool_options(plan), *keep, *more], log, **server), f", {start}"
            ) as own:
                first, found = asyncio.run(_first_token(own, plan.prompt))
            held = sum(path.stat().st_size for path in Path(folder).glob("*/*/*"))
            rows.append({
                "kind": kind, "start": start, "prompt": plan.prompt, "ready_s": own.seconds, "first_token_s": first,
                "found_tokens": found, "disk_bytes": held,
            })  # fmt: skip
    return rows


async def _first_token(server: Server, prompt: int) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's were found outside of the engine."""
    async with client_of(server) as client:
        chat, text = await read_text(client)
        await client.complete(text[50_000:50_200], 8)  # first uses prepare things that later ones find
        before = await client.metrics()
        answer = await client.complete([*chat, *text][:prompt], 2)
        after = await client.metrics()
    return answer.first, int((after - before)["external_prefix_cache_hits_total"])


def tables(rows: list[Row]) -> Iterator[Table]:
    table = Table(title=f"kept: a prompt of {rows[0]['prompt']:,} tokens, and the same after a restart")
    for column in ("cache", "ready after s", "restarted", "first token s", "restarted", "tokens found", "MB on disk"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for one, two in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(
            one["kind"], f"{one['ready_s']:.0f}", f"{two['ready_s']:.0f}", f"{one['first_token_s']:.2f}",
            f"{two['first_token_s']:.2f}", f"{two['found_tokens']:,}", f"{one['disk_bytes'] / 1e6:.1f}",
        )  # fmt: skip
    yield table
