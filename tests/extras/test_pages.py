"""Python that pages show, and that needs what only extras bring."""

import json
from pathlib import Path
from typing import Any

import documented_commands as documented
import pytest

from kvfold.integrations.weights import weights_held

DOCS = Path(documented.ROOT, "docs")


def block_of(page: str, words: str) -> str:
    """The one snippet of a page that has these words."""
    (block,) = (each for each in documented.fenced((DOCS / page).read_text(), "python") if words in each)
    return block


def test_quantised_weights() -> None:
    names: dict[str, Any] = {}
    exec(block_of("transformers.md", "int8"), names)
    assert weights_held(names["model"]) < 180e6


def test_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a task of local data in the place of one from a hub."""
    rows = [{"question": "word " * 400 + "\nTwo and two are", "answer": " four"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    task = {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["."], "max_gen_toks": 2},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    block = block_of("evaluation.md", "lm_eval")
    assert "gsm8k" in block
    names: dict[str, Any] = {}
    exec(block.replace("gsm8k", str(tmp_path / "sums.yaml")), names)
    assert "exact_match,none" in names["results"]["results"]["sums"]
    assert names["model"].folded_share > 0.5
