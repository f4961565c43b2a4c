"""The command line with models that it was not made for: an answer that means something, or one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_cli
import pytest
import torch
import transformers
from commands import run_kvfold
from conftest import DATA
from safetensors.torch import load_file, save_file
from tiny_gguf import WINDOW, write_gemma
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.cache.calibration import Calibration
from kvfold.cli import errors
from kvfold.integrations.models import load_model

SIZES = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 600},
    "rwkv": {"hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2, "context_length": 600},
    "falcon": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "new_decoder_architecture": False},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small models of several kinds, and a text."""
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in KINDS.items():
        AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **sizes)).save_pretrained(folder / name)
        fuzz_cli.make_tokenizer(folder / name)
    (folder / "text.txt").write_text("It rained all day, and the keeper wrote it down. " * 20)
    return folder


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _changed(folder: Path, change: Callable[[Path], None]) -> Path:
    """A tiny Llama's folder with something changed."""
    fuzz_cli.make_model(folder)
    change(folder)
    return folder


def _fails(*arguments: object) -> str:
    run = run_kvfold(*map(str, arguments))
    assert run.returncode == 1, run.stdout
    assert list(fuzz_cli.check_status(run.returncode, run.stdout, run.stderr)) == []
    return next(line for line in run.stderr.splitlines() if line.startswith("error: "))


COMMANDS = {
    "generate": ("--prompt", "Why?", "--max-new-tokens", "2"), "eval": ("--passage", "120", "--passages", "1"),
    "bench": ("--contexts", "100", "--new", "2"), "compare": ("--tokens", "120", "--generate", "2"),
    "tasks": ("--tasks", "needle", "--lengths", "150", "--repeats", "1"),
    "calibrate": ("--passage", "100", "--passages", "1", "--no-budgets"), "demo": ("--tokens", "260"),
    "sweep": ("--passage", "260"),
}  # fmt: skip
PROSE = (DATA / "prose.txt").read_text()
TEXT = ("eval", "bench", "compare", "calibrate", "sweep")


def _with(command: str, place: Path, name: str) -> list[object]:
    text = ("--text", place / "text.txt") if command in TEXT else ()
    return [command, "--model", place / name, *text, *COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_takes_no_cache(place: Path, command: str) -> None:
    assert "takes no cache of keys and values" in _fails(*_with(command, place, "rwkv"))
    assert os.listdir() == []


@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_layers_are_compared_wherever_a_model_has_them(place: Path, name: str) -> None:
    run = run_kvfold(*map(str, _with("compare", place, name)), "--json")
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["layers"]) == 2


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma in one file, beside a file that is no model."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "model.bin").write_bytes(b"weights")
    return write_gemma(folder / "tiny.gguf")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("command", [*COMMANDS, "plan"])
def test_a_gguf_file_is_a_model(command: str, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command takes the file that it is given, by any path, and not one of the same name where it runs."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    prose = tmp_path / "prose.txt"
    prose.write_text(PROSE[:2_000])
    text = ("--text", str(prose)) if command in TEXT else ()
    more = {"sweep": ("--key-bits", "4", "--value-bits", "4", "--lossless-kl", "1"), "demo": ("--formats", "kvfold-4")}
    rest = (*text, *COMMANDS.get(command, ()), *more.get(command, ()))
    run = run_kvfold(command, "--model", str(gguf_file), *rest)
    assert run.returncode == 0, run.stderr
    monkeypatch.chdir(gguf_file.parent)
    says = "there is no such file or folder"
    assert says in _fails(command, "--model", "nothing.gguf", *rest)
    assert says in _fails(command, "--model", "./nothing", *rest)
    says = "is a file, and its name does not end in .gguf; give smollm2, a folder with a config.json"
    assert f"model = 'model.bin' {says}" in _fails(command, "--model", "model.bin", *rest)


@pytest.mark.usefixtures("own_cache")
def test_mlx_reads_a_gguf_file(gguf_file: Path) -> None:
    """And predicts what transformers predicts."""
    pytest.importorskip("mlx_lm")
    from kvfold.integrations.mlx import load_mlx_model
    from kvfold.kernels.mlx import mx

    run = run_kvfold("generate", "--prompt", "Why?", "--model", str(gguf_file), "--runtime", "mlx")
    assert run.returncode == 0, run.stderr
    (model, tokenizer), (network, _) = load_model(gguf_file), load_mlx_model(gguf_file)
    ids = tokenizer("It rained all day, and why? " * 5, return_tensors="pt").input_ids
    expected = model(ids).logits.detach()
    assert ids.shape[1] > 2 * WINDOW
    got = torch.tensor(network(mx.array(ids.numpy())).astype(mx.float32))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


def test_a_gguf_file_is_not_replaced(gguf_file: Path, tmp_path: Path) -> None:
    before = gguf_file.read_bytes()
    (tmp_path / "text").write_text(PROSE[:2_000])
    to = ("calibrate", "--model", gguf_file, "--text", tmp_path / "text", "--passage", 100, "--passages", 1)
    assert "would replace" in _fails(*to, "--no-budgets", "--out", gguf_file)
    assert gguf_file.read_bytes() == before


def test_a_prompt_beyond_the_positions_that_a_model_has(place: Path) -> None:
    said = _fails("generate", "--model", place / "gpt2", "--file", place / "text.txt")
    assert "transformers failed on this model or input: IndexError" in said
    assert "kvfold is at fault" not in said


def _json(name: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(change(weights), path, metadata={"format": "pt"})

    return rewrite


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_json("tokenizer_config.json", chat_template="{% for x in %}"), "jinja2 failed on this model or input: Templ"),
        (_json("tokenizer_config.json", chat_template="{{ messages[7].content }}"), "jinja2 failed on this model or"),
        (_json("tokenizer_config.json", chat_template="{{ raise_exception('no') }}"), "Error: no"),
        (_json("generation_config.json", eos_token_id="x"), "transformers failed on this model or input"),
        (_weights(lambda w: w | {"model.norm.weight": w["model.norm.weight"] * torch.nan}), "hold a NaN or an inf"),
        (_weights(lambda w: {name: w[name] for name in w if ".1." not in name}), "lacks 9 of its weights, such as"),
        (_json("config.json", num_hidden_layers=3), "lacks 9 of its weights, such as model.layers.2"),
    ],
)  # fmt: skip
def test_damaged_settings(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    folder = _changed(tmp_path / "model", change)
    assert says in _fails("generate", "--model", folder, "--prompt", "Why is the sky blue?", "--max-new-tokens", 3)


def test_predictions_that_are_no_numbers_are_not_compared(tmp_path: Path, place: Path) -> None:
    folder = _changed(
        tmp_path / "model", _weights(lambda w: w | {"model.norm.weight": w["model.norm.weight"] * torch.inf})
    )
    assert "hold a NaN or an infinity" in _fails(*_with("eval", place, str(folder)))


def test_settings_of_a_model_that_generate_otherwise(tmp_path: Path) -> None:
    change = _json("generation_config.json", num_beams=4, cache_implementation="static", do_sample=True)
    folder = _changed(tmp_path / "model", change)
    run = run_kvfold("generate", "--model", str(folder), "--prompt", "Why?", "--max-new-tokens", "3", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["new_tokens"] == 3


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("generation_config.json", {"use_cache": False}),
        ("config.json", {"use_cache": False}),
        ("generation_config.json", {"prompt_lookup_num_tokens": 3}),
        ("generation_config.json", {"return_dict_in_generate": True, "output_hidden_states": True}),
        ("generation_config.json", {"penalty_alpha": 0.6, "top_k": 4}),
        ("generation_config.json", {"max_time": 0.0}),
        ("generation_config.json", {"stop_strings": ["never said"]}),
    ],
)
def test_settings_of_a_model_change_no_answer(tmp_path: Path, file: str, settings: dict[str, Any]) -> None:
    """Each token is read once, into the cache, and one answer comes of it."""
    question = ("--prompt", "Why is the sky blue, and who said so?", "--max-new-tokens", "5", "--json")
    seen = []
    for change in (lambda folder: None, _json(file, **settings)):
        torch.manual_seed(0)
        folder = _changed(tmp_path / f"model{len(seen)}", change)
        if file == "config.json":
            (folder / "generation_config.json").unlink(missing_ok=True)
        run = run_kvfold("generate", "--model", str(folder), *question, "--cache", str(folder / "prompt.kv"))
        assert run.returncode == 0, run.stderr
        answer = json.loads(run.stdout)
        seen.append((answer["text"], answer["new_tokens"], [row["tokens"] for row in answer["layers"]]))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "settings", [{"use_cache": False}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 4}, {"stop_strings": ["never"]}]
)
def test_settings_of_a_model_change_no_task(tmp_path: Path, settings: dict[str, Any]) -> None:
    seen = []
    for change in (lambda folder: None, _json("generation_config.json", **settings)):
        torch.manual_seed(0)
        folder = _changed(tmp_path / f"model{len(seen)}", change)
        run = run_kvfold(
            "tasks", "--model", str(folder), "--tasks", "needle", "--lengths", "400", "--repeats", "1", "--formats",
            "kvfold-3", "--out", str(folder / "rows.jsonl"), "--json",
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        seen.append([(row["format"], row["case"], row["answer"]) for row in json.loads(run.stdout)["outcomes"]])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("differs", ["query_energy", "key_variance", "energy"])
def test_a_cache_by_another_calibration_is_not_reused(tmp_path: Path, differs: str) -> None:
    model = str(fuzz_cli.make_model(tmp_path / "model"))
    (tmp_path / "text").write_text(PROSE[:4000])
    one, other = tmp_path / "one", tmp_path / "other"
    made = run_kvfold(
        "calibrate", "--model", model, "--text", str(tmp_path / "text"), "--passage", "300", "--passages", "1",
        "--no-budgets", "--out", str(one),
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    calibration = Calibration.load(one)
    changed = {i: replace(each, **{differs: getattr(each, differs).flip(-1)}) for i, each in calibration.layers.items()}
    replace(calibration, layers=changed).save(other)
    say = ("generate", "--model", model, "--prompt", PROSE[:1000], "--max-new-tokens", "2")
    reuse = ("--format", "kvfold-3:turboquant-2.5", "--cache", str(tmp_path / "kept.kv"))
    if differs == "energy":
        reuse = ("--format", "turboquant-2.5", *reuse[2:])
    assert run_kvfold(*say, *reuse, "--calibration", str(one)).returncode == 0
    assert run_kvfold(*say, *reuse, "--calibration", str(one)).returncode == 0
    assert "was made with another --calibration" in _fails(*say, *reuse, "--calibration", str(other))


def test_files_that_a_model_is_made_of_are_not_replaced_through_links(tmp_path: Path) -> None:
    """As a hub keeps them: a folder of links to files elsewhere."""
    real = fuzz_cli.make_model(tmp_path / "blobs")
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for each in real.iterdir():
        (linked / each.name).symlink_to(Path("..") / "blobs" / each.name)
    (tmp_path / "text").write_text(PROSE[:4000])
    before = {each.name: each.read_bytes() for each in real.iterdir()}
    to = ("calibrate", "--model", linked, "--text", tmp_path / "text", "--passage", 300, "--passages", 1)
    new = linked / "chat_template.jinja"
    for out in (linked / "model.safetensors", real / "model.safetensors", real / "config.json", new):
        assert "would replace" in _fails(*to, "--no-budgets", "--out", out)
    assert {each.name: each.read_bytes() for each in real.iterdir()} == before
    assert not new.exists()


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 0}, {"rope_theta": -5.0}, {"rope_theta": 1e308}, {"partial_rotary_factor": -1},
     {"partial_rotary_factor": 0.001}, {"rope_type": "linear", "factor": 0.0}],
)  # fmt: skip
def test_rope_that_no_model_has(tmp_path: Path, rope: dict[str, Any]) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4} | rope
    folder = _changed(tmp_path / "model", _json("config.json", rope_parameters=parameters))
    (tmp_path / "text").write_text(PROSE[:4000])
    said = _fails(
        "calibrate", "--eviction", "--model", folder, "--text", tmp_path / "text", "--passage", 300, "--passages", 1,
        "--out", tmp_path / "out.tria",
    )  # fmt: skip
    assert "the config's " in said


@pytest.mark.parametrize("command", ["calibrate", "sweep", "tasks"])
def test_what_is_written_does_not_replace_the_model_that_is_read(
    command: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is named, and not a path: its files lie somewhere, too."""
    from kvfold.integrations import models, unpacking

    for name in ("XDG_CACHE_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
    monkeypatch.setattr(models.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    blobs = tmp_path / "cache" / "models--some--model" / "blobs"
    for folder, model in ((unpacking.kept_models() / f"{models.demo_file().stem}-0", "smollm2"), (blobs, "some/model")):
        folder.mkdir(parents=True)
        out = folder / "model.safetensors"
        out.write_bytes(b"weights")
        text = ("--text", place / "text.txt") if command in TEXT else ()
        assert "would replace" in _fails(command, "--model", model, "--out", out, *text, *COMMANDS[command])
        assert out.read_bytes() == b"weights"


def test_what_fails_leaves_no_empty_file(place: Path, tmp_path: Path) -> None:
    model = fuzz_cli.make_model(tmp_path / "model")
    for arguments in (
        ("sweep", "--passage", "2", "--text", place / "text.txt"), ("tasks", "--lengths", "1"),
        ("sweep", "--key-bits", "99", "--text", place / "text.txt"),
    ):  # fmt: skip
        out = tmp_path / "out.jsonl"
        _fails(*arguments, "--model", model, "--out", out)
        assert not out.exists()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_request_to_end_leaves_no_part_of_a_file(number: signal.Signals, tmp_path: Path) -> None:
    source = tmp_path / "x"
    with source.open("wb") as file:
        for _ in range(60):
            file.write(torch.randn(8_000, 128).numpy().tobytes())
    script = (
        "import signal\n"  # in the background, and under nohup, some are ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"signal.signal({signal.SIGTERM:d}, signal.SIG_DFL), signal.signal({signal.SIGHUP:d}, signal.SIG_DFL)\n"
        "from kvfold.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "convert", "x", "y", "--from", "f32"]
    process = subprocess.Popen([*command, "--to", "tq4"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".*.part")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == {signal.SIGINT: 130}.get(number, 128 + number)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "redirect"),
    [(("formats",), redirect) for redirect in (">/dev/full", ">&-", "| true")]
    + [(arguments, ">/dev/full") for arguments in (("--version",), ("formats", "--json"))],
)
def test_output_that_nobody_can_take(arguments: tuple[str, ...], redirect: str) -> None:
    if redirect == ">/dev/full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", *arguments]
    line = subprocess.list2cmdline(command)
    run = subprocess.run(["bash", "-c", f"{line} {redirect}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr
    assert "kvfold is at fault" not in run.stderr
    if redirect != "| true":
        assert run.returncode == 1
        assert run.stderr.startswith("error: ")


def test_an_error_that_hides_an_interrupt_is_one() -> None:
    """As transformers makes of Ctrl-C while it imports."""
    error = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    assert not errors._was_interrupted(error)
    error.__cause__ = KeyboardInterrupt()
    assert errors._was_interrupted(error)


def test_a_hybrid_model_is_not_asked_to_keep_its_cache(tmp_path: Path) -> None:
    """It is known before anything is read that states of linear attention are not saved."""
    config = transformers.JambaConfig(
        **SIZES, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_experts=1,
        num_key_value_heads=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
        pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "jamba")
    fuzz_cli.make_tokenizer(tmp_path / "jamba")
    said = _fails("generate", "--model", tmp_path / "jamba", "--prompt", "Why?", "--cache", tmp_path / "kept.kv")
    assert "save knows folded layers" in said
    assert not (tmp_path / "kept.kv").exists()
