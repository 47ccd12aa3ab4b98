"""Requests to the ranks, seen to their end, and begun anew in another world if lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.cluster import transfer
from nbdist.cluster.failures import cell_error, failures_of, summary
from nbdist.cluster.lifecycle import Lifecycle
from nbdist.cluster.observer import Observer, Quiet
from nbdist.cluster.shortage import explained
from nbdist.errors import CellError, RankDied, StartError
from nbdist.wire import Failure

if TYPE_CHECKING:
    from nbdist.cluster.rescue import Rescue
    from nbdist.cluster.run import Run

__all__ = ["QUIET", "Requests"]

LOSS_TIMEOUT_S = 5.0
"""Until the end of the launcher is known, after that of its ranks."""

QUIET = Quiet()


class Requests(Lifecycle, ABC):
    """A running cluster that can be asked; `Cluster` says what for."""

    @abstractmethod
    def restart(self) -> Lifecycle:
        """Begin anew with the same options and size, and run the setup cells again."""

    def _run(
        self,
        target: str,
        args: dict[int, tuple[object, ...]],
        what: str,
        observer: Observer,
        *,
        needs_all: bool = False,
    ) -> Run:
        from nbdist.cluster.run import Run

        roster = self._live()
        self._supervisor_of().admit(args)
        infos = [roster[rank] for rank in args]
        return Run(
            roster.link, infos, target, args, what, observer, needs_all=needs_all
        )

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


def _that_say_more(failures: Sequence[Failure]) -> list[Failure]:
    """Those that say more than that a rank was interrupted, or has not come back."""
    return [failure for failure in failures if failure.evalue not in ("", "still busy")]
