"""A running cluster: execute, push, pull, look."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.cluster import transfer
from nbdist.cluster.failures import render, summary
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.observer import Event, Observer, Quiet
from nbdist.cluster.result import CellResult, RankResult
from nbdist.cluster.scripts import checked_script
from nbdist.cluster.shortage import explained
from nbdist.cluster.start import Progress
from nbdist.errors import CellError, RankDied, StartError
from nbdist.wire import Failure

if TYPE_CHECKING:
    from nbdist.cluster.rescue import Rescue
    from nbdist.cluster.run import Run

__all__ = ["Cluster"]

VARIABLES_TIMEOUT_S = 10.0
LOSS_TIMEOUT_S = 5.0
"""Until the end of the launcher is known, after that of its ranks."""
FIRST_LINE = "# %%distributed\n"
"""Stands where the notebook has the magic, so that line numbers agree."""

QUIET = Quiet()


class Cluster(Lifecycle):
    """Ranks of one distributed PyTorch program, driven from here.

    Creating one checks the request and starts nothing; `start`, or entering a `with`,
    brings it up. Leaving the `with`, `stop`, or the end of this process takes it down.

    Args:
        n: Number of ranks; default one per visible GPU, else min(4, cores).
        options: The fields of `nbdist.config.ClusterConfig`, such as `device="cpu"`.

    Raises:
        UsageError: The request cannot be met on this machine.
    """

    def __enter__(self) -> Cluster:
        return self if self.running else self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def restart(
        self, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> Cluster:
        """Begin anew with the same options and size, and run the setup cells again."""
        self.stop()
        self.start(on_progress)
        for code, number in self._setup:
            self.execute(code, number=number)
        return self

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
        selected = self._select(ranks)
        collected = _Collected(observer)
        if not code.lstrip().startswith("%%"):
            code = FIRST_LINE + code
        if setup:
            self._setup.append((code, number))
        target, what = "nbdist.engine.cells:run_cell", f"In[{number}]"
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
        collected = _Collected(observer)
        script = checked_script(path, n_ps, self.size)
        arguments = str(script), [str(each) for each in args], n_ps, keep
        target = "nbdist.engine.run_script:run_script"
        return self._see(
            target, selected, arguments, script.name, collected, timeout_s, check
        )

    def _see(
        self,
        target: str,
        ranks: Sequence[int],
        args: tuple[object, ...],
        what: str,
        collected: _Collected,
        timeout_s: float | None,
        check: bool,
    ) -> CellResult:
        """Have ranks run code that answers with a `CellReply`; see it to its end."""
        run, stopped = self._attempt(target, ranks, args, what, collected, timeout_s)
        result = CellResult(collected.results(run), self.size)
        for failure in self._failures(run):
            result[failure.rank].failure = failure
        for failure in self._explained(result.failures):
            result[failure.rank].failure = failure
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
        """Each rank's Python stack, also while its main thread is blocked.

        None from a rank that does not answer; `last_seen` says where it was.
        """
        return self._live().ask("nbdist.engine.agent:stack")

    def last_seen(self, rank: int) -> str:
        """Where a rank was when it last answered in a cell; "" if that is not known.

        While a cell runs, all ranks are asked every two seconds.
        """
        place, when = self._live().last_places.get(rank, ("", 0.0))
        return place and f"{time.monotonic() - when:.0f} s ago at {place}"

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

    # -- inside ----------------------------------------------------------------

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
        run, stopped = self._attempt(target, selected, args, what, observer, timeout_s)
        failures = self._explained(self._failures(run))
        if stopped is not None or failures:
            transfer.refuse(answer.value for answer in run.answers.values())
        if stopped is not None:
            raise stopped
        if failures:
            raise transfer.translate(failures) or _cell_error(failures, self.size)
        return [answer.value for answer in run.answers.values()]

    def _attempt(
        self,
        target: str,
        ranks: Sequence[int],
        args: tuple[object, ...],
        what: str,
        observer: Observer,
        timeout_s: float | None,
    ) -> tuple[Run, CellError | None]:
        """Have ranks do something, and see it to its end.

        Where the whole world is lost in an elastic run, another one takes its place.
        """
        restarts = 0
        while True:
            run = self._run(target, dict.fromkeys(ranks, args), what, observer)
            stopped, rescue = self._see_through(run, timeout_s)
            if rescue is None:
                break
            self._begin_anew(rescue, restarts)
            restarts += 1
            ranks = range(self.size)
        if restarts:
            self._begin_from(self._resume)
        return run, stopped

    def _see_through(
        self, run: Run, timeout_s: float | None
    ) -> tuple[CellError | None, Rescue | None]:
        """Why it was stopped, if it was, and what is saved if the world was lost."""
        from nbdist.cluster.rescue import Rescue

        try:
            stopped = self._supervisor_of().see_through(run, timeout_s)
        except StartError as error:
            rescue = Rescue.from_survivors(self._live(), run.paused)
            if rescue is None:
                raise self._give_up(error) from error
            return None, rescue
        call = run.lost_in
        survives = self.fault_tolerant or self.config.on_failure == "stop"
        if stopped is not None or call is None or survives:
            return stopped, None
        self._loss.wait(LOSS_TIMEOUT_S)
        return None, Rescue(call, self._commit)

    def _begin_anew(self, rescue: Rescue, restarts: int) -> None:
        """Start another world, to go on from what was saved of this one."""
        call = rescue.call
        if restarts >= call.max_restarts:
            self.stop()
            raise RankDied(
                f"max_restarts={restarts} are spent, and {self.mpi} ends all ranks "
                f"when one dies; {rescue.keep()}"
                if not self.fault_tolerant
                else f"max_restarts={restarts} are spent; {rescue.keep()}"
            )
        self.restart()
        self._commit = rescue.commit  # until there is a later one
        run_dir = self._live().run_dir
        shipment = rescue.shipment(run_dir)
        if shipment is not None:
            self._call("nbdist.engine.calls:store", (shipment,), None, "variables")
        self._begin_from(rescue.resume(run_dir) or self._resume)
        self.on_note(
            f"all {self.size} ranks were lost, and started again; {call.name} "
            + ("goes on from its last commit" if rescue.commit else "begins anew")
        )

    def _explained(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures; those for want of a GPU's memory say who holds what."""
        roster = self._live()
        return explained(
            failures, roster.infos, lambda: roster.ask("nbdist.engine.agent:memory")
        )

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

    def __init__(self, observer: Observer) -> None:
        self._text: dict[tuple[str, str], list[str]] = {}
        self._outputs: dict[str, list[dict[str, Any]]] = {}
        self._observer = observer

    def take(self, event: Event) -> None:
        message = event.output
        if message is None:
            pass
        elif message["msg_type"] == "stream":
            content = message["content"]
            key = event.process, content["name"]
            self._text.setdefault(key, []).append(content["text"])
        elif message["msg_type"] in ("display_data", "execute_result"):
            outputs = self._outputs.setdefault(event.process, [])
            outputs.append(message["content"]["data"])
        self._observer.take(event)

    def due(self) -> float | None:
        return self._observer.due()

    def notice(self, text: str) -> None:
        self._observer.notice(text)

    def results(self, run: Run) -> dict[int, RankResult]:
        """Each rank's part of a run of cells that has ended."""
        results = {}
        for rank, process in run.processes.items():
            stdout, stderr = (
                "".join(self._text.get((process, name), []))
                for name in ("stdout", "stderr")
            )
            outputs = self._outputs.get(process, [])
            results[rank] = RankResult(rank, stdout, stderr, outputs)
            answer = run.answers.get(rank)
            if answer is not None and answer.ok:
                results[rank].failure, results[rank].seconds = answer.value
        return results


def _cell_error(failures: Sequence[Failure], world_size: int) -> CellError:
    return CellError(summary(failures, world_size), render(failures, world_size))


def _with_result(error: CellError, result: CellResult) -> CellError:
    error.result = result
    if not error.rendered:
        expected = ("KeyboardInterrupt", "Unfinished")
        failures = [f for f in result.failures if f.ename not in expected]
        error.rendered = render(failures, result.world_size)
    return error
