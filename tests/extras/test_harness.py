"""Tasks of lm-eval, made of local data, read through folded caches."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from commands import run_kvfold
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.integrations.harness import FoldedLM
from kvfold.integrations.text import standard_text

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks: to choose the number that a long text names, and to write it."""
    folder = tmp_path_factory.mktemp("tasks")
    text, rows = standard_text(), []
    for i, number in enumerate(("41972", "80315")):
        part = text[9_000 * i :][:1_900]
        needle = f" The secret number is {number}."
        rows.append({
            "text": f"{part[:600]}{needle}{part[600:]}\n\nThe secret number is", "number": number,
            "choices": [number, "11111", "93750"],
        })  # fmt: skip
    data = folder / "numbers.json"
    data.write_text(json.dumps(rows))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{text}}", "metadata": {"version": 1},
    }  # fmt: skip
    choose = common | {
        "task": "choose_number", "output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    write = common | {
        "task": "write_number", "output_type": "generate_until", "doc_to_target": " {{number}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "ignore_case": True}],
    }  # fmt: skip
    for task in (choose, write):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


def scored(lm: Any, folder: Path, *names: str) -> dict[str, Any]:
    """Results of tasks, with each question's likelihoods."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=list(names), task_manager=manager, bootstrap_iters=0)


def likelihoods(results: dict[str, Any]) -> list[float]:
    """Of each answer of each question."""
    samples = sorted(results["samples"]["choose_number"], key=lambda sample: sample["doc_id"])
    return [answer[0] for sample in samples for answer in sample["filtered_resps"]]


def test_scores_are_those_of_a_folded_cache(demo: Demo, tasks: Path) -> None:
    """Dense ones are the harness's own; a folded cache changes them, fewer bits more, and most tokens were folded."""
    model, tokenizer = demo
    kvfold.attach(model)
    stock = likelihoods(scored(HFLM(model, tokenizer=tokenizer), tasks, "choose_number"))
    dense = likelihoods(scored(FoldedLM(model, "dense", tokenizer=tokenizer), tasks, "choose_number"))
    assert dense == pytest.approx(stock, abs=1e-3)
    far = []
    for format in ("kvfold-4", "turboquant-2"):
        reader = FoldedLM(model, format, tokenizer=tokenizer)
        assert reader.folded_share == 0
        own = likelihoods(scored(reader, tasks, "choose_number"))
        far.append(max(abs(a - b) for a, b in zip(own, dense, strict=True)))
        assert 0.5 < reader.folded_share <= 1
        assert reader.get_model_info()["kv_cache"] == format
    assert 1e-3 < far[0] < far[1]


def test_a_likelihood_does_not_depend_on_the_batch(demo: Demo) -> None:
    """Longer texts beside a short one change nothing, nor does their padding count as folded."""
    model, tokenizer = demo
    text = tokenizer(standard_text()[:8_000]).input_ids
    requests = [(("", ""), text[:n], text[n : n + 4]) for n in (60, 330, 900)]
    said = []
    for size in (1, 3):
        reader = FoldedLM(model, "turboquant-3", tokenizer=tokenizer, batch_size=size)
        said.append(reader._loglikelihood_tokens(requests, disable_tqdm=True))
        assert reader.batch_size == size
    assert said[0] == said[1]
    short = FoldedLM(model, "kvfold-4", tokenizer=tokenizer, batch_size=2)
    short._loglikelihood_tokens([requests[0], (("", ""), text[:100], text[100:104])], disable_tqdm=True)
    assert short.folded_share == 0


def test_generated_answers_are_read_from_the_cache(demo: Demo, tasks: Path) -> None:
    """The number is found with four bits, in a batch, too, and lost with turboquant's two."""
    model, tokenizer = demo
    found = {}
    for format in ("dense", "kvfold-4", "turboquant-2"):
        reader = FoldedLM(model, format, tokenizer=tokenizer, batch_size=2)
        found[format] = scored(reader, tasks, "write_number")["results"]["write_number"]["exact_match,none"]
    assert found["dense"] == found["kvfold-4"] == 1
    assert found["turboquant-2"] < 1


def test_the_harness_knows_the_model_by_name(tasks: Path) -> None:
    results = lm_eval.simple_evaluate(
        "kvfold", model_args="pretrained=smollm2,format=kvfold-3,dtype=float32", tasks=["choose_number"], limit=1,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    assert results["config"]["kv_cache"] == "kvfold-3"
    assert results["config"]["folded_share"] > 0.5


def test_the_command(tasks: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    run = run_kvfold(
        "harness", "--tasks", "choose_*,write_number", "--include", str(tasks), "--formats", "kvfold-4", "--limit",
        "2", "--out", str(out), "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["folded_share"]["dense"] == 0 < said["folded_share"]["kvfold-4"]
    rows = {(row["task"], row["metric"], row["format"]): row for row in said["rows"]}
    assert rows["write_number", "exact_match", "kvfold-4"]["value"] == 1
    assert {row["cases"] for row in said["rows"]} == {2}
    assert len(json.loads(out.read_text())["kvfold-4"]["samples"]["write_number"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tasks", "no_such_task"), "lm-eval knows no such task"),
        (("--tasks", ""), "name at least one"),
        (("--tasks", "choose_number", "--formats", "kvfold-9"), "kvfold-9"),
        (("--tasks", "choose_number", "--model", "nowhere/at/all.gguf"), "no such file"),
    ],
)
def test_what_the_command_refuses(tasks: Path, arguments: tuple[str, ...], words: str) -> None:
    run = run_kvfold("harness", "--include", str(tasks), *arguments)
    assert run.returncode == 1
    assert words in run.stderr
    assert run.stderr.count("\n") <= 2, run.stderr


def test_what_the_class_refuses(demo: Demo) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        FoldedLM(demo[0])
    with pytest.raises(ValueError, match="dtype = 'float33'"):
        FoldedLM("smollm2", dtype="float33")
    with pytest.raises(ValueError, match="kvfold-9"):
        FoldedLM(demo[0], "kvfold-9", tokenizer=demo[1])
    with pytest.raises(ValueError, match="peft = 'adapter' is no option"):
        FoldedLM(demo[0], tokenizer=demo[1], peft="adapter")
    with pytest.raises(ValueError, match="a dense cache has no use"):
        FoldedLM(demo[0], "dense", policy=kvfold.Policy("kvfold-3"), tokenizer=demo[1])
