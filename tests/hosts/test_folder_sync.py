"""What is copied of a folder, and how a copy is kept up to date."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nbdist.clusters.hosts.folder_sync import (
    MOST_FILE_BYTES,
    FolderCopy,
    FolderSync,
    difference,
)
from nbdist.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "module.py").write_text("x = 1\n")
    (folder / "notes.txt").write_text("notes\n")
    return folder


def copied(sync: FolderSync) -> tuple[list[str], list[str]]:
    """Bring the copy up to date. Returns what was sent and removed."""
    copy = FolderCopy(sync.name)
    changed, removed = difference(sync.stamps(), copy.stamps())
    copy.update(sync.packed(changed), removed)
    return sorted(changed), sorted(removed)


def test_a_copy_gets_what_has_changed(folder: Path):
    sync = FolderSync(folder)
    assert copied(sync) == (["notes.txt", "package/module.py"], [])
    assert copied(sync) == ([], [])
    copy = FolderCopy(sync.name).folder
    assert (copy / "package/module.py").read_text() == "x = 1\n"
    module = folder / "package" / "module.py"
    assert (copy / "package/module.py").stat().st_mtime_ns == module.stat().st_mtime_ns
    module.write_text("x = 2\n")
    (folder / "notes.txt").unlink()
    assert copied(sync) == (["package/module.py"], ["notes.txt"])
    assert not (copy / "notes.txt").exists()


def test_files_that_a_rank_makes_stay(folder: Path):
    sync = FolderSync(folder)
    copied(sync)
    made = FolderCopy(sync.name).folder / "checkpoint.pt"
    made.write_text("weights")
    (folder / "notes.txt").unlink()
    copied(sync)
    assert made.read_text() == "weights"


def test_a_changed_copy_is_written_again(folder: Path):
    sync = FolderSync(folder)
    copied(sync)
    (FolderCopy(sync.name).folder / "notes.txt").write_text("changed there")
    assert copied(sync)[0] == ["notes.txt"]


def test_what_git_ignores_is_left_out(folder: Path):
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".gitignore").write_text("data/\n*.pt\n")
    (folder / "data").mkdir()
    (folder / "data" / "large.bin").write_text("")
    (folder / "model.pt").write_text("")
    names = FolderSync(folder).stamps()
    assert sorted(names) == [".gitignore", "notes.txt", "package/module.py"]


def test_without_git_hidden_files_and_caches_are_left_out(folder: Path):
    for name in (".hidden/x", "__pycache__/x", "venv/x", ".secret", "package/y.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    names = FolderSync(folder).stamps()
    assert sorted(names) == ["notes.txt", "package/module.py", "package/y.py"]


def test_large_files_are_left_out_and_named(folder: Path):
    os.truncate((folder / "notes.txt"), MOST_FILE_BYTES + 1)
    sync = FolderSync(folder)
    assert sync.left_out == ["notes.txt"]
    assert "notes.txt" not in sync.stamps()


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"--sync .*nowhere is not a folder"):
        FolderSync(tmp_path / "nowhere")


def test_no_path_leaves_the_copy(folder: Path):
    sync = FolderSync(folder)
    copy = FolderCopy(sync.name)
    archive = sync.packed(["notes.txt"]).replace(b"notes.txt", b"../es.txt")
    with pytest.raises(ValueError, match="not in the folder"):
        copy.update(archive, [])


def test_paths_are_translated(folder: Path):
    sync = FolderSync(folder)
    assert sync.path_in_copy(f"{folder}/package/x.py", "/copy") == "/copy/package/x.py"
    assert sync.path_in_copy("/etc/passwd", "/copy") is None
