"""The command line, as a user runs it."""

import json
from pathlib import Path

import pytest
import torch
from commands import run_kvfold, run_process
from small_model import LAYERS

from kvfold.attention import cpu
from kvfold.formats import FORMATS, get_format


@pytest.mark.contract
def test_help_teaches() -> None:
    out = run_process("--help").stdout
    for command in ("demo", "generate", "formats"):
        assert command in out
        assert "--json" in run_kvfold(command, "--help").stdout


def test_formats() -> None:
    table = run_kvfold("formats").stdout
    rows = json.loads(run_kvfold("formats", "--head-dim", "64", "--json").stdout)
    assert [row["format"] for row in rows] == list(FORMATS)
    for row in rows:
        assert row["format"] in table
        assert row["bits_per_value"] == 8 * (row["key_bytes"] + row["value_bytes"]) / 128
    sizes = {row["format"]: (row["key_bytes"], row["value_bytes"]) for row in rows}
    assert sizes["turboquant-4"] == (34, 34)
    assert sizes["kvfold-3"] == (28, 26)  # a float16 centre and scale a channel and page; a float16 scale a token


def test_formats_of_others() -> None:
    rows = {row["format"]: row for row in json.loads(run_kvfold("formats", "--blocks", "--json").stdout)}
    assert rows["tbqp3"]["block_bytes"] == 52
    assert rows["polar4-u8"]["key_bytes"] == 132
    assert rows["safe"]["bits_per_value"] == 8 * (66 + 68) / 256
    assert "tq3" not in run_kvfold("formats", "--blocks", "--head-dim", "64", "--json").stdout


def test_convert(tmp_path: Path) -> None:
    x = torch.randn(5_000, 128)
    (tmp_path / "x").write_bytes(x.numpy().tobytes())
    paths = [str(tmp_path / name) for name in ("x", "tq4", "tbq4", "back")]
    for i, (old, new) in enumerate((("f32", "tq4"), ("tq4", "tbq4"), ("tbq4", "f32"))):
        run = run_kvfold("convert", paths[i], paths[i + 1], "--from", old, "--to", new, "--json")
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout)["vectors"] == 5_000
        assert json.loads(run.stdout)["error"] == pytest.approx(0.0 if new == "f32" else 0.0093, rel=0.05)
    assert Path(paths[1]).stat().st_size == 5_000 * 68
    fmt = get_format("tq4", 128)
    assert Path(paths[1]).read_bytes() == fmt.to_bytes(fmt.fold(x)).numpy().tobytes()  # type: ignore[attr-defined]
    y = torch.frombuffer(bytearray(Path(paths[3]).read_bytes()), dtype=torch.float32).view(-1, 128)
    assert ((x - y).square().sum() / x.square().sum()).item() == pytest.approx(2 * 0.0093, rel=0.05)
    for arguments, word in (
        ((paths[1], paths[3], "--from", "tq3", "--to", "f32"), "a vector of 128 in tq3 takes 52"),
        ((paths[1], paths[3], "--from", "tq4", "--to", "kvfold-4"), "has no blocks"),
        ((paths[1] + "x", paths[3], "--from", "tq4", "--to", "f32"), "there is no such file"),
    ):
        run = run_kvfold("convert", *arguments)
        assert (run.returncode, word in run.stderr) == (1, True), run.stderr
    assert y.shape == (5_000, 128)


def test_what_reads_each_format_here() -> None:
    rows = json.loads(run_kvfold("formats", "--devices", "--json").stdout)
    paths = {row["format"]: row["cpu"] for row in rows}
    assert list(paths) == list(FORMATS)
    integers = cpu.INSTRUCTION_SETS[0] in cpu.INTEGER_SETS
    assert paths["kvfold-4"] == f"C++, {cpu.INSTRUCTION_SETS[0]}, in {'integers' if integers else 'floats'}"
    assert paths["turboquant-8"] == f"C++, {cpu.INSTRUCTION_SETS[0]}, in floats"


def test_bench(small_folder: Path, tmp_path: Path) -> None:
    run = run_kvfold(
        "bench", "--model", str(small_folder), "--formats", "turboquant-2", "--contexts", "100,300", "--new", "3",
        "--plot", str(tmp_path / "a.png"), "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)
    assert [(row["context"], row["format"]) for row in rows] == [
        (context, name) for context in (100, 300) for name in ("dense", "turboquant-2")
    ]
    for dense, folded in (rows[:2], rows[2:]):
        assert folded["held_bytes"] < dense["held_bytes"] / 8  # of float32
        assert dense["decode_ratio"] == 1
        assert folded["ms_per_token"] == pytest.approx(1000 / folded["decode_tok_s"])
        assert dense["prefill_ms"] > 0
    assert rows[2]["held_bytes"] > 2.5 * rows[0]["held_bytes"]
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.contract
def test_generate(tmp_path: Path) -> None:
    document = tmp_path / "doc.txt"
    document.write_text("Mary's favourite fruit is the mango. " + "It rained all day. " * 70, encoding="utf-8")
    run = run_process(
        "generate", "--file", str(document), "--prompt", "What is Mary's favourite fruit?", "--max-new-tokens", "20",
        "--format", "kvfold-4:turboquant-4", "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    row = json.loads(run.stdout)
    assert "mango" in row["text"].lower()
    assert row["new_tokens"] <= 20
    assert row["bits_per_value"] == pytest.approx(8 * row["held_bytes"] / row["values"])
    assert row["ratio_to_bf16"] > 1.5


def test_demo_in_small() -> None:
    """The secret in the middle of the document is read from a page, and lost at two bits as published."""
    run = run_kvfold("demo", "--tokens", "1000", "--formats", "kvfold-3,turboquant-2", "--json")
    assert run.returncode == 0, run.stderr
    dense, folded, broken = json.loads(run.stdout)
    assert (dense["format"], dense["bits_per_value"]) == ("dense", 32)
    assert broken["bits_per_value"] < 3
    assert broken["kl_mean"] > 0.1 > folded["kl_mean"] > dense["kl_mean"] == 0  # whatever the text
    assert ["48213" in row["answer"] for row in (dense, folded, broken)] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--prompt", "x", "--format", "nope"), "format = 'nope' is not known"),
        (("generate",), "nothing to answer: give --prompt, --file, or both"),
        (("generate", "--file", "/nowhere.txt"), "file = '/nowhere.txt': there is no such file"),
        (("generate", "--prompt", "x", "--dtype", "int8"), "dtype = 'int8': choose one of float32"),
        (("generate", "--prompt", "x", "--model", "/nowhere"), "model = '/nowhere': there is no such file or folder"),
        (("generate", "--prompt", "x", "--model", "."), "neither a config.json nor exactly one .gguf"),
        (("formats", "--head-dim", "63"), "head_dim = 63"),
        (("generate", "--prompt", "x", "--format", "[/b]"), "format = '[/b]' is not known"),
        (("demo", "--formats", "kvfold-4,what"), "format = 'what' is not known"),
    ],
)
def test_errors_are_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    run = run_kvfold(*arguments)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_forgetting(small_folder: Path, tmp_path: Path) -> None:
    """Measured, and then used, with files and options that do not fit named."""
    tria, document = str(tmp_path / "model.tria"), tmp_path / "doc.txt"
    document.write_text("It rained all day, and the keeper wrote it down. " * 60, encoding="utf-8")
    model = ("--model", str(small_folder))
    run = run_kvfold("calibrate", "--eviction", "--out", tria, "--passage", "256", "--passages", "2", *model)
    assert run.returncode == 0, run.stderr
    assert f"{LAYERS} layers, 512 tokens" in run.stderr
    assert Path(tria).stat().st_size == 64 + LAYERS * 4 + LAYERS * 9 * 4 * 32 * 4
    common = (
        "generate",
        *model,
        "--file",
        str(document),
        "--prompt",
        "What did the keeper do?",
        "--max-new-tokens",
        "20",
        "--json",
    )
    run = run_kvfold(*common, "--eviction", tria, "--budget", "320")
    assert run.returncode == 0, run.stderr
    row = json.loads(run.stdout)
    tokens = row["prompt_tokens"] + row["new_tokens"] - 1
    assert all(layer["tokens"] == tokens and tokens - layer["evicted"] < 320 + 128 for layer in row["layers"])
    for options, says in (
        (("--budget", "320"), "budget = 320, but no --eviction"),
        (("--eviction", str(document)), "no TRIA file"),
        (("--eviction", tria, "--cache", "x.kv"), "a cache that forgets tokens is not kept"),
        (("--eviction", tria, "--budget", "100"), "budget = 100 holds no more"),
    ):
        run = run_kvfold(*common, *options)
        assert run.returncode != 0
        assert says in run.stderr.replace("\n", " ")
