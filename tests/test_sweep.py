"""The sweep: a planted bug stops it, a kill does not lose a row."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import run_kvfold
from conftest import tiny_model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold import Calibration, FoldedCache, Policy
from kvfold.evaluate.records import append_row, open_rows, read_rows
from kvfold.evaluate.runtime import Runtime, runtime_of
from kvfold.evaluate.sweep import FLOAT16, Budgets, Config, StageFailed, Steps, Sweep, ablation, pareto, recommend
from kvfold.formats import NO_RESIDUAL, FormatPair, get_formats
from kvfold.integrations.transformers.runtime import TransformersRuntime


def _sweep(model: PreTrainedModel | Runtime, ids: Tensor, path: Path, **options: Any) -> Sweep:
    runtime_of(model).detach()
    return Sweep(model, [ids[:, 2000:2512]], path, {"model": "smollm2"}, **options)


class Faulty(TransformersRuntime):
    """Its folded layers get keys and values as a fault changes them."""

    def __init__(self, model: PreTrainedModel, fault: Callable[[FormatPair, Tensor, Tensor], tuple[Tensor, Tensor]]):
        super().__init__(model)
        self.fault = fault

    def folded_cache(self, policy: Policy, calibration: Calibration | None = None) -> FoldedCache:
        fault = self.fault

        class FaultyCache(FoldedCache):
            def update(self, key: Tensor, value: Tensor, layer: int, *more: Any, **options: Any) -> Any:
                name = policy.format_of(layer, len(self.layers))
                if name is not None:
                    key, value = fault(get_formats(name, key.shape[-1], value.shape[-1]), key, value)
                return super().update(key, value, layer, *more, **options)

        return FaultyCache(self.config, policy=policy, calibration=calibration)


def _swap_heads_and_tokens(formats: FormatPair, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The bug of sanctum-mlx: (batch, heads, tokens, dim) read as if it lay (batch, tokens, heads, dim)."""
    key, value = (x.transpose(1, 2).reshape(x.shape) for x in (key, value))
    return key, value


def _mirror_codes_of_values(formats: FormatPair, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Levels lie symmetrically, so other signs are mirrored codes; float16 has none."""
    return key, value if formats.values.bits == FLOAT16 else -value


@pytest.mark.parametrize("family", ["kvfold", "turboquant"])
def test_a_planted_bug_stops_the_ablation_at_the_bridge(
    small: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    small_ids: Tensor,
    tmp_path: Path,
    family: str,
) -> None:
    model, _ = small
    path = tmp_path / "sweep.jsonl"
    with pytest.raises(StageFailed, match=r"stops at its bridge stage.*heads and tokens are swapped.*Nothing is swept"):
        _sweep(Faulty(model, _swap_heads_and_tokens), small_ids, path, family=family).run()
    stages = [(row["stage"], row["verdict"]) for row in read_rows(path)]
    assert stages == [("ablation/identity", "pass"), ("ablation/bridge", "fail")]
    # Mended, the stage that failed is measured again, the one that passed is not.
    job = _sweep(model, small_ids, path, family=family)
    rows = job.ablate()
    stages = 5 if family in NO_RESIDUAL else 6
    assert [row["verdict"] for row in rows] == ["pass"] * stages
    assert len(read_rows(path)) == 1 + stages
    assert rows[0]["kl_mean"] == 0  # attaching alone changes nothing
    assert 0 < rows[1]["kl_mean"] < 1e-4  # float16


def test_a_bug_in_values_stops_at_the_values_stage(
    small: tuple[PreTrainedModel, PreTrainedTokenizerBase], small_ids: Tensor, tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match=r"stops at its values stage"):
        _sweep(Faulty(small[0], _mirror_codes_of_values), small_ids, tmp_path / "sweep.jsonl").run()


def test_killed_and_started_again(small_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    arguments = (
        "sweep", "--model", str(small_folder), "--out", str(out), "--passage", "200", "--key-bits", "4,3,2",
        "--value-bits", "4,2", "--page-sizes", "32", "--family", "centred", "--residuals", "sign", "--json",
        "--pass-abs", "90", "--pass-pct", "50", "--warn-abs", "200",
    )  # fmt: skip
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (out.exists() and out.read_text().count("\n") >= 7):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with out.open("a") as file:
        file.write('{"ts": "2026-')  # killed in the middle of a row
    before = [line for line in out.read_text().splitlines() if line.endswith("}")]

    run = run_kvfold(*arguments)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    lines = out.read_text().splitlines()
    assert lines[: len(before)] == before
    formats = [json.loads(line)["config"]["format"] for line in lines]
    assert len(formats) == len(set(formats)) > 10
    staircase = {row["config"]["format"]: row["stage"] for row in result["staircase"]}
    assert set(staircase.values()) == {"key_bits", "value_bits", "page_size", "residual"}
    assert result["recommended"] in staircase
    assert result["recommended"] in result["pareto"]
    assert "of a dense bfloat16 cache after 200 tokens" in result["why"]
    fields = "ts host config eval ppl_fp16 ppl_tq abs_delta rel_delta runtime_sec verdict"
    for line in lines:
        row = json.loads(line)
        assert set(fields.split()) <= set(row)
        assert row["abs_delta"] == pytest.approx(row["ppl_tq"] - row["ppl_fp16"])
    assert {"key_bits", "value_bits", "group_size", "use_qjl", "head_dim"} <= set(json.loads(lines[-1])["config"])


def test_a_corrupt_line_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for i in range(3):
        append_row(path, {"i": i})
    assert [row["i"] for row in open_rows(path, {})] == [0, 1, 2]
    content = path.read_text().replace('{"i": 1}', '{"i": 1')
    path.write_text(content)
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: not a row of results .* The 1 rows before it are whole"):
        open_rows(path, {})
    run = run_kvfold("sweep", "--out", str(path))
    assert (run.returncode, "line 2" in run.stderr) == (1, True)
    assert path.read_text() == content
    append_row(path.with_name("unicode.jsonl"), {"answer": "a\u2028b\x85c"})  # line separators inside a row
    assert read_rows(path.with_name("unicode.jsonl")) == [{"answer": "a\u2028b\x85c"}]
    cut = path.with_name("cut.jsonl")
    cut.write_bytes('{"i": 0}\n{"answer": "한'.encode()[:-1])  # cut in the middle of a letter
    assert open_rows(cut, {}) == [{"i": 0}]
    assert cut.read_text() == '{"i": 0}\n'
    notes = path.with_name("notes.txt")
    notes.write_text("not ours")
    with pytest.raises(ValueError, match=r"notes.txt, line 1: not a row of results"):
        open_rows(notes, {})
    assert notes.read_text() == "not ours"
    path.write_text('{"i": 0}\n{"i": 1}')  # whole, only its newline is missing
    assert len(open_rows(path, {})) == 2
    append_row(path, {"i": 2})
    assert [row["i"] for row in read_rows(path)] == [0, 1, 2]


def test_verdicts() -> None:
    budgets = Budgets()
    for ppl, verdict in ((10.2, "pass"), (9.8, "pass"), (10.31, "warn"), (9.5, "warn"), (11.01, "fail"), (5.0, "fail")):
        assert budgets.verdict(10.0, ppl) == verdict
    assert budgets.verdict(4.0, 4.25) == "warn"  # within 0.3, beyond 5 %
    assert Budgets(pass_pct=10).verdict(4.0, 4.25) == "pass"
    assert budgets.verdict(10.0, math.inf) == budgets.verdict(math.nan, 10.0) == "invalid"
    assert budgets.verdict_of_stage(10.0, 10.04, 0.0) == "pass"
    assert budgets.verdict_of_stage(10.0, 9.9, 0.0) == "fail"
    assert budgets.verdict_of_stage(10.0, 10.0, 0.1) == "fail"  # the same perplexity, other predictions
    assert budgets.verdict_of_stage(10.0, 10.0, math.nan) == "invalid"


def test_configs_have_names_that_formats_understand() -> None:
    expected = {
        Config("kvfold", 4, 4): "kvfold-4",
        Config("kvfold", 4, 3, 32): "kvfold-4@32:kvfold-3@32",
        Config("turboquant", 3, 4, residual="qjl"): "turboquant-3+qjl:turboquant-4",
        Config("kvfold", 16, 8): "float16:kvfold-8",
        Config("kvfold", 16, 16): "float16",
    }
    for config, name in expected.items():
        assert config.format == name
        get_formats(name, 64, 64)
    assert [stage.name for stage in ablation("kvfold")][:2] == ["identity", "bridge"]


def _row(format: str, bits: float, kl: float, delta: float, verdict: str) -> dict[str, Any]:
    return {
        "stage": "key_bits", "config": {"format": format}, "eval": {"n_tokens": 9}, "bits_per_value": bits,
        "kl_mean": kl, "abs_delta": delta,
        "rel_delta": delta / 10, "verdict": verdict,
    }  # fmt: skip


def test_pareto_and_recommendation() -> None:
    rows = [
        _row("a", 8, 0.001, 0.0, "pass"),
        _row("b", 5, 0.01, 0.1, "pass"),
        _row("c", 4, 0.02, 0.2, "pass"),
        _row("d", 6, 0.05, 0.2, "pass"),
        _row("e", 3, 0.3, 0.8, "warn"),
        _row("f", 2, math.nan, math.nan, "invalid"),
    ]
    assert [row["config"]["format"] for row in pareto(rows)] == ["e", "c", "b", "a"]
    best = recommend(rows, Budgets())
    assert best.format == "c"
    assert "of the 4 that meet Δ ≤ 0.3 and ≤ 5 %, its cache is the smallest: 25.0 % of a dense" in best.reason
    assert "The next cheaper, e with 18.8 %, is a warn" in best.reason
    nothing = recommend([row for row in rows if row["verdict"] != "pass"], Budgets())
    assert nothing.format == "e"
    assert "nothing meets" in nothing.reason


def test_few_bits_that_save_nothing_are_not_recommended() -> None:
    """In a model with windows a whole cache hardly shrinks: 3 % fewer bytes are not worth a hundred times the loss."""
    rows = [
        _row("kvfold-8", 20.8, 0.0001, 0.0, "pass"),
        _row("kvfold-4", 20.3, 0.001, 0.0, "pass"),
        _row("kvfold-2", 20.0, 0.01, 0.1, "pass"),
        _row("kvfold-1", 19.9, 0.1, 0.5, "warn"),
        _row("dense", 32.0, 0.0, 0.0, "pass"),
    ]
    best = recommend(rows, Budgets())
    assert best.format == "kvfold-8"
    assert "the least loss of the 3 whose caches are at most 5 % larger than the smallest, kvfold-2's" in best.reason
    assert "(125.0 %, KL 0.0100): 130.0 % of a dense bfloat16 cache" in best.reason
    rows[0]["bits_per_value"] = 21.1  # 5.5 % more
    assert recommend(rows, Budgets()).format == "kvfold-4"


def test_a_model_with_windows(random_ids: Callable[[int, int], Tensor], tmp_path: Path) -> None:
    """A short text of a tiny Gemma: the same few bytes in any format, so the one that loses least."""
    ids, steps = random_ids(1, 300), Steps((8, 2), (8, 2), ())
    # What random weights predict is of no use, so every change passes.
    budgets = Budgets(pass_abs=1e9, pass_pct=1e9, lossless_pct=1e9, lossless_kl=1e9)
    _, rows = Sweep(
        tiny_model("gemma3").float(), [ids], tmp_path / "sweep.jsonl", {}, budgets=budgets, steps=steps
    ).run()
    held = {row["config"]["format"]: row["held_bytes"] for row in rows}
    loss = {row["config"]["format"]: row["kl_mean"] for row in rows}
    smallest = min(held.values())
    best = recommend(rows, budgets).format
    assert held[best] <= 1.05 * smallest
    assert loss[best] == min(loss[name] for name in held if held[name] <= 1.05 * smallest)


def test_errors(small: tuple[PreTrainedModel, PreTrainedTokenizerBase], small_ids: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family = 'nope': choose one of kvfold, turboquant"):
        _sweep(small[0], small_ids, tmp_path / "x.jsonl", family="nope")
    with pytest.raises(ValueError, match="passage = 100: no page of the largest size folds in so few tokens"):
        Sweep(small[0], [small_ids[:, :100]], tmp_path / "x.jsonl", {})
    with pytest.raises(ValueError, match="key_bits is empty"):
        Steps(key_bits=())
    with pytest.raises(ValueError, match=r"value_bits = 9: give bits from 1 to 8"):
        Steps(value_bits=(9,))
    with pytest.raises(ValueError, match="page_sizes = 40"):
        Steps(page_sizes=(40,))
    with pytest.raises(ValueError, match="residuals = 'nope'"):
        Steps(residuals=("nope",))
