"""Random argument lists for every command, against tiny models: no traceback, and no exit 0 with a wrong result.

In this process, so that a thousand lists take minutes. Files are made first: models that are whole and models that are
not, texts, blocks, rows, calibrations; and paths at which there is no file: folders, FIFOs, devices. After each list:

- the exit status is 0, 1 or 2, and 1 and 2 come with one line on stderr that is no fault of kvfold's;
- at exit 0, JSON is JSON with finite numbers, figures are possible, and written files are whole;
- whatever the status, what was read is as it was, and no half-written file is left.

    python benchmarks/fuzz_cli.py [--runs 1000] [--seed 0] [--verbose]
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import kvfold
from kvfold.cache.calibration import Calibration
from kvfold.cli.errors import run
from kvfold.formats import BLOCKS, get_format
from kvfold.formats.before_rope import frequencies_of

HANGS = 600
"""Seconds after which a list counts as hung."""
SLOW = ("demo", "bench", "sweep", "tasks")
"""Commands of which half as many lists are drawn."""
LINE = "It rained all day, and the keeper of the light wrote it down. "


class Hung(BaseException):
    """A list took longer than `HANGS`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every list and how it ended")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        faults, statuses = fuzz(Path(folder), args.runs, args.seed, args.verbose)
    for fault in faults:
        print(fault, file=sys.stderr)
    for command, counts in sorted(statuses.items()):
        print(f"{command:10}", ", ".join(f"{count} × {status}" for status, count in sorted(counts.items())))
    print(f"{args.runs} lists, {len(faults)} faults")
    sys.exit(bool(faults))


def fuzz(folder: Path, runs: int, seed: int, verbose: bool = False) -> tuple[list[str], dict[str, Counter[int]]]:
    """Faults, and how often each command ended with which status."""
    place = Place(folder)
    faults: list[str] = []
    statuses: dict[str, Counter[int]] = {}
    commands = [name for name in COMMANDS if name != "serve" or find_spec("vllm") is None]  # or it would serve
    for number in range(runs):
        draw = Draw(random.Random(f"{seed}/{number}"), place)
        command = draw.one(commands + [name for name in commands if name not in SLOW])
        arguments = [command, *COMMANDS[command](draw)]
        shutil.rmtree(place.out, ignore_errors=True)
        place.make_outputs()
        before = place.state()
        begin = time.perf_counter()
        status, out, err = call(arguments)
        if verbose:
            print(f"{number}: {status} in {time.perf_counter() - begin:.1f} s: {arguments}", err[-300:], flush=True)
        statuses.setdefault(command, Counter())[status] += 1
        # A job that is killed keeps its rows; whatever else fails leaves all as it was.
        outputs = draw.outputs + place.defaults if status == 0 or command in ("sweep", "tasks") else []
        draw.outputs = outputs
        wrong = [*check_status(status, out, err), *place.changes(before, arguments, outputs)]
        if status == 0 and not wrong and "--help" not in arguments:
            try:
                CHECKS.get(command, check_nothing)(arguments, out, draw)
            except Exception as error:
                wrong.append(f"exit 0 with a wrong result: {type(error).__name__}: {error}")
        place.put_back(before)
        faults += [f"{seed}/{number}: kvfold {' '.join(map(repr, arguments))}: {each}" for each in wrong]
    return faults, statuses


def call(arguments: list[str], given: str = LINE) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; `given` is on stdin."""

    def hang(*_: Any) -> None:
        raise Hung

    out, err, stdin = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(given)
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANGS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = run(arguments)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        status = -1
        err.write(f"\nTraceback: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        sys.stdin = stdin
    return status, out.getvalue(), err.getvalue()


def check_status(status: int, out: str, err: str) -> Iterator[str]:
    """What is wrong with how a list ended."""
    if "Traceback" in err or "Traceback" in out:
        yield f"a traceback: {err[-500:]}"
    if "kvfold is at fault" in err:
        yield err[err.index("kvfold is at fault") :][:500]
    if status not in (0, 1, 2):
        yield f"status {status}"
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    if status in (1, 2) and (len(errors) != 1 or not err.rstrip().endswith(errors[0])):
        yield f"status {status} with {len(errors)} lines of error: {err[-500:]!r}"
    if status == 0 and errors:
        yield f"exit 0 with {errors}"


def make_model(folder: Path, positions: int = 4_096) -> Path:
    """A tiny random Llama with a tokenizer of bytes, as a folder."""
    config = LlamaConfig(
        vocab_size=258,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=positions,
        bos_token_id=256,
        eos_token_id=257,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, 258 tokens, into a model's folder."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(letters)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


class Place:
    """A folder of files to read, of files that are damaged, and of paths that are no files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder / "in", folder / "out"
        self.folder.mkdir()
        torch.manual_seed(0)
        self.text = self._file("text.txt", LINE * 40)
        self.page = self._file("page.txt", LINE * 6)
        self.short = self._file("short.txt", "Why?")
        self.bad_texts = [
            self._file("latin.txt", "caf\xe9".encode("latin-1")),
            self._file("empty.txt", ""),
            self._file("nul.txt", "\0" * 9),
        ]
        self.model = make_model(self.folder / "model")
        self.bad_models = self._bad_models()
        self.vectors, self.blocks = 37, dict[str, Path]()
        x = torch.randn(self.vectors, 128)
        self.blocks["f32"] = self._file("x.f32", x.numpy().tobytes())
        for name in BLOCKS:
            fmt = get_format(name, 128).at(0, frequencies_of(1e6))
            if hasattr(fmt, "to_bytes"):
                self.blocks[name] = self._file(f"x.{name}", fmt.to_bytes(fmt.fold(x)).numpy().tobytes())
        self.nan_blocks = self._file("nan.f32", torch.full((4, 128), float("nan")).numpy().tobytes())
        self.huge_blocks = self._file("huge.f32", torch.full((4, 128), 3e38).numpy().tobytes())
        self.calibration, self.tria = self.folder / "a.safetensors", self.folder / "a.tria"
        self.kept = self.folder / "kept.kv"
        common = ["--model", str(self.model), "--json"]
        self.rows = []
        for name, arguments in {
            "calibration": [
                "calibrate",
                "--text",
                str(self.text),
                "--passage",
                "520",
                "--passages",
                "1",
                "--out",
                str(self.calibration),
            ],
            "tria": [
                "calibrate",
                "--eviction",
                "--text",
                str(self.text),
                "--passage",
                "520",
                "--passages",
                "1",
                "--out",
                str(self.tria),
            ],
            "kept": ["generate", "--file", str(self.text), "--cache", str(self.kept), "--max-new-tokens", "2"],
            "eval": [
                "eval",
                "--text",
                str(self.text),
                "--passage",
                "300",
                "--passages",
                "1",
                "--formats",
                "kvfold-4,turboquant-3",
            ],
            "tasks": [
                "tasks",
                "--tasks",
                "needle",
                "--lengths",
                "150",
                "--repeats",
                "1",
                "--formats",
                "kvfold-4",
                "--out",
                str(self.folder / "tasks.jsonl"),
            ],
            "compare": ["compare", "--text", str(self.text), "--tokens", "280", "--generate", "2"],
            "plan": ["plan", "--memory", "1GB", "--context", "500"],
        }.items():
            status, out, err = call([*arguments, *common])
            assert status == 0, (name, err)
            if name in ("eval", "tasks", "compare", "plan"):
                self.rows.append(self._file(f"{name}.json", out))
        self.rows.append(self.folder / "tasks.jsonl")
        sweep = [self._sweep_row(f"kvfold-{bits}") for bits in (4, 3, 2)]
        self.rows.append(self._file("sweep.jsonl", "".join(json.dumps(row) + "\n" for row in sweep)))
        whole = [self.calibration, self.tria, self.kept, *self.rows]
        self.damaged = [self._file(f"cut-{path.name}", path.read_bytes()[:-7]) for path in whole]
        self.strange_rows = [
            self._file("nan.json", '{"kl_mean": NaN}'),
            self._file("list.json", "[1]"),
            self._file("deep.json", "[" * 99_999),
            self._file("big.json", '{"kl_mean": 1e999, "format": "x"}'),
            self._file("word.json", "nothing"),
        ]
        self.contents = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        names = ("sweep.jsonl", "tasks.jsonl", "calibration.safetensors", "queries.tria", "report.html")
        self.defaults = [self.out / name for name in names]

    def _file(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def _bad_models(self) -> list[Path]:
        """The model, with one thing wrong each."""
        config = json.loads((self.model / "config.json").read_text())
        bad: dict[str, dict[str, str | bytes | None]] = {
            "no config": {"config.json": None},
            "no weights": {"model.safetensors": None},
            "no tokenizer": {"tokenizer.json": None, "tokenizer_config.json": None},
            "cut weights": {"model.safetensors": (self.model / "model.safetensors").read_bytes()[:-9]},
            "pickled weights": {"model.safetensors": None, "pytorch_model.bin": b"\x80\x04K\x01."},
            "damaged gguf": {"config.json": None, "a.gguf": b"GGUF\x03\0\0\0" + b"\xff" * 40},
            "cut gguf": {"config.json": None, "a.gguf": b"GGUF"},
            "empty gguf": {"config.json": None, "a.gguf": b""},
            "words for numbers": {"config.json": json.dumps(config | {"num_hidden_layers": "two"})},
            "no layers": {"config.json": json.dumps(config | {"num_hidden_layers": 0})},
            "many layers": {"config.json": json.dumps(config | {"num_hidden_layers": 10**12})},
            "less than none": {"config.json": json.dumps(config | {"num_key_value_heads": -1})},
            "odd head_dim": {"config.json": json.dumps(config | {"head_dim": 63})},
            "another kind": {"config.json": json.dumps(config | {"model_type": "t5"})},
            "unknown kind": {"config.json": json.dumps(config | {"model_type": "nope"})},
            "no json": {"config.json": "{"},
            "a list": {"config.json": "[]"},
        }
        folders = []
        for name, files in bad.items():
            folder = self.folder / name
            shutil.copytree(self.model, folder)
            for file, content in files.items():
                if content is None:
                    (folder / file).unlink()
                else:
                    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
            folders.append(folder)
        return folders

    @staticmethod
    def _sweep_row(format: str) -> dict[str, Any]:
        return {
            "stage": "key_bits",
            "config": {"format": format, "family": "kvfold"},
            "eval": {"model": "a", "n_tokens": 99},
            "ppl_fp16": 10.0,
            "ppl_tq": 10.1,
            "abs_delta": 0.1,
            "rel_delta": 0.01,
            "kl_mean": 0.1,
            "bits_per_value": 4.0,
            "verdict": "pass",
        }

    def make_outputs(self) -> None:
        """The folder for outputs, with paths that no file should replace, and a file that one may."""
        self.out.mkdir()
        os.chdir(self.out)
        (self.out / "folder").mkdir()
        os.mkfifo(self.out / "fifo")
        with contextlib.suppress(PermissionError):
            os.mknod(self.out / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null is
        (self.out / "old").write_text("old")
        (self.out / "loop").symlink_to("loop")

    def state(self) -> dict[Path, str]:
        """What each path is, by its kind and content."""
        paths = [path for top in (self.folder, self.out) for path in top.rglob("*")]
        return {path: _state(path) for path in paths}

    def changes(self, before: dict[Path, str], arguments: list[str], outputs: list[Path]) -> Iterator[str]:
        """What is not as it was, beside outputs that are not read, too."""
        after = self.state()
        for path in before.keys() | after.keys():
            if before.get(path) == after.get(path):
                continue
            asked = path in outputs and arguments.count(str(path)) < 2 and str(path.parent) not in arguments
            if not asked or not after.get(path, "").startswith(f"{stat.S_IFREG:o}"):
                yield f"{path} was {before.get(path, 'not there')} and is {after.get(path, 'not there')}"

    def put_back(self, before: dict[Path, str]) -> None:
        """What is read, if a list asked to write there."""
        for path, content in self.contents.items():
            if not path.exists() or _state(path) != before[path]:
                path.write_bytes(content)


def _state(path: Path) -> str:
    mode = path.lstat().st_mode
    content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
    return f"{stat.S_IFMT(mode):o} {content}"


class Draw:
    """Arguments, mostly such as a user might give, some hostile."""

    def __init__(self, random: random.Random, place: Place) -> None:
        self.random, self.place = random, place
        self.outputs: list[Path] = []

    def one(self, choices: Any) -> Any:
        return self.random.choice(list(choices))

    def rarely(self, share: float = 0.15) -> bool:
        return self.random.random() < share

    def option(self, name: str, value: Callable[[], str], share: float = 0.5) -> list[str]:
        return [name, value()] if self.random.random() < share else []

    def flag(self, name: str, share: float = 0.5) -> list[str]:
        return [name] if self.random.random() < share else []

    def end(self, arguments: list[str]) -> list[str]:
        """The arguments, now and then with one more, one less, or two changed about."""
        if self.rarely(0.06):
            word = self.one(HOSTILE)
            arguments.insert(self.random.randrange(len(arguments) + 1), word)
            self.outputs.append(self.place.out / word)  # it names the output if that is the argument taken away
        if self.rarely(0.04) and arguments:
            del arguments[self.random.randrange(len(arguments))]
        if self.rarely(0.02):
            arguments.append("--help")
        return arguments

    def number(self, *usual: Any) -> str:
        return str(self.one(NUMBERS if self.rarely() else usual))

    def numbers(self, *usual: Any) -> str:
        return self.one((",", ", ")).join(self.number(*usual) for _ in range(self.random.randint(1, 2)))

    def format(self) -> str:
        if self.rarely(0.2):
            return str(self.one(BAD_FORMATS))
        name = str(self.one(FORMATS))
        return f"{name}:{self.one(FORMATS)}" if self.rarely() else name

    def formats(self) -> str:
        if self.rarely(0.1):
            return str(self.one(("", ",", " ", "dense", "kvfold-4,,")))
        return str(self.one((",", ", "))).join(self.format() for _ in range(self.random.randint(1, 2)))

    def model(self) -> str:
        if self.rarely(0.2):
            return str(self.one([*self.place.bad_models, *self.inputs(), "nobody/nothing", "", "/nowhere", "."]))
        return str(self.place.model)

    def text(self, usual: Path | None = None) -> str:
        return str(self.one([*self.place.bad_texts, *self.inputs()]) if self.rarely() else usual or self.place.text)

    def inputs(self) -> list[Any]:
        """Paths that are readable files of some kind, or no files."""
        place = self.place
        return [*place.damaged, *place.rows, place.calibration, place.tria, place.short, place.folder, *self.no_files()]

    def no_files(self) -> list[Any]:
        out = self.place.out
        return [out / "folder", out / "fifo", out / "device", out / "loop", "/nowhere/x", "x" * 300, "", "\udcff"]

    def output(self, suffix: str = "") -> str:
        if self.rarely(0.2):
            path = self.one([*self.no_files(), self.place.text, *self.place.rows, self.place.model / "config.json"])
            self.outputs.append(self.place.out / path)  # where commands run
            return str(path)
        path = self.place.out / str(self.one(("new", "old"))) if not suffix else self.place.out / f"new{suffix}"
        self.outputs.append(path)
        return str(path)

    def dtype(self) -> str:
        return str(self.one(("float32", "bfloat16", "float16", "int8", "FLOAT32", "")))

    def common(self, *arguments: list[str]) -> list[str]:
        own = [["--model", self.model()], self.flag("--json"), *arguments]
        self.random.shuffle(own)
        return self.end([word for part in own for word in part])


FORMATS = (
    "kvfold-4",
    "kvfold-3",
    "kvfold-2",
    "turboquant-4",
    "turboquant-3+qjl",
    "centred-4",
    "hadamard-4",
    "float16",
    "q8_0",
    "affine-4",
    "uniform-4",
    "kvfold-4@128",
    "near-lossless",
    "balanced",
    "tbq3",
    "kvfold-1",
    "turboquant-8@16",
    "dense",
)
BAD_FORMATS = (
    "kvfold-04",
    "kvfold-٤",
    "kvfold-4@1000000000",
    "kvfold-4@9223372036854775808",
    "kvfold-4@0",
    "kvfold-4@040",
    "",
    "kvfold-99999999999999999999",
    "kvfold--4",
    "kvfold-4:",
    ":",
    "a:b:c",
    "kvfold-4+qjl",
    "[/b]",
    "\udcff",
    "kvfold-4 ",
    "KVFOLD-4",
    "affine-4g999999999999",
    "uniform-٣",
    "turboquant-2.50",
    "tq3",
    "amx3",
    "dense:kvfold-4",
)
NUMBERS = (
    "0",
    "-1",
    "-128",
    "1",
    "7",
    "10000000000",
    "9223372036854775808",
    "9" * 400,
    "nan",
    "inf",
    "-inf",
    "1e-320",
    "1e400",
    "٤",
    "4.5",
    "",
    "x",
    "0x10",
    "--",
)
HOSTILE = ("--nope", "", "-", "--", "\udcff", "--json=1", "extra", "-h", "--model", "--out", "\0", "--version")


def demo(draw: Draw) -> list[str]:
    return draw.common(
        ["--formats", draw.formats()],
        ["--tokens", draw.number(256, 300)],
        ["--max-new-tokens", draw.number(1, 3)],
        draw.option("--dtype", draw.dtype, 0.3),
    )


def generate(draw: Draw) -> list[str]:
    return draw.common(
        draw.option("--file", lambda: draw.text(draw.place.page)),
        draw.option("--prompt", lambda: draw.one(("Why?", "", "\udcff", " ", "x" * 500)), 0.7),
        ["--max-new-tokens", draw.number(1, 3)],
        draw.option("--format", draw.format, 0.6),
        draw.option("--temperature", lambda: draw.number(0, 0.5, 1), 0.3),
        draw.option("--dtype", draw.dtype, 0.2),
        draw.option("--calibration", lambda: draw.one([draw.place.calibration, *draw.inputs()]).__str__(), 0.15),
        draw.option("--cache", draw.output, 0.3),
        draw.flag("--replace", 0.1),
        draw.flag("--raw", 0.2),
        draw.option("--eviction", lambda: draw.one([draw.place.tria, *draw.inputs()]).__str__(), 0.15),
        draw.option("--budget", lambda: draw.number(261, 300, 260), 0.15),
        draw.option("--runtime", lambda: draw.one(("torch", "mlx", "x")), 0.05),
    )


def chat(draw: Draw) -> list[str]:
    return draw.common(
        draw.option("--system", lambda: draw.one(("Be brief.", "", "\udcff")), 0.3),
        ["--max-new-tokens", draw.number(1, 3)],
        draw.option("--format", draw.format, 0.6),
        draw.option("--temperature", lambda: draw.number(0, 0.5, 1), 0.3),
        draw.option("--dtype", draw.dtype, 0.2),
        draw.option("--calibration", lambda: draw.one([draw.place.calibration, *draw.inputs()]).__str__(), 0.15),
        draw.flag("--sliding", 0.1),
    )


def serve(draw: Draw) -> list[str]:
    return draw.end(
        [draw.model(), *draw.option("--format", draw.format), *draw.option("--calibration", draw.text, 0.3)]
    )


def calibrate(draw: Draw) -> list[str]:
    return draw.common(
        ["--text", draw.text()],
        ["--out", draw.output()],
        ["--passage", draw.number(64, 300, 512)],
        ["--passages", draw.number(1, 2)],
        draw.flag("--eviction", 0.3),
        draw.flag("--no-budgets", 0.3),
        draw.option("--dtype", draw.dtype, 0.2),
    )


def evaluate(draw: Draw) -> list[str]:
    return draw.common(
        ["--text", draw.text()],
        ["--formats", draw.formats()],
        ["--passage", draw.number(2, 100, 300)],
        draw.option("--passages", lambda: draw.number(1, 2)),
        draw.option("--offsets", lambda: draw.numbers(0, 100), 0.3),
        draw.option("--dtype", draw.dtype, 0.2),
        draw.flag("--layers", 0.3),
        draw.option("--calibration", lambda: str(draw.one([draw.place.calibration, *draw.inputs()])), 0.15),
    )


def bench(draw: Draw) -> list[str]:
    return draw.common(
        ["--text", draw.text()],
        ["--formats", draw.formats()],
        ["--contexts", draw.numbers(50, 300)],
        ["--new", draw.number(2, 3)],
        draw.option("--threads", lambda: draw.number(1, 2, 10**6), 0.2),
        draw.option("--plot", lambda: draw.output(draw.one((".png", ".svg", ".nope", ""))), 0.15),
        draw.option("--dtype", draw.dtype, 0.2),
    )


def sweep(draw: Draw) -> list[str]:
    return draw.common(
        ["--text", draw.text()],
        ["--out", draw.output()],
        ["--passage", draw.number(300, 310, 50)],
        ["--key-bits", draw.numbers(4, 8)],
        ["--value-bits", draw.numbers(4)],
        ["--page-sizes", draw.numbers(32)],
        draw.option("--family", lambda: draw.one(("kvfold", "turboquant", "x", "")), 0.3),
        draw.option("--residuals", lambda: draw.one(("", "sign", "x")), 0.3),
        draw.option("--pass-abs", lambda: draw.number(0.3, 5), 0.3),
        ["--lossless-pct", draw.number(50)],
        ["--lossless-kl", draw.number(5)],
    )


def tasks(draw: Draw) -> list[str]:
    return draw.common(
        ["--tasks", draw.one(("needle", "needle", "needle,nope", "", ","))],
        ["--formats", draw.formats()],
        ["--lengths", draw.numbers(150, 170)],
        ["--repeats", draw.number(1)],
        ["--out", draw.output()],
        draw.option("--seed", lambda: draw.number(0, 1), 0.3),
        draw.option("--plot", lambda: draw.output(draw.one((".png", ".svg", ""))), 0.15),
    )


def compare(draw: Draw) -> list[str]:
    executors = (
        "float32",
        "bfloat16",
        "float64",
        "float32/reference",
        "reference",
        "float16",
        "float32/meta",
        "meta",
        "cuda",
        "",
        "float32/float32",
        "cpu",
        "triton",
        "int8",
    )
    return draw.common(
        [draw.one(executors), draw.one(executors)],
        draw.option("--format", draw.format),
        ["--text", draw.text()],
        ["--tokens", draw.number(2, 280)],
        ["--generate", draw.number(1, 2)],
    )


def report(draw: Draw) -> list[str]:
    place = draw.place
    files = [str(draw.one(place.rows)) for _ in range(draw.random.randint(0, 2))]
    if draw.rarely(0.3):
        files.append(str(draw.one([*place.strange_rows, *draw.inputs()])))
    if draw.rarely(0.6):
        files.append(mangled(draw))
    return draw.end(
        [*files, "--out", draw.output(), *draw.option("--title", lambda: draw.one(("A", "\udcff", "<b>")), 0.2)]
    )


def mangled(draw: Draw) -> str:
    """A file of rows in which one thing is another, or missing."""
    source = draw.one(draw.place.rows)
    text = source.read_text()
    rows = [json.loads(line) for line in text.splitlines()] if source.suffix == ".jsonl" else json.loads(text)
    at = rows
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = draw.one(keys)
        if isinstance(at[key], dict | list) and at[key] and draw.rarely(0.8):
            at = at[key]
            continue
        if draw.rarely(0.4):
            del at[key]
        else:
            at[key] = draw.one((None, "x", -1, 10**40, [], {}, [[1]], 1e308, float("nan"), True, "kvfold-4", 0.5))
        break
    path = draw.place.out.parent / "mangled.json"
    path.write_text(json.dumps(rows))
    return str(path)


def plan(draw: Draw) -> list[str]:
    model = ["--model", draw.model()]
    numbers = [
        *draw.option("--layers", lambda: draw.number(2, 30), 0.9),
        *draw.option("--kv-heads", lambda: draw.number(1, 8), 0.9),
        *draw.option("--head-dim", lambda: draw.number(64, 128), 0.9),
    ]
    sizes = (
        "8GB",
        "1TB",
        "512MiB",
        "1 GB",
        "0",
        "-1GB",
        "9" * 400,
        "1e3",
        "1EB",
        ".5GB",
        "٤GB",
        "0.0000001B",
        "",
        "nan",
    )
    return draw.end(
        [
            *draw.one((model, numbers, model + numbers)),
            *draw.option("--memory", lambda: draw.one(sizes)),
            *draw.option("--context", lambda: draw.number(100, 5000)),
            *draw.option("--formats", draw.formats),
            *draw.option("--plot", lambda: draw.output(draw.one((".png", ".svg"))), 0.1),
            *draw.flag("--json"),
        ]
    )


def formats(draw: Draw) -> list[str]:
    options = [*draw.option("--head-dim", lambda: draw.number(64, 128, 80, 256, 8, 1024)), *draw.flag("--devices", 0.2)]
    return draw.end([*options, *draw.flag("--blocks", 0.3), *draw.flag("--json")])


def doctor(draw: Draw) -> list[str]:
    return draw.end(draw.flag("--json"))


def convert(draw: Draw) -> list[str]:
    place = draw.place
    first, second = draw.one(place.blocks), draw.one(place.blocks)
    source = place.blocks[first]
    if draw.rarely():
        source = draw.one([place.nan_blocks, place.huge_blocks, *draw.inputs()])
    return draw.end(
        [
            str(source),
            draw.output(),
            "--from",
            draw.format() if draw.rarely(0.1) else first,
            "--to",
            draw.format() if draw.rarely(0.1) else second,
            *draw.option("--head-dim", lambda: draw.number(128, 64), 0.3),
            *draw.option("--position", lambda: draw.number(0, 5), 0.2),
            *draw.option("--layer", lambda: draw.number(0, 3), 0.2),
            *draw.option("--rope-base", lambda: draw.number(1e6, 1e4), 0.2),
            *draw.flag("--json"),
        ]
    )


COMMANDS: dict[str, Callable[[Draw], list[str]]] = {
    "demo": demo,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "calibrate": calibrate,
    "eval": evaluate,
    "bench": bench,
    "sweep": sweep,
    "tasks": tasks,
    "compare": compare,
    "report": report,
    "plan": plan,
    "formats": formats,
    "convert": convert,
    "doctor": doctor,
}


def given(arguments: list[str], name: str, default: str = "") -> str:
    """The value of an option, the last if it is there twice."""
    at = [i for i, word in enumerate(arguments) if word == name]
    return arguments[at[-1] + 1] if at else default


def read_json(arguments: list[str], out: str) -> Any:
    """What was printed, as JSON of finite numbers; None where a table was asked for."""
    if "--json" not in arguments:
        assert out.strip() or "generate" in arguments, "nothing was printed"
        return None

    def no_number(text: str) -> None:
        raise ValueError(f"{text} in JSON")

    return json.loads(out, parse_constant=no_number)


def check_nothing(arguments: list[str], out: str, draw: Draw) -> None:
    read_json(arguments, out)
    for path in draw.outputs:
        assert not path.exists() or path.stat().st_size, f"{path} is empty"


def check_rows(arguments: list[str], out: str, draw: Draw) -> None:
    """Of `demo`, `eval` and `bench`: a row for each format, with figures that are possible."""
    check_nothing(arguments, out, draw)
    for row in read_json(arguments, out) or []:
        assert row["held_bytes"] > 0
        assert row.get("ppl", 1) > 0
        assert row.get("kl_mean", 0) > -1e-4
        assert 0 < row.get("bits_per_value", 1) < 2000  # short passages stay dense, in whole tails
        assert row.get("decode_tok_s", 1) > 0


def check_generate(arguments: list[str], out: str, draw: Draw) -> None:
    row = read_json(arguments, out)
    if row is not None:
        assert 0 < row["new_tokens"] <= int(given(arguments, "--max-new-tokens", "128"))
        assert row["held_bytes"] > 0
        assert 0 <= row["reused_tokens"] < row["prompt_tokens"]
    if path := given(arguments, "--cache"):
        cache = kvfold.FoldedCache.load(path)
        assert cache.ids.shape == (1, cache.get_seq_length())


def check_calibrate(arguments: list[str], out: str, draw: Draw) -> None:
    read_json(arguments, out or "{}")
    path = given(arguments, "--out")
    if "--eviction" in arguments:
        statistics = kvfold.QueryStatistics.load(path or "queries.tria")
        assert (statistics.layers, statistics.heads) == (2, 2)
    else:
        assert set(Calibration.load(path or "calibration.safetensors").layers) == {0, 1}


def check_compare(arguments: list[str], out: str, draw: Draw) -> None:
    document = read_json(arguments, out)
    for layer in document["layers"] if document else []:
        assert -1.001 < layer["hidden_cosine_min"] <= layer["hidden_cosine"] + 1e-9 < 1.001
        assert all(layer[key] is None or 0 <= layer[key] <= 1 for key in ("key_match", "value_match"))


def check_report(arguments: list[str], out: str, draw: Draw) -> None:
    page = Path(given(arguments, "--out", "report.html")).read_text()
    assert page.startswith("<!doctype html>")
    assert page.rstrip().endswith("</html>")


def check_plan(arguments: list[str], out: str, draw: Draw) -> None:
    document = read_json(arguments, out)
    for row in document["rows"] if document else []:
        assert row["held_bytes"] > 0
        assert row["users"] == document["memory"] // row["held_bytes"]
        assert math.isfinite(row["bytes_per_token"])


def check_convert(arguments: list[str], out: str, draw: Draw) -> None:
    """The bytes are those that the formats themselves give."""
    before = ["", *arguments]
    names = [word for last, word in zip(before, arguments, strict=False) if not {last[:1], word[:1]} & {"-"}]
    source, target = (Path(name) for name in names[1:3])
    dim, position = int(given(arguments, "--head-dim", "128")), int(given(arguments, "--position", "0"))
    layer, base = int(given(arguments, "--layer", "0")), float(given(arguments, "--rope-base", "1e6"))
    x = torch.frombuffer(bytearray(source.read_bytes()), dtype=torch.uint8)
    if (name := given(arguments, "--from")) == "f32":
        x = x.view(torch.float32).view(-1, dim)
    else:
        fmt = get_format(name, dim).at(layer, frequencies_of(base))
        x = fmt.unfold(fmt.from_bytes(x.view(-1, fmt.block_bytes), position))
    count = len(x)
    if (name := given(arguments, "--to")) == "f32":
        x = x.contiguous().view(torch.uint8)
    else:
        fmt = get_format(name, dim).at(layer, frequencies_of(base))
        x = fmt.to_bytes(fmt.fold(x, position))
    assert target.read_bytes() == x.contiguous().numpy().tobytes(), "other bytes than the format's own"
    row = read_json(arguments, out)
    assert row is None or (row["vectors"] == count and row["error"] >= 0)


CHECKS: dict[str, Callable[[list[str], str, Draw], None]] = {
    "demo": check_rows,
    "eval": check_rows,
    "bench": check_rows,
    "generate": check_generate,
    "calibrate": check_calibrate,
    "compare": check_compare,
    "report": check_report,
    "plan": check_plan,
    "convert": check_convert,
}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
