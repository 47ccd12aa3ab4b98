"""The quickstart notebook, run once from its first cell to its last."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.ipynb"
TIME_LIMIT_S = 120
"""The quickstart must finish within this time."""


@pytest.fixture(scope="module")
def report() -> str:
    """Run the quickstart as `make demo` does; return its output."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "run.py", "quickstart"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def executed(report: str) -> NotebookNode:
    """The executed notebook, at the path that the report names."""
    found = re.search(r"^executed notebook: +(.+)$", report, re.MULTILINE)
    assert found is not None
    return nbformat.read(found[1], as_version=4)


def outputs_of(notebook: NotebookNode, cell_id: str) -> list[NotebookNode]:
    return next(cell.outputs for cell in notebook.cells if cell.id == cell_id)


def text_of(notebook: NotebookNode, cell_id: str) -> str:
    outputs = outputs_of(notebook, cell_id)
    return "".join(output.get("text", "") for output in outputs)


def test_reaches_more_than_95_percent(report: str) -> None:
    found = re.search(r"^final test accuracy: ([\d.]+)%$", report, re.MULTILINE)
    assert found is not None
    assert 95 < float(found[1]) <= 100


def test_every_rank_took_part(executed: NotebookNode) -> None:
    text = text_of(executed, "look")
    assert "we are 4 ranks" in text
    for rank in range(4):
        assert f"I am rank {rank} on cpu" in text


def test_the_weights_are_the_same_on_all_ranks(executed: NotebookNode) -> None:
    (table,) = outputs_of(executed, "inspect")
    *_header, row = table.data["text/plain"].splitlines()
    assert row.startswith("0-3 ")


def test_the_chart_and_the_plot_are_in_the_saved_notebook(
    executed: NotebookNode,
) -> None:
    monitor, still = outputs_of(executed, "monitor")
    assert "application/vnd.jupyter.widget-view+json" in monitor.data
    assert "loss" in still.data["text/html"]
    (plot,) = outputs_of(executed, "plot")
    assert plot.data["image/png"]


def test_it_stops_its_cluster(executed: NotebookNode) -> None:
    assert text_of(executed, "stop").strip() == "stopped"


def test_notebooks_are_kept_without_outputs() -> None:
    for path in QUICKSTART.parent.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert cell.outputs == [], f"{path.name}: {cell.id}"
                assert cell.execution_count is None, f"{path.name}: {cell.id}"


def test_every_example_is_in_the_index() -> None:
    index = (QUICKSTART.parent / "README.md").read_text(encoding="utf-8")
    for path in QUICKSTART.parent.glob("*.ipynb"):
        assert f"({path.name})" in index
