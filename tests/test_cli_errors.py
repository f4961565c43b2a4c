"""Whatever is asked of the command line: an answer, or one line that says what to mend."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fuzz_cli
import pytest
import torch
import typer
from rich.console import Console
from rich.table import Table
from trials import trials

import kvfold
from kvfold.cache.report import CacheReport, LayerReport
from kvfold.cli import errors, main
from kvfold.cli.app import COMMANDS, command
from kvfold.cli.generate import _beside_bf16, _bits
from kvfold.cli.output import to_stdout
from kvfold.evaluate.records import held_cells

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Its files: a tiny model, texts, blocks, results, and others that are damaged."""
    here = os.getcwd()
    yield fuzz_cli.Place(tmp_path_factory.mktemp("fuzz"))
    os.chdir(here)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _fails(*arguments: object) -> str:
    """The one line of an error that the user can mend."""
    status, out, err = fuzz_cli.call([str(argument) for argument in arguments])
    assert (status, out) == (1, ""), err
    assert list(fuzz_cli.check_status(status, out, err)) == []
    return next(line for line in err.splitlines() if line.startswith("error: "))


@pytest.mark.drawn
def test_random_lists(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        faults, statuses = fuzz_cli.fuzz(tmp_path, trials(60, 1_000), seed=3)
    finally:
        os.chdir(here)
    assert faults == []
    assert {status for counts in statuses.values() for status in counts} == {0, 1, 2}


@pytest.mark.parametrize("name", [
    "no weights", "no tokenizer", "cut weights", "pickled weights", "damaged gguf", "cut gguf", "empty gguf",
    "words for numbers", "another kind", "unknown kind", "no json", "a list", "odd head_dim", "many layers",
    "no layers",
])  # fmt: skip
@pytest.mark.parametrize("command", ["generate", "calibrate", "eval", "bench", "sweep", "compare", "tasks", "demo"])
def test_models_that_are_damaged(place: Any, command: str, name: str) -> None:
    options = {"generate": ["--prompt", "Why?"], "tasks": ["--tasks", "needle", "--lengths", "150"], "demo": []}
    rest = options.get(command, ["--text", place.text])
    says = _fails(command, "--model", place.folder / name, *rest)
    assert name in says or "head_dim = 63" in says


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("words for numbers", "config.json: num_hidden_layers = 'two': give a whole number"),
        ("many layers", "num_hidden_layers = 1000000000000"),
        ("no layers", "num_hidden_layers = 0: give a whole number from 1"),
        ("less than none", "num_key_value_heads = -1"),
        ("no json", "config.json is no JSON"),
        ("damaged gguf", "a.gguf is damaged, no GGUF file, or"),
        ("empty gguf", "a.gguf is damaged, no GGUF file, or"),
    ],
)
def test_a_plan_of_a_damaged_model(place: Any, name: str, says: str) -> None:
    assert says in _fails("plan", "--model", place.folder / name)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ("9" * 400, "write a number and a unit"), ("1EB", "TiB"), ("", "write"), ("-1GB", "write"), ("٤GB", "write"),
        ("0", "is 0 bytes"), ("0.0000001B", "is 0 bytes"), ("99999999999TB", "less than 2**63"), ("1e3", "write"),
    ],
)  # fmt: skip
def test_memories_that_are_none(memory: str, says: str) -> None:
    line = _fails("plan", "--layers", 2, "--kv-heads", 1, "--head-dim", 64, "--memory", memory)
    assert "memory = " in line
    assert says in line


def test_a_terabyte_and_spaces_after_commas() -> None:
    numbers = ("plan", "--layers", "2", "--kv-heads", "1", "--head-dim", "64", "--json")
    _, out, _ = fuzz_cli.call([*numbers, "--memory", "1TB", "--formats", " bfloat16, kvfold-4 ,kvfold-4"])
    document = json.loads(out)
    assert document["memory"] == 10**12
    assert [row["format"] for row in document["rows"]] == ["bfloat16", "kvfold-4"]


@pytest.mark.parametrize("command", ["plan", "eval", "demo", "bench", "tasks"])
@pytest.mark.parametrize("listed", ["", " , "])
def test_no_formats(command: str, listed: str) -> None:
    assert f"formats = {listed!r}: " in _fails(command, "--formats", listed)


@pytest.mark.parametrize("head_dim", [0, -128, 7, 63, 1032, 2**40])
def test_vectors_of_no_length(place: Any, head_dim: int) -> None:
    for first, second in (("f32", "q8_0"), ("q8_0", "f32"), ("f32", "f32")):
        if head_dim in (7, 63) and (first, second) == ("f32", "f32"):
            continue
        says = _fails("convert", place.blocks[first], "out", "--from", first, "--to", second, "--head-dim", head_dim)
        assert f"head_dim = {head_dim}" in says
    assert not Path("out").exists()


@pytest.mark.parametrize("base", ["0", "-1", "nan", "inf", "1e-320", "1e300"])
def test_rope_bases_that_are_none(place: Any, base: str) -> None:
    says = _fails("convert", place.blocks["f32"], "out", "--from", "f32", "--to", "amx3", "--rope-base", base)
    assert "rope_base = " in says


def test_numbers_that_are_none_are_not_converted(place: Any) -> None:
    for target in place.blocks:
        says = _fails("convert", place.nan_blocks, "out", "--from", "f32", "--to", target)
        assert "nan.f32': vector 0 holds a NaN" in says
    assert not Path("out").exists()


@pytest.mark.parametrize("temperature", ["1e-320", "1e-7", "inf", "1e7"])
def test_temperatures_that_are_none(place: Any, temperature: str) -> None:
    says = _fails("generate", "--model", place.model, "--prompt", "Why?", "--temperature", temperature)
    assert "temperature = " in says


def test_a_temperature_that_is_no_number(place: Any) -> None:
    """By releases of typer it is no argument, or one that the command refuses."""
    status, out, err = fuzz_cli.call(
        ["generate", "--model", str(place.model), "--prompt", "Why?", "--temperature", "nan"]
    )
    assert out == ""
    assert status in (1, 2)
    assert "temperature" in err


def test_arguments_that_are_no_utf_8(place: Any) -> None:
    assert "prompt is no UTF-8" in _fails("generate", "--model", place.model, "--prompt", "caf\udce9")
    assert "is no UTF-8" in _fails("generate", "--model", "caf\udce9", "--prompt", "Why?")
    assert "title is no UTF-8" in _fails("report", place.rows[0], "--title", "caf\udce9")
    assert "no UTF-8: byte 3 is 0xe9" in _fails("eval", "--text", place.bad_texts[0])


@pytest.mark.parametrize("executor", ["float32/meta", "meta", "float99", "", "float32/float32/cpu/cpu"])
def test_executors_that_are_none(executor: str) -> None:
    assert f"executor = {executor!r}" in _fails("compare", executor, "float32")


@pytest.mark.parametrize("number", range(5))
def test_report_rows_that_lack_a_key(place: Any, number: int, tmp_path: Path) -> None:
    """Each key of each kind of row, missing or of another kind, is named with the file, or not needed."""
    source = place.rows[number]
    text = source.read_text()
    rows = [json.loads(line) for line in text.splitlines()] if source.suffix == ".jsonl" else json.loads(text)
    row = rows[0] if isinstance(rows, list) else rows["outcomes"][0] if "outcomes" in rows else rows
    refused = []
    for key, value in [*row.items()]:
        for wrong in (None, {"a": [1]}, "x" if not isinstance(value, str) else 7, 1e308):
            row[key] = wrong
            path = tmp_path / "rows.json"
            path.write_text(json.dumps(rows))
            status, out, err = fuzz_cli.call(["report", str(path), "--out", str(tmp_path / "page.html")])
            assert list(fuzz_cli.check_status(status, out, err)) == []
            if status:
                refused.append(key)
                assert "rows.json" in err
                assert not (tmp_path / "page.html").exists()
            else:
                (tmp_path / "page.html").unlink()
        row[key] = value
    assert len(set(refused)) > 3


@pytest.mark.parametrize("name", ["a.safetensors", "a.tria", "kept.kv"])
def test_files_that_are_cut(place: Any, name: str) -> None:
    option = {"a.safetensors": "--calibration", "a.tria": "--eviction", "kept.kv": "--cache"}[name]
    says = _fails("generate", "--model", place.model, "--prompt", "Why?", option, place.folder / f"cut-{name}")
    assert f"cut-{name}'" in says


def test_outputs_onto_inputs(place: Any) -> None:
    before = place.state()
    for arguments in (
        ("report", place.rows[0], place.rows[1], "--out", place.rows[0]),
        ("convert", place.blocks["f32"], place.blocks["f32"], "--from", "f32", "--to", "tq3"),
        ("calibrate", "--text", place.text, "--out", place.text, "--model", place.model),
        ("calibrate", "--text", place.text, "--out", place.model / "model.safetensors", "--model", place.model),
        ("generate", "--model", place.model, "--file", place.text, "--cache", place.text),
        ("sweep", "--model", place.model, "--text", place.text, "--out", place.text),
        ("tasks", "--model", place.model, "--calibration", place.calibration, "--out", place.calibration),
        ("bench", "--model", place.model, "--text", place.text, "--plot", "link.svg"),
    ):
        if "link.svg" in arguments:
            Path("link.svg").symlink_to(place.text)
        assert "would replace" in _fails(*arguments)
    assert place.state() == before


def test_a_cache_of_another_document_is_kept(place: Any, tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("It rained all day. " * 20)
    other.write_text("It rained all night. " * 20)
    common = [
        "generate",
        "--model",
        place.model,
        "--max-new-tokens",
        2,
        "--json",
        "--raw",
        "--cache",
        tmp_path / "a.kv",
    ]

    def ask(*arguments: object) -> int:
        status, out, err = fuzz_cli.call([str(each) for each in (*common, *arguments)])
        assert status == 0, err
        return int(json.loads(out)["reused_tokens"])

    assert ask("--file", one, "--prompt", "Why?") == 0
    assert ask("--file", one, "--prompt", "When?") > 300  # another question of the same document
    assert ask("--file", one) > 300
    kept = (tmp_path / "a.kv").read_bytes()
    says = _fails(*(each for each in common if each != "--json"), "--file", other, "--prompt", "Why?")
    assert "holds another document" in says
    assert "--replace" in says
    assert "holds another document" in _fails(*common, "--prompt", "Something else, not to be lost?")
    assert (tmp_path / "a.kv").read_bytes() == kept
    assert ask("--file", other, "--prompt", "Why?", "--replace") < 20
    assert ask("--file", other, "--prompt", "Where?") > 300
    assert "no --cache" in _fails("generate", "--prompt", "Why?", "--replace")


@pytest.mark.parametrize(
    ("one", "other"),
    [("kvfold-4", "near-lossless"), ("near-lossless", "kvfold-4:kvfold-4"), ("kvfold-4", "kvfold-4@64"),
     ("balanced", "uniform-4"), ("affine-4g128", "affine-4"), ("dense", "dense")],
)  # fmt: skip
def test_names_that_mean_the_same(place: Any, one: str, other: str, tmp_path: Path) -> None:
    if one.startswith("affine"):
        one, other = "q8_0", "q8_0:q8_0"  # of 64 channels there are no groups of 128
    common = ["generate", "--model", str(place.model), "--file", str(place.page), "--max-new-tokens", "1", "--json"]
    common += ["--cache", str(tmp_path / "a.kv"), "--format"]
    (status, _, err), (again, out, more) = fuzz_cli.call([*common, one]), fuzz_cli.call([*common, other])
    assert (status, again) == (0, 0), err + more
    row = json.loads(out)
    assert row["reused_tokens"] == row["prompt_tokens"] - 1
    assert "is folded as" in _fails(*common, "turboquant-2")


@pytest.mark.parametrize("command", ["eval", "demo", "bench", "tasks", "generate", "compare"])
def test_dense_is_a_format_of_every_command(place: Any, command: str) -> None:
    rest = {
        "eval": ["--text", place.page, "--passage", 100, "--passages", 1, "--formats", "dense,turboquant-4"],
        "demo": ["--tokens", 256, "--max-new-tokens", 1, "--formats", "turboquant-4,dense"],
        "bench": ["--text", place.page, "--contexts", 50, "--new", 2, "--formats", "dense,turboquant-4"],
        "tasks": ["--tasks", "needle", "--lengths", 150, "--repeats", 1, "--formats", "dense,turboquant-4"],
        "generate": ["--prompt", "Why?", "--max-new-tokens", 2, "--format", "dense"],
        "compare": ["--text", place.page, "--tokens", 40, "--generate", 1, "--format", "dense"],
    }[command]
    status, out, err = fuzz_cli.call([command, "--model", str(place.model), *map(str, rest), "--json"])
    assert status == 0, err
    document = json.loads(out)
    if command == "generate":
        assert document["bits_per_value"] == 32
    elif command in ("demo", "bench"):
        assert [row["format"] for row in document] == ["dense", "turboquant-4"]


@pytest.mark.parametrize(
    ("error", "says", "status"),
    [
        (ValueError("x = 3: give 4\nor 5"), "error: x = 3: give 4 or 5", 1),
        (FileNotFoundError(2, "No such file or directory", "a"), "error: 'a': No such file or directory", 1),
        (OSError(28, "No space left on device"), "error: No space left on device", 1),
        (ImportError("install gguf"), "error: install gguf", 1),
        (MemoryError(), "error: there is not enough memory", 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "error: there is not enough memory", 1),
        (KeyError("x"), "error: kvfold is at fault, not what you gave it: KeyError: 'x' (cli/report.py:", 1),
        (ValueError(), "error: kvfold is at fault, not what you gave it: ValueError", 1),
        (RecursionError("deep"), "error: kvfold is at fault, not what you gave it: RecursionError: deep", 1),
        (typer.BadParameter("no"), "error: Invalid value: no", 2),
        (KeyboardInterrupt(), "", 130),
        (typer.Abort(), "", 130),
    ],
)  # fmt: skip
@pytest.mark.parametrize("traceback", [False, True])
def test_each_kind_of_error(
    error: BaseException, says: str, status: int, traceback: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("kvfold.cli.report.check_output", fail)
    monkeypatch.setattr(sys, "argv", ["kvfold", "report", "x.json"])
    if traceback:
        monkeypatch.setenv(errors.TRACEBACK, "1")
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == status
    assert err.splitlines()[-1:] == [] or err.splitlines()[-1].startswith(says)
    assert (len(err.splitlines()) <= 1) is not (traceback and status != 130)
    assert ("Traceback" in err) is (traceback and status != 130)


@pytest.mark.parametrize("module", ["rich.console", "typer", "torch", "transformers", "kvfold.cli.plan"])
def test_an_interrupt_of_what_is_imported(module: str) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in what runs in the background
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from kvfold.cli import main; main()\n"
    )
    run = subprocess.run([sys.executable, "-c", script, "plan"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("torchao", ("generate", "--prompt", "x", "--weights", "int8"), "kvfold[weights]"),
        ("torchao", ("bench", "--weights", "int8"), "kvfold[weights]"),
        ("lm_eval", ("harness", "--tasks", "x"), "kvfold[harness]"),
    ],
)
def test_what_an_extra_brings_is_said(
    missing: str, arguments: tuple[str, ...], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "kvfold.integrations.harness", raising=False)
    status, _, err = fuzz_cli.call([*arguments])
    assert status == 1
    assert extra in err
    assert len(err.splitlines()) == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvfold {version('kvfold')}\n"
    assert kvfold.__version__ == version("kvfold")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_needs_no_torch(option: str) -> None:
    """Which takes seconds to import, while nothing is computed."""
    script = f"import sys; from kvfold.cli.errors import run; run(['{option}']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_help_lists_commands_in_their_own_words() -> None:
    listed = " ".join(re.sub("[│╭╮╰╯─]", " ", fuzz_cli.call(["--help"])[1]).split())
    for name in COMMANDS:
        words = (command(name).help or "").split("\n\n")[0].split()
        assert f" {name} {' '.join(words)} " in f"{listed} ", name


def test_help_shows_what_is_in_brackets() -> None:
    """Nothing of an option's help is taken for markup: [mlx] and its kin."""
    for name in COMMANDS:
        sub = command(name)
        shown = Console().render_str(sub.help or "").plain
        assert "".join(shown.split()) == "".join((sub.help or "").split()), name
        for option in sub.params:
            text = getattr(option, "help", None) or ""
            assert "[" not in Console().render_str(text).plain or "\\[" in text, (name, option.name)
            assert Console().render_str(text).plain == text.replace("\\[", "["), (name, option.name)
    assert "kvfold[mlx]" in " ".join(fuzz_cli.call(["eval", "--help"])[1].split())


def test_no_figure_is_cut_off_in_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table()
    for i in range(12):
        table.add_column(f"column {i}", no_wrap=True)
    table.add_row(*["123456789"] * 12)
    to_stdout().print(table)
    assert capsys.readouterr().out.count("123456789") == 12


def _report(dense: int, *layers: tuple[str, int, int, int]) -> CacheReport:
    """Of layers with a format, values, values held dense, and bytes; beside them `dense` windows of float32."""
    windows = [("dense", 100, 100, 400)] * dense
    rows = [LayerReport(i, name, 1, 0, *own) for i, (name, *own) in enumerate([*windows, *layers])]
    return CacheReport(tuple(rows), 0, sum(row.held_bytes for row in rows), sum(row.values for row in rows))


@pytest.mark.parametrize(
    ("report", "says", "cells"),
    [
        (_report(0, ("kvfold-4", 1000, 40, 600)), ("4.80 bits a value (4% dense)", "3.33x smaller"), ("4.80", "30.0")),
        (_report(0, ("kvfold-4", 100, 100, 400)), ("nothing folded yet", "2.00x larger"), ("–", "200.0")),
        (_report(9, ("kvfold-4", 100, 100, 5000)), ("nothing folded yet", "4.30x larger"), ("–", "430.0")),
        (
            _report(9, ("kvfold-4", 100, 20, 60)),
            ("4.80 bits a value where layers fold (20% dense)", "1.83x larger"), ("4.80", "183.0"),
        ),
        (_report(9), ("32.00 bits a value", "2.00x larger"), ("32.00", "200.0")),
        (_report(1, ("kvfold-4", 4000, 1, 7800)), ("15.60 bits", "as large as"), ("15.60", "100.0")),
    ],
)  # fmt: skip
def test_what_a_cache_holds_is_said_as_it_is(
    report: CacheReport, says: tuple[str, str], cells: tuple[str, str]
) -> None:
    """Bits of what folds, once something has, and the whole beside bfloat16: smaller, or larger."""
    assert _bits(report).startswith(says[0])
    assert f"{says[1]} {'' if says[1].endswith('as') else 'than '}in bf16" == _beside_bf16(report)
    assert held_cells(report.to_json()) == (cells[0], f"{cells[1]} %")


def test_letters_that_a_terminal_does_not_have() -> None:
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", "formats", "--head-dim", "128"]
    for more in ([], ["--json"]):
        run = subprocess.run(
            [*command, *more], capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"}
        )
        assert run.returncode == 0, run.stderr
        run.stdout.decode("ascii")
        if more:
            assert "Lloyd–Max" in json.loads(run.stdout)[6]["what"] + json.loads(run.stdout)[5]["what"]


def test_json_has_no_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    from kvfold.cli.output import print_json

    print_json({"a": (float("nan"), [float("inf")], 1.5), "b": {"c": torch.inf}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None], 1.5], "b": {"c": None}}
