"""`kvfold serve` as users run it: a process of its own, spoken to over HTTP."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from kvfold.integrations.vllm.counters import FOLDER, count

KEY = "a-key-for-tests"
LONGEST = 2048
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)

    def post(self, path: str, body: dict[str, Any], key: str | None = KEY) -> dict[str, Any]:
        """The answer to a plain HTTP request."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def metrics(self, name: str) -> dict[str, float]:
        """The numbers of /metrics that have this name, by their engine."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        found = re.findall(rf'^{name}{{.*engine="(\d+)".*}} (\S+)$', text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return {engine: float(number) for engine, number in found}

    def metric(self, name: str) -> float:
        """A number of /metrics, of all engines."""
        return sum(self.metrics(name).values())


def _wait(until: Any, seconds: float, server: Server | None = None) -> None:
    """Ask until it is so."""
    end = time.monotonic() + seconds
    while not until():
        assert server is None or server.process.poll() is None, server.log.read_text()[-5000:]
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all that it started."""
    return [(own := psutil.Process(process.pid)), *own.children(recursive=True)]


@contextmanager
def _serving(log: Path, *arguments: object) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("kvfold"), "serve", *arguments, "--port", port, "--api-key", KEY]
    with log.open("wb") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT)
    own = Server(process, port, log)
    family: list[psutil.Process] = []

    def is_up() -> bool:
        family[:] = _family(process)
        try:
            return urllib.request.urlopen(f"{own.url}/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        _wait(is_up, 600, own)
        yield own
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            for left in family:  # vLLM's engine outlives a server that is killed while it works
                if left.is_running():
                    left.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--max-model-len", LONGEST, "--kv-cache-memory-bytes", "256M", "--enforce-eager"]
    with _serving(log, "smollm2", *options) as own:
        yield own


def test_chat_answers(server: Server) -> None:
    chat = server.client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, max_tokens=20)
    assert "Paris" in chat.choices[0].message.content
    assert chat.usage.prompt_tokens > 10


def test_chat_streams(server: Server) -> None:
    stream = server.client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=20, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(parts) > 3
    assert "Paris" in "".join(parts)


def test_plain_http_is_enough(server: Server) -> None:
    body = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 20}
    answer = server.post("/v1/chat/completions", body)
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("key", [None, "another"])
def test_without_the_key_nothing_is_answered(server: Server, key: str | None) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/v1/completions", {"model": "smollm2", "prompt": "Hello"}, key)
    assert error.value.code == 401


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    listening = [
        connection.laddr
        for process in _family(server.process)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.port
    ]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_prompts_that_are_too_long_are_refused(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/v1/completions", {"model": "smollm2", "prompt": "word " * 2 * LONGEST})
    assert error.value.code == 400
    assert str(LONGEST) in json.load(error.value)["error"]["message"]
    test_plain_http_is_enough(server)


def test_metrics_tell_of_the_folded_cache(server: Server) -> None:
    capacity, layers, kv_heads, slot = server.metric("kvfold:capacity_tokens"), 30, 3, 70
    assert f"CPU KV cache size: {capacity:,.0f} tokens" in server.log.read_text()
    assert server.metric("kvfold:bytes_per_token") == layers * kv_heads * slot
    before = server.metric("kvfold:folds_total")
    body = {"model": "smollm2", "prompt": "The sea is blue and deep. " * 100, "max_tokens": 2, "temperature": 0}
    pages = server.post("/v1/completions", body)["usage"]["prompt_tokens"] // 64
    assert pages >= 9
    _wait(lambda: server.metric("kvfold:folds_total") >= before + pages * layers, 60, server)


def test_a_stream_that_nobody_reads_is_ended(server: Server) -> None:
    stream = server.client.completions.create(
        model="smollm2", prompt="Count: one, two,", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    _wait(lambda: server.metric("kvfold:used_bytes") > 0, 60, server)
    stream.close()
    _wait(lambda: server.metric("vllm:num_requests_running") == 0, 60, server)
    test_chat_answers(server)
    _wait(lambda: server.metric("kvfold:used_bytes") == 0, 60, server)


def test_when_its_worker_dies_the_server_ends_and_says_so(server: Server) -> None:
    """The last test of this server."""
    family = _family(server.process)
    worker = next(process for process in family if "VLLM::Worker" in " ".join(process.cmdline()))
    stream = server.client.completions.create(
        model="smollm2", prompt="Count: one, two,", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    worker.kill()
    start = time.monotonic()
    with pytest.raises((openai.APIError, openai.APIConnectionError)) as error:
        for _ in stream:
            pass
    assert time.monotonic() - start < 30
    print(f"\nafter {time.monotonic() - start:.1f} s: {error.value!r}")
    server.process.wait(30)
    assert not psutil.wait_procs(family[1:], 30)[1]


def test_metrics_of_several_engines_behind_several_servers(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever server is asked, by whichever engine a request was served, and whatever another engine here counts."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    count(1000, 0, 0, 0)
    options = ["--data-parallel-size", 2, "--api-server-count", 2, "--kv-cache-memory-bytes", "64M", "--enforce-eager"]
    own = ["--served-model-name", "tiny", "--format", "turboquant-4", "--dtype", "bfloat16"]
    with _serving(tmp_path / "log", tiny_llama, *own, *options) as server:
        prompts, layers = [list(range(3, 203)), list(range(10, 150)), list(range(20, 90)), list(range(30, 100))], 4
        for prompt in prompts:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
            assert server.post("/v1/completions", body)["usage"]["prompt_tokens"] == len(prompt)
        expected = sum(len(prompt) // 64 for prompt in prompts) * layers
        end = time.monotonic() + 60
        while (folds := server.metrics("kvfold:folds_total")).keys() != {"0", "1"} or sum(folds.values()) != expected:
            assert time.monotonic() < end, f"{folds} of {expected}"
            time.sleep(0.1)
        for _ in range(6):
            for name in ("capacity_tokens", "used_tokens", "bytes_per_token", "used_bytes", "folds_total"):
                numbers = server.metrics(f"kvfold:{name}")
                assert set(numbers) == {"0", "1"}, name
                assert all(number == int(number) for number in numbers.values())
            assert all(number > 1000 for number in server.metrics("kvfold:capacity_tokens").values())
            assert sum(server.metrics("kvfold:folds_total").values()) == expected
            assert not any(server.metrics("kvfold:used_tokens").values())
