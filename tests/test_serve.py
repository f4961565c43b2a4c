"""Arguments of `kvfold serve`, which are those of `vllm serve`."""

import json
from pathlib import Path

import pytest
from tiny_gguf import write_gemma

from kvfold.integrations.vllm.options import Options
from kvfold.integrations.vllm.serve import serve_arguments


def _config(arguments: list[str]) -> dict[str, object]:
    assert arguments.count("--additional-config") == 1
    return json.loads(arguments[arguments.index("--additional-config") + 1])


def test_what_a_user_sets_is_not_set_again() -> None:
    options = Options("kvfold-3", "a.safetensors")
    arguments = serve_arguments("folder", options, ["--host", "0.0.0.0", "--max_num_seqs=4", "--port", "1"])
    assert arguments[:2] == ["serve", "folder"]
    assert arguments.count("--host") == 1
    assert "--max-num-seqs" not in arguments
    assert _config(arguments) == {"kvfold": {"format": "kvfold-3", "calibration": "a.safetensors"}}
    assert arguments[-5:] == ["--host", "0.0.0.0", "--max_num_seqs=4", "--port", "1"]


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
        (["--config", "options.yaml"], "would overwrite each other"),
        (["--additional-config.a=1"], "would overwrite each other"),
    ],
)
def test_what_would_be_lost_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve_arguments("folder", Options(), given)


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
        assert rest[:4] == ["--served-model-name", "tiny", "--dtype", "bfloat16"]
        assert Path(folder).parent == own_cache
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    assert "float16" in serve_arguments(str(file), None, ["--dtype", "float16"])
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
