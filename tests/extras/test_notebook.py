"""The tour runs as it stands, shows what it says, and is kept without outputs."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


@pytest.fixture(scope="module")
def kept() -> NotebookNode:
    """The notebook as it is in the repository."""
    return nbformat.read(TOUR, as_version=nbformat.NO_CONVERT)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NotebookNode]:
    """Its code cells by id, after a run in an empty folder; a cell that raises ends it."""
    folder = tmp_path_factory.mktemp("tour")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # this environment's kernel, and not one of the user's own
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        patch.delenv("MPLBACKEND", raising=False)  # the kernel's own draws into the notebook
        manager = AsyncKernelManager(kernel_name="python3")
        assert manager.format_kernel_cmd()[0] == sys.executable
        run = nbformat.read(TOUR, as_version=nbformat.NO_CONVERT)
        NotebookClient(run, km=manager, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    assert not list(folder.iterdir())  # so a reader's folder stays as it was
    return {cell.id: cell for cell in run.cells if cell.cell_type == "code"}


def printed(cell: NotebookNode) -> str:
    """What a cell wrote to stdout."""
    return "".join(each.text for each in cell.outputs if each.output_type == "stream" and each.name == "stdout")


def figures(cell: NotebookNode, unit: str) -> dict[str, float]:
    """Numbers that a cell printed by name, as in "kvfold-4: 10.9 MB"."""
    return {
        name: float(number) for name, number in re.findall(rf"^(.+?): ([\d.]+) {unit}", printed(cell), re.MULTILINE)
    }


def test_it_is_kept_without_outputs(kept: NotebookNode) -> None:
    nbformat.validate(kept)
    assert (kept.nbformat, kept.nbformat_minor) == (4, 5)
    for cell in kept.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_its_links_lead_somewhere(kept: NotebookNode) -> None:
    links = [
        link for cell in kept.cells if cell.cell_type == "markdown" for link in re.findall(r"\]\((.+?)\)", cell.source)
    ]
    assert len(links) >= 5
    for link in links:
        assert (TOUR.parent / link).is_file(), link


def test_every_cell_runs(cells: dict[str, NotebookNode]) -> None:
    assert len(cells) >= 7
    assert [cell.execution_count for cell in cells.values()] == [*range(1, len(cells) + 1)]
    for cell in cells.values():
        assert all(each.output_type != "error" for each in cell.outputs)


def test_both_caches_answer(cells: dict[str, NotebookNode]) -> None:
    answers = dict(re.findall(r"^(.+?): (.+)$", printed(cells["answers"]), re.MULTILINE))
    assert answers.keys() == {"dense", "kvfold-4"}
    for answer in answers.values():
        assert "41972" in answer


def test_the_folded_cache_holds_less(cells: dict[str, NotebookNode]) -> None:
    held = figures(cells["held"], "MB")
    assert held["dense float32"] == pytest.approx(2 * held["dense bfloat16"], abs=0.2)
    assert held["kvfold-4"] < 0.36 * held["dense bfloat16"]  # 10.9 of 33.3 MB; Python's text differs by version


def test_two_plots(cells: dict[str, NotebookNode]) -> None:
    drawn = {name: sum("image/png" in each.get("data", {}) for each in cell.outputs) for name, cell in cells.items()}
    assert {name: number for name, number in drawn.items() if number} == {"memory": 1, "divergence": 1}


def test_fewer_bits_diverge_more(cells: dict[str, NotebookNode]) -> None:
    kl = figures(cells["divergence"], "nats")
    assert 0 < kl["kvfold-4"] < kl["kvfold-3"] < kl["kvfold-2"] < 0.1


def test_a_loaded_cache_goes_on(cells: dict[str, NotebookNode]) -> None:
    said = printed(cells["save"])
    assert "Lisbon" in said
    assert said.endswith("the same answer: True\n")
    tokens = re.search(r"([\d,]+) tokens held, (\d+) to read", said)
    assert tokens is not None
    assert int(tokens[1].replace(",", "")) > 20 * int(tokens[2])
