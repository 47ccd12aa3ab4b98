"""A running cluster: start, execute, push, pull, look, stop."""

from __future__ import annotations

import threading
import time
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
from nbdist.cluster.supervisor import Supervisor
from nbdist.config import ClusterConfig
from nbdist.errors import (
    AlreadyRunning,
    CellError,
    CellInterrupted,
    CellTimeout,
    NotRunning,
    RankDied,
    UsageError,
)
from nbdist.telemetry.collector import Collector
from nbdist.wire import Failure, RankInfo, format_ranks

if TYPE_CHECKING:
    from nbdist.cluster.run import Run

__all__ = ["Cluster"]

ANSWER_TIMEOUT_S = 2.0
INTERRUPT_GRACE_S = 5.0
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
        if not self.config.timeout_s > 0:
            raise UsageError(
                f"--timeout {self.config.timeout_s} is not above 0 seconds"
            )
        self._launcher = Mpiexec(self.config.mpiexec)
        self._places = place(self.config, this_host())
        self.collector = Collector()
        self._started: Started | None = None
        self._supervisor: Supervisor | None = None
        self._infos: dict[int, RankInfo] = {}
        self._died: dict[int, RankDied] = {}
        self._lock = threading.Lock()
        self._cells = 0

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
        self._died.clear()
        self._infos = {info.rank: info for info in self._started.infos}
        self.collector.set_ranks(self._started.infos)
        self._supervisor = Supervisor(self._started.infos, self._on_death)
        return self

    def stop(self) -> None:
        """End every rank and remove what the start created. A second stop is harmless.

        Every process has ended when this returns.
        """
        started, self._started = self._started, None
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()
        if started is not None:
            started.link.close()
            started.keeper.close()

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._started is not None

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._places)

    @property
    def ranks(self) -> list[RankInfo]:
        """Every rank that lives, in rank order."""
        return [info for rank, info in self._infos.items() if rank not in self._died]

    @property
    def infos(self) -> list[RankInfo]:
        """Every rank, dead ones too, in rank order."""
        return list(self._infos.values())

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
        observer: Observer = QUIET,
    ) -> CellResult:
        """Run a cell on all ranks, or on some, and wait for them.

        Args:
            code: What a notebook cell may hold: magics, `!`, await, a last expression.
            timeout_s: Interrupts the ranks after so many seconds.
            check: Raise when a rank fails; else the result says so.
            number: The notebook's In[] number; counted when not given.
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
        run = self._run(
            "nbdist.engine.cells:run_cell",
            dict.fromkeys(collected.ranks, (code, number)),
            f"In[{number}]",
            collected,
        )
        stopped = self._finish(run, timeout_s)
        for rank, (status, answer) in run.answers.items():
            failure, seconds = (
                answer if status == "ok" else (self._failure(rank, answer), 0.0)
            )
            collected.ranks[rank].failure = failure
            collected.ranks[rank].seconds = seconds
        for rank, error in run.died.items():
            collected.ranks[rank].failure = self._failure(rank, error)
        result = CellResult(collected.ranks, self.size)
        if stopped is not None:
            raise _with_result(stopped, result)
        if check and not result.ok:
            raise _with_result(_cell_error(result.failures, self.size), result)
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
        with transfer.outgoing(values) as shipment:
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
        return [transfer.incoming(shipment) for shipment in shipments]

    def __getitem__(self, expression: str) -> list[Any]:
        return self.pull(expression)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push(**{name: value})

    # -- looking ---------------------------------------------------------------

    def ask(
        self, target: str, *args: object, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> dict[int, Any]:
        """Ask each rank's agent, busy or not; None for a rank that does not answer."""
        link = self._live().link
        deadline = time.monotonic() + timeout_s
        asked = {
            info.rank: link.send(info.engine_uuid, target, *args, control=True)
            for info in self.ranks
        }
        answers: dict[int, Any] = dict.fromkeys(self._infos)
        for rank, exchange in asked.items():
            try:
                status, value = exchange.reply.result(
                    max(0.0, deadline - time.monotonic())
                )
            except (TimeoutError, RankDied):
                continue
            answers[rank] = value if status == "ok" else None
        return answers

    def status(self) -> dict[int, dict[str, Any] | None]:
        """Each rank's state, as `nbdist.engine.agent.status` says it, busy or not."""
        return self.ask("nbdist.engine.agent:status")

    def stacks(self) -> dict[int, str | None]:
        """Each rank's Python stack, also while its main thread is blocked."""
        return self.ask("nbdist.engine.agent:stack")

    def variables(self, pattern: str = "*") -> dict[int, Any]:
        """A description of each rank's variables, for `%dist_vars`."""
        return self.ask("nbdist.engine.inspection:variables", pattern, timeout_s=10)

    def inspect(self, expression: str) -> dict[int, str]:
        """One expression's value on every rank, as text."""
        ranks = [info.rank for info in self.ranks]
        texts = self._call(
            "nbdist.engine.calls:show", (expression,), ranks, f"inspect {expression}"
        )
        return dict(zip(ranks, texts, strict=True))

    def complete(self, token: str, line: str, cursor: int) -> list[str]:
        """Completions of a token, from the lowest living rank's namespace."""
        lowest = self.ranks[0]
        exchange = self._live().link.send(
            lowest.engine_uuid,
            "nbdist.engine.agent:complete",
            *(token, line, cursor),
            control=True,
        )
        try:
            status, matches = exchange.reply.result(ANSWER_TIMEOUT_S)
        except TimeoutError:
            return []
        return matches if status == "ok" else []

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in whatever cell each rank runs."""
        self.ask("nbdist.engine.agent:interrupt")

    def died(self) -> dict[int, RankDied]:
        """The ranks whose processes have ended, and why."""
        return dict(self._died)

    # -- inside ----------------------------------------------------------------

    def _live(self) -> Started:
        if self._started is None:
            raise NotRunning("no cluster is running: start one with %dist_start")
        return self._started

    def _select(self, ranks: Iterable[int] | None) -> list[int]:
        """The ranks asked for, checked against those that live and are idle."""
        self._live()
        wanted = sorted(self._infos if ranks is None else set(ranks))
        missing = [rank for rank in wanted if rank not in self._infos]
        if missing or not wanted:
            raise UsageError(
                f"rank {format_ranks(missing) or '(none)'} is not one of "
                f"0-{self.size - 1}"
            )
        dead = [rank for rank in wanted if rank in self._died]
        if dead:
            reasons = "; ".join(str(self._died[rank]) for rank in dead)
            raise RankDied(
                f"{reasons}. The others keep their variables: -r "
                f"{format_ranks(i.rank for i in self.ranks) or 'none'} reaches them; "
                "%dist_stop and %dist_start begin anew"
            )
        return wanted

    def _run(
        self,
        target: str,
        args: dict[int, tuple[object, ...]],
        what: str,
        observer: Observer,
    ) -> Run:
        from nbdist.cluster.run import Run

        link = self._live().link
        self._refuse_busy(args)
        infos = [self._infos[rank] for rank in args]
        run = Run(link, infos, target, args, what, observer)
        self._current = run
        return run

    _current: Run | None = None

    def _refuse_busy(self, ranks: Iterable[int]) -> None:
        """A rank that was left behind by an earlier cell cannot take another."""
        if self._current is None:
            return
        self._current.wait(time.monotonic())  # answers that came meanwhile
        busy = {info.rank for info in self._current.unfinished} & set(ranks)
        if busy:
            places = self.ask("nbdist.engine.agent:where")
            where = "; ".join(f"rank {r} at {places[r]}" for r in sorted(busy))
            raise UsageError(
                f"still busy with an earlier cell: {where}. Interrupt again, choose "
                "other ranks with -r, or %dist_stop"
            )

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
        stopped = self._finish(run, timeout_s)
        failures = [
            self._failure(rank, answer)
            for rank, (status, answer) in run.answers.items()
            if status == "error"
        ]
        failures += [self._failure(rank, error) for rank, error in run.died.items()]
        if stopped is not None:
            raise stopped
        if failures:
            raise transfer.translate(failures) or _cell_error(failures, self.size)
        return [run.answers[rank][1] for rank in selected]

    def _finish(self, run: Run, timeout_s: float | None) -> CellError | None:
        """Wait for a run; end it on all ranks at a time-out, interrupt or death."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not run.wait(deadline, tick_s=0.5):
                if deadline is not None and time.monotonic() >= deadline:
                    return self._time_out(run, timeout_s)
                if run.died:
                    self._end(run)
                    return None
        except KeyboardInterrupt:
            return self._interrupted(run)
        return None

    def _time_out(self, run: Run, timeout_s: float | None) -> CellError:
        places = self.ask("nbdist.engine.agent:where")
        where = "; ".join(f"rank {i.rank} at {places[i.rank]}" for i in run.unfinished)
        self._end(run)
        return CellTimeout(
            f"not finished after {timeout_s:g} s: {where}. All ranks were interrupted "
            f"and keep their variables{self._left_behind(run)}"
        )

    def _interrupted(self, run: Run) -> CellError:
        self._end(run)
        return CellInterrupted(
            f"interrupted; all ranks keep their variables{self._left_behind(run)}"
        )

    def _end(self, run: Run) -> None:
        """Interrupt the ranks of a run, and wait for those that listen."""
        deadline = time.monotonic() + INTERRUPT_GRACE_S
        self.interrupt()
        try:
            run.wait(deadline)
        except KeyboardInterrupt:
            return  # a second press: the user does not want to wait

    def _left_behind(self, run: Run) -> str:
        left = run.unfinished
        if not left:
            return ""
        ranks = format_ranks(info.rank for info in left)
        return (
            f". Rank {ranks} has not come back within {INTERRUPT_GRACE_S:g} s: "
            "%dist_stacks shows where it is, and it takes no cell until then"
        )

    def _on_death(self, rank: int) -> None:
        """Called by the supervisor's thread."""
        started = self._started
        if started is None:
            return
        error = RankDied(self._obituary(rank, started))
        with self._lock:
            self._died[rank] = error
        started.link.fail(self._infos[rank].engine_uuid, error)

    def _obituary(self, rank: int, started: Started) -> str:
        info = self._infos[rank]
        path = started.keeper.run_dir / f"rank{rank}.stderr"
        text = path.read_text(errors="replace") if path.exists() else ""
        last = "".join(f"\n    {line}" for line in text.rstrip().splitlines()[-5:])
        said = f"; the last lines of its stderr:{last}\n" if last else ""
        return f"rank {rank} (pid {info.pid} on {info.host}) has died{said}"

    def _failure(self, rank: int, error: Any) -> Failure:
        host = self._infos[rank].host
        if isinstance(error, RankDied):
            return Failure(rank, host, "RankDied", str(error))
        ename, evalue, lines = error
        return Failure(rank, host, ename, evalue, tuple(lines))


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
        failures = [f for f in result.failures if f.ename != "KeyboardInterrupt"]
        error.rendered = render(failures, result.world_size)
    return error
