"""A cluster with the settings of nbdist.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import nbdist
from nbdist.errors import UsageError

FILE = """
[cluster]
n = 1
device = "cpu"
threads = 1
[collectives]
slot_bytes = 65536
[output]
cap_mb = 0.001
"""


def in_ipython(folder: Path, *lines: str) -> str:
    """What IPython prints for these lines, in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", "\n".join(lines)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def test_the_ranks_have_the_settings_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nbdist.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    with nbdist.Cluster(threads=2) as cluster:
        assert cluster.size == 1
        code = (
            "import os; print(os.environ['NBDIST_SLOT_BYTES'], torch.get_num_threads())"
        )
        assert cluster.execute(code)[0].stdout == "65536 2\n"
        shown = cluster.execute("print('x' * 5000)")[0].stdout
        assert shown.count("x") < 1100  # cap_mb
        sources = {each.name: each.source for each in cluster.settings()}
    assert sources["n"] == sources["slot_bytes"] == "nbdist.toml"
    assert sources["threads"] == "%dist_start"


def test_a_wrong_file_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nbdist.toml").write_text("[cluster]\nnn = 4\n")
    monkeypatch.chdir(tmp_path)
    before = psutil.Process().children()
    with pytest.raises(UsageError, match="unknown setting 'nn'"):
        nbdist.Cluster()
    assert psutil.Process().children() == before


def test_a_notebook_shows_the_settings_and_what_is_wrong_in_the_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "nbdist.toml").write_text(FILE)
    shown = in_ipython(tmp_path, "%load_ext nbdist", "%dist_config")
    assert "cluster.n " in shown
    assert "nbdist.toml" in shown.partition("cluster.n ")[2].partition("\n")[0]
    (tmp_path / "nbdist.toml").write_text("[cluster]\nnn = 4\n")
    shown = in_ipython(tmp_path, "%load_ext nbdist", "print('loaded')", "%dist_start")
    assert "no rank can be started yet" in shown
    assert "loaded" in shown
    assert "UsageError" in shown
    assert shown.count("did you mean 'n'") == 2
