"""Arguments of `kvfold serve`, which are those of `vllm serve`."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny_gguf import write_gemma

from kvfold.cache.calibration import Calibration
from kvfold.eviction import QueryStatistics
from kvfold.integrations.models import load_config
from kvfold.integrations.vllm.options import Options
from kvfold.integrations.vllm.serve import serve_arguments


def _config(arguments: list[str]) -> dict[str, object]:
    assert arguments.count("--additional-config") == 1
    return json.loads(arguments[arguments.index("--additional-config") + 1])


def test_what_a_user_sets_is_not_set_again(tmp_path: Path) -> None:
    file = str(tmp_path / "a.safetensors")
    Calibration({}).save(file)
    given = ["--host", "0.0.0.0", "--max_num_seqs=4", "--kv_cache_memory_bytes", "1G"]
    arguments = serve_arguments("folder", Options("kvfold-3", file), given)
    assert arguments[:2] == ["serve", "folder"]
    assert arguments.count("--host") == 1
    assert not {"--max-num-seqs", "--kv-cache-memory-bytes"} & {*arguments}
    assert _config(arguments) == {"kvfold": {"format": "kvfold-3", "calibration": file}}
    assert arguments[-5:] == given


@pytest.mark.parametrize("given", [[], ["-tp", "2"], ["--data-parallel-size=2", "--tensor_parallel_size", "2"]])
def test_the_cache_gets_memory_that_is_there(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of what is free beside the weights, by all workers; unless the user says another size, in any way."""
    save_file({"x": torch.zeros(2**20)}, tmp_path / "model.safetensors")  # 4 MiB
    free = 3 * 2**30
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))
    workers = max(1, 2 * sum("parallel" in word or word == "-tp" for word in given))
    arguments = serve_arguments(str(tmp_path), Options(), given)
    size = int(arguments[arguments.index("--kv-cache-memory-bytes") + 1])
    copies = 2 if any("data" in word for word in given) else 1
    assert size == pytest.approx((free - copies * 2**22) / 2 / workers, rel=1e-4)
    assert f"the cache gets {size / 2**30:.1f} GiB" in caplog.text
    for more in (["--gpu-memory-utilization", "0.5"], ["--kv-cache-memory-bytes=1G"]):
        assert "--kv-cache-memory-bytes" not in serve_arguments(str(tmp_path), Options(), [*given, *more])
    assert "--kv-cache-memory-bytes" not in serve_arguments(str(tmp_path), None, given)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert "--kv-cache-memory-bytes" not in serve_arguments(str(tmp_path), Options(), given)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    free = 2**28
    with pytest.raises(ValueError, match="too little for a cache: free some, or give --kv-cache-memory-bytes"):
        serve_arguments(str(tmp_path), Options(), given)


@pytest.mark.parametrize(
    ("given", "sequences"),
    [
        # Of 256 MiB an eighth; each has 30 layers x 3 heads x 2 x (64 + 4 first) tokens x 64 numbers.
        (["--kv-cache-memory-bytes", "256M"], 21),
        (["--kv-cache-memory-bytes", "256M", "--dtype", "float32"], 10),
        (["--kv-cache-memory-bytes", "256M", "-tp", "3"], 64),
        (["--kv-cache-memory-bytes", "256M", "--speculative-config", "{}"], 11),
        (["--kv-cache-memory-bytes", "16M"], 4),
        (["--kv-cache-memory-bytes", "64G"], 256),
        (["--gpu-memory-utilization", "0.5"], 256),
    ],
)
def test_sequences_follow_memory(given: list[str], sequences: int, own_cache: Path) -> None:
    arguments = serve_arguments("smollm2", Options(), given)
    assert arguments[arguments.index("--max-num-seqs") + 1] == str(sequences)


def test_pages_may_be_kept(tmp_path: Path, own_cache: Path) -> None:
    kept = Options(keep=str(tmp_path), keep_limit=10**6)
    arguments = serve_arguments("smollm2", kept, [])
    assert _config(arguments) == {"kvfold": {"format": "kvfold-4", "keep": str(tmp_path), "keep_limit": 10**6}}
    assert Options.of(_config(arguments)) == kept
    assert "--shutdown-timeout" in arguments  # or pages that wait to be written are lost
    assert "--shutdown-timeout" not in serve_arguments("smollm2", kept, ["--shutdown-timeout=0"])[:-1]
    assert "--shutdown-timeout" not in serve_arguments("smollm2", Options(), [])
    for wrong in ({"keep": 3}, {"keep_limit": "20GB"}, {"keep_limit": 0}, {"keep_limit": True}):
        with pytest.raises(ValueError, match=r"give a (string|number of bytes)"):
            Options.of({"kvfold": wrong})


def test_requests_may_forget(tmp_path: Path, own_cache: Path) -> None:
    forgetful = Options(eviction="streaming", budget=1024, keep_prompt=True)
    arguments = serve_arguments("smollm2", forgetful, [])
    own = {"format": "kvfold-4", "eviction": "streaming", "budget": 1024, "keep_prompt": True}
    assert _config(arguments) == {"kvfold": own}
    assert Options.of(_config(arguments)) == forgetful
    tables = torch.ones(3, 2, 4, 8)
    QueryStatistics(kv_heads=1, head_dim=16, rope_theta=1e4, attn_scale=1.0, tables=tables).save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"of 3 layers, 2 heads, .* run kvfold calibrate --eviction with this model"):
        serve_arguments("smollm2", Options(eviction=str(tmp_path / "other")), [])
    (tmp_path / "damaged").write_bytes(b"TRIA")
    with pytest.raises(ValueError, match="this is no TRIA file"):
        serve_arguments("some/model", Options(eviction=str(tmp_path / "damaged")), [])
    with pytest.raises(FileNotFoundError, match="kvfold calibrate --eviction makes one"):
        serve_arguments("some/model", Options(eviction=str(tmp_path / "none")), [])
    with pytest.raises(ValueError, match="budget = 200 holds no more than"):
        serve_arguments("some/model", Options(eviction="streaming", budget=200), [])
    for more in ({"budget": 1024}, {"keep_prompt": True}):
        with pytest.raises(ValueError, match="but no eviction: give a TRIA file, or 'streaming'"):
            Options(**more)


def test_what_an_engine_would_find_after_minutes_is_found_before(tmp_path: Path, small_folder: Path) -> None:
    model = str(small_folder)
    with pytest.raises(FileNotFoundError, match=r"none.safetensors.*kvfold calibrate makes one"):
        serve_arguments(model, Options("kvfold-4", str(tmp_path / "none.safetensors")), [])
    (tmp_path / "damaged").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="the file is damaged"):
        serve_arguments("some/model", Options("kvfold-4", str(tmp_path / "damaged")), [])
    Calibration({}, {"layers": "300"}).save(tmp_path / "other")
    with pytest.raises(ValueError, match=r"with 300 layers, this is a model with .*: calibrate this model"):
        serve_arguments(model, Options("kvfold-4", str(tmp_path / "other")), [])
    for given in (["--max-num-batched-tokens", "64"], ["--max_model_len=128"]):
        with pytest.raises(ValueError, match="fits kvfold-4 to a text of 128 tokens or more when it starts"):
            serve_arguments(model, Options(), given)
        serve_arguments(model, Options("turboquant-4"), given)  # has nothing to fit
    with pytest.raises(ValueError, match="leave --enforce-eager out"):
        serve_arguments(model, Options(), ["-pp", "2", "--enforce-eager"])


def test_by_default_only_this_machine_is_answered() -> None:
    arguments = serve_arguments("folder", Options(), [])
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("given", [["--additional-config", '{"a": 1}'], ['--additional_config={"a": 1}']])
def test_an_additional_config_of_the_users_is_kept(given: list[str]) -> None:
    assert _config(serve_arguments("folder", Options(), given)) == {"a": 1, "kvfold": {"format": "kvfold-4"}}


def test_dense_leaves_vllm_as_it_is() -> None:
    assert serve_arguments("folder", None, ["--port", "1"]) == ["serve", "folder", "--host", "127.0.0.1", "--port", "1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--additional-config", "kvfold"], "no JSON object"),
        (["--additional-config"], "no JSON object"),
        (
            ["--additional-config", '{"kvfold": {"format": "kvfold-2"}}'],
            "give --format, --calibration, --keep and --eviction in its place",
        ),
        (["--config", "options.yaml"], "would overwrite each other"),
        (["--additional-config.a=1"], "would overwrite each other"),
    ],
)
def test_what_would_be_lost_is_refused(given: list[str], message: str) -> None:
    for options in (Options(), None):
        with pytest.raises(ValueError, match=message):
            serve_arguments("folder", options, given)


def test_models_that_vllm_does_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(FileNotFoundError, match=r"model.gguf': there is no such file or folder"):
        serve_arguments(str(file), Options(), [])
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"model.gguf' cannot be loaded"):
        serve_arguments(str(file), Options(), [])
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"is a file, and its name does not end in .gguf"):
        serve_arguments(str(tmp_path / "model.bin"), Options(), [])
    assert serve_arguments("some/model", None, [])[1] == "some/model"


def test_a_gguf_file_is_unpacked_for_vllm(tmp_path: Path, own_cache: Path) -> None:
    """As a folder with a config and safetensors, served by the file's name in 16 bits; by its folder, too."""
    file = write_gemma(tmp_path / "tiny.gguf")
    for model in (file, tmp_path):
        _, folder, *rest = serve_arguments(str(model), None, [])
        assert rest[:2] == ["--served-model-name", "tiny"]
        assert load_config(folder).dtype == torch.bfloat16
        assert Path(folder).parent == own_cache
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    assert load_config(serve_arguments(str(file), None, ["--dtype=float16"])[1]).dtype == torch.float16
    (tmp_path / "params.json").touch()
    file.unlink()
    assert serve_arguments(str(tmp_path), None, [])[1] == str(tmp_path)


def test_options_are_checked() -> None:
    assert Options.of({}) is None
    assert Options.of({"kvfold": {}}) == Options()
    with pytest.raises(ValueError, match="give a mapping"):
        Options.of({"kvfold": {"formt": "kvfold-4"}})
    with pytest.raises(ValueError, match="is not known"):
        Options.of({"kvfold": {"format": "kvfold-x"}})
    with pytest.raises(ValueError, match="cannot be served"):
        Options("amx3").formats(128)
