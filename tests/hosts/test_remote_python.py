"""Where the Python of another host is looked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.clusters.hosts.remote_python import RemotePython

ODD = "my $HOME's (env)"


def run(python: RemotePython, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python.command(["first", "two words", "$x"]),
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def script(path: Path) -> None:
    """A program that prints its path and arguments."""
    path.parent.mkdir(parents=True)
    path.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"\n')
    path.chmod(0o755)


@pytest.mark.parametrize("name", ["env", ODD])
@pytest.mark.parametrize("place", ["~/", ""])
def test_a_path_is_that_of_the_other_host(name: str, place: str, tmp_path: Path):
    there = tmp_path / name / "bin/python"
    script(there)
    path = f"{place}{name}/bin/python" if place else str(there)
    done = run(RemotePython.of(path), tmp_path)
    assert done.stdout == f"{there}|first|two words|$x|"


def test_no_python_is_exit_code_127(tmp_path: Path):
    python = RemotePython.of("~/none/bin/python")
    assert run(python, tmp_path).returncode == 127
    assert str(python) == "~/none/bin/python"


def test_the_counterpart_is_at_the_same_place_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, there = tmp_path / "here", tmp_path / "there"
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setattr(sys, "executable", str(here / "train/.venv/bin/python"))
    script(there / "train/.venv/bin/python")
    done = run(RemotePython.of(None), there)
    assert done.stdout.startswith(str(there / "train/.venv/bin/python"))


@pytest.mark.parametrize("name", ["train", "base"])
def test_the_counterpart_is_the_conda_environment_of_the_same_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where Jupyter was started in another environment than the kernel's."""
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "of-jupyter"))
    inside = "" if name == "base" else f"envs/{name}/"
    prefix = tmp_path / "here" / inside
    (prefix / "conda-meta").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "not-there"))
    script(tmp_path / f"miniconda3/{inside}bin/not-there")
    done = run(RemotePython.of(None), tmp_path)
    assert done.stdout.startswith(str(tmp_path / "miniconda3"))
