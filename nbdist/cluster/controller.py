"""A running cluster: start, execute, push, pull, look, stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.cluster import transfer
from nbdist.cluster.failures import render, summary
from nbdist.cluster.inventory import this_host
from nbdist.cluster.launchers.mpiexec import Mpiexec
from nbdist.cluster.observer import Event, Observer, Quiet
from nbdist.cluster.placement import place
from nbdist.cluster.result import CellResult, RankResult
from nbdist.cluster.start import Progress, Started, start
from nbdist.config import ClusterConfig
from nbdist.errors import (
    AlreadyRunning,
    CellError,
    NotRunning,
    RankDied,
    StartError,
    UsageError,
)
from nbdist.telemetry.collector import Collector
from nbdist.wire import Failure, RankInfo

if TYPE_CHECKING:
    from nbdist.cluster.recovery import Recovery
    from nbdist.cluster.roster import Roster
    from nbdist.cluster.run import Run
    from nbdist.cluster.supervisor import Supervisor

__all__ = ["Cluster"]

VARIABLES_TIMEOUT_S = 10.0
FIRST_LINE = "# %%distributed\n"
"""Stands where the notebook has the magic, so that line numbers agree."""

QUIET = Quiet()


class Cluster:
    """Ranks of one distributed PyTorch program, driven from here.

    Creating one checks the request and starts nothing; `start`, or entering a `with`,
    brings it up. Leaving the `with`, `stop`, or the end of this process takes it down.

    Args:
        n: Number of ranks; default one per visible GPU, else min(4, cores).
        options: The fields of `nbdist.config.ClusterConfig`, such as `device="cpu"`.

    Raises:
        UsageError: The request cannot be met on this machine.
    """

    def __init__(self, n: int | None = None, **options: Any) -> None:
        unknown = options.keys() - ClusterConfig.__dataclass_fields__.keys()
        if unknown:
            known = ", ".join(sorted(ClusterConfig.__dataclass_fields__))
            raise UsageError(f"unknown option {sorted(unknown)}: expected {known}")
        given = {name: value for name, value in options.items() if value is not None}
        self.config = replace(ClusterConfig.from_environment(), n=n, **given)
        if not 0 < self.config.timeout_s < threading.TIMEOUT_MAX:
            raise UsageError(
                f"--timeout {self.config.timeout_s} is not a number of seconds above 0"
            )
        if self.config.on_failure not in ("stop", "shrink", "replace"):
            raise UsageError(
                f"--on-failure {self.config.on_failure!r} is not known: expected stop, "
                "shrink or replace"
            )
        self._launcher = Mpiexec(self.config.mpiexec)
        self._places = place(self.config, this_host())
        self.collector = Collector()
        self._started: Started | None = None
        self._roster: Roster | None = None
        self._supervisor: Supervisor | None = None
        self._recovery: Recovery | None = None
        self._setup: list[tuple[str, int]] = []
        self._cells = 0
        self.on_note: Callable[[str], None] = logging.getLogger("nbdist").warning
        """Hears of ranks that were replaced or dropped between two requests."""

    # -- life ------------------------------------------------------------------

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
            self._places,
            self.config.timeout_s,
            self.collector.receive,
            on_progress,
        )
        # Like the link, these are loaded once a cluster runs, not before.
        from nbdist.cluster.recovery import Recovery
        from nbdist.cluster.roster import Roster
        from nbdist.cluster.supervisor import Supervisor

        self.collector.set_ranks(self._started.infos)
        self._roster = Roster(self._started)
        self._supervisor = Supervisor(self._roster)
        self._recovery = Recovery(self._roster, self._places, self.config)
        self._recovery.setup = self._setup
        self._started.keeper.on_loss(self._on_loss)
        return self

    def _on_loss(self, reason: str) -> None:
        """What the ranks cannot live without has ended: leave nothing behind."""
        started, roster = self._started, self._roster
        if started is not None and roster is not None:
            roster.lose(reason)
            started.keeper.close()

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
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise UsageError(f"-n {n!r} is not a whole number of 1 or more")
        if not self.fault_tolerant:
            raise UsageError(
                f"{self.mpi} cannot change a running world: %dist_stop, then "
                f"%dist_start -n {n}"
            )
        self._supervisor_of().admit(self._select(None))
        if n == self.size:
            return f"the world is {n} ranks already"
        assert self._recovery is not None
        note = self._recovery.scale(n, drop)
        self.collector.set_ranks(self.infos)
        return note

    def mend(self) -> None:
        """Replace or drop ranks that have died since the last request, as configured.

        Every request does so first. `on_note` hears what was done.

        Raises:
            RankDied: The others could not go on; the cluster was stopped.
        """
        note = self._recover()
        if note:
            self.on_note(note)

    def restart(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Cluster:
        """Begin anew with the same options and size, and run the setup cells again."""
        self.stop()
        self.start(on_progress)
        for code, number in self._setup:
            self.execute(code, number=number)
        return self

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

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

    # -- running ---------------------------------------------------------------

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
        collected = _Collected(self._select(ranks), observer)
        if not code.lstrip().startswith("%%"):
            code = FIRST_LINE + code
        if setup:
            self._setup.append((code, number))
        run = self._run(
            "nbdist.engine.cells:run_cell",
            dict.fromkeys(collected.ranks, (code, number)),
            f"In[{number}]",
            collected,
        )
        stopped = self._supervisor_of().see_through(run, timeout_s)
        for rank, answer in run.answers.items():
            if answer.ok:
                part = collected.ranks[rank]
                part.failure, part.seconds = answer.value
        for failure in self._failures(run):
            collected.ranks[failure.rank].failure = failure
        result = CellResult(collected.ranks, self.size)
        error = stopped
        if error is None and check and not result.ok:
            error = _cell_error(result.failures, self.size)
        note = self._recover()
        if error is not None:
            error.note = note
            raise _with_result(error, result)
        return result

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
        payload = transfer.encode((fn, args, kwargs), "the function or an argument")
        return self._call(
            "nbdist.engine.calls:call",
            (payload,),
            ranks,
            getattr(fn, "__name__", "a function"),
            timeout_s,
            observer,
        )

    def push(self, ranks: Iterable[int] | None = None, /, **values: Any) -> None:
        """Give every rank a copy of these values, under these names.

        Arrays and tensors of any dtype travel as raw bytes: on this host all ranks map
        one copy (copy-on-write), so that 100 MB cost one `memcpy`.

        Raises:
            TransferError: A value cannot travel; the message says which.
        """
        with transfer.outgoing(values, self._live().run_dir) as shipment:
            self._call("nbdist.engine.calls:store", (shipment,), ranks, "push")

    def pull(self, expression: str, ranks: Iterable[int] | None = None) -> list[Any]:
        """The value of an expression on each rank, in rank order.

        Tensors arrive on the CPU. This needs torch in this process only for tensors.

        Raises:
            TransferError: It does not exist on a rank, or cannot travel; the message
                says which name, which rank, and its type.
        """
        shipments = self._call(
            "nbdist.engine.calls:fetch", (expression,), ranks, f"pull {expression}"
        )
        return transfer.incoming(shipments)

    def __getitem__(self, expression: str) -> list[Any]:
        return self.pull(expression)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push(**{name: value})

    # -- looking ---------------------------------------------------------------

    def status(self) -> dict[int, dict[str, Any] | None]:
        """Each rank's state, as `nbdist.engine.agent.status` says it, busy or not."""
        return self._live().ask("nbdist.engine.agent:status")

    def stacks(self) -> dict[int, str | None]:
        """Each rank's Python stack, also while its main thread is blocked."""
        return self._live().ask("nbdist.engine.agent:stack")

    def variables(self, pattern: str = "*") -> dict[int, Any]:
        """A description of each rank's variables, for `%dist_vars`."""
        target = "nbdist.engine.inspection:variables"
        return self._live().ask(target, pattern, timeout_s=VARIABLES_TIMEOUT_S)

    def inspect(self, expression: str) -> dict[int, str]:
        """One expression's value on every living rank, as text."""
        ranks = [info.rank for info in self.ranks]
        texts = self._call(
            "nbdist.engine.calls:show", (expression,), ranks, f"inspect {expression}"
        )
        return dict(zip(ranks, texts, strict=True))

    def complete(self, token: str, line: str, cursor: int) -> list[str]:
        """Completions of a token, from the lowest living rank's namespace."""
        lowest = self.ranks[0].rank
        target = "nbdist.engine.agent:complete"
        answers = self._live().ask(target, token, line, cursor, ranks=[lowest])
        return answers[lowest] or []

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in whatever cell each rank runs."""
        self._live().ask("nbdist.engine.agent:interrupt")

    def died(self) -> dict[int, RankDied]:
        """The ranks whose processes have ended, and why."""
        return self._live().died

    # -- inside ----------------------------------------------------------------

    def _live(self) -> Roster:
        if self._roster is None:
            raise NotRunning("no cluster is running: start one with %dist_start")
        return self._roster

    def _run(
        self,
        target: str,
        args: dict[int, tuple[object, ...]],
        what: str,
        observer: Observer,
    ) -> Run:
        from nbdist.cluster.run import Run

        roster = self._live()
        self._supervisor_of().admit(args)
        infos = [roster[rank] for rank in args]
        return Run(roster.link, infos, target, args, what, observer)

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
        roster, supervisor = self._live(), self._supervisor_of()
        wanted = self.config.on_failure != "stop" and self.fault_tolerant
        if not roster.died or roster.lost or not wanted or supervisor.busy:
            return ""
        assert self._recovery is not None
        try:
            note = self._recovery.recover()
        except StartError as error:
            self.stop()
            raise RankDied(
                f"a rank has died, and the others could not go on without it: {error}. "
                "The cluster was stopped; start a new one"
            ) from error
        self.collector.set_ranks(roster.infos)
        supervisor.mended()
        return note

    def _call(
        self,
        target: str,
        args: tuple[object, ...],
        ranks: Iterable[int] | None,
        what: str,
        timeout_s: float | None = None,
        observer: Observer = QUIET,
    ) -> list[Any]:
        selected = self._select(ranks)
        run = self._run(target, dict.fromkeys(selected, args), what, observer)
        stopped = self._supervisor_of().see_through(run, timeout_s)
        failures = self._failures(run)
        if stopped is not None or failures:
            transfer.refuse(answer.value for answer in run.answers.values())
        if stopped is not None:
            raise stopped
        if failures:
            raise transfer.translate(failures) or _cell_error(failures, self.size)
        return [run.answers[rank].value for rank in selected]

    def _failures(self, run: Run) -> list[Failure]:
        """What went wrong in the requests themselves, rank by rank."""
        failures = []
        for rank, answer in run.answers.items():
            if not answer.ok:
                ename, evalue, lines = answer.value
                host = self._live()[rank].host
                failures.append(
                    Failure(rank, host, ename, evalue, traceback=tuple(lines))
                )
        for rank, error in run.died.items():
            host = self._live()[rank].host
            failures.append(Failure(rank, host, "RankDied", str(error)))
        failures += [
            Failure(info.rank, info.host, "Unfinished", "still busy")
            for info in run.unfinished
        ]
        return failures


class _Collected:
    """Keeps what the ranks print, and passes it on."""

    def __init__(self, ranks: Sequence[int], observer: Observer) -> None:
        self.ranks = {rank: RankResult(rank) for rank in ranks}
        self._text: dict[tuple[int, str], list[str]] = {}
        self._observer = observer

    def take(self, event: Event) -> None:
        message = event.output
        result = self.ranks[event.rank]
        if message is None:
            for name in ("stdout", "stderr"):
                setattr(result, name, "".join(self._text.pop((event.rank, name), [])))
        elif message["msg_type"] == "stream":
            content = message["content"]
            key = event.rank, content["name"]
            self._text.setdefault(key, []).append(content["text"])
        elif message["msg_type"] in ("display_data", "execute_result"):
            result.outputs.append(message["content"]["data"])
        self._observer.take(event)

    def due(self) -> float | None:
        return self._observer.due()


def _cell_error(failures: Sequence[Failure], world_size: int) -> CellError:
    return CellError(summary(failures, world_size), render(failures, world_size))


def _with_result(error: CellError, result: CellResult) -> CellError:
    error.result = result
    if not error.rendered:
        expected = ("KeyboardInterrupt", "Unfinished")
        failures = [f for f in result.failures if f.ename not in expected]
        error.rendered = render(failures, result.world_size)
    return error
