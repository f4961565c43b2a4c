"""Serving SmolLM2 with vLLM on a CPU: kvfold's cache beside vLLM's own in bfloat16 and in fp8.

Each kind of cache has a server of its own, one after the other, with the same threads, lengths, memory and requests,
which are streamed, greedy and of fixed length. Run it with the Python of the environment that has vLLM and kvfold, and
on a machine that does nothing else: one other busy process can slow a server's threads, which wait for one another,
tenfold. There are four parts:

startup  The tokens that the engine says its pool holds, at equal memory, for SmolLM2 (head_dim 64) and for a small
         random Llama of head_dim 128.
speed    Decoding by 1, 8 and 32 users at once, after prompts of several lengths. The users of a cell share one
         document, which prefix caching holds once, and differ in their last 16 tokens. A cell is timed from when the
         last user has its first token until the first user has its last one, so that all users decode all the time. A
         user's speed is its tokens between its first and last arrival in there over the time between the two; tok/s is
         the sum over users, "ms a token" the time of a step, users / tok/s, and "context ms" what a step takes above
         the one after the shortest prompt: attention. "Reading" is the time to the first token of a prompt that is
         not cached. Medians over rounds that each go through all cells, in brackets the least and the most. (What
         users share may stay in the processor's own caches from one user to the next, which helps the larger cache.)
load     Requests a minute when memory is short: 32 users in a closed loop, prompts of 500 to 1,500 tokens of which no
         two are alike, answers of 128 to 384, and a pool in which a bfloat16 cache must queue and preempt. Requests a
         minute are those of the whole list; latency runs from sending a request to its last token; "running" and
         "waiting" are the most that the engine reported, twice a second.
soak     1,000 short requests by 16 users, some of them abandoned in mid-stream, some asking for two answers: resident
         memory of all of the server's processes after every 100, when nothing runs.

    python benchmarks/serving.py                               # all parts and kinds: about an hour
    python benchmarks/serving.py --quick                       # the same in small: a quarter of one
    python benchmarks/serving.py --parts speed --kinds bf16,kvfold-4 --contexts 64,7900 --users 1
    python benchmarks/serving.py --parts load --repeat-first   # how much did the machine change meanwhile?

Kinds are bf16 and fp8, vLLM's own, and formats of kvfold. A part's results replace that part's in the JSON file and
leave the others. What servers write is in a folder beside it.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

try:
    import aiohttp
    import psutil
except ModuleNotFoundError:  # vLLM brings both; --help works without
    aiohttp = psutil = None

RESULTS = Path(__file__).resolve().parents[1] / "build" / "serving.json"
MIB = 2**20
SUFFIX = 16
"""Tokens by which the prompts of users that share a document differ."""
CHAT = "<|im_start|>user\n"
"""What every prompt starts with, as a chat does."""

Row = dict[str, Any]
Advance = Callable[[], None]

console = Console(width=110)
stderr = Console(stderr=True)


class ServingError(RuntimeError):
    """A server did not start, or did not answer as it must."""


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeedPlan:
    contexts: tuple[int, ...] = (64, 512, 4_096, 7_900)
    users: tuple[int, ...] = (1, 8, 32)
    rounds: int = 3
    new: int = 64
    new_of_many: int = 32  # tokens, from `many` users on
    many: int = 32
    max_model_len: int = 8_192
    max_num_seqs: int = 32
    pool_mib: int = 1_024

    def new_tokens(self, users: int) -> int:
        return self.new_of_many if users >= self.many else self.new


@dataclass(frozen=True)
class LoadPlan:
    users: int = 32
    requests: int = 96
    prompt: tuple[int, int] = (500, 1_500)
    new: tuple[int, int] = (128, 384)
    max_model_len: int = 4_096
    max_num_seqs: int = 32
    pool_mib: int = 256


@dataclass(frozen=True)
class SoakPlan:
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


@dataclass(frozen=True)
class StartupPlan:
    models: tuple[str, ...] = ("smollm2", "llama-128")
    max_model_len: int = 4_096
    max_num_seqs: int = 8
    pool_mib: int = 512


KINDS = ("bf16", "fp8", "kvfold-4")
"""bf16 and fp8 are vLLM's own caches; other names are formats of kvfold."""
PLANS = {"startup": StartupPlan(), "speed": SpeedPlan(), "load": LoadPlan(), "soak": SoakPlan()}
QUICK = {
    "startup": replace(PLANS["startup"], models=("smollm2",)),
    "speed": SpeedPlan(contexts=(64, 2_048), users=(1, 8), rounds=2, new=32, pool_mib=256),
    "load": LoadPlan(
        users=12, requests=24, prompt=(300, 600), new=(32, 64), max_model_len=2_048, max_num_seqs=12, pool_mib=64
    ),
    "soak": SoakPlan(requests=200, every=20, settled=40),
}

LLAMA_128 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 512,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 49_152, "max_position_embeddings": 4_096, "rms_norm_eps": 1e-6, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


# --- servers ----------------------------------------------------------------------------------------------------------


def server_command(name: str, options: Sequence[str], model: str = "smollm2") -> list[str]:
    """The command that serves a model with a format's cache; "dense" is vLLM as it is."""
    return [str(Path(sys.executable).parent / "kvfold"), "serve", model, "--format", name, *options]


def kind_options(kind: str) -> tuple[str, list[str]]:
    """A kind's format, and what its server is told besides; "… again" is the same kind once more."""
    name = kind.removesuffix(" again")
    if name == "bf16":
        return "dense", []
    return ("dense", ["--kv-cache-dtype", "fp8"]) if name == "fp8" else (name, [])


@dataclass
class Server:
    """One server on the loopback interface.

    Attributes
    ----------
    others
        Share of the machine that other processes kept busy in the second before it started.
    seconds
        Time from starting it until it was ready.
    pool_tokens
        What the engine said that its pool holds.
    """

    kind: str
    options: Sequence[str]
    log: Path
    threads: int
    timeout: float
    model: str = "smollm2"
    url: str = ""
    others: float = 0.0
    seconds: float = 0.0
    pool_tokens: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        name, more = kind_options(self.kind)
        options = [*self.options, *more, "--host", "127.0.0.1", "--port", str(port)]
        command = server_command(name, options, self.model)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" keeps a core for other processes, half of a machine of two
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.others = psutil.cpu_percent(interval=1) / 100
        if self.others > 0.1:
            stderr.print(
                f"[bold yellow]other processes keep {self.others:.0%} of this machine busy: figures will be off"
            )
        start = time.perf_counter()
        with self.log.open("wb") as log:
            log.write(f"{shlex.join(command)}\n".encode())
            log.flush()
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
            except FileNotFoundError:
                raise ServingError(
                    f"there is no {command[0]}: run this with the Python of the environment that has kvfold and vLLM"
                ) from None
        self._wait(start + self.timeout)
        self.seconds = time.perf_counter() - start
        found = re.findall(r"KV cache size: ([\d,]+) tokens", self.log.read_text(errors="replace"))
        if not found:
            raise ServingError(f"{self.kind}: the log has no line about the size of the KV cache")
        self.pool_tokens = int(found[-1].replace(",", ""))

    def stop(self) -> None:
        """End its whole process group, and what is below it."""
        process = self._process
        if process is None:
            return
        below = self.processes()
        try:
            process.terminate()  # it ends its workers itself
            psutil.wait_procs(below, timeout=20)
        finally:  # a second signal ends the wait
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for each in below:  # those that made a session of their own
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
            self._process = None

    def print_log(self) -> None:
        """Errors in what it wrote, and the end of it."""
        if self._process is None:
            return
        text = self.log.read_text(errors="replace")
        errors = dict.fromkeys(re.findall(r"\b\w+Error: .*", text))  # each process repeats those of its workers
        for title, lines in (("errors", list(errors)[:5]), ("the last lines", text.splitlines()[-20:])):
            if lines:
                stderr.print(f"[bold red]{title} of {self.log}:")
                stderr.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)

    def processes(self) -> list["psutil.Process"]:
        """The server's process and all below it."""
        assert self._process
        try:
            top = psutil.Process(self._process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def check_alive(self) -> None:
        """Raise if it has ended."""
        assert self._process
        if self._process.poll() is not None:
            raise ServingError(f"{self.kind}: the server ended with status {self._process.returncode}")

    def _wait(self, until: float) -> None:
        while True:
            self.check_alive()
            if time.perf_counter() > until:
                raise ServingError(f"{self.kind}: the server was not ready after {self.timeout:.0f} s")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)


# --- a client ---------------------------------------------------------------------------------------------------------


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


# --- the parts --------------------------------------------------------------------------------------------------------


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


async def measure_speed(server: Server, plan: SpeedPlan, advance: Advance) -> list[Row]:
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
                # Every document starts at a place of its own, so the first to ask for it has it read.
                at = 100 + 997 * (i * len(plan.contexts) + j)
                at %= len(text) - context - SUFFIX * max(plan.users)
                own = at + context - len(chat) - SUFFIX
                document = [*chat, *text[at:own]]
                reading[context].append((await client.complete([*document, *text[own : own + SUFFIX]], 1)).first)
                for users in plan.users:
                    tails = [text[own + SUFFIX * u :][:SUFFIX] for u in range(users)]
                    answers = await asyncio.gather(
                        *(client.complete([*document, *tail], plan.new_tokens(users)) for tail in tails)
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


def speed_tables(rows: list[Row]) -> Iterator[Table]:
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


async def measure_load(server: Server, plan: LoadPlan, advance: Advance) -> list[Row]:
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


def load_tables(rows: list[Row]) -> Iterator[Table]:
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


async def measure_soak(server: Server, plan: SoakPlan, advance: Advance) -> list[Row]:
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


def soak_tables(rows: list[Row]) -> Iterator[Table]:
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


def startup_tables(rows: list[Row]) -> Iterator[Table]:
    base = reference(rows)
    dense = {row["model"]: row for row in rows if row["kind"] == base}
    table = Table(title="startup: what the engine says its pool holds")
    for column in ("model", "head_dim", "cache", "pool MiB", "tokens", f"× {base}", "ready after s"):
        table.add_column(column, justify="left" if column in ("model", "cache") else "right")
    for row in sorted(rows, key=lambda row: row["head_dim"]):
        table.add_row(
            row["model"], str(row["head_dim"]), row["kind"], str(row["pool_mib"]), f"{row['pool_tokens']:,}",
            f"{row['pool_tokens'] / dense[row['model']]['pool_tokens']:.3f}", f"{row['seconds']:.0f}",
        )  # fmt: skip
    yield table


MEASURES = {"speed": measure_speed, "load": measure_load, "soak": measure_soak}
TABLES = {"speed": speed_tables, "load": load_tables, "soak": soak_tables, "startup": startup_tables}


# --- figures ----------------------------------------------------------------------------------------------------------


def reference(rows: list[Row]) -> str:
    """The kind that ratios are against: bf16, or else the first."""
    kinds = [row["kind"] for row in rows]
    return "bf16" if "bf16" in kinds else kinds[0]


def spread(values: Sequence[float], form: str) -> str:
    """A median, and from where to where the values go."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def about() -> dict[str, Any]:
    """The machine and the versions that figures depend on."""
    from kvfold.evaluate.quality import versions

    def vllm() -> str:
        for name in ("vllm-cpu", "vllm"):
            try:
                return f"{version(name)} ({name})"
            except PackageNotFoundError:
                continue
        return "none"

    processor = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": processor[1] if processor else versions()["machine"],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions() | {"vllm": vllm()},
    }


# --- the command ------------------------------------------------------------------------------------------------------


@contextmanager
def served(progress: Progress, server: Server, note: str = "") -> Iterator[Server]:
    """A server that runs; a line says so while it starts, and its log's end is shown when something fails."""
    task = progress.add_task(f"starting {server.kind}{note}", total=None)
    try:
        server.start()
        progress.remove_task(task)
        yield server
    except Exception as error:
        server.print_log()
        if isinstance(error, aiohttp.ClientError):  # perhaps because it is gone
            server.check_alive()
        raise
    finally:
        server.stop()


def pool_options(plan: Any) -> list[str]:
    """What all kinds of a part have in common."""
    sizes = {
        "--max-model-len": plan.max_model_len,
        "--max-num-seqs": plan.max_num_seqs,
        "--kv-cache-memory-bytes": plan.pool_mib * MIB,
    }
    return ["--dtype", "bfloat16", *(str(word) for pair in sizes.items() for word in pair)]


def run_startup(progress: Progress, kind: str, plan: StartupPlan, more: list[str], **server: Any) -> list[Row]:
    from kvfold.integrations.models import demo_folder

    rows = []
    folder = server.pop("logs")
    for name in plan.models:
        options = [*pool_options(plan), "--enforce-eager", *more]
        with tempfile.TemporaryDirectory() as scratch:
            model, head_dim = name, 64
            if name == "llama-128":
                model, head_dim = str(Path(scratch) / name), 128
                Path(model).mkdir()
                (Path(model) / "config.json").write_text(json.dumps(LLAMA_128))
                options += ["--load-format", "dummy", "--tokenizer", str(demo_folder())]
            log = folder / f"startup-{kind.replace(' ', '-')}-{name}.log"
            with served(progress, Server(kind, options, log, model=model, **server), f", {name}") as ready:
                rows.append({
                    "kind": kind, "model": name, "head_dim": head_dim, "pool_mib": plan.pool_mib,
                    "pool_tokens": ready.pool_tokens, "seconds": ready.seconds,
                })  # fmt: skip
    return rows


def run_part(progress: Progress, part: str, kind: str, plan: Any, more: list[str], **server: Any) -> list[Row]:
    """One kind's rows of a part, from a server of its own."""
    if part == "startup":
        return run_startup(progress, kind, plan, more, **server)
    log = server.pop("logs") / f"{part}-{kind.replace(' ', '-')}.log"
    total = plan.rounds * len(plan.contexts) * len(plan.users) if part == "speed" else plan.requests
    with served(progress, Server(kind, [*pool_options(plan), *more], log, **server)) as ready:
        task = progress.add_task(f"{part}, {kind}", total=total)
        try:
            rows = asyncio.run(MEASURES[part](ready, plan, lambda: progress.advance(task)))
        finally:
            progress.remove_task(task)
    for row in rows:
        row |= {"ready_s": ready.seconds, "others": ready.others}
    return rows


def save(path: Path, part: str, found: dict[str, Any]) -> None:
    """Put a part's results in the place of that part's in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = json.loads(path.read_text()) if path.exists() else {}
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(parts | {part: found}, indent=2, ensure_ascii=False) + "\n")
    scratch.replace(path)


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in listed(text))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", default=tuple(PLANS), type=listed, help=f"by default {','.join(PLANS)}")
    add(
        "--kinds",
        default=KINDS,
        type=listed,
        help=f"in the order in which they are served, by default {','.join(KINDS)}",
    )
    add("--quick", action="store_true", help="small sizes, to see that everything works")
    add("--repeat-first", action="store_true", help="serve the first kind once more at the end, beside itself")
    add("--contexts", type=numbers, help="speed: lengths of prompts in tokens")
    add("--users", type=numbers, help="speed: numbers of users, 32 at most")
    add("--rounds", type=int, help="speed: how often each cell is measured")
    add("--new", type=int, help="speed: tokens that each user decodes")
    add("--requests", type=int, help="load and soak: how many")
    add("--pool-mib", type=int, help="memory of the cache; it must hold one request of the longest")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of a server's model, by default the cores")
    add("--serve-options", default="", help="for all kinds, as in --serve-options='--enforce-eager --block-size 64'")
    add("--start-timeout", type=float, default=600, help="seconds after which a server counts as failed")
    add("--json", type=Path, default=RESULTS, help="where results go, part by part; by default build/serving.json")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PLANS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {', '.join(PLANS)}")
    if not args.kinds or not args.parts:
        parser.error("name at least one kind and one part")
    if args.users and not 0 < max(args.users) <= 32:
        parser.error(f"--users {max(args.users)}: 1 to 32")
    if aiohttp is None or find_spec("kvfold") is None:
        parser.error("run this with the Python of the environment that has both vLLM and kvfold")
    return args


def planned(args: argparse.Namespace, part: str) -> Any:
    """A part's sizes, as the command line says."""
    plan = (QUICK if args.quick else PLANS)[part]
    names = {
        "speed": ("contexts", "users", "rounds", "new", "pool_mib"),
        "load": ("requests", "pool_mib"),
        "soak": ("requests", "pool_mib"),
        "startup": ("pool_mib",),
    }[part]
    plan = replace(plan, **{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    if part == "speed":
        if args.new is not None:
            plan = replace(plan, new_of_many=args.new)
        longest = max(plan.contexts) + max(map(plan.new_tokens, plan.users))
        if longest > plan.max_model_len or min(plan.contexts) < 2 * SUFFIX:
            sys.exit(f"serving.py: contexts go from {2 * SUFFIX} to {plan.max_model_len:,} tokens, answers included")
    if part == "soak" and plan.requests <= plan.settled:
        sys.exit(f"serving.py: soak compares with memory after {plan.settled} requests: ask for more")
    return plan


def main() -> None:
    args = arguments()
    plans = {part: planned(args, part) for part in args.parts}
    kinds = [*args.kinds, *([f"{args.kinds[0]} again"] if args.repeat_first else [])]
    for each in (signal.SIGTERM, signal.SIGHUP):  # so that servers are stopped then too
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    server = {"logs": args.json.with_suffix(""), "threads": args.threads, "timeout": args.start_timeout}
    machine = about()
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {args.threads} threads, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; "
        + ", ".join(f"{name} {value}" for name, value in machine["versions"].items()),
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    more = shlex.split(args.serve_options)
    try:
        for part, plan in plans.items():
            rows: list[Row] = []
            start = time.perf_counter()
            try:
                with Progress(*columns, console=stderr, transient=True) as progress:
                    for kind in kinds:
                        rows += run_part(progress, part, kind, plan, more, **server)
                        settings = asdict(plan) | {"serve_options": more, "threads": args.threads}
                        settings |= {"quick": args.quick, "seconds": time.perf_counter() - start}
                        save(args.json, part, {"settings": settings, "rows": rows, **machine})
            finally:  # what there is, should a later kind fail
                for table in TABLES[part](rows) if rows else ():
                    console.print(table)
            console.print(f"{part} took {(time.perf_counter() - start) / 60:.1f} min; in {args.json}", highlight=False)
    except (ServingError, aiohttp.ClientError) as error:
        sys.exit(f"serving.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
