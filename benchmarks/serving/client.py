"""What is asked of a server, and when its answers came."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from server import Server, ServingError

CHAT = "<|im_start|>user\n"
"""What every prompt starts with, as a chat does."""


@dataclass
class Answer:
    """When a streamed answer was asked for, and when how many of its tokens had arrived (times in seconds)."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def latency(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1][0] - self.sent

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1]


@dataclass
class Client:
    """What is asked of a server."""

    session: "aiohttp.ClientSession"
    model: str

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""
        order = {"model": self.model, "prompt": text, "add_special_tokens": False}
        async with self.session.post("/tokenize", json=order) as response:
            await _check(response)
            return (await response.json())["tokens"]

    async def complete(self, prompt: Sequence[int], new: int, *, abandon: bool = False, n: int = 1) -> Answer:
        """Stream `new` tokens after a prompt; with `abandon`, close the connection when the first has arrived."""
        order = {
            "model": self.model, "prompt": list(prompt), "max_tokens": new, "ignore_eos": True, "stream": True,
            "temperature": 0.0 if n == 1 else 1.0, "n": n,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        answer = Answer(time.perf_counter())
        async with self.session.post("/v1/completions", json=order) as response:
            await _check(response)
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    raise ServingError(f"the server answered {part['error']}")
                if not part["choices"]:
                    continue
                answer.arrivals.append((now, part["usage"]["completion_tokens"]))
                if abandon:
                    response.close()
                    return answer
        if n == 1 and (not answer.arrivals or answer.tokens != new):
            raise ServingError(f"{answer.tokens if answer.arrivals else 0} tokens came where {new} were asked for")
        return answer

    async def metrics(self) -> Counter[str]:
        """The engine's own figures by name; labels are summed over."""
        found: Counter[str] = Counter()
        async with self.session.get("/metrics") as response:
            await _check(response)
            for name, value in re.findall(r"^vllm:(\w+)(?:\{.*\})? (\S+)$", await response.text(), re.MULTILINE):
                found[name] += float(value)
        return found

    async def preemptions(self) -> int:
        return int((await self.metrics())["num_preemptions_total"])


async def _check(response: "aiohttp.ClientResponse") -> None:
    if response.status != 200:
        raise ServingError(f"{response.url.path} answered {response.status}: {(await response.text())[:500]}")


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        yield Client(session, server.model)


async def read_text(client: Client) -> tuple[list[int], list[int]]:
    """Token ids that every prompt starts with, and those of the standard library's text."""
    from kvfold.evaluate import standard_text

    return await client.tokenize(CHAT), await client.tokenize(standard_text())


async def in_turns(users: int, jobs: Iterable[Callable[[], Any]]) -> None:
    """Users in a closed loop: each takes the next job when its last is done."""
    left = iter(jobs)

    async def user() -> None:
        for job in left:
            await job()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
