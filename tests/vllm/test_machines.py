"""Two machines: two network namespaces, each with an address of its own, are two machines to vLLM."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import rounding
import torch
from engines import ask, differences, engine

import kvfold

ADDRESSES = ("10.231.77.1", "10.231.77.2")
NEW = 24
OWN = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-batched-tokens", "512"]

ASK = """
import json, sys, urllib.request
url, *prompts = json.loads(sys.argv[1])
try:
    urllib.request.urlopen(f"{url}/health", timeout=5)
except OSError:
    sys.exit(1)
said = []
for prompt in prompts:
    body = {"model": "served", "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    said.append(json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["token_ids"])
print(json.dumps(said))
""".replace("NEW", str(NEW))


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces, by their names, and a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("two network namespaces need iproute2's ip, and root")
    names = f"kvfold-{os.getpid()}-0", f"kvfold-{os.getpid()}-1"
    ends = f"kv{os.getpid()}a", f"kv{os.getpid()}b"

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode and "Operation not permitted" in done.stderr:
            pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
        assert not done.returncode, done.stderr

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name, "name", "cable")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


class Nodes:
    """One engine on both machines: the first has the server."""

    def __init__(self, machines: Sequence[str], folder: Path, model: Path, options: Sequence[Sequence[str]]) -> None:
        self.first, self.logs = machines[0], [folder / "first", folder / "second"]
        self.processes = []
        for name, address, log, own in zip(machines, ADDRESSES, self.logs, options, strict=True):
            command = [
                "ip", "netns", "exec", name, str(Path(sys.executable).with_name("kvfold")), "serve", str(model),
                "--served-model-name", "served", "--kv-cache-memory-bytes", "64M", *OWN, *own,
            ]  # fmt: skip
            environment = os.environ | {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            with log.open("wb") as out:
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))

    def ask(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """New tokens of each, once the server is up."""
        end = time.monotonic() + 300
        question = json.dumps(["http://127.0.0.1:8000", *prompts])
        while True:
            for process, log in zip(self.processes, self.logs, strict=True):
                assert process.poll() is None, log.read_text()[-3000:]
            done = self.python(ASK, question)
            if done.returncode == 0:
                return json.loads(done.stdout)
            assert time.monotonic() < end, self.logs[0].read_text()[-3000:]
            time.sleep(0.5)

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Python on the first machine."""
        command = ["ip", "netns", "exec", self.first, sys.executable, "-c", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    def stop(self) -> None:
        family = [each for process in self.processes for each in _family(process.pid)]
        for process in self.processes:
            process.terminate()
        _, left = psutil.wait_procs(family, 20)
        for each in left:
            each.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        return [(own := psutil.Process(pid)), *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _nodes(*arguments: Any) -> Iterator[Nodes]:
    nodes = Nodes(*arguments)
    try:
        yield nodes
    finally:
        nodes.stop()


def _with_rank(*options: str) -> list[list[str]]:
    """The same engine's options on each machine."""
    own = ["--nnodes", "2", "--master-addr", ADDRESSES[0], *options]
    return [[*own, "--node-rank", "0"], [*own, "--node-rank", "1", "--headless"]]


def _as_at_home(
    said: list[list[int]], model: Path, prompts: Sequence[list[int]], own: dict[str, Any], tie: float
) -> bool:
    """Whether one process says the same, up to ties."""
    options = {"max_model_len": 2048, "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 64 << 20}
    with engine(model, in_process=True, additional_config={"kvfold": own}, **options) as llm:
        at_home = [ask(llm, [prompt], NEW, ignore_eos=True)[0] for prompt in prompts]
    there = [replace(answer, tokens=tokens) for answer, tokens in zip(at_home, said, strict=True)]
    differ = differences(there, at_home)
    print(f"\n{len(said)} answers beside one process's: {differ}; a tie is {tie:.1e}")
    return all(gap < tie for _, _, gap in differ)


def test_tensor_parallel_forgets_together_and_ends_together(
    machines: tuple[str, str], tiny_llama: Path, tiny_ids: list[int], tmp_path: Path
) -> None:
    """The same tokens as in one process, though each machine scores its own heads; one that dies ends the other."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    assert kvfold.attach(model)
    kvfold.measure_queries(model, [torch.tensor([tiny_ids[3000:3500]])]).save(tmp_path / "own.tria")
    prompts = [tiny_ids[:200], tiny_ids[500:2000]]
    own = {"format": "turboquant-4", "eviction": str(tmp_path / "own.tria"), "budget": 512}
    told = ["--format", "turboquant-4", "--eviction", own["eviction"], "--budget", "512"]
    with _nodes(machines, tmp_path, tiny_llama, _with_rank("--tensor-parallel-size", "2", *told)) as nodes:
        said = nodes.ask(prompts)
        second = _family(nodes.processes[1].pid)
        for process in reversed(second):
            process.send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert nodes.python(ASK, json.dumps(["http://127.0.0.1:8000", prompts[0]])).returncode != 0
        nodes.processes[0].wait(120)
        print(f"\nthe first machine's server ended {time.monotonic() - start:.0f} s after the second was gone")
        log = nodes.logs[0].read_text()
        assert "Connection closed by peer" in log or "Connection reset by peer" in log, log[-3000:]
    tie = rounding.tie_of(tiny_llama, [prompts[0]], "turboquant-4", "turboquant-4")
    assert _as_at_home(said, tiny_llama, prompts, own, tie)


def test_pipeline_parallel(machines: tuple[str, str], smollm2: Path, calibration: Path, tmp_path: Path) -> None:
    """SmolLM2's first layers here, its last ones there."""
    prompts = [list(range(300, 350)), list(range(1000, 1300))]
    told = ["--format", "kvfold-4", "--calibration", str(calibration), "--pipeline-parallel-size", "2"]
    with _nodes(machines, tmp_path, smollm2, _with_rank(*told)) as nodes:
        said = nodes.ask(prompts)
    tie = rounding.tie_of(smollm2, [prompts[1]], "kvfold-4", "kvfold-4")
    assert _as_at_home(said, smollm2, prompts, {"format": "kvfold-4", "calibration": str(calibration)}, tie)


def test_data_parallel(machines: tuple[str, str], tiny_llama: Path, tiny_ids: list[int], tmp_path: Path) -> None:
    """An engine on each machine behind one server."""
    prompts = [tiny_ids[i : i + 150] for i in range(0, 600, 100)]
    own = [
        "--format", "turboquant-4", "--data-parallel-size", "2", "--data-parallel-size-local", "1",
        "--data-parallel-address", ADDRESSES[0], "--data-parallel-rpc-port", "13345",
    ]  # fmt: skip
    options = [own, [*own, "--headless", "--data-parallel-start-rank", "1"]]
    with _nodes(machines, tmp_path, tiny_llama, options) as nodes:
        said = nodes.ask(prompts)
        metrics = nodes.python(
            "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
        )
        read = dict(re.findall(r'^vllm:prompt_tokens_total{engine="(.)".*} (.*)$', metrics.stdout, re.MULTILINE))
        assert {engine for engine, tokens in read.items() if float(tokens)} == {"0", "1"}
    tie = rounding.tie_of(tiny_llama, [prompts[0]], "turboquant-4", "turboquant-4")
    assert _as_at_home(said, tiny_llama, prompts, {"format": "turboquant-4"}, tie)
