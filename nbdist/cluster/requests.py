"""Requests to the ranks, seen to their end, and begun anew in another world if lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbdist.cluster import transfer
from nbdist.cluster.failures import cell_error, failures_of, summary
from nbdist.cluster.lifecycle import Lifecycle, whole_loss
from nbdist.cluster.observer import Observer, Quiet
from nbdist.cluster.oom_report import explained
from nbdist.errors import CellError, ChangeFailed, ClusterError, RankDied
from nbdist.ipc import endpoints
from nbdist.ipc.shm_payload import discard
from nbdist.wire import ElasticCall, Failure, Notice, format_ranks

if TYPE_CHECKING:
    from nbdist.cluster.call import Run
    from nbdist.cluster.world_restart import LastCommit, Rescue

__all__ = ["QUIET", "Requests"]

LOSS_TIMEOUT_S = 5.0
"""Until the end of the launcher is known, after that of its ranks."""

QUIET = Quiet()


class Requests(Lifecycle):
    """A running cluster that can be asked; `Cluster` says what for."""

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

    def _rebuild(self, error: ChangeFailed) -> str:
        """Start all ranks again, with the variables of those that live."""
        rescue = self._rescue(error, {})
        self.restart()
        return (
            f"the ranks could not meet again ({error}), and all were started again; "
            + self._give_back(rescue)
        )

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
        lost = f"{whole_loss(died)}. A" if died else "a"
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
        lost = whole_loss(self._live().died)
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

    def _explained(self, failures: Sequence[Failure]) -> list[Failure]:
        """The failures; those for want of a GPU's memory say who holds what."""
        roster = self._live()
        return explained(
            failures,
            roster.infos,
            lambda: roster.ask(endpoints.MEMORY),
        )


def _that_say_more(failures: Sequence[Failure]) -> list[Failure]:
    """Those that say more than that a rank was interrupted, or has not come back."""
    return [failure for failure in failures if failure.evalue not in ("", "still busy")]
