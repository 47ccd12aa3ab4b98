"""The pages agree with the code, and the extension loads few modules."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import Specifier

import nbdist
from nbdist.errors import UsageError
from nbdist.kernel_versions import (
    NEEDED,
    TORCH_RUNS,
    check_loaded,
    untested_torch,
)
from nbdist.magics import DistMagics
from tests import matrix

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it on 3.10

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
LOAD = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import nbdist
shell.run_line_magic("load_ext", "nbdist")
print(*sys.modules)
"""


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by their names alone."""
    names = Counter(path.name for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def tracked_texts() -> Iterator[tuple[str, str]]:
    for path in tracked_files():
        if path.suffix not in {".png", ".gz"}:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def registered_magics() -> set[str]:
    by_kind = DistMagics.magics
    return {f"%{name}" for name in by_kind["line"]} | {
        f"%%{name}" for name in by_kind["cell"]
    }


def options() -> Iterator[tuple[str, str]]:
    """(magic, option) for every option that a magic takes."""
    for names in DistMagics.magics.values():
        for name in names:
            parser = getattr(getattr(DistMagics, name), "parser", None)
            for action in parser._actions if parser else []:
                if action.option_strings:
                    yield name, action.option_strings[0]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.replace(" ", "-") for word in words}


CLOCKS = {f"time.{name}" for name in ("monotonic", "perf_counter", "time")}


def bounded_from_above(tested: ast.expr) -> Iterator[ast.expr]:
    """The operands of comparisons that must be less than another operand."""
    for compared in ast.walk(tested):
        if isinstance(compared, ast.Compare):
            operands = [compared.left, *compared.comparators]
            pairs = zip(compared.ops, operands, operands[1:], strict=False)
            for operator, left, right in pairs:
                if isinstance(operator, (ast.Lt, ast.LtE)):
                    yield left
                elif isinstance(operator, (ast.Gt, ast.GtE)):
                    yield right


def is_elapsed(node: ast.expr) -> bool:
    """Whether an expression is the time since a moment, as `time.monotonic() - a`."""
    return isinstance(node, ast.BinOp) and any(
        isinstance(call, ast.Call) and ast.unparse(call.func) in CLOCKS
        for call in ast.walk(node)
    )


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("assert time.monotonic() - begun < 4", True),
        ("assert 0.1 < time.time() - begun <= 4", True),
        ("assert 4 > time.perf_counter() - begun", True),
        ("assert time.monotonic() - begun >= 0.1", False),
        ("assert time.monotonic() < deadline", False),
        ("assert sample.time <= time.time()", False),
    ],
)
def test_a_bound_in_seconds_is_found(line: str, is_found: bool) -> None:
    (tested,) = [n.test for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Assert)]
    assert any(map(is_elapsed, bounded_from_above(tested))) == is_found


def test_no_test_asserts_that_something_takes_at_most_some_seconds() -> None:
    """It would fail on a busy machine, and tell nothing on a fast one."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.glob("tests/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
        and any(map(is_elapsed, bounded_from_above(node.test)))
    ]
    assert found == []


def test_the_readme_lists_all_magics() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(%+\w+)", readme, re.MULTILINE)
    assert sorted(listed) == sorted(registered_magics())


def test_every_option_is_explained() -> None:
    page = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert not [(name, option) for name, option in options() if option not in page]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(aim), f"{page.name} links to {target}"


def test_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert project["project"]["version"] == nbdist.__version__ == newest[1]
    extension = json.loads((ROOT / "nbdist/labextension/package.json").read_text())
    assert extension["version"] == newest[1]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {newest[1]}\n" in citation


def test_the_extension_of_jupyterlab_is_installed_whole() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = {
        Path(folder).relative_to("share/jupyter/labextensions/nbdist") / Path(file).name
        for folder, files in project["tool"]["setuptools"]["data-files"].items()
        if "labextensions" in folder
        for file in files
    }
    sources = ROOT / "nbdist" / "labextension"
    there = {path.relative_to(sources) for path in sources.rglob("*") if path.is_file()}
    assert installed == there
    about = json.loads((sources / "package.json").read_text())
    assert Path(about["jupyterlab"]["_build"]["load"]) in installed


def test_the_workflows_run_the_checks_and_each_night_the_long_tests() -> None:
    ran = {
        path.stem: set(re.findall(r"run: bash (\S+)$", path.read_text(), re.MULTILINE))
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
    }
    assert ran == {"checks": {".ci/run"}, "nightly": {".ci/nightly"}, "release": set()}
    assert all((ROOT / name).is_file() for names in ran.values() for name in names)
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert re.search(r'^  schedule:\n    - cron: "', nightly, re.MULTILINE)


def test_the_recipe_for_conda_needs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == project["project"]["version"]
    names = {"torch": "pytorch"}
    needed = set()
    for text in project["project"]["dependencies"]:
        requirement = Requirement(text)
        if "python_version" not in str(requirement.marker):  # tomli is not needed there
            name = names.get(requirement.name, requirement.name)
            needed.add((name, frozenset(map(str, requirement.specifier))))
    run = [line.split() for line in recipe["requirements"]["run"] if line != "python"]
    assert {(name, frozenset(bounds.split(","))) for name, bounds in run} == needed


def test_each_action_of_a_workflow_is_named_by_its_commit() -> None:
    used = [
        (path.name, action)
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
        for action in re.findall(r"uses: (\S+.*)", path.read_text())
    ]
    assert len(used) > 10
    for name, action in used:
        assert re.fullmatch(r"[\w./-]+@[\da-f]{40} # v[\d.]+", action), (name, action)


def test_no_text_has_an_absolute_path_of_a_machine() -> None:
    # Whole absolute paths, not relative ones that end alike, nor conda's usual ones.
    names = r"root|work|opt(?!/conda|/miniforge3)|home/\w+|Users/\w+"
    personal = re.compile(rf"(?<![\w.)}}~$-])/(?:{names})/\S")
    found = [
        (name, match[0])
        for name, text in tracked_texts()
        for match in personal.finditer(text)
    ]
    assert not found


def test_the_versions_that_a_kernel_must_have_loaded_are_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    bounds = dict(
        found.groups()
        for found in map(
            re.compile(r"(\w+)>=([\d.]+)").match, project["project"]["dependencies"]
        )
        if found is not None
    )
    for name, needed in NEEDED.items():
        assert bounds[name.lower()] == ".".join(map(str, needed))


def test_a_kernel_that_has_loaded_an_old_package_must_be_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_loaded()
    monkeypatch.setattr("IPython.version_info", (7, 34, 0, ""))
    with pytest.raises(UsageError, match=r"IPython 7\.34\.0.*8\.18.*restart"):
        check_loaded()


def test_an_ipykernel_that_loses_requests_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (needed,) = (
        Requirement(text).specifier
        for text in project["project"]["dependencies"]
        if text.startswith("ipykernel")
    )
    for version in ("6.29.0", "6.31.0", "7.0.1", "7.1.0", "7.3.0", "7.4.0", "8.0.0"):
        numbers = tuple(map(int, version.split(".")))
        monkeypatch.setattr("ipykernel.version_info", numbers)
        if needed.contains(version):
            check_loaded()
        else:
            with pytest.raises(UsageError, match=f"ipykernel {version}, which loses"):
                check_loaded()


def test_the_page_has_the_table_of_the_matrix() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert f"\n\n{matrix.table()}\n" in page
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    oldest = Specifier(project["project"]["requires-python"])
    (torch,) = (
        Requirement(text).specifier
        for text in project["project"]["dependencies"]
        if text.startswith("torch")
    )
    versions = [(row["python"], row["torch"]) for row in matrix.rows()]
    assert (oldest.version, f"{Specifier(str(torch)).version}.0") in versions
    assert "newest" in dict(versions).values()


def test_the_page_and_the_code_name_the_same_runs_of_torch() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| 3\.\d+ \| ([\d.]+), .*? \| ([\d-]+) \|", page, re.MULTILINE)
    newest: dict[str, str] = {}
    for version, date in rows:
        newest[version] = max(date, newest.get(version, date))
    assert newest == TORCH_RUNS


@pytest.mark.parametrize(
    ("version", "is_new"),
    [
        ("2.7.0", False), ("2.9.1+cu128", False), ("2.15.0+cpu", False),
        ("2.15.1", True), ("2.16.0.dev20261201+cpu", True), ("10.0", True),
    ],
)  # fmt: skip
def test_a_torch_that_is_newer_than_all_that_were_run_is_one_line(
    version: str, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    line = untested_torch()
    assert (line is not None) == is_new
    if line is not None:
        assert line.startswith(f"torch {version} is newer than 2.15.0")
        assert "\n" not in line


def test_no_package_index_is_named() -> None:
    index = re.compile(
        r"https?://[\w.-]*(?:pypi|pythonhosted|npmjs|anaconda)[\w.]*"
        r"|https?://[\w./-]+/(?:simple|whl)\b"
    )
    found = [
        (name, url) for name, text in tracked_texts() for url in index.findall(text)
    ]
    assert not found


def test_the_extension_loads_neither_torch_nor_mpi() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(done.stdout.split())
    assert {"nbdist.magics", "IPython"} <= loaded
    heavy = {"torch", "mpi4py", "numpy", "ipyparallel", "ipywidgets", "anywidget"}
    assert not heavy & loaded


def test_an_editable_installation_is_found_next_to_a_folder_named_nbdist(
    tmp_path: Path,
):
    copy = tmp_path / "copy"
    (copy / "nbdist").mkdir(parents=True)
    (copy / "nbdist" / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    site = tmp_path / "site"
    install = f"-m pip install -q --no-index --no-deps --no-build-isolation -t {site}"
    command = [sys.executable, *install.split(), "-e", str(copy)]
    subprocess.run(command, check=True, timeout=120)
    here = tmp_path / "here"
    (here / "nbdist").mkdir(parents=True)
    code = f"import site; site.addsitedir({str(site)!r}); import nbdist; "
    found = subprocess.run(
        [sys.executable, "-S", "-c", code + "print(nbdist.__file__)"],
        cwd=here,
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.strip() == str(copy / "nbdist" / "__init__.py")
