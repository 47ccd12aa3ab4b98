"""Sees every run to its end: nothing waits for a rank that will not come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING

from nbdist.cluster.call import Run
from nbdist.cluster.ipp_client import Answer
from nbdist.cluster.rank_registry import Roster
from nbdist.cluster.recovery import Recovery
from nbdist.cluster.stall_detector import Standstill
from nbdist.errors import CellError, CellInterrupted, CellTimeout, UsageError
from nbdist.ipc import endpoints
from nbdist.wire import CollectiveCall, format_ranks

if TYPE_CHECKING:
    from nbdist.cluster.elastic import Elastic

__all__ = ["Supervisor"]

INTERRUPT_GRACE_S = 5.0
RELEASE_AFTER_S = 0.5
PROBE_S = 0.1
"""How often waiting ranks are asked what they wait for, once a rank is missing."""
STEADY_S = 0.3
"""How long a rank must have been seen in one call: all its data would be there."""
RENEW_TIMEOUT_S = 20.0


Waiting = dict[int, tuple[CollectiveCall, float]]
"""What each rank waits in, and since when it was seen there (monotonic clock)."""


class Supervisor:
    """Waits for runs, ends those that cannot end, and mends the ranks afterwards."""

    def __init__(self, roster: Roster, recovery: Recovery) -> None:
        self._roster = roster
        self._recovery = recovery
        self._unfinished: list[Run] = []
        self._spent = False
        self._groups: dict[str, int] = {}
        """How many process groups each engine has made, as it last said."""
        self._mourned: set[str] = set()
        """The dead engines that the living have been released from."""
        self.is_waiting = False
        """Whether a run is being seen through, so that its error says what happens."""
        self.elastic: Elastic | None = None
        """Leads elastic runs on, where that can be."""
        self.repair: Callable[[], None] = lambda: None
        """Makes the ranks a whole world again."""

    def admit(self, ranks: Iterable[int]) -> None:
        """Before a run: its ranks must be idle, and able to communicate.

        Raises:
            UsageError: A rank was left behind by an earlier cell.
        """
        busy = self._busy()
        if busy & set(ranks):
            raise UsageError(
                f"still busy with an earlier cell: {self._places(busy & set(ranks))}. "
                f"Wait for it, or {self._replacing(busy & set(ranks))}"
            )
        self._renew_if_spent()
        if self._recovery.is_broken:
            self.repair()

    @property
    def busy(self) -> bool:
        """Whether a living rank is still at work."""
        return bool(self._busy())

    def mended(self) -> None:
        """The ranks have met anew."""
        self._spent = False
        self._groups.clear()

    def see_through(self, run: Run, timeout_s: float | None) -> CellError | None:
        """Wait until a run has ended on all its ranks.

        Returns:
            None, or why it was ended before it had finished.

        Raises:
            UsageError: The time-out makes no sense; nothing was sent.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"--timeout {timeout_s:g} is not above 0 seconds")
        self._unfinished.append(run)
        self.is_waiting = True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        waiting: Waiting = {}
        stopped: CellError | None = None
        standstill = Standstill(self._roster, run)
        try:
            if self.elastic is not None:
                self.elastic.begin(run)
            run.begin()
            while not run.wait(deadline, tick_s=PROBE_S):
                if run.lost:
                    self._end(run)
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    stopped = self._time_out(run, timeout_s)
                    break
                standstill.look()
                self._release_from_dead()
                waiting = self._release_waiting(run, waiting)
                if self.elastic is not None:
                    self.elastic.attend(run)
        except KeyboardInterrupt:
            stopped = self._interrupt(run)
        finally:
            self.is_waiting = False
            if self.elastic is not None:
                self.elastic.end(run)
        self._spent |= run.spent or bool(run.unfinished) or self._differ_after(run)
        with contextlib.suppress(KeyboardInterrupt):  # then the next run does it
            self._renew_if_spent()
        return stopped

    # -- ranks that will not come --------------------------------------------------

    def _release_from_dead(self) -> None:
        """Let the living out of what they do with the dead: these will never come."""
        dead = [
            info
            for info in map(self._roster.__getitem__, self._roster.died)
            if info.engine_uuid not in self._mourned
        ]
        if dead:
            self._mourned |= {info.engine_uuid for info in dead}
            ranks = [info.rank for info in dead]
            reason = f"rank {format_ranks(ranks)} has died"
            self._roster.tell(endpoints.RELEASE_FROM, ranks, reason)

    def _release_waiting(self, run: Run, before: Waiting) -> Waiting:
        """Release ranks that wait in a collective for one that is at work no more.

        Its cell has ended or is paused, or it was not asked. A call that has been there
        for a while is not about to complete.

        Returns:
            What each rank waits in now.
        """
        busy = self._busy() - run.paused.keys()
        if busy >= {info.rank for info in self._roster.infos}:
            return {}
        ranks = busy & {info.rank for info in run.unfinished}
        calls = self._roster.ask(endpoints.WAITING, ranks=ranks)
        now = time.monotonic()
        waiting: Waiting = {}
        for rank, call in calls.items():
            if call is None:
                continue
            seen = before.get(rank)
            since = seen[1] if seen is not None and seen[0] == call else now
            waiting[rank] = call, since
            missing = set(call.members) - busy
            if missing and now >= since + STEADY_S:
                reason = self._reason(call, missing, set(run.processes))
                self._roster.ask(endpoints.RELEASE, reason, ranks=[rank])
        return waiting

    def _reason(self, call: CollectiveCall, missing: set[int], asked: set[int]) -> str:
        dead = missing & self._roster.died.keys()
        ended = missing - dead
        whys = [f"rank {format_ranks(dead)} has died"] if dead else []
        if ended & asked:
            whys.append(f"the cell of rank {format_ranks(ended & asked)} has ended")
        if ended - asked:
            whys.append(f"rank {format_ranks(ended - asked)} was not asked to run it")
        return f"released from {call.operation}: {' and '.join(whys)}"

    def _busy(self) -> set[int]:
        """The living ranks that have not answered some run."""
        for run in self._unfinished:
            run.wait(time.monotonic())  # answers that came meanwhile
        self._unfinished = [run for run in self._unfinished if run.unfinished]
        # News of a death reaches the roster first, and its runs a moment later.
        living = {info.engine_uuid for info in self._roster.living}
        return {
            info.rank
            for run in self._unfinished
            for info in run.unfinished
            if info.engine_uuid in living
        }

    # -- ending a run --------------------------------------------------------------

    def _time_out(self, run: Run, timeout_s: float | None) -> CellError:
        where = self._places(info.rank for info in run.unfinished)
        self._end(run, "timed out")
        return CellTimeout(
            f"not finished after {timeout_s:g} s: {where}. All ranks were interrupted "
            f"and keep their variables{self._left_behind(run)}"
        )

    def _interrupt(self, run: Run) -> CellError:
        self._end(run)
        return CellInterrupted(
            f"interrupted; all ranks keep their variables{self._left_behind(run)}"
        )

    def _end(self, run: Run, outcome: str = "interrupted") -> None:
        """Interrupt the ranks of a run, and wait for those that listen."""
        begun = time.monotonic()
        try:
            run.interrupt(outcome)
            if not run.wait(begun + RELEASE_AFTER_S):
                # A rank that waits in C++, as in DDP's backward, hears no signal.
                ranks = [info.rank for info in run.unfinished]
                release = endpoints.RELEASE
                self._roster.ask(release, "interrupted", ranks=ranks)
            run.wait(begun + INTERRUPT_GRACE_S)
        except KeyboardInterrupt:
            return  # a second press: the user does not want to wait

    def _left_behind(self, run: Run) -> str:
        left = run.unfinished
        if not left:
            return ""
        ranks = format_ranks(info.rank for info in left)
        return (
            f". Rank {ranks} has not come back within {INTERRUPT_GRACE_S:g} s "
            f"({self._places(info.rank for info in left)}): it takes no cell until it "
            f"does. %dist_stacks shows more; "
            + self._replacing({info.rank for info in left})
        )

    def _replacing(self, ranks: Collection[int]) -> str:
        """How ranks that do not come back are replaced, and what that costs."""
        if set(ranks) >= {info.rank for info in self._roster.living}:
            return (
                "%dist_restart starts all ranks again, without their variables and "
                "with the setup cells"
            )
        return (
            f"%dist_restart -r {format_ranks(ranks)} puts a new process in its place, "
            "and the other ranks keep everything"
        )

    def _places(self, ranks: Iterable[int]) -> str:
        places = self._roster.ask(endpoints.WHERE, ranks=ranks)
        return "; ".join(
            f"rank {rank} at {place}" if place else f"rank {rank} does not answer"
            for rank, place in places.items()
        )

    # -- mending -------------------------------------------------------------------

    def _differ_after(self, run: Run) -> bool:
        """Whether some ranks have made process groups that others have not."""
        answers, processes = run.answers, run.processes
        self._groups |= {processes[r]: answers[r].groups for r in answers}
        living = [info.engine_uuid for info in self._roster.living]
        return len({self._groups.get(uuid, 0) for uuid in living}) > 1

    def _renew_if_spent(self) -> None:
        """Give the ranks working collectives again, as soon as all are idle.

        With a dead rank there is no renewing: its survivors have no world to meet in.
        """
        if not self._spent or self._roster.died or self._busy():
            return
        link = self._roster.link
        asked = [
            link.send(info.engine_uuid, endpoints.RENEW, what="renew")
            for info in self._roster.living
        ]
        replies = [exchange.reply for exchange in asked]
        wait(replies, RENEW_TIMEOUT_S, return_when=FIRST_EXCEPTION)
        answers = [_answer(reply) for reply in replies]
        if not all(answer is not None and answer.ok for answer in answers):
            self._recovery.is_broken = True  # whoever lives is to meet again
            return
        whole = [answer for answer in answers if answer is not None]
        self._roster.update(answer.value for answer in whole)
        self._groups = {
            exchange.engine_uuid: answer.groups
            for exchange, answer in zip(asked, whole, strict=True)
        }
        self._spent = False


def _answer(reply: Future[Answer]) -> Answer | None:
    """None from a rank that has died, or is late."""
    if not reply.done() or reply.exception() is not None:
        return None
    return reply.result()
