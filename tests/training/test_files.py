"""A file is saved completely or not at all, and a failure raises on every rank."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.errors import SaveError
from nbdist.training.files import load, save


def test_in_a_plain_script_the_process_saves_the_file(tmp_path):
    save({"step": 3}, tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"step": 3}
    with pytest.raises(SaveError, match=r"nowhere/state\.pt was not saved"):
        save({}, tmp_path / "nowhere" / "state.pt")


def test_loading_runs_no_code_unless_it_is_allowed(tmp_path):
    save(Path("a"), tmp_path / "object.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        load(tmp_path / "object.pt")
    assert load(tmp_path / "object.pt", weights_only=False) == Path("a")


def test_a_process_that_is_not_a_rank_saves_without_mpi(tmp_path):
    program = (
        "import sys, nbdist\n"
        "nbdist.save([1], 'x.pt')\n"
        "assert nbdist.load('x.pt') == [1]\n"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
