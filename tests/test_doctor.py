"""`kvfold doctor` says whether kvfold works, and what to do where it does not."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import fuzz_cli
import pytest

import kvfold.attention
from kvfold.cli.doctor import FORMATS, TESTED, Finding, doctor, packages

ROOT = Path(__file__).parents[1]


def told() -> tuple[int, dict[str, Finding]]:
    """Exit status and findings of `kvfold doctor --json`."""
    status, out, _ = fuzz_cli.call(["doctor", "--json"])
    answer = json.loads(out)
    assert answer["works"] == (status == 0)
    return status, {each["subject"]: Finding(**each) for each in answer["findings"]}


@pytest.mark.contract
def test_it_works_here() -> None:
    status, found = told()
    assert status == 0
    assert found["torch"].found == metadata.version("torch")
    for format in FORMATS:
        assert re.search(r"^C\+\+, .+; off the formula by [\d.]+% of", found[f"{format} on cpu"].found)
    assert "kvfold works here" in fuzz_cli.call(["doctor"])[1]


def test_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kvfold.attention.attend
    monkeypatch.setattr(
        kvfold.attention,
        "attend",
        lambda *args, backend, **options: right(*args, **options) * (3, 1)[backend is None],
    )
    status, found = told()
    assert status == 1
    assert all(found[f"{format} on cpu"].broken and "report" in found[f"{format} on cpu"].remedy for format in FORMATS)


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvfold.attention.cpu", None)
    status, found = told()
    assert status == 1
    assert found["module"].broken
    assert "make setup" in found["module"].remedy


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("5.15.9", "older than tests ran with 5.16 to .*: pip install -U 'transformers>=5.16'"),
        ("5.16", "^$"),
        ("5.23.0+local", "^$"),
        ("99.0.dev1", "newer than .*: if something fails, pip install 'transformers==5"),
    ],
)
def test_other_releases(version: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "transformers" else of(name))
    found = next(each for each in packages() if each.subject == "transformers")
    assert found.found == version
    assert not found.broken
    assert re.search(remedy, found.remedy)


@pytest.mark.parametrize(("missing", "broken"), [("safetensors", True), ("gguf", False)])
def test_what_is_not_installed(missing: str, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of = metadata.version

    def version(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return of(name)

    monkeypatch.setattr(metadata, "version", version)
    found = next(each for each in packages() if each.subject == missing)
    assert found.broken == broken
    assert "pip install" in found.remedy if broken else "GGUF" in found.found


def test_releases_are_those_that_tests_run_with() -> None:
    pins = {}
    for file in ("requirements-oldest.txt", "constraints.txt", "requirements-vllm.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if found := re.match(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", line):
                pins.setdefault(found[1], []).append(found[2])
    for name, (lowest, highest) in TESTED.items():
        assert pins[name][0] == lowest, name
        assert tuple(map(int, highest.split("."))) >= max(tuple(map(int, x.split("."))) for x in pins[name][:2]), name


def test_it_needs_nothing_to_say_so() -> None:
    """Its own module imports nothing that may be what is broken."""
    assert doctor.__module__ == "kvfold.cli.doctor"
    source = (ROOT / "kvfold/cli/doctor.py").read_text()
    assert not re.search(r"^(import|from) (torch|transformers|numpy|kvfold\.(?!cli\.output))", source, re.MULTILINE)
