"""What pages show is run as it stands: Python here, command lines here or by benchmarks/documented_commands.py."""

import ast
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import documented_commands as documented
import pytest
import torch
from transformers import PreTrainedModel

from kvfold.cli import errors
from kvfold.cli.app import COMMANDS, command
from kvfold.formats import check_names

ROOT = Path(__file__).parents[1]


LINES = documented.documented_commands()
SNIPPETS = [
    pytest.param(page, block, id=f"{page.stem}-{number}")
    for page in documented.PAGES
    for number, block in enumerate(documented.fenced(page.read_text(), "python"))
]
ELSEWHERE = {"openai", "vllm", "lm_eval", "torchao"}
"""Packages of snippets that another environment has, where tests/vllm and tests/extras run: such are compiled only."""
IN_SECONDS = ("kvfold formats", "kvfold convert", "kvfold plan")
"""Beginnings of command lines that are run here."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages name: a tiny model, texts, blocks."""
    folder = tmp_path_factory.mktemp("documented")
    documented.make_files(folder)
    return folder


def test_pages_have_snippets_and_commands() -> None:
    assert {page.values[0].name for page in SNIPPETS} >= {"README.md", "eviction.md", "formats.md", "mlx.md"}  # type: ignore[union-attr]
    pages = {line.page for line in LINES}
    assert pages >= {"README.md", "docs/formats.md", "docs/evaluation.md", "docs/serving.md", "kvfold/cli/generate.py"}
    used = {words[1] for line in LINES for words in line.commands if words[0] == "kvfold"}
    assert used >= set(COMMANDS) - {"demo"}


# Python


@pytest.mark.parametrize(("page", "block"), SNIPPETS)
def test_snippet(
    page: Path,
    block: str,
    made: Path,
    llama: PreTrainedModel,
    random_ids: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, tree = compile(block, str(page), "exec"), ast.parse(block)
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if 'weights="int8"' in block:
        imports.add("torchao")
    if imports & ELSEWHERE:
        return
    if any("mlx" in name for name in imports):
        pytest.importorskip("mlx_lm")
    monkeypatch.chdir(made)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    if "demo_model()" not in block:  # it goes on with a model that pages have by then
        import kvfold

        names = {"kvfold": kvfold, "model": llama, "passages": [random_ids(1, 640, seed) for seed in range(2)]}
    try:
        exec(code, names)
    finally:
        if "mlx_lm" in imports:
            from kvfold.integrations.mlx import detach

            detach()
    if page.name == "README.md":  # and it shows what the page is about
        assert names["cache"].bits_per_value() < 6
        assert names["cache"].report().ratio_to_bf16 > 2.5
        assert (made / "reference.kv").is_file()


# Messages


def _messages(tree: ast.AST) -> list[str]:
    """What strings of a module say, with … for what is put in."""
    said = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
            said.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said.append(node.value.replace("%s", "…"))
    return said


@pytest.mark.parametrize(
    "heading", re.findall(r"^## `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
)
def test_a_message_that_is_explained_is_one(heading: str) -> None:
    sources = (ROOT / "kvfold").rglob("*.py")
    said = [message for source in sources for message in _messages(ast.parse(source.read_text()))]
    wanted = ".*".join(map(re.escape, heading.split("…")))
    assert any(re.search(wanted, message) for message in said)


# Command lines


@pytest.mark.contract
@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.page}: {line.text}"[:90])
def test_command_is_understood(line: Any) -> None:
    """As far as it can be without the files and models that it names."""
    for program, *arguments in line.commands:
        if program == "kvfold":
            with command(arguments[0]).make_context(arguments[0], arguments[1:]):
                pass
            for option, value in pairwise(arguments):
                for name in value.split(",") if option in ("--format", "--formats") else ():
                    check_names(name)
        elif program == "make":
            assert re.search(rf"^{arguments[0]}\b.*:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        elif program == "python" and arguments[0] != "-m":
            path = ROOT / arguments[0]
            sources = [path] if path.is_file() else list(path.glob("*.py"))
            assert sources, f"there is no {arguments[0]}"
            source = "".join(each.read_text() for each in sources)
            for option in (word for word in arguments if word.startswith("--")):
                assert f'"{option}"' in source, f"{arguments[0]} has no {option}"


@pytest.mark.parametrize(
    "text", dict.fromkeys(line.text for line in LINES if line.text.startswith(IN_SECONDS) and not line.not_here)
)
def test_command_runs(
    text: str, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    for _, *arguments in documented.Documented("", text).commands:
        status = errors.run(arguments)
        printed = capsys.readouterr()
        assert status == 0, printed.err
        assert printed.out.strip()
