"""What a wheel brings, installed where there is no checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from nbdist.commands.doctor import PARTS
from tests.processes import HANG_S

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(
    path.name for kind in ("*.ipynb", "marimo_*.py") for path in EXAMPLES.glob(kind)
)
BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


def _run(*argv: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(each) for each in argv],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True, text=True, timeout=3 * HANG_S, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("nbdist", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    _run(sys.executable, "-c", BUILD, folder, cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and the packages of this one."""
    environment = tmp_path_factory.mktemp("installed") / "env"
    _run(sys.executable, "-m", "venv", environment)
    python = environment / "bin" / "python"
    install = ("-m", "pip", "install", "--no-deps", "--no-index", wheel)
    _run(python, *install, cwd=environment)  # the checkout's folder counts as installed
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return python


def _nbdist(python: Path, *args: str, folder: Path) -> str:
    return _run(python, "-m", "nbdist", *args, cwd=folder).stdout


def test_it_serves_all_pythons_and_has_every_part(wheel: Path):
    assert re.fullmatch(r"nbdist-.+-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    for part in PARTS:
        assert f"nbdist/collectives/{part}.abi3.so" in names
    assert "nbdist/widgets/static/monitor.js" in names
    assert "nbdist/py.typed" in names
    assert any(name.endswith("/labextensions/nbdist/package.json") for name in names)
    assert not any(name.endswith(".c") or "tests/" in name for name in names)


def test_the_compiled_parts_need_nothing_but_the_c_library(wheel: Path, tmp_path: Path):
    """Another torch, CUDA or MPI can be installed then, later too."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf, of binutils")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for part in PARTS:
        library = tmp_path / f"nbdist/collectives/{part}.abi3.so"
        told = _run("readelf", "-d", library).stdout
        assert re.findall(r"\(NEEDED\).*\[(.+)\]", told) == ["libc.so.6"]


def test_the_doctor_finds_nothing_wrong_and_starts_ranks(python: Path, tmp_path: Path):
    found = json.loads(_nbdist(python, "doctor", "--json", folder=tmp_path))
    statuses = {each["name"]: each["status"] for each in found}
    assert statuses["start"] == statuses["compiled parts"] == "ok"
    assert "problem" not in statuses.values()
    where = next(each["text"] for each in found if each["name"] == "nbdist")
    assert str(python.parents[1]) in where


def test_the_notebooks_are_copied_and_not_over_others(python: Path, tmp_path: Path):
    text = _nbdist(python, "examples", folder=tmp_path)
    assert f"{len(NOTEBOOKS)} notebooks are in nbdist-examples" in text
    folder = tmp_path / "nbdist-examples"
    assert sorted(path.name for path in folder.iterdir()) == NOTEBOOKS
    with pytest.raises(AssertionError, match="name another folder"):
        _nbdist(python, "examples", folder=tmp_path)


def test_the_demo_trains_loses_a_rank_and_goes_on(python: Path, tmp_path: Path):
    text = _nbdist(python, "demo", "-n", "3", "--device", "cpu", folder=tmp_path)
    accuracy = re.search(r"([\d.]+)% of the other images are recognised", text)
    assert accuracy is not None, text
    assert float(accuracy[1]) > 80
    assert "rank 1 was replaced" in text
    assert "3 ranks are here" in text
