"""What the notebook does while a fault strikes, and how the test knows when it does.

Each scene is one call that a notebook makes, and the event by which the middle of it is
seen: a mark that ranks write to a pipe, or the stage that a new rank has reached.
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

from nbdist.cluster.startup import Progress
from nbdist.training.elastic import checkpoint
from tests.chaos.draw import RANKS, STAGES, Draw
from tests.chaos.on_ranks import BIG, SlowToArrive
from tests.cluster_processes import ClusterProcesses, ComingRank, process_supervisors
from tests.processes import wait_until

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

__all__ = ["SCENES", "Marks", "Scene"]

REACHED_WITHIN_S = 60.0
STRUCK_WITHIN_S = 60.0
NOTICED_WITHIN_S = 2.0


class Marks:
    """What ranks write when they are where a fault is to strike.

    Args:
        folder: where the pipe lies, and the files that the ranks look for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        os.mkfifo(folder / "marks", 0o600)
        # Open for writing too, so that no rank waits for a reader, nor finds none.
        self._pipe = os.open(folder / "marks", os.O_RDWR | os.O_NONBLOCK)
        self._go = folder / "go"
        self.newcomers = folder / "hold newcomers"
        self._go.touch()

    def close(self) -> None:
        os.close(self._pipe)

    def arm(self) -> None:
        """From now on ranks wait where they hold."""
        self._go.unlink(missing_ok=True)
        while select.select([self._pipe], [], [], 0)[0]:
            os.read(self._pipe, 4096)

    def let_go(self) -> None:
        """Ranks that hold go on, and no other will hold."""
        self._go.touch()
        self.newcomers.unlink(missing_ok=True)

    def wait(self, count: int) -> None:
        """Until so many ranks have said that they are there."""
        deadline = time.monotonic() + REACHED_WITHIN_S
        while count > 0:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._pipe], [], [], left)[0], f"{count} not there"
            count -= len(os.read(self._pipe, count))


class Scene:
    """Something that a notebook does, on a stage."""

    marks = RANKS
    """How many ranks say that they are there."""

    def __init__(self, stage: Stage, draw: Draw) -> None:
        self.stage, self.draw = stage, draw
        self.struck = threading.Event()
        """Set once the fault has struck; what was stopped may still be."""

    def prepare(self) -> None:
        """Before anything is held up."""

    def act(self) -> None:
        """What the notebook does. Raises what the user would see."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until the act is in its midst; called on a thread of its own."""
        self.stage.marks.wait(self.marks)

    def targets(self) -> list[psutil.Process]:
        """The processes to strike, once the act is in its midst."""
        draw = self.draw
        if draw.process == "rank":
            return [self._rank(rank) for rank in draw.victims]
        if draw.process == "rank parent":
            return [self._parent(rank) for rank in draw.victims]
        if draw.process == "worker":
            pids = [pid for rank in draw.victims for pid in self.stage.workers[rank]]
            return [psutil.Process(pid) for pid in pids]
        if draw.process == "folder":
            return []
        helper = self.stage.processes.helper(draw.process)
        return [] if helper is None else [helper]

    def _rank(self, rank: int) -> psutil.Process:
        return self.stage.ranks[rank]

    def _parent(self, rank: int) -> psutil.Process:
        return self.stage.parents[rank]

    def check(self) -> None:
        """What must hold of this scene once all is mended."""


class Idle(Scene):
    """No cell runs; then one does."""

    def wait(self) -> None:
        pass

    def act(self) -> None:
        assert self.struck.wait(STRUCK_WITHIN_S)
        if not self.draw.fault.startswith(("wrong", "disk")):
            self._await_notice()
        self.stage.cluster.execute("pass")

    def _await_notice(self) -> None:
        draw, cluster = self.draw, self.stage.cluster
        if draw.process in ("rank", "rank parent") and draw.fault != "SIGSTOP":
            died = set(draw.victims)
            wait_until(
                lambda: not cluster.running or died <= cluster.died().keys(),
                NOTICED_WITHIN_S,
                lambda: f"died: {list(cluster.died())}",
            )
        elif draw.process in ("controller", "mpiexec", "process supervisor"):
            wait_until(
                lambda: bool(self.stage.said) or not cluster.running,
                NOTICED_WITHIN_S,
                lambda: f"{draw.process}: nothing was said, and the cluster runs on",
            )


class Cell(Scene):
    """A cell runs that needs no other rank."""

    def act(self) -> None:
        self.stage.cluster.execute("on_ranks.hold()")


class Collective(Scene):
    """All ranks go from one all-reduce into the next."""

    def act(self) -> None:
        self.stage.cluster.execute("on_ranks.reduce_until_struck()")


class Push(Scene):
    """The ranks unpickle what the notebook has sent."""

    def act(self) -> None:
        held = SlowToArrive(self.stage.folder)
        self.stage.cluster.push(pushed=[held, bytes(BIG * 8)])


class Pull(Scene):
    """The ranks pickle what the notebook wants."""

    def act(self) -> None:
        values = self.stage.cluster.pull(
            f"[on_ranks.SlowToLeave(), torch.zeros({BIG}, dtype=torch.float64)]"
        )
        assert [value[0] for value in values] == [7] * RANKS


class Save(Scene):
    """Rank 0 writes a file of saved state; the file that was there must stay whole."""

    marks = 1

    def prepare(self) -> None:
        self._path = self.stage.folder / "saved.state"
        self.stage.cluster.execute(self._code(1.0))

    def _code(self, value: float) -> str:
        return (
            "state = nbdist.elastic.State("
            f"wire=on_ranks.Tripwire(), value=torch.full((1000,), {value}))\n"
            f"state.save({str(self._path)!r})\n"
            "nbdist.barrier()"
        )

    def act(self) -> None:
        self.stage.cluster.execute(self._code(2.0))

    def check(self) -> None:
        opened = checkpoint.check(self._path)
        assert opened.path == self._path, opened.refused
        assert set(opened.header["names"]) == {"wire", "value"}


class Commit(Scene):
    """All ranks are in one commit of an elastic training."""

    def prepare(self) -> None:
        self.stage.reference()

    def act(self) -> None:
        self.stage.cluster.execute(
            "state = make_state(wire=on_ranks.Tripwire())\nresult = train(state)"
        )

    def check(self) -> None:
        self.stage.assert_trained()


class Change(Scene):
    """A new rank is on its way; `stage` of the draw says how far."""

    def prepare(self) -> None:
        if self.draw.stage == "setup cell":
            self.stage.marks.newcomers.touch()
        self._coming = ComingRank(self.stage.processes.run_dir, self.draw.first)

    def wait(self) -> None:
        if self.draw.stage == "setup cell":
            self.stage.marks.wait(1)
        else:
            _await_stage(self._coming, self.draw.stage)

    def _rank(self, rank: int) -> psutil.Process:
        if rank != self.draw.first:
            return super()._rank(rank)
        return _await_process(self._coming)

    def _parent(self, rank: int) -> psutil.Process:
        if rank != self.draw.first:
            return super()._parent(rank)
        return _await_parent(self._coming)


class Scale(Change):
    """The world grows by one rank."""

    def act(self) -> None:
        self.stage.cluster.scale(RANKS + 1)


class Restart(Change):
    """One rank is replaced because the user wants it."""

    def act(self) -> None:
        self.stage.cluster.replace([self.draw.first])


class Recovery(Change):
    """One rank has died, and the next cell replaces it."""

    def act(self) -> None:
        cluster, first = self.stage.cluster, self.draw.first
        os.kill(self.stage.ranks[first].pid, signal.SIGKILL)
        wait_until(lambda: first in cluster.died(), NOTICED_WITHIN_S)
        cluster.execute("pass")


class Start(Scene):
    """The first ranks come up."""

    def __init__(self, stage: Stage, draw: Draw) -> None:
        super().__init__(stage, draw)
        stage.close()
        self._before = process_supervisors()

    def act(self) -> None:
        self.stage.start(self._stay)

    def _stay(self, progress: Progress) -> None:
        """Once the fault is due, let the start wait until it has struck."""
        if all(_is_past(progress.stages.get(r), self.draw.stage) for r in self._whose):
            assert self.struck.wait(STRUCK_WITHIN_S)

    @property
    def _whose(self) -> Sequence[int]:
        """The ranks whose stage counts."""
        return self.draw.victims or range(RANKS)

    def wait(self) -> None:
        wait_until(
            lambda: len(process_supervisors() - self._before) == 1, REACHED_WITHIN_S
        )
        (supervisor,) = process_supervisors() - self._before
        self.stage.processes = ClusterProcesses(supervisor)
        run_dir = self.stage.processes.run_dir
        self._coming = [ComingRank(run_dir, rank, again=False) for rank in range(RANKS)]
        for rank in self._whose:
            _await_stage(self._coming[rank], self.draw.stage)
        assert self.stage.processes.memory.exists()

    def targets(self) -> list[psutil.Process]:
        if self.draw.process in ("controller", "mpiexec"):
            helper = self.stage.processes.helper
            wait_until(lambda: helper(self.draw.process) is not None, REACHED_WITHIN_S)
        return super().targets()

    def _rank(self, rank: int) -> psutil.Process:
        return _await_process(self._coming[rank])

    def _parent(self, rank: int) -> psutil.Process:
        return _await_parent(self._coming[rank])


def _await_stage(coming: ComingRank, stage: str) -> None:
    """Until a rank that comes up is at this stage, or past it."""
    wait_until(
        lambda: _is_past(coming.stage, stage),
        REACHED_WITHIN_S,
        lambda: f"{stage}: it is at {coming.stage}",
    )


def _is_past(now: str | None, stage: str) -> bool:
    return now is not None and STAGES.index(now) >= STAGES.index(stage)


def _await_process(coming: ComingRank) -> psutil.Process:
    wait_until(lambda: coming.process() is not None, REACHED_WITHIN_S)
    process = coming.process()
    assert process is not None
    return process


def _await_parent(coming: ComingRank) -> psutil.Process:
    """The parent of a rank, once the rank is there."""
    _await_process(coming)
    parent = coming.parent()
    assert parent is not None
    return parent


SCENES: dict[str, type[Scene]] = {
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
