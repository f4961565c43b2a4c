"""The command line, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold.formats import FORMATS


def _kvfold(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=None)


def test_help_teaches() -> None:
    out = _kvfold("--help").stdout
    for command in ("demo", "generate", "formats"):
        assert command in out
        assert "--json" in _kvfold(command, "--help").stdout


def test_formats() -> None:
    table = _kvfold("formats").stdout
    rows = json.loads(_kvfold("formats", "--head-dim", "64", "--json").stdout)
    assert [row["format"] for row in rows] == list(FORMATS)
    for row in rows:
        assert row["format"] in table
        assert row["bits_per_value"] == 8 * (row["key_bytes"] + row["value_bytes"]) / 128
    sizes = {row["format"]: (row["key_bytes"], row["value_bytes"]) for row in rows}
    assert sizes["turboquant-4"] == (34, 34)
    assert sizes["kvfold-3"] == (28, 26)  # a float16 centre and scale a channel and page; a float16 scale a token


def test_generate(tmp_path: Path) -> None:
    document = tmp_path / "doc.txt"
    document.write_text("Mary's favourite fruit is the mango. " + "It rained all day. " * 120, encoding="utf-8")
    run = _kvfold(
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
    run = _kvfold("demo", "--tokens", "300", "--formats", "turboquant-2", "--max-new-tokens", "4", "--json")
    assert run.returncode == 0, run.stderr
    dense, folded = json.loads(run.stdout)
    assert (dense["format"], dense["bits_per_value"]) == ("dense", 32)
    assert folded["bits_per_value"] < 3
    assert folded["ppl"] > dense["ppl"]
    assert folded["kl_mean"] > 0 == dense["kl_mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--prompt", "x", "--format", "nope"), "format = 'nope' is not known"),
        (("generate",), "nothing to answer: give --prompt, --file, or both"),
        (("generate", "--file", "/nowhere.txt"), "file = '/nowhere.txt': there is no such file"),
        (("generate", "--prompt", "x", "--dtype", "int8"), "dtype = 'int8': choose one of float32"),
        (("generate", "--prompt", "x", "--model", "/nowhere"), "model = '/nowhere': there is no such folder"),
        (("generate", "--prompt", "x", "--model", "."), "neither a config.json nor exactly one .gguf"),
        (("formats", "--head-dim", "63"), "head_dim = 63"),
        (("generate", "--prompt", "x", "--format", "[/b]"), "format = '[/b]' is not known"),
        (("demo", "--formats", "kvfold-4,what"), "format = 'what' is not known"),
    ],
)
def test_errors_are_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    run = _kvfold(*arguments)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
