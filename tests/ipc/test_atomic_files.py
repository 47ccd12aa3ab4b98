"""A file is replaced atomically, and other users cannot interfere."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from nbdist.ipc.atomic_files import write_atomically


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def half(file: BinaryIO) -> None:
        file.write(b"new")
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    write_atomically(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def modes_while_writing(path: Path) -> list[int]:
    """The modes of all files in the folder of `path` while it is written."""
    seen: list[int] = []

    def look(file: BinaryIO) -> None:
        file.write(b"x")
        seen.extend(stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir())

    write_atomically(path, look)
    return seen


def test_a_file_is_private_until_it_is_renamed(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert modes_while_writing(tmp_path / "x") == [0o600]
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
        write_atomically(tmp_path / "y", lambda file: None, mode=0o600)
        assert stat.S_IMODE((tmp_path / "y").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_link_at_the_path_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in (f".x.{os.getpid()}.part", ".x.part"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "x", lambda file: file.write(b"new"))
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "x").read_bytes() == b"new"
