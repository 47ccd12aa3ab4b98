"""A cluster of three ranks on which draws are run one after the other."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from nbdist import Cluster
from nbdist.clusters.startup import Progress
from nbdist.wire import RankInfo
from tests.chaos.draw import RANKS
from tests.chaos.faults import FolderFull
from tests.chaos.moments import Marks
from tests.cluster_processes import ClusterProcesses, rank_parent
from tests.clusters import elastic_training
from tests.processes import HANG_S, Footprint, left_in, wait_until

__all__ = ["ReusedCluster", "reused"]

FOLDER_BYTES = 256 << 20
MORE_DESCRIPTORS = 3
"""Descriptors that may stay open after a stop, such as that of a library's log."""
KEEP = "kept = (rank, torch.arange(3, device=device) + rank, os.getpid())"
KEPT = "(kept[0], kept[1].cpu(), kept[2])"


class ReusedCluster:
    """A cluster that runs until a draw ends it, and its notes.

    Args:
        folder: the folder of the marks. The cluster's files are in another file system
            below it, if this process may mount one.
        ranks_per_gpu: None for ranks on the CPU.
    """

    def __init__(self, folder: Path, ranks_per_gpu: int | None = None) -> None:
        self.folder = folder
        self.marks = Marks(folder)
        self.said: list[str] = []
        """The cluster's notes since the draw began."""
        self.processes: ClusterProcesses
        self.workers: dict[int, list[int]] = {}
        """The processes of each rank's loader."""
        self._cluster: Cluster | None = None
        self._reference: Any = None
        device = "cpu" if ranks_per_gpu is None else "cuda"
        self._options = {"device": device, "ranks_per_gpu": ranks_per_gpu}
        self._descriptors: Counter[str] | None = None
        self._patch = pytest.MonkeyPatch()
        self.own = folder / "own"
        """The folder of the cluster's files."""
        self.own.mkdir()
        self.full = FolderFull(self.own) if _mounted(self.own) else None
        """None if no file system can be mounted."""
        # The threads and descriptors of ZMQ's context outlive all clusters.
        zmq.Context.instance().socket(zmq.PAIR).close()
        self._patch.setenv("TMPDIR", str(self.own))
        self._patch.setattr(tempfile, "tempdir", None)

    def end(self) -> None:
        """Close the cluster, and unmount the file system."""
        try:
            self.close()
        finally:
            self._patch.undo()
            self.marks.close()
            if self.full is not None:
                subprocess.run(["umount", "--lazy", str(self.own)], check=True)

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def started(self) -> bool:
        """Whether a start has succeeded; the cluster may have ended since."""
        return self._cluster is not None

    @property
    def running(self) -> bool:
        return self._cluster is not None and self._cluster.running

    @property
    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks at the last `look_up`, also dead ones."""
        return self._ranks

    @property
    def parents(self) -> dict[int, psutil.Process]:
        """The rank parents at the last `look_up`."""
        return self._parents

    @property
    def infos(self) -> list[RankInfo]:
        """The ranks of the cluster; [] before it runs."""
        return [] if self._cluster is None else self._cluster.infos

    def said_stopped(self) -> bool:
        """Whether a note says that a process was stopped."""
        return any("stopped" in note for note in self.said)

    def look_up(self) -> None:
        """Find the current processes."""
        self.processes = ClusterProcesses.of(self.cluster)
        assert self.processes.memory.exists()
        infos = self.cluster.ranks
        self._ranks = {info.rank: psutil.Process(info.pid) for info in infos}
        self._parents = {info.rank: rank_parent(info) for info in infos}

    def ready(self) -> None:
        """Make sure that a complete cluster runs."""
        if not self.running:
            self.start()

    def start(self, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        """Start a cluster."""
        self.close()
        cluster = Cluster(RANKS, threads=1, **self._options)
        cluster.start(on_progress)
        self._cluster = cluster
        cluster.on_note = self.said.append
        cluster.execute(
            "import os\nfrom tests.chaos import on_ranks\n"
            f"on_ranks.begin({str(self.folder)!r})",
            setup=True,
        )
        cluster.execute(elastic_training.SETUP, setup=True)
        cluster.push(folder=str(self.folder))
        self.look_up()

    def close(self) -> None:
        """Stop the cluster, and check that nothing of it is left.

        Raises:
            AssertionError: A process, a file or a descriptor is left.
        """
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        footprint = None
        with contextlib.suppress(psutil.NoSuchProcess):
            footprint = Footprint(process.pid for process in self.processes.all())
        cluster.stop()
        if footprint is not None:
            footprint.assert_gone(HANG_S)
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Check that no process, file or descriptor of a cluster is left."""
        processes = self.processes
        wait_until(lambda: not processes.all(), HANG_S, processes.describe)
        in_memory = processes.in_memory()
        assert not processes.memory.exists(), f"in shared memory: {in_memory}"
        left = {path.name for path in left_in(self.own)} - {"filler"}
        left -= {name for name in left if name.startswith("torchinductor_")}
        assert not left, f"left in the temporary folder: {left}"
        now = _descriptors()
        before = self._descriptors = self._descriptors or now
        more = now - before
        assert more.total() <= MORE_DESCRIPTORS, f"open descriptors: {dict(more)}"

    def reference(self) -> Any:
        """The weights of an undisturbed training."""
        if self._reference is None:
            code = "state = make_state(wire=on_ranks.Tripwire())\nresult = train(state)"
            self.cluster.execute(code)
            self._reference = elastic_training.weights(self.cluster)[0]
        return self._reference

    def assert_trained(self) -> None:
        """Check that the training has the result of an undisturbed training."""
        elastic_training.assert_trained(self.cluster, self._reference)

    def keep(self) -> None:
        """Set a variable on each rank that identifies its process."""
        self.cluster.execute(KEEP)

    def assert_kept(self, but: set[int]) -> None:
        """Check that all ranks but these have their variable."""
        pids = {info.rank: info.pid for info in self.cluster.ranks}
        if but >= set(range(RANKS)):
            return  # all were started again, without variables
        for rank, (number, tensor, pid) in enumerate(self.cluster[KEPT]):
            if rank in pids.keys() - but and rank < RANKS:
                own = rank, [rank, rank + 1, rank + 2], pids[rank]
                assert (number, tensor.tolist(), pid) == own

    def assert_sums(self) -> None:
        """Check an all-reduce of all ranks, through nbdist and torch.distributed."""
        total = float(sum(range(1, self.cluster.size + 1)))
        for call in ("nbdist.all_reduce(t)", "dist.all_reduce(t)"):
            self.cluster.execute(
                f"t = torch.full((3,), rank + 1.0, device=device)\n{call}"
            )
            sums = [t.tolist() for t in self.cluster["t.cpu()"]]
            assert sums == [[total] * 3] * self.cluster.size


def _descriptors() -> Counter[str]:
    """Counts the open files of this process by name or kind."""
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this very folder
            found[re.sub(r":\[\d+\]", "", os.readlink(path))] += 1
    return found


def _mounted(folder: Path) -> bool:
    """Mount a small file system in a folder; False if this process may not."""
    if os.geteuid() != 0:
        return False
    option = f"size={FOLDER_BYTES}"
    mount = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)]
    return subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0


@pytest.fixture
def reused(
    _reused: ReusedCluster, request: pytest.FixtureRequest
) -> Iterator[ReusedCluster]:
    """The module's cluster. After a draw that fails, the next one gets another."""
    failed = request.session.testsfailed
    yield _reused
    if request.session.testsfailed > failed:
        _reused.close()
