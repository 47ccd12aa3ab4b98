"""A file is saved whole or not at all, and every rank learns which."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
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


def modes_while_writing(path: Path) -> list[int]:
    """The modes of the files beside `path`, as they are while it is written."""
    seen: list[int] = []

    def look(file):
        file.write(b"x")
        seen.extend(stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir())

    write_atomically(path, look)
    return seen


def test_a_file_is_private_until_it_has_its_name(tmp_path):
    before = os.umask(0o027)
    try:
        assert modes_while_writing(tmp_path / "x") == [0o600]
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
        write_atomically(tmp_path / "y", lambda file: None, mode=0o600)
        assert stat.S_IMODE((tmp_path / "y").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_link_in_the_way_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in (f".x.{os.getpid()}.part", ".x.part"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "x", lambda file: file.write(b"new"))
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_process_that_is_no_rank_saves_without_mpi(tmp_path):
    program = (
        "import sys, nbdist\n"
        "nbdist.save([1], 'x.pt')\n"
        "assert nbdist.load('x.pt') == [1]\n"
        "assert not [name for name in sys.modules if name.startswith('mpi4py')]\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
