"""The notebook's calls during which faults are injected.

Each of them is one call of a notebook, and an event in the middle of it: a mark that
ranks write to a pipe, or the stage that a new rank has reached.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nbdist.clusters.startup import Progress
from nbdist.training.elastic import checkpoint
from tests.chaos.draw import RANKS, STAGES, Draw
from tests.chaos.on_ranks import BIG, SlowToArrive
from tests.cluster_processes import ClusterProcesses, StartingRank, process_supervisors
from tests.processes import HANG_S, wait_until

if TYPE_CHECKING:
    from tests.chaos.reused_cluster import ReusedCluster

__all__ = ["CALLS", "Marks", "NotebookCall"]

REACHED_WITHIN_S = 60.0
INJECTED_WITHIN_S = 60.0


class Marks:
    """The marks that ranks write at the position at which a fault is injected.

    Args:
        folder: the folder of the pipe and of the files for which the ranks poll.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.mkfifo(folder / "marks", 0o600)
        # Also open it for writing, so that ranks neither wait for a reader nor fail.
        self._pipe = os.open(folder / "marks", os.O_RDWR | os.O_NONBLOCK)
        self._go = folder / "go"
        self.newcomers = folder / "hold newcomers"
        self._go.touch()

    def close(self) -> None:
        os.close(self._pipe)

    def arm(self) -> None:
        """Make ranks wait at their positions from now on."""
        self._go.unlink(missing_ok=True)
        while select.select([self._pipe], [], [], 0)[0]:
            os.read(self._pipe, 4096)

    def let_go(self) -> None:
        """Continue the ranks that wait, and let no other rank wait."""
        self._go.touch()
        self.newcomers.unlink(missing_ok=True)

    def wait(self, count: int) -> None:
        """Wait until `count` ranks have reached their positions."""
        deadline = time.monotonic() + REACHED_WITHIN_S
        while count > 0:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._pipe], [], [], left)[0], f"{count} not there"
            count -= len(os.read(self._pipe, count))


class NotebookCall:
    """A call of a notebook, and an event in the middle of it."""

    marks = RANKS
    """The number of ranks that write a mark."""

    def __init__(self, reused: ReusedCluster, draw: Draw) -> None:
        self.reused, self.draw = reused, draw
        self.injected = threading.Event()
        """Set when the fault was injected. Stopped processes may still be stopped."""

    def prepare(self) -> None:
        """Prepare the call, before ranks wait at their positions."""

    def make(self) -> None:
        """Make the notebook's call. Raises the error that the user would see."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the call is in its middle. Called on another thread."""
        self.reused.marks.wait(self.marks)

    def targets(self) -> list[psutil.Process]:
        """The processes that get the fault, when the call is in its middle."""
        draw = self.draw
        if draw.process == "rank":
            return [self._rank(rank) for rank in draw.victims]
        if draw.process == "rank parent":
            return [self._parent(rank) for rank in draw.victims]
        if draw.process == "worker":
            pids = [pid for rank in draw.victims for pid in self.reused.workers[rank]]
            return [psutil.Process(pid) for pid in pids]
        if draw.process == "folder":
            return []
        helper = self.reused.processes.helper(draw.process)
        return [] if helper is None else [helper]

    def _rank(self, rank: int) -> psutil.Process:
        return self.reused.ranks[rank]

    def _parent(self, rank: int) -> psutil.Process:
        return self.reused.parents[rank]

    def check(self) -> None:
        """Check the result of this call after the recovery."""


class Idle(NotebookCall):
    """No cell runs, and then a cell is run."""

    def wait(self) -> None:
        pass

    def make(self) -> None:
        assert self.injected.wait(INJECTED_WITHIN_S)
        if not self.draw.fault.startswith(("wrong", "disk")):
            self._await_notice()
        self.reused.cluster.execute("pass")

    def _await_notice(self) -> None:
        draw, cluster = self.draw, self.reused.cluster
        if draw.process in ("rank", "rank parent") and draw.fault != "SIGSTOP":
            died = set(draw.victims)
            wait_until(
                lambda: not cluster.running or died <= cluster.died().keys(),
                HANG_S,
                lambda: f"died: {list(cluster.died())}",
            )
        elif draw.process in ("controller", "mpiexec", "process supervisor"):
            wait_until(
                lambda: bool(self.reused.said) or not cluster.running,
                HANG_S,
                lambda: f"{draw.process}: nothing was said, and the cluster runs on",
            )


class Cell(NotebookCall):
    """A cell without collectives runs."""

    def make(self) -> None:
        self.reused.cluster.execute("on_ranks.hold()")


class Collective(NotebookCall):
    """All ranks call all-reduces one after the other."""

    def make(self) -> None:
        self.reused.cluster.execute("on_ranks.reduce_until_injected()")


class Push(NotebookCall):
    """The ranks unpickle a value that the notebook has sent."""

    def make(self) -> None:
        held = SlowToArrive(self.reused.folder)
        self.reused.cluster.push(pushed=[held, bytes(BIG * 8)])


class Pull(NotebookCall):
    """The ranks pickle a value that the notebook pulls."""

    def make(self) -> None:
        values = self.reused.cluster.pull(
            "[on_ranks.SlowToLeave(), "
            f"torch.zeros({BIG}, dtype=torch.float64, device=device)]"
        )
        assert [value[0] for value in values] == [7] * RANKS


class Save(NotebookCall):
    """Rank 0 writes a file of saved state. The previous file must stay complete."""

    marks = 1

    def prepare(self) -> None:
        self._path = self.reused.folder / "saved.state"
        self.reused.cluster.execute(self._code(1.0))

    def _code(self, value: float) -> str:
        return (
            "state = nbdist.elastic.State("
            "wire=on_ranks.Tripwire(), "
            f"value=torch.full((1000,), {value}, device=device))\n"
            f"state.save({str(self._path)!r})\n"
            "nbdist.barrier()"
        )

    def make(self) -> None:
        self.reused.cluster.execute(self._code(2.0))

    def check(self) -> None:
        opened = checkpoint.check(self._path)
        assert opened.path == self._path, opened.refused
        assert set(opened.header["names"]) == {"wire", "value"}


class Commit(NotebookCall):
    """All ranks are in one commit of an elastic training."""

    def prepare(self) -> None:
        self.reused.reference()

    def make(self) -> None:
        self.reused.cluster.execute(
            "state = make_state(wire=on_ranks.Tripwire())\nresult = train(state)"
        )

    def check(self) -> None:
        self.reused.assert_trained()


class Change(NotebookCall):
    """A new rank starts. The draw's `stage` is the stage that it has reached."""

    def prepare(self) -> None:
        if self.draw.stage == "setup cell":
            self.reused.marks.newcomers.touch()
        self._starting = StartingRank(self.reused.processes.run_dir, self.draw.first)

    def wait(self) -> None:
        if self.draw.stage == "setup cell":
            self.reused.marks.wait(1)
        else:
            _await_stage(self._starting, self.draw.stage)

    def _rank(self, rank: int) -> psutil.Process:
        if rank != self.draw.first:
            return super()._rank(rank)
        return _await_process(self._starting)

    def _parent(self, rank: int) -> psutil.Process:
        if rank != self.draw.first:
            return super()._parent(rank)
        return _await_parent(self._starting)


class Scale(Change):
    """The world grows by one rank."""

    def make(self) -> None:
        self.reused.cluster.scale(RANKS + 1)


class Restart(Change):
    """One rank is replaced on request of the user."""

    def make(self) -> None:
        self.reused.cluster.replace([self.draw.first])


class Recovery(Change):
    """One rank has died, and the next cell replaces it."""

    def make(self) -> None:
        cluster, first = self.reused.cluster, self.draw.first
        os.kill(self.reused.ranks[first].pid, signal.SIGKILL)
        wait_until(lambda: first in cluster.died(), HANG_S)
        cluster.execute("pass")


class Start(NotebookCall):
    """The first ranks start."""

    def __init__(self, reused: ReusedCluster, draw: Draw) -> None:
        super().__init__(reused, draw)
        reused.close()
        self._before = process_supervisors()

    def make(self) -> None:
        self.reused.start(self._stay)

    def _stay(self, progress: Progress) -> None:
        """Make the start wait until the fault was injected."""
        if all(_is_past(progress.stages.get(r), self.draw.stage) for r in self._whose):
            assert self.injected.wait(INJECTED_WITHIN_S)

    @property
    def _whose(self) -> Sequence[int]:
        """The ranks whose stage is awaited."""
        return self.draw.victims or range(RANKS)

    def wait(self) -> None:
        wait_until(
            lambda: len(process_supervisors() - self._before) == 1, REACHED_WITHIN_S
        )
        (supervisor,) = process_supervisors() - self._before
        self.reused.processes = ClusterProcesses(supervisor)
        run_dir = self.reused.processes.run_dir
        self._starting = [
            StartingRank(run_dir, rank, again=False) for rank in range(RANKS)
        ]
        for rank in self._whose:
            _await_stage(self._starting[rank], self.draw.stage)
        assert self.reused.processes.memory.exists()

    def targets(self) -> list[psutil.Process]:
        if self.draw.process in ("controller", "mpiexec"):
            helper = self.reused.processes.helper
            wait_until(lambda: helper(self.draw.process) is not None, REACHED_WITHIN_S)
        return super().targets()

    def _rank(self, rank: int) -> psutil.Process:
        return _await_process(self._starting[rank])

    def _parent(self, rank: int) -> psutil.Process:
        return _await_parent(self._starting[rank])


def _await_stage(starting: StartingRank, stage: str) -> None:
    """Wait until a rank that starts has reached this stage, or a later one."""
    wait_until(
        lambda: _is_past(starting.stage, stage),
        REACHED_WITHIN_S,
        lambda: f"{stage}: it is at {starting.stage}",
    )


def _is_past(now: str | None, stage: str) -> bool:
    return now is not None and STAGES.index(now) >= STAGES.index(stage)


def _await_process(starting: StartingRank) -> psutil.Process:
    wait_until(lambda: starting.process() is not None, REACHED_WITHIN_S)
    process = starting.process()
    assert process is not None
    return process


def _await_parent(starting: StartingRank) -> psutil.Process:
    """The parent of a rank, when the rank's process exists."""
    _await_process(starting)
    parent = starting.parent()
    assert parent is not None
    return parent


CALLS: dict[str, type[NotebookCall]] = {
    "start": Start,
    "idle": Idle,
    "cell": Cell,
    "collective": Collective,
    "push": Push,
    "pull": Pull,
    "scale": Scale,
    "restart": Restart,
    "commit": Commit,
    "save": Save,
    "recovery": Recovery,
}
