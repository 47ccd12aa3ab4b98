"""CONTRIBUTING.md names files and lines that exist, and its examples work."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "collectives"))

from ranks import launch  # noqa: E402

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w./]+/[\w./]*|[\w./]+\.(?:py|md))(?::([\w.]+))?`", PAGE)
TO_BE_WRITTEN = {
    "nbdist/collectives/ops/scan.py",
    "nbdist/clusters/launchers/srun.py",
    "nbdist/training/strategies/sign_vote.py",
    "out/durations.json",
}
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
BODIES = """
import torch
import nbdist.collectives as nc
from mpi4py import MPI

def run():
    group = nc.Group(MPI.COMM_WORLD)
    nc.set_default_group(group)
    found = {"rank": group.rank}
    tensor = torch.tensor([1.0, float(group.rank)])
    scan(tensor)
    found["scan"] = tensor.tolist()
    tensor = torch.full((3, 2), group.rank + 1.0).t()  # not contiguous
    transport = GatherTransport(group._connection.inner, group._check)
    transport.all_reduce(tensor, "mean")
    found["all_reduce"] = tensor.unique().tolist()
    alone = torch.ones(3)
    GatherTransport(MPI.COMM_SELF, group._check).all_reduce(alone, "sum")
    found["alone"] = alone.tolist()
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = SignVote().setup(
        model, torch.optim.SGD(model.parameters(), lr=0.5)
    )
    (model.weight * (-3.0 if group.rank == 0 else 2.0)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    found["moved"] = (model.weight - before).item()
    group.close()
    return found
"""


def names_in(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in inner}
    return found


def test_paths_are_found_in_the_page():
    assert ("nbdist/config.py", "ClusterConfig") in NAMED
    assert ("nbdist/clusters/", "") in NAMED
    assert len(NAMED) > 60


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_the_files_and_lines_that_the_page_names_exist(path: str, name: str):
    if path in TO_BE_WRITTEN:
        return
    assert (ROOT / path).exists()
    if name:
        assert name in names_in(ROOT / path)


def test_headings_that_the_page_names_exist():
    pairs = re.findall(r"`(docs/\w+\.md)`, \"([^\"]+)\"", PAGE)
    assert pairs
    for page, heading in pairs:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert re.search(rf"^#+ {re.escape(heading)}$", text, re.MULTILINE), heading


def test_ten_questions_are_answered_in_at_most_four_steps():
    rows = re.findall(r"^\| [^|]+\? \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 10
    assert max(row.count("→") + 1 for row in rows) <= 4


def test_each_path_begins_at_a_page_that_readme_links_to():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+\? \| (.+) \|$", PAGE, re.MULTILINE)
    for row in rows:
        page = re.match(r"`(docs/\w+\.md)`", row)
        assert f"]({page[1] if page else 'CONTRIBUTING.md'})" in readme, row


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the examples on three ranks."""
    file = tmp_path_factory.mktemp("contributing") / "bodies.py"
    file.write_text("\n".join([*BLOCKS, BODIES]), encoding="utf-8")
    return launch(3, str(file), "run")


def test_the_operation_works(found: list[dict[str, Any]]):
    assert [each["scan"] for each in found] == [[1, 0], [2, 1], [3, 3]]


def test_the_transport_works(found: list[dict[str, Any]]):
    assert [each["all_reduce"] for each in found] == [[2.0]] * 3
    assert [each["alone"] for each in found] == [[1.0] * 3] * 3


def test_the_strategy_works(found: list[dict[str, Any]]):
    # Two of three ranks have a gradient above 0, so all take a step down.
    assert [each["moved"] for each in found] == [pytest.approx(-0.5)] * 3


def test_the_launcher_works():
    namespace: dict[str, Any] = {}
    block = next(block for block in BLOCKS if "class Srun" in block)
    exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)
    launcher = namespace["Srun"]()
    assert launcher.argv(2, ["python"])[-2:] == ["2", "python"]


def test_pre_commit_runs_what_lint_runs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"entry: \S+python -m (.+)", hooks)
    lint = subprocess.run(
        ["make", "--dry-run", "--always-make", "lint"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip
    # make ends with the lint's own commands.
    assert re.findall(r"python -m (ruff .+|mypy.*)", lint) == entries
