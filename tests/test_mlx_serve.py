"""mlx-lm's server with folded caches: several at once are answered as each alone, by mlx-lm's own batches."""

import json
import logging
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("mlx_lm") is None:  # what is there and does not import is no reason to skip
    pytest.skip("the extra mlx is not installed", allow_module_level=True)
from kvfold.kernels.mlx import mx  # isort: split

import openai
from commands import run_kvfold
from conftest import tiny_model
from mlx_lm.models import cache as theirs

import kvfold.integrations.mlx  # before MLX: torch's BLAS
from kvfold.cache.budgets import FEWEST
from kvfold.integrations.mlx import make_prompt_cache
from kvfold.integrations.mlx.batch import BATCHES, FoldedBatchCache
from kvfold.integrations.mlx.serve import SoundPrompts

generating = import_module("mlx_lm.generate")
batched = pytest.mark.skipif(not BATCHES, reason="this mlx-lm puts dense caches into its batches, whatever it is given")
NEW = 24
LENGTHS = (5, 300, 129, 270)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random model in mlx-lm, float32, with and without sliding windows."""
    folder = tmp_path_factory.mktemp(request.param)
    own = {} if request.param == "gemma3" else {"num_hidden_layers": FEWEST}
    tiny_model(request.param, **own).float().save_pretrained(folder)
    from mlx_lm.utils import load_model

    from kvfold.integrations.mlx.models import config_as_before

    return load_model(folder, model_config=config_as_before(json.loads((folder / "config.json").read_text())))[0]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 250, (n,), generator=draw).tolist() for n in LENGTHS]


def _alone(network: Any, prompt: list[int], format: str, cache: list[Any] | None = None) -> list[int]:
    cache = make_prompt_cache(network, format) if cache is None else cache
    return [
        token for token, _ in generating.generate_step(mx.array(prompt), network, max_tokens=NEW, prompt_cache=cache)
    ]


@dataclass
class Batch:
    """mlx-lm's batched generation, step by step."""

    generator: Any
    said: dict[int, list[int]]
    caches: dict[int, list[Any]]

    @classmethod
    def of(cls, network: Any, step: int = 128) -> "Batch":
        return cls(generating.BatchGenerator(network, max_tokens=NEW, prefill_step_size=step), {}, {})

    def insert(self, prompts: Sequence[list[int]], caches: Sequence[list[Any]]) -> list[int]:
        uids = self.generator.insert(list(prompts), [NEW] * len(prompts), caches=list(caches))
        self.said |= {uid: [] for uid in uids}
        return list(uids)

    def step(self) -> bool:
        read, said = self.generator.next()
        for one in said:
            self.said[one.uid].append(one.token)
            if one.finish_reason is not None:
                self.caches[one.uid] = one.prompt_cache
        return bool(read or said)

    def run(self) -> None:
        while self.step():
            pass


@pytest.mark.contract
@batched
@pytest.mark.parametrize("format", ["kvfold-4", "turboquant-4"])
def test_a_batch_says_what_each_says_alone(network: Any, prompts: list[list[int]], format: str) -> None:
    """Prompts of unequal lengths, some of which come while others are answered; caches go on alone afterwards."""
    alone = [_alone(network, prompt, format) for prompt in prompts]
    batch = Batch.of(network)
    uids = batch.insert(prompts[:2], [make_prompt_cache(network, format) for _ in prompts[:2]])
    while len(batch.said[uids[0]]) < 7:
        batch.step()
    uids += batch.insert(prompts[2:], [make_prompt_cache(network, format) for _ in prompts[2:]])
    batch.run()
    assert [batch.said[uid] for uid in uids] == alone
    for uid, prompt, said in zip(uids, prompts, alone, strict=True):
        cache = batch.caches[uid]
        assert not any(isinstance(layer, FoldedBatchCache) for layer in cache)
        assert cache[-1].offset == len(prompt) + NEW
        whole = make_prompt_cache(network, format)
        mx.eval(network(mx.array([prompt]), cache=whole))
        more = _alone(network, said, format, whole)
        assert _alone(network, said, format, _copied(network, prompt, batch, format)) == more


def _copied(network: Any, prompt: list[int], batch: Batch, format: str) -> list[Any]:
    """The cache of a prompt that was read in a batch with another, taken out of the batch as the server does."""
    other = [make_prompt_cache(network, format), make_prompt_cache(network, format)]
    merged = generating._merge_caches(other)
    long = max(len(prompt), 40)
    padded = mx.array([prompt + [0] * (long - len(prompt)), [*range(3, 43)] + [0] * (long - 40)])
    for layer in merged:
        layer.prepare(lengths=[len(prompt), 40], right_padding=[long - len(prompt), long - 40])
    mx.eval(network(padded, cache=merged))
    for layer in merged:
        layer.finalize()
    taken = [layer.extract(0) for layer in merged]
    mx.eval(network(mx.array([[7], [8]]), cache=merged))  # the batch goes on; what was taken stays
    return taken


def test_a_broken_row_breaks_no_other(network: Any, prompts: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """Its answer means nothing, which the log says; the others get theirs."""
    caches = [make_prompt_cache(network, "turboquant-4") for _ in range(3)]
    alone = [_alone(network, prompts[i], "turboquant-4") for i in (1, 3)]
    index = next(i for i, layer in enumerate(caches[1]) if isinstance(layer, kvfold.integrations.mlx.FoldedKVCache))
    layer = caches[1][index].layer
    append = layer.append
    layer.append = lambda key, value, padding=None: append(key * mx.nan, value, padding)
    batch = Batch.of(network)
    with caplog.at_level(logging.ERROR, "kvfold"):
        uids = batch.insert([prompts[1], prompts[2], prompts[3]], caches)
        batch.run()
    assert [batch.said[uids[0]], batch.said[uids[2]]] == alone
    assert "a request's cache is broken, and its answer means nothing" in caplog.text
    kept = SoundPrompts()
    for uid, prompt in zip(uids, (prompts[1], prompts[2], prompts[3]), strict=True):
        kept.insert_cache("model", prompt, batch.caches[uid])
    assert len(kept) == 2


def test_a_batch_holds_a_quarter(network: Any) -> None:
    """Of what mlx-lm's own batch holds in 16 bits, of the layers that fold."""
    prompts = [[(i * 7 + k) % 240 + 3 for i in range(2000)] for k in range(3)]
    held = []
    for make in (lambda: make_prompt_cache(network, "kvfold-4"), lambda: theirs.make_prompt_cache(network)):
        caches = [make() for _ in prompts]
        folding = [i for i, layer in enumerate(caches[0]) if not isinstance(layer, theirs.RotatingKVCache)]
        merged = generating._merge_caches(caches)
        mx.eval(network(mx.array(prompts), cache=merged))
        held.append(sum(merged[i].nbytes for i in folding))
    print(f"\n{held[0]:,} bytes beside {held[1] // 2:,}")
    assert held[0] < 0.36 * held[1] / 2  # heads of 64 and 32 channels: tables and dense tokens weigh more in short rows


def test_what_batches_do_not_take(network: Any) -> None:
    cache = generating._merge_caches([make_prompt_cache(network, "turboquant-4")])
    folded = next(layer for layer in cache if isinstance(layer, FoldedBatchCache))
    with pytest.raises(ValueError, match=r"left_padding = .* padded on the right only"):
        folded.prepare(left_padding=[3])
    assert not folded.is_trimmable()
    assert folded.empty()


@pytest.mark.contract
@pytest.mark.skipif(BATCHES, reason="this mlx-lm makes batches of the caches that it is given")
def test_older_mlx_lm_is_refused() -> None:
    """It would batch dense caches in silence."""
    assert not hasattr(kvfold.integrations.mlx.FoldedKVCache, "merge")
    result = run_kvfold("serve", "smollm2", "--runtime", "mlx")
    assert result.returncode == 1
    assert "puts dense caches in the place of those that it is given" in result.stderr.replace("\n", " ")


# The server


@dataclass
class Server:
    """A running server."""

    port: int
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=300)

    def ask(self, text: str, **options: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(
            model="smollm2", messages=messages, max_tokens=12, temperature=0, **options
        )


@contextmanager
def _serving(log: Path, *arguments: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "from kvfold.cli import main; main()",
        "serve",
        *arguments,
        "--runtime",
        "mlx",
        "--port",
        str(port),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 300
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.2)
        yield Server(port, log)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with _serving(log, "smollm2", "--dtype", "float32", "--cache-limit-mb", "256") as own:
        yield own


ASKED = ("What is the capital of France?", "Name three colours.", "How many legs has a spider?", "Count to ten.")


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    alone = [server.ask(text).choices[0].message.content for text in ASKED]
    assert "Paris" in alone[0]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda text: server.ask(text).choices[0].message.content, ASKED * 2))
    assert together == alone * 2


def test_streams(server: Server) -> None:
    parts = [part.choices[0].delta.content or "" for part in server.ask(ASKED[0], stream=True) if part.choices]
    assert len(parts) > 3
    assert "".join(parts) == server.ask(ASKED[0]).choices[0].message.content


def test_prompts_are_reused_folded(server: Server) -> None:
    """The next turn of a conversation reads what is new only, and says so."""
    story = "Once upon a time there was a fox. " * 30
    first = server.ask(story + "Who is it about?")
    again = server.client.chat.completions.create(
        model="smollm2", max_tokens=12, temperature=0,
        messages=[
            {"role": "user", "content": story + "Who is it about?"},
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And who else?"},
        ],
    )  # fmt: skip
    read = again.usage.prompt_tokens_details.cached_tokens
    print(f"\nof {again.usage.prompt_tokens} tokens {read} were in the cache")
    assert read > 250
    assert again.usage.prompt_tokens - read < 60
    assert server.client.models.list().data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--runtime", "mlx", "--keep", "folder"), "keep = folder, and runtime = 'mlx': it is for runtime 'vllm'"),
        (("--runtime", "mlx", "--budget", "900"), "budget = 900, and runtime = 'mlx': it is for runtime 'vllm'"),
        (("--runtime", "mlx", "--kv-bits", "4"), "--kv-bits: this cache is folded already; leave it out"),
        (("--runtime", "mlx", "--model", "x"), "takes the model as its first argument; leave --model out"),
        (("--runtime", "mlx", "--memory-limit-mb", "-1"), "memory = -1"),
        (("--runtime", "mlx", "--format", "amx4"), "'amx4' is not known"),
        (("--runtime", "jax"), "runtime = 'jax': choose one of vllm, mlx"),
        (("--cache-limit-mb", "3"), "cache_limit_mb = 3, and runtime = 'vllm': it is for runtime 'mlx'"),
        (("--budget", "900"), "budget = 900, but no --eviction"),
        (("--format", "dense", "--keep-prompt"), "keep_prompt = True, but no --eviction"),
        (("--budget", "0", "--eviction", "streaming"), "budget = 0"),
        (("--keep-limit", "1GB"), "keep_limit = '1GB', but no --keep: name the folder"),
    ],
)
def test_errors_of_the_command_line(arguments: tuple[str, ...], message: str) -> None:
    result = run_kvfold("serve", "smollm2", *arguments)
    assert result.returncode == 1
    assert message in result.stderr.replace("\n", " ")
