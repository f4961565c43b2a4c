"""Two executors beside each other, and the page of all results."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from backends import with_instruction_set
from commands import run_kvfold
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.attention import BACKENDS, cpu
from kvfold.evaluate.compare import Executor, compare
from kvfold.evaluate.report import Results, render


def test_an_executor_agrees_with_itself() -> None:
    from conftest import tiny_model

    model = tiny_model("llama")
    ids = torch.randint(3, 256, (1, 300), generator=torch.Generator().manual_seed(0))
    seen: list[int] = []
    same = compare(model, ids, "centred-4", (Executor("float64"),) * 2, generate=5, progress=seen.append)
    assert sum(seen) == 2 * 305
    assert len(same.layers) == 4
    for layer in same.layers:
        assert (layer.key_match, layer.value_match, layer.scale_error) == (1, 1, 0)
        assert layer.hidden_cosine_min == pytest.approx(1, abs=1e-12)
    assert same.first_divergence is None
    assert not hasattr(model, "_kvfold_attached")  # copies were attached, not the model itself

    other = compare(model, ids, "centred-4", (Executor("float64"), Executor("bfloat16")), generate=5)
    for layer in other.layers:
        assert layer.key_match is not None
        assert 0.2 < layer.key_match < 0.995
        assert layer.scale_error > 0
        assert 0.9 < layer.hidden_cosine < 0.99999


@pytest.mark.parametrize("isa", [isa for isa in cpu.INSTRUCTION_SETS if isa != "serial"][:2])
def test_the_kernel_and_the_reference_agree_on_a_real_model(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], counting: Tensor, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = demo[0]
    kvfold.detach(model)
    monkeypatch.setitem(BACKENDS, "cpu", with_instruction_set(isa))
    result = compare(model, counting, "centred-4", (Executor(backend="reference"), Executor()), generate=8)
    assert result.layers[0].key_match == result.layers[0].value_match == 1
    assert min(layer.hidden_cosine for layer in result.layers) > 0.999
    assert result.first_divergence is None
    if isa not in cpu.INTEGER_SETS:  # integer products are held to the codec's own error, in test_attention_cpu.py
        assert min(layer.key_match for layer in result.layers) > 0.99
        assert min(layer.value_match for layer in result.layers) > 0.99


def test_float32_and_bfloat16_agree_on_a_real_model(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], text_ids: Tensor
) -> None:
    model = demo[0]
    kvfold.detach(model)
    result = compare(model, text_ids[:, :350], "centred-4", (Executor("float32"), Executor("bfloat16")), generate=2)
    assert result.layers[0].key_match > 0.8  # before errors of earlier layers
    assert result.layers[0].value_match > 0.97
    assert min(layer.hidden_cosine for layer in result.layers) > 0.99


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("float32/bfloat16", "names two dtypes, float32 and bfloat16"),
        ("float99", "'float99' is neither a dtype"),
        ("", "'' is neither"),
    ],
)
def test_executors_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Executor.parse(text)
    assert Executor.parse("cpu/bfloat16") == Executor("bfloat16", "cpu")


class _Page(HTMLParser):
    """Collects tags and whatever a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            outside = name in ("src", "href", "xlink:href") and value and not value.startswith(("#", "data:"))
            if outside or tag in ("script", "link", "iframe"):
                self.fetched.append(f"{tag} {name}={value}")


def test_report(small_folder: Path, tmp_path: Path) -> None:
    """From rows that the commands really wrote to a page that fetches nothing."""
    files = []
    for name, command in {
        "eval.json": ("eval", "--passage", "150", "--passages", "1", "--formats", "centred-4,turboquant-3"),
        "tasks.json": (
            "tasks",
            "--tasks",
            "needle",
            "--lengths",
            "120",
            "--repeats",
            "1",
            "--formats",
            "centred-4",
            "--out",
            str(tmp_path / "tasks.jsonl"),
        ),
        "compare.json": ("compare", "--tokens", "120", "--generate", "2"),
        "plan.json": ("plan", "--memory", "1GB"),
    }.items():
        run = run_kvfold(*command, "--model", str(small_folder), "--json")
        assert run.returncode == 0, run.stderr
        files.append(tmp_path / name)
        files[-1].write_text(run.stdout)
    out = tmp_path / "report.html"
    run = run_kvfold("report", *map(str, files), "--out", str(out))
    assert run.returncode == 0, run.stderr
    text = out.read_text()
    page = _Page()
    page.feed(text)
    assert page.fetched == []
    assert not re.search(r"url\((?!#)|@import", text)
    # The Pareto plot, a heat map of layers for each of two formats, and needles dense and folded.
    assert page.tags.count("svg") == 1 + 2 + 2
    assert page.tags.count("h2") == 5
    rows = json.loads(files[0].read_text())
    for row in rows:
        assert row["format"] in text
        assert f"{row['kl_mean']:.4f}" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_report_keeps_jobs_apart_and_takes_unfinished_ones(tmp_path: Path) -> None:
    """Rows of two models in one file, one job killed before its last case; and a sweep whose stage was mended."""

    def outcome(model: str, case: int, format: str, score: float) -> dict[str, object]:
        about = {"length": 100, "depth": 0.5 if case else 0.0}
        return {
            "model": model, "seed": 0, "dtype": "float32", "task": "needle", "case": str(case), "about": about,
            "format": format, "expected": "1", "answer": "1", "score": score, "detail": "", "tokens": 100,
            "folded": 0.5,
        }  # fmt: skip

    def run(stage: str, format: str, verdict: str) -> dict[str, object]:
        return {
            "stage": stage, "config": {"format": format, "family": "kvfold"}, "eval": {"model": "a", "n_tokens": 99},
            "ppl_fp16": 10.0, "ppl_tq": 10.0, "abs_delta": 0.0, "rel_delta": 0.0, "kl_mean": 0.1, "bits_per_value": 4.0,
            "verdict": verdict,
        }  # fmt: skip

    rows = [outcome("a", case, format, 1.0) for format in ("dense", "centred-4") for case in (0, 1)]
    rows += [outcome("b", case, "dense", 1.0) for case in (0, 1)] + [outcome("b", 0, "centred-4", 0.0)]
    rows += [run("ablation/bridge", "float16", "fail"), run("ablation/bridge", "float16", "pass")]
    rows += [run("ablation/residual off", "kvfold-8", "pass")]
    rows += [run("key_bits", f"kvfold-{bits}", "pass") for bits in (6, 4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render(Results.read([path]))
    assert page.count("<h2>Needle") == 2
    assert "100% (100%)" in page
    assert "0% (0%)" in page
    assert 'class="fail"' not in page
    staircase = page[page.index("<h2>Staircase") :]
    assert all(f"kvfold-{bits}" in staircase for bits in (8, 6, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("[]", "hold no results"),
        ('{"a": 1}', "a row that no kvfold command writes"),
        ("[3]", "holds a int where a row of results belongs"),
        ('{"kl_mean": 1}\n{"kl\n{"kl_mean": 1}', "line 2"),
    ],
)
def test_report_errors(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content + "\n")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        render(Results.read([path]))


@pytest.mark.contract
def test_plan_draws(tmp_path: Path) -> None:
    plot = tmp_path / "plan.svg"
    run = run_kvfold("plan", "--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--plot", str(plot))
    assert run.returncode == 0, run.stderr
    assert "<svg" in plot.read_text()
