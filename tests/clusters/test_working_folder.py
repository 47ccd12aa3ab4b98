"""The notebook's folder is removed or renamed while ranks run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdist
from nbdist import Cluster, KeptCluster
from nbdist.clusters.kept.clusters import kept_clusters

WHERE = "__import__('os').getcwd()"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working folder, two below one that remains."""
    before = os.open(".", os.O_RDONLY)
    folder = tmp_path / "work" / "notebook"
    folder.mkdir(parents=True)
    os.chdir(folder)
    yield folder
    os.fchdir(before)
    os.close(before)


def remove(folder: Path) -> Path:
    """Remove a folder. Returns where processes that start later work."""
    folder.rmdir()
    return folder.parent


def rename(folder: Path) -> Path:
    """As `remove`, by another name."""
    return folder.rename(folder.with_name("renamed"))


@pytest.mark.parametrize("change", [remove, rename])
def test_ranks_start_in_a_folder_that_exists_and_say_so(
    folder: Path, change: object
) -> None:
    assert callable(change)
    with Cluster(2, device="cpu", threads=1) as cluster:
        notes: list[str] = []
        cluster.on_note = notes.append
        cluster.execute("kept = rank")
        works_in = change(folder)
        cluster.replace([1])
        assert f"rank 1 works in {works_in}, because {folder}" in notes[-1]
        assert cluster.scale(3).count(f"rank 2 works in {works_in}") == 1
        assert cluster["kept"] == [0, 0, 0]
        assert cluster.pull(WHERE, [1, 2]) == [str(works_in)] * 2
        notes.clear()
        cluster.restart()
        assert cluster[WHERE] == [str(works_in)] * 3
        gone = f"the folder {folder} was removed: the ranks work in {works_in}"
        assert notes == ([gone] if change is remove else [])


def test_a_kept_cluster_whose_folder_was_removed_can_be_attached(
    folder: Path,
) -> None:
    name = f"gone{os.getpid()}"
    cluster = KeptCluster(2, name=name, device="cpu", threads=1).start()
    try:
        cluster.execute("kept = rank + 5")
        cluster.detach()
        remaining = remove(folder)
        (listed,) = [each for each in kept_clusters() if each.name == name]
        assert (listed.folder, listed.size) == (str(folder), 2)
        os.chdir(remaining)
        cluster = nbdist.attach(name)
        assert cluster["kept"] == [5, 6]
        cluster.replace([1])
        assert cluster["kept"] == [5, 5]
    finally:
        cluster.stop()
