"""A cluster's life: brought up, kept whole, changed in size, taken down."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nbdist.cluster.inventory import this_host
from nbdist.cluster.launchers.mpiexec import Mpiexec
from nbdist.cluster.options import configured, resume_of, suggests_keywords
from nbdist.cluster.placement import place
from nbdist.cluster.startup import Progress, Started, start
from nbdist.cluster.supervisor_client import Loss
from nbdist.errors import (
    AlreadyRunning,
    CellInterrupted,
    ChangeFailed,
    ClusterError,
    NotRunning,
    RankDied,
    ScaleFailed,
    UsageError,
)
from nbdist.ipc import endpoints
from nbdist.ipc.private_files import make_commit_folders
from nbdist.telemetry.collector import Collector
from nbdist.wire import RankInfo, Resume, format_ranks

if TYPE_CHECKING:
    from nbdist.cluster.elastic import Elastic
    from nbdist.cluster.rank_registry import Roster
    from nbdist.cluster.recovery import Recovery
    from nbdist.cluster.supervisor import Supervisor
    from nbdist.cluster.world_restart import LastCommit

__all__ = ["Lifecycle", "whole_loss"]

Self = TypeVar("Self", bound="Lifecycle")


class Lifecycle(ABC):
    """Ranks that are brought up and kept whole; `Cluster` says what to do with them."""

    @suggests_keywords
    def __init__(
        self,
        n: int | None = None,
        *,
        device: str | None = None,
        ranks_per_gpu: int | None = None,
        gpu_memory: str | float | int | None = None,
        threads: int | None = None,
        timeout_s: float | None = None,
        on_failure: str | None = None,
        oversubscribe: bool | None = None,
        hosts: str | None = None,
        resume: str | None = None,
        mpiexec: str | None = None,
    ) -> None:
        options: dict[str, object] = {
            "device": device,
            "ranks_per_gpu": ranks_per_gpu,
            "gpu_memory": gpu_memory,
            "threads": threads,
            "timeout_s": timeout_s,
            "on_failure": on_failure,
            "oversubscribe": oversubscribe,
            "hosts": hosts,
            "resume": resume,
            "mpiexec": mpiexec,
        }
        self.config = configured(n, options)
        self._resume = resume_of(self.config)
        self._launcher = Mpiexec(self.config.mpiexec)
        self._places = place(self.config, this_host())
        self.collector = Collector()
        self._started: Started | None = None
        self._roster: Roster | None = None
        self._supervisor: Supervisor | None = None
        self._recovery: Recovery | None = None
        self._elastic: Elastic | None = None
        self._beginning: Resume | None = None
        self._commit: LastCommit | None = None
        """The last commit of a world that was lost."""
        self._loss = threading.Event()
        self._setup: list[tuple[str, int]] = []
        self._cells = 0
        self.on_note: Callable[[str], None] = logging.getLogger("nbdist").warning
        """Hears of ranks that were replaced or dropped between two requests."""

    def start(
        self: Self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Self:
        """Bring every rank up, and return when all of them answer.

        Raises:
            StartError: A rank did not come up; nothing is left running.
            AlreadyRunning: This cluster is running.
        """
        if self._started is not None:
            raise AlreadyRunning(
                f"this cluster of {self.size} ranks is running already"
            )
        self._started = start(
            self._launcher,
            self._places,
            self.config.timeout_s,
            self.collector.receive,
            on_progress,
        )
        # Like the link, these are loaded once a cluster runs, not before.
        from nbdist.cluster.elastic import Elastic
        from nbdist.cluster.rank_registry import Roster
        from nbdist.cluster.recovery import Recovery
        from nbdist.cluster.supervisor import Supervisor

        self.collector.set_ranks(self._started.infos)
        self._roster = Roster(self._started)
        self._recovery = Recovery(
            self._roster, self._places, self.config, self._on_change
        )
        self._supervisor = Supervisor(self._roster, self._recovery)
        self._recovery.setup = self._setup
        self._elastic = Elastic(
            self._roster,
            self._recovery,
            self.config,
            self._tell,
            survives=self.fault_tolerant,
        )
        self._supervisor.elastic = self._elastic
        self._commit = None
        self._loss.clear()
        if self.config.on_failure != "stop":
            make_commit_folders(self._roster.run_dir)
        try:
            self._begin_from(self._resume)
        except BaseException:
            self.stop()
            raise
        self._supervisor.repair = self.mend
        self._started.keeper.on_note = self._tell
        self._started.keeper.on_loss(self._on_loss)
        return self

    def _begin_from(self, resume: Resume | None) -> None:
        """Have new states on the ranks begin from a file; None to have them not.

        Raises:
            ClusterError: A rank refuses the file, or does not answer.
        """
        target = endpoints.ELASTIC_BEGIN_FROM
        if resume is None:
            self._live().ask(target, None)
        else:
            try:
                self._live().instruct(target, resume)
            except ClusterError as error:
                raise ClusterError(
                    f"states cannot begin from {resume.path}: {error}"
                ) from error
        before, self._beginning = self._beginning, resume
        if before is not None and before.trusted and before != resume:
            shutil.rmtree(Path(before.path).parent, ignore_errors=True)

    def _on_change(self) -> None:
        """The ranks are others now."""
        self.collector.set_ranks(self.infos)
        if self._beginning is not None:
            self._begin_from(self._beginning)

    def _tell(self, note: str) -> None:
        self.on_note(note)

    def _on_loss(self, loss: Loss) -> None:
        """What the ranks cannot live without has ended: leave nothing behind."""
        from nbdist.cluster.world_restart import last_commit

        started, roster = self._started, self._roster
        supervisor = self._supervisor
        if started is not None and roster is not None and supervisor is not None:
            with contextlib.suppress(OSError):  # somebody has taken it, or written it
                self._commit = last_commit(roster.run_dir) or self._commit
            is_said = supervisor.is_waiting or not loss.is_cause
            roster.lose(loss)
            self._loss.set()
            started.keeper.close()
            if not is_said:
                self._tell(loss.reason)

    def stop(self) -> None:
        """End every rank and remove what the start created. A second stop is harmless.

        Every process has ended when this returns.
        """
        started, self._started = self._started, None
        roster, self._roster = self._roster, None
        if roster is not None:
            roster.close()
        if started is not None:
            started.link.close()
            started.keeper.close()

    def scale(self, n: int, *, drop: bool = False) -> str:
        """Grow or shrink the running world to `n` ranks; what was done, in words.

        New ranks run the setup cells and get a copy of the lowest rank's variables.

        Args:
            drop: Let ranks go although they hold variables that no other rank has.

        Raises:
            UsageError: It cannot be had, or variables would be lost; nothing changed.
            ScaleFailed: A rank died, or a new one did not come up. The message says
                what was done about it.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"-n {n!r} is not a whole number of 1 or more")
        if not self.fault_tolerant:
            raise UsageError(
                f"{self.mpi} cannot change a running world: %dist_stop, then "
                f"%dist_start -n {n}"
            )
        assert self._recovery is not None
        assert self._elastic is not None
        note = self._elastic.scale(n, drop=drop)
        if note is not None:
            return note
        self._supervisor_of().admit(self._select(None))
        if n == self.size:
            return f"the world is {n} ranks already"
        self._recovery.check(n, drop)
        try:
            return self._recovery.scale(n)
        except ChangeFailed as error:
            died = self._live().died
            way = self._way_on() if self._is_lost else self._rebuild(error)
            why = whole_loss(died) if died else str(error)
            raise ScaleFailed(f"{why}\n{way}") from error

    def replace(self, ranks: Iterable[int]) -> None:
        """End the processes of some ranks, whatever they do, and put others in place.

        The other ranks keep everything. For one that does not come back: stopped, or
        in foreign code that hears no interrupt.

        Raises:
            UsageError: There is no such rank, or this cluster replaces none; or these
                are all ranks, so that nothing would be kept.
            RankDied: The others could not go on; the cluster was stopped.
        """
        chosen = self._select(ranks)
        if set(chosen) >= {info.rank for info in self.ranks}:
            raise UsageError(
                f"rank {format_ranks(chosen)} is every rank, and no variables would be "
                "left: %dist_restart without -r starts all ranks again"
            )
        if not self.fault_tolerant or self.config.on_failure != "replace":
            raise UsageError(
                f"rank {format_ranks(chosen)} cannot be replaced with --on-failure "
                f"{self.config.on_failure} and {self.mpi}: %dist_restart without -r "
                "begins anew"
            )
        self._live().kill(chosen)
        self.mend()

    def mend(self) -> None:
        """Do what deaths since the last request ask for, as configured.

        Dead ranks are replaced or dropped. Where no rank is left, all are started
        again, with the setup cells. Every request does so first. `on_note` hears what
        was done.

        Raises:
            RankDied: The ranks could not go on; the cluster was stopped.
        """
        if self._is_lost and self.config.on_failure == "replace":
            died = self._live().died
            self.restart()
            note = (
                f"{whole_loss(died)}. {self.size} ranks were started again, without "
                "the variables of before"
            )
        else:
            died = self._live().died
            note = self._recover()
            if died and note:
                note = f"{whole_loss(died)}\n{note}"
        if note:
            self.on_note(note)

    @abstractmethod
    def restart(self) -> Lifecycle:
        """Begin anew with the same options and size, and run the setup cells again."""

    @abstractmethod
    def _rebuild(self, error: ChangeFailed) -> str:
        """Start all ranks again, with the variables of those that live."""

    @property
    def _is_lost(self) -> bool:
        """Whether no rank is left."""
        roster = self._live()
        return bool(roster.lost) or not roster.living

    @property
    def running(self) -> bool:
        return self._roster is not None and not self._roster.lost

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._places)

    @property
    def ranks(self) -> list[RankInfo]:
        """Every rank that lives, in rank order."""
        return self._live().living

    @property
    def infos(self) -> list[RankInfo]:
        """Every rank, dead ones too, in rank order."""
        return self._live().infos

    @property
    def fault_tolerant(self) -> bool:
        """Whether the other ranks outlive one that dies."""
        return self._launcher.is_fault_tolerant

    @property
    def mpi(self) -> str:
        """The MPI launcher in use, with its version and path."""
        return self._launcher.description

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<nbdist.Cluster of {self.size} ranks, {state}>"

    def died(self) -> dict[int, RankDied]:
        """The ranks whose processes have ended, and why."""
        return self._live().died

    def _live(self) -> Roster:
        if self._roster is None:
            raise NotRunning("no cluster is running: start one with %dist_start")
        return self._roster

    def _supervisor_of(self) -> Supervisor:
        self._live()
        assert self._supervisor is not None
        return self._supervisor

    def _select(self, ranks: Iterable[int] | None) -> list[int]:
        """The ranks asked for; what has died since the last request is mended first."""
        self.mend()
        return self._live().select(ranks)

    def _recover(self) -> str:
        """Replace or drop the dead, where that is wanted and possible now."""
        assert self._recovery is not None
        recovery, supervisor = self._recovery, self._supervisor_of()
        wanted = self.config.on_failure != "stop" and self.fault_tolerant
        if self._is_lost:
            return self._way_on()
        if not recovery.is_needed or not wanted or supervisor.busy:
            return ""
        try:
            note = recovery.recover()
        except ChangeFailed as error:
            return self._way_on() if self._is_lost else self._rebuild(error)
        except CellInterrupted:  # the ranks are whole; newcomers lack something
            supervisor.mended()
            raise
        except KeyboardInterrupt:
            return "the recovery was interrupted: the next cell goes on with it"
        supervisor.mended()
        return note

    def _way_on(self) -> str:
        """What follows the loss of all ranks."""
        if self.config.on_failure == "replace":
            return (
                f"no rank is left: the next cell starts {self.size} ranks again and "
                "runs the setup cells; variables are lost"
            )
        return "no rank is left, and variables are lost: %dist_restart begins again"


def whole_loss(died: Mapping[int, RankDied]) -> str:
    """How all ranks were lost, each cause once."""
    return "; ".join(dict.fromkeys(map(str, died.values()))) or "no rank was left"
