"""The oldest releases that are tested are those that pyproject.toml allows."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
UNTESTED = {"torch", "triton"}
"""Triton comes with torch, and torch stays as constraints.txt has it."""
BESIDE = ("harness", "weights", "notebook")
"""Extras that are tested as constraints.txt has them, and so allow nothing older."""


def _extras() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _allowed(version: str) -> dict[tuple[str, str], str]:
    """The lowest release of each package, by its name and a system."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(x for name, own in _extras().items() if name not in ("dev", *BESIDE) for x in own),
    ]
    return _by_system(asked, version)


def _by_system(lines: list[str], version: str) -> dict[tuple[str, str], str]:
    return {
        (need.name, system): next(iter(need.specifier)).version
        for need in map(Requirement, lines)
        for system in ("Linux", "Darwin")
        if need.name not in UNTESTED
        and (need.marker is None or need.marker.evaluate({"platform_system": system, "python_version": version}))
    }


def test_the_oldest_are_the_lowest_allowed() -> None:
    lines = (ROOT / "requirements-oldest.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert _by_system(pinned, "3.11") == _by_system(pinned, "3.12") == _allowed("3.11")


def test_extras_that_are_tested_once_allow_nothing_older() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    elsewhere = {need.name for need in map(Requirement, _extras()["plots"])}
    for need in (Requirement(line) for name in BESIDE for line in _extras()[name]):
        if need.name not in elsewhere:
            lowest = Version(next(iter(need.specifier)).version).release
            assert Version(pins[need.name]).release[: len(lowest)] == lowest, need.name


@pytest.mark.contract
def test_torch_is_the_one_that_is_pinned() -> None:
    import torch

    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={torch.__version__.split('+')[0]}" in pins
