"""The files of a commit pass from a cluster to the next one. No ranks needed."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nbdist import Cluster
from nbdist.clusters import world_restart
from nbdist.clusters.world_restart import LastCommit, SavedWorld, last_commit
from nbdist.errors import CheckpointError, ClusterError
from nbdist.ipc import private_files
from nbdist.training.elastic import shared_copies
from nbdist.training.elastic.state import State
from nbdist.wire import ElasticCall

CALL = ElasticCall("train", max_restarts=1, min_ranks=1, max_ranks=None, timeout_s=1)


class Clusters:
    """Makes the folders of clusters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> Path:
        """Make the folders of a new cluster. Returns its run folder."""
        run_dir = Path(tempfile.mkdtemp(dir=self._folder))
        private_files.make_memory_folder(run_dir, private_files.new_memory_folder())
        private_files.make_commit_folders(run_dir)
        return run_dir

    def end(self, run_dir: Path) -> None:
        """Remove the folders of a cluster."""
        memory = private_files.memory_folder(run_dir)
        private_files.remove_folders(run_dir, memory)


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clusters:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(private_files, "MEMORY_FOLDER", shared)
    runs = tmp_path / "runs"
    runs.mkdir()
    return Clusters(runs)


def training(run_dir: Path, **values: Any) -> State:
    """A state as it is in an elastic run on rank 0."""
    state = State(**values)
    state._share(private_files.commit_folders(run_dir))
    return state


def taken(run_dir: Path) -> LastCommit:
    commit = last_commit(run_dir)
    assert commit is not None
    return commit


def test_a_commit_passes_through_three_clusters(clusters: Clusters) -> None:
    first = clusters.begin()
    assert last_commit(clusters.begin()) is None
    state = training(first, weight=torch.arange(5.0), step=7)
    for _ in range(3):
        state.commit()
    commit = taken(first)
    clusters.end(first)
    second = clusters.begin()
    commit.give(second, None)  # it is lost before its own first commit
    again = taken(second)
    clusters.end(second)
    third = clusters.begin()
    resume = again.give(third, None)
    fresh = State(weight=torch.zeros(5), step=0)
    fresh.load(resume.path, trusted=True)
    assert (fresh.commits, fresh.step) == (3, 7)
    assert fresh.weight.tolist() == [0, 1, 2, 3, 4]


def test_a_new_commit_is_preferred_to_the_one_a_cluster_began_from(
    clusters: Clusters,
) -> None:
    first, second = clusters.begin(), clusters.begin()
    training(first, step=1).commit()
    taken(first).give(second, None)
    state = training(second, step=2)
    for _ in range(2):
        state.commit()
    assert taken(second).number == 2
    assert taken(second).number == 2  # it can be asked for again


def test_a_later_commit_of_a_living_rank_does_not_change_the_kept_commit(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_copies, "END_TIMEOUT_S", 0.1)
    run_dir = clusters.begin()
    state = training(run_dir, weight=torch.ones(1000))
    state.commit()
    commit = taken(run_dir)
    state.weight += 1
    for _ in range(2):
        with pytest.raises(ClusterError, match="ends this cluster"):
            state.commit()
    resumed = State(weight=torch.zeros(1000))
    resumed.load(commit.give(clusters.begin(), None).path, trusted=True)
    assert resumed.weight.eq(1).all()


def test_a_commit_is_kept_in_the_run_folder_if_memory_is_full(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = clusters.begin(), clusters.begin()
    training(first, weight=torch.ones(1000)).commit()
    commit = taken(first)
    copy = world_restart._copy
    full = private_files.memory_folder(second)

    def copy_where_is_room(source: int, path: Path) -> None:
        if path.is_relative_to(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(source, path)

    monkeypatch.setattr(world_restart, "_copy", copy_where_is_room)
    resume = commit.give(second, None)
    assert Path(resume.path).is_relative_to(second)
    assert not (full / "resume").exists()
    State(weight=torch.zeros(1000)).load(resume.path, trusted=True)


def test_a_kept_commit_is_an_ordinary_file(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = clusters.begin()
    training(run_dir, weight=torch.arange(4.0), step=3).commit()
    saved = SavedWorld(CALL, taken(run_dir))
    clusters.end(run_dir)
    monkeypatch.setattr(world_restart.tempfile, "tempdir", str(tmp_path))
    note = saved.keep()
    assert "number 1" in note
    state = State(weight=torch.zeros(4), step=0)
    state.load(note.rsplit(" ", 1)[1])
    assert state.weight.tolist() == [0, 1, 2, 3]
    assert SavedWorld(CALL, None).keep() == "there was no commit yet"


def test_a_commit_that_others_can_write_is_refused(clusters: Clusters) -> None:
    run_dir = clusters.begin()
    training(run_dir, step=1).commit()
    (folder, _other) = private_files.commit_folders(run_dir)
    (folder / "record").chmod(0o622)
    assert last_commit(run_dir) is None


def test_a_record_that_names_a_file_elsewhere_is_refused(
    clusters: Clusters, tmp_path: Path
) -> None:
    from nbdist.training.elastic import checkpoint
    from nbdist.training.elastic.commit_files import read_record

    path = tmp_path / "record"
    header = {"commit": 1, "size": 1, "names": [], "time": 0, "parts": []}
    for name in ("../data", "/etc/passwd", "", ".", 5):
        path.write_bytes(checkpoint.packed({**header, "data": name}, b""))
        with pytest.raises(CheckpointError, match="lacks the data file"):
            read_record(checkpoint.check(path))


def test_a_stopped_cluster_has_no_file_of_a_commit_open(
    clusters: Clusters,
) -> None:
    run_dir = clusters.begin()
    training(run_dir, weight=torch.arange(4.0)).commit()
    cluster = Cluster(1, device="cpu")
    before = len(os.listdir("/proc/self/fd"))
    cluster._commit = taken(run_dir)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    cluster.stop()
    assert len(os.listdir("/proc/self/fd")) == before
