"""Every command line of README.md, docs/ and the commands' own help, run as it stands there.

The files that they name are made first, in a folder of their own: texts, blocks, rows, and FOLDER, which is the
packaged model's. A line that fails is told, and the next one runs. Lines that need a network, a server, or another
environment are not run here (`NOT_HERE`). All lines together take a day, because some of them measure SmolLM2 for
hours; with --small they take minutes, as SmolLM2's first layers (`small_model.py`) stand in its place.

    python benchmarks/documented_commands.py [--only "kvfold plan"] [--small] [--timeout 3600] [--list] [--json FILE]
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from kvfold.cli.output import to_stdout

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = ("kvfold", "python", "make", "pip", "curl")
NOT_HERE = {
    "kvfold serve": "serves until it is stopped: tests/vllm",
    "make": "makes environments: .ci/run",
    "pip": "needs an index of packages",
    "curl": "asks a server: tests/vllm",
    "kvfold harness": "needs lm-eval, and data from a hub: tests/extras",
    "python -m vllm": "serves until it is stopped: tests/vllm",
    "python benchmarks": "hours: each is run for the figures of its page",
    "kvfold compare float32/cpu float32/cuda": "needs a GPU",
}
"""Beginnings of lines, and why they are not run."""


@dataclass(frozen=True)
class Documented:
    """A command line as a page has it.

    Attributes
    ----------
    page
        Relative to the repository.
    text
        The line, without its comment and with continued lines joined.
    """

    page: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command that a shell makes of it, from the command's own name on."""
        shell = shlex.shlex(self.text, posix=True, punctuation_chars=";&|<>")
        shell.whitespace_split = True
        commands: list[list[str]] = [[]]
        for word in shell:
            if word in (";", "&&", "||", "|"):
                commands.append([])
            elif commands[-1] or not re.match(r"\w+=", word):  # variables of the environment come first
                commands[-1].append(word)
        without_files = [words[: words.index(">")] if ">" in words else words for words in commands]
        return [[Path(words[0]).name, *words[1:]] for words in without_files]

    @property
    def not_here(self) -> str:
        """Why it is not run; empty if it is."""
        words = " ".join(self.commands[0])
        return next((why for beginning, why in NOT_HERE.items() if words.startswith(beginning)), "")


def documented_commands() -> list[Documented]:
    """Command lines of all pages, in their order, each once a page."""
    found = []
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        lines = [line for block in fenced(text, "sh") for line in block.splitlines()]
        outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\\n", " ")
        lines += re.findall(r"^ {4}(\S.*)", outside, flags=re.MULTILINE)
        lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", outside) if "--" in code]
        found += [Documented(name, line) for line in map(_without_comment, lines) if _is_command(line)]
    for path in sorted((ROOT / "kvfold" / "cli").glob("*.py")):  # help: a line of its own in a docstring
        for line in re.findall(r"^ {4}(kvfold [a-z].*)", path.read_text(), flags=re.MULTILINE):
            found.append(Documented(str(path.relative_to(ROOT)), _without_comment(line)))
    return list(dict.fromkeys(found))


def fenced(text: str, language: str) -> list[str]:
    """Blocks of a page in one language, with continued lines joined."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [block.replace("\\\n", " ") for block in blocks] if language == "sh" else blocks


def make_files(folder: Path, model: Path | None = None) -> None:
    """Make what pages name in `folder`.

    Parameters
    ----------
    model
        What FOLDER is; a tiny random model if None.
    """
    import torch
    from fuzz_cli import make_model

    import kvfold
    from kvfold.evaluate import standard_text

    model = model or make_model(folder / "tiny", positions=16_384)
    (folder / "some").mkdir()
    for name in ("FOLDER", "my-model", "some/folder"):
        (folder / name).symlink_to(model)
    for name in ("report.txt", "long.txt"):
        (folder / name).write_text(standard_text()[:20_000])
    for name, head_dim in (("tq3", 128), ("q8_0", 64)):
        fmt = kvfold.get_format(name, head_dim)
        (folder / f"keys.{name}").write_bytes(fmt.to_bytes(fmt.fold(torch.randn(1_000, head_dim))).numpy().tobytes())


def make_rows(folder: Path) -> None:
    """Make the rows that `kvfold report` reads, by commands with a tiny model."""
    from fuzz_cli import Place

    here = Path.cwd()
    (folder / "made").mkdir()
    for rows in Place(folder / "made").rows:
        (folder / rows.name).write_bytes(rows.read_bytes())
    os.chdir(here)


def _without_comment(line: str) -> str:
    return re.split(r"\s+#", line, maxsplit=1)[0].strip()


def _is_command(line: str) -> bool:
    try:
        return bool(line) and Documented("", line).commands[0][0] in COMMANDS
    except (ValueError, IndexError):  # prose
        return False


def stand_in(folder: Path) -> Path:
    """Let the packaged model be a part of itself for commands that run from now on; `folder` holds it."""
    from small_model import make_small_model

    from kvfold.integrations.models import demo_folder

    whole = demo_folder()
    place = folder / "kvfold" / whole.name
    place.parent.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)
    return make_small_model(whole, place)


def _run(line: Documented, folder: Path, timeout: float) -> tuple[int, str]:
    """Exit status (-1: out of time) and the end of what it printed."""
    bin_first = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryFile("w+") as output:
        job = subprocess.Popen(
            line.text, shell=True, cwd=folder, env=os.environ | bin_first, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = job.wait(timeout)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = -1
        output.seek(0)
        return status, output.read()[-2_000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run lines with this in them")
    parser.add_argument("--small", action="store_true", help="let SmolLM2's first layers stand in its place")
    parser.add_argument("--timeout", type=float, default=3_600, help="seconds that a line may take")
    parser.add_argument("--list", action="store_true", help="print the lines and run none")
    parser.add_argument("--json", type=Path, help="a file for the rows, written after each line")
    args = parser.parse_args()
    lines = [line for line in documented_commands() if args.only in line.text]
    if args.list:
        for line in lines:
            print(f"{line.page}: {line.text}" + (f"    ({line.not_here})" if line.not_here else ""))
        return
    console, rows = to_stdout(), []
    table = Table("page", "command", "status", "seconds")
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as cache:
        from kvfold.integrations.models import demo_folder

        folder = Path(name)
        make_files(folder, stand_in(Path(cache)) if args.small else demo_folder())
        make_rows(folder)
        done: dict[str, tuple[int, float]] = {}
        for line in lines:
            if line.not_here:
                table.add_row(line.page, line.text, f"not here: {line.not_here}", "")
                continue
            if line.text not in done:
                begin = time.perf_counter()
                status, output = _run(line, folder, args.timeout)
                done[line.text] = status, time.perf_counter() - begin
                console.print(f"{status} in {done[line.text][1]:.0f} s: {line.text}", markup=False, soft_wrap=True)
                if status:
                    console.print(output, markup=False, soft_wrap=True)
            status, seconds = done[line.text]
            rows.append(asdict(line) | {"status": status, "seconds": seconds})
            table.add_row(line.page, line.text, str(status), f"{seconds:.0f}")
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table)
    sys.exit(any(row["status"] for row in rows))


if __name__ == "__main__":
    main()
