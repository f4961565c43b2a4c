"""Servers of the kinds that are compared."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.progress import Progress

MIB = 2**20

stderr = Console(stderr=True)


class ServingError(RuntimeError):
    """A server did not start, or did not answer as it must."""


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
    threads
        Of its model, unbound, which sleep while they wait; 0 for those that vLLM binds by itself.
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
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1"}
        if self.threads:  # by itself, vLLM keeps a core for other processes, half of a machine of two
            environment |= {
                "OMP_NUM_THREADS": str(self.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_WAIT_POLICY": "passive",
            }  # fmt: skip
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


def pool_options(plan: Any) -> list[str]:
    """What all kinds of a part have in common."""
    sizes = {
        "--max-model-len": plan.max_model_len,
        "--max-num-seqs": plan.max_num_seqs,
        "--kv-cache-memory-bytes": plan.pool_mib * MIB,
    }
    return ["--dtype", "bfloat16", *(str(word) for pair in sizes.items() for word in pair)]


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
