"""Every example runs as it stands."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert out.strip()
    if script.stem == "serve_a_batch":
        assert "Paris" in out
    if script.stem == "generation_loop":
        assert "seven" in out
    bits = [float(each) for each in re.findall(r"([\d.]+) bits a value", out)]
    if script.stem in ("fold_a_model", "keys_and_values_apart"):
        assert bits[0] < 8  # so it does fold
    if script.stem == "keys_and_values_apart":
        assert bits[1] < min(bits[0], bits[2])  # coarser values; and dense layers beside them


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
