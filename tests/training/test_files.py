"""A file is saved whole or not at all, and every rank learns which."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from nbdist.errors import SaveError
from nbdist.training.files import load, save, write_atomically


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def half(file):
        file.write(b"new")
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_in_a_plain_script_the_process_saves_itself(tmp_path):
    save({"step": 3}, tmp_path / "state.pt")
    assert load(tmp_path / "state.pt") == {"step": 3}
    with pytest.raises(SaveError, match=r"nowhere/state\.pt was not saved"):
        save({}, tmp_path / "nowhere" / "state.pt")


def test_loading_runs_no_code_unless_it_is_allowed(tmp_path):
    save(Path("a"), tmp_path / "object.pt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        load(tmp_path / "object.pt")
    assert load(tmp_path / "object.pt", weights_only=False) == Path("a")
