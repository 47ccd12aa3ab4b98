"""Leads an elastic run past the deaths of its ranks, and to other sizes.

A rank in an elastic run that was released from a collective pauses and says so. When
all that live have, the notebook changes the membership, by way of the paused main
threads, sends newcomers the same cell, and lets the others go on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace

from nbdist.cluster.call import Run
from nbdist.cluster.ipp_client import Answer
from nbdist.cluster.rank_registry import Roster
from nbdist.cluster.recovery import Recovery
from nbdist.cluster.shielded import shielded
from nbdist.config import ClusterConfig
from nbdist.errors import ChangeFailed, RankDied, ScaleFailed, UsageError
from nbdist.ipc import endpoints
from nbdist.wire import ElasticCall, RankInfo, Verdict, format_ranks

__all__ = ["Elastic"]

GRACE_S = 0.5
"""How long the news of a death may come after its effect."""
HOLD_TIMEOUT_S = 5.0


@dataclass
class _Lead:
    """How far a run has been led."""

    run: Run
    index: int = -1
    """Of the elastic call in its cell."""
    still_since: float | None = None
    """When all its ranks were first seen paused."""
    short_since: float | None = None
    """When it began to wait for ranks."""
    joined: set[str] = field(default_factory=set)
    """The engines that have joined it."""


class Elastic:
    """Decides what follows when the ranks of an elastic run have paused.

    Args:
        roster: The ranks.
        recovery: Changes their membership.
        config: As the cluster was started.
        on_note: Hears what was done, in words.
        survives: Whether the other ranks outlive one that dies.
    """

    def __init__(
        self,
        roster: Roster,
        recovery: Recovery,
        config: ClusterConfig,
        on_note: Callable[[str], None],
        *,
        survives: bool,
    ) -> None:
        self._roster = roster
        self._recovery = recovery
        self._config = config
        self._on_note = on_note
        self._survives = survives
        self._leads: dict[Run, _Lead] = {}
        self._wishes = Wishes()

    # -- from another thread -------------------------------------------------------

    def scale(self, size: int, *, drop: bool) -> str | None:
        """Have the elastic run that is under way take another size at its next commit.

        Returns:
            What was done, in words; None where there is no such run.

        Raises:
            UsageError: The run's limits, or variables that would be lost, forbid it.
        """
        run = next((run for run in list(self._leads) if run.elastic), None)
        if run is None:
            return None
        for notice in run.elastic.values():
            _check_limits(notice.call, size)
        if size == self._recovery.size and not self._roster.died:
            return f"the world is {size} ranks already"
        self._recovery.check(size, drop)
        wish = self._wishes.make(run, size)
        self._roster.tell(endpoints.ELASTIC_WANT_RESIZE, wish.number)
        return self._wishes.await_outcome(wish, lambda: run in self._leads)

    # -- from the thread that waits for the run ------------------------------------

    def begin(self, run: Run) -> None:
        """A run begins; it may turn out to be elastic."""
        self._leads[run] = _Lead(run)

    def end(self, run: Run) -> None:
        """The run has ended."""
        self._leads.pop(run, None)
        wish = self._wishes.open
        if wish is not None and wish.run is run:
            self._wishes.grant(None)

    def attend(self, run: Run) -> None:
        """Act, if every rank of the run that lives is paused.

        Raises:
            ChangeFailed: The ranks could not meet again.
        """
        lead, paused = self._leads[run], run.paused
        if not paused or len(paused) < len(run.unfinished):
            return
        call = next(iter(paused.values())).call
        if lead.index != call.index:
            if lead.index >= 0:
                run.restarts = 0
            lead.index = call.index
        try:
            verdict = self._judge(lead, call)
        except KeyboardInterrupt:
            run.decide(Verdict("interrupt"))  # they hold the signal back
            raise
        if verdict is not None:
            verdict = replace(verdict, granted=self._wishes.granted)
            lead.still_since = lead.short_since = None
            run.decide(verdict)

    def _judge(self, lead: _Lead, call: ElasticCall) -> Verdict | None:
        """What follows; None to wait."""
        run, paused = lead.run, lead.run.paused
        reasons = {notice.reason for notice in paused.values()}
        if run.failed:
            return Verdict("give up")
        if run.answers:
            if reasons == {"finished"}:
                return Verdict("finish")
            ended = format_ranks(run.answers)
            return Verdict("give up", f"the cell of rank {ended} has ended already")
        absent = {info.rank for info in self._roster.living} - paused.keys()
        if absent:
            return Verdict(
                "give up",
                f"{call.name} is an elastic run, which needs every rank: rank "
                f"{format_ranks(absent)} takes no part",
            )
        if reasons == {"resize"} and not self._roster.died:
            return self._resize(lead)
        return self._restart(lead, call)

    def _restart(self, lead: _Lead, call: ElasticCall) -> Verdict | None:
        """After a failure."""
        now = time.monotonic()
        dead = self._roster.died
        lead.still_since = lead.still_since or now
        if not dead and now < lead.still_since + GRACE_S:
            return None
        if dead and not self._survives:
            return None  # the others are about to die as well
        why = "; ".join(map(str, dead.values())) or next(
            notice.text for notice in lead.run.paused.values()
        )
        if self._config.on_failure == "stop":
            return Verdict("give up", f"{why}; and --on-failure is stop")
        if lead.run.restarts >= call.max_restarts:
            return Verdict(
                "give up", f"max_restarts={lead.run.restarts} are spent: {why}"
            )
        if self._too_few(call):
            return self._wait_for_ranks(lead, call, why)
        self._check_survivors(lead)
        if not self._hold(lead.run):
            return None  # another rank has died: there is more to mend
        lead.run.restarts += 1
        note = self._lead_over(
            lead, lambda: self._recovery.recover(self._ask_in(lead.run))
        )
        self._on_note(f"{why}\n{note}; {call.name} goes on")
        return Verdict("go on")

    def _check_survivors(self, lead: _Lead) -> None:
        """Whether a rank is left that has a commit; those that have joined may not."""
        processes = lead.run.processes
        if all(
            processes[rank] in lead.joined and not notice.commit
            for rank, notice in lead.run.paused.items()
        ):
            raise ChangeFailed("no rank is left that has the last commit")

    def _too_few(self, call: ElasticCall) -> bool:
        shrinks = self._config.on_failure == "shrink"
        return shrinks and len(self._roster.living) < call.min_ranks

    def _wait_for_ranks(
        self, lead: _Lead, call: ElasticCall, why: str
    ) -> Verdict | None:
        """With fewer ranks than the run wants: until `scale`, or the time is up."""
        living = len(self._roster.living)
        now = time.monotonic()
        if lead.short_since is None:
            lead.short_since = now
            self._on_note(
                f"{why}\n{living} ranks are left, and {call.name} needs "
                f"{call.min_ranks}: it waits {call.timeout_s:g} s for cluster.scale"
            )
        if now > lead.short_since + call.timeout_s:
            return Verdict(
                "give up",
                f"{living} ranks were left for {call.timeout_s:g} s, fewer than "
                f"min_ranks={call.min_ranks}: {why}",
            )
        if self._wishes.open is None or not self._hold(lead.run):
            return None
        lead.run.restarts += 1
        return self._resize(lead, held=True)

    def _resize(self, lead: _Lead, *, held: bool = False) -> Verdict | None:
        wish = self._wishes.open
        if wish is None:
            return Verdict("go on")
        if not held and not self._hold(lead.run):
            return None
        ask = self._ask_in(lead.run)

        def change() -> str:
            if self._roster.died:
                self._recovery.drop(ask)
            return self._recovery.scale(wish.size, ask)

        try:
            note = self._lead_over(lead, change)
        except ScaleFailed as error:
            self._wishes.refuse(error)
        else:
            self._wishes.grant(note)
        return Verdict("go on")

    # -- carrying it out -----------------------------------------------------------

    def _ask_in(self, run: Run) -> Callable[..., Future[Answer]]:
        """Asks paused ranks by orders, and newcomers by requests."""
        paused = set(run.processes.values())

        def ask(info: RankInfo, target: str, *args: object) -> Future[Answer]:
            if info.engine_uuid in paused:
                return run.order(info, target, *args)
            return self._roster.link.send(info.engine_uuid, target, *args).reply

        return ask

    def _hold(self, run: Run) -> bool:
        """Have no interrupt cut what follows; whether all ranks are there for it."""
        held = [run.order(info, endpoints.ELASTIC_HOLD) for info in run.unfinished]
        try:
            for future in held:
                future.result(HOLD_TIMEOUT_S)
        except (RankDied, NotYet):
            return False
        return True

    def _lead_over(self, lead: _Lead, change: Callable[[], str]) -> str:
        """Change the membership, and have newcomers join the run."""
        run = lead.run
        call = next(iter(run.paused.values())).call

        def whole() -> str:
            try:
                return change()
            finally:
                follow()

        def follow() -> None:
            known = set(run.processes.values())
            run.follow(self._roster.infos)
            new = [i for i in self._roster.living if i.engine_uuid not in known]
            for info in new:
                self._roster.tell(endpoints.ELASTIC_EXPECT, call, ranks=[info.rank])
                lead.joined.add(info.engine_uuid)
                run.join(info)

        return shielded(whole, self._recovery.interrupt)


def _check_limits(call: ElasticCall, size: int) -> None:
    if size < call.min_ranks:
        raise UsageError(f"-n {size}: {call.name} has min_ranks={call.min_ranks}")
    if call.max_ranks is not None and size > call.max_ranks:
        raise UsageError(f"-n {size}: {call.name} has max_ranks={call.max_ranks}")


LOOK_S = 0.2


@dataclass
class Wish:
    """One that is not granted yet."""

    run: Run
    size: int
    number: int
    """Counts from 1."""
    outcome: Future[str | None] = field(default_factory=Future)
    """What was done, in words; None when the run ended before."""


class Wishes:
    """At most one at a time. One thread makes it and waits, another grants it."""

    def __init__(self) -> None:
        self.open: Wish | None = None
        self.granted = 0
        """The number of the last one that is none any more."""

    def make(self, run: Run, size: int) -> Wish:
        """Wish that a run's ranks become so many.

        Raises:
            UsageError: There is one already.
        """
        if self.open is not None:
            raise UsageError(f"a change to {self.open.size} ranks is under way")
        self.open = Wish(run, size, self.granted + 1)
        return self.open

    def await_outcome(self, wish: Wish, goes_on: Callable[[], bool]) -> str | None:
        """What was done, in words; None when the run does not go on."""
        while True:
            with contextlib.suppress(NotYet):
                return wish.outcome.result(LOOK_S)
            if not goes_on() and self.open is wish:
                self.grant(None)  # it had ended before it could hear of the wish

    def refuse(self, error: Exception) -> None:
        """It cannot be had: whoever waits for it gets the error."""
        if (wish := self._close()) is not None:
            wish.outcome.set_exception(error)

    def grant(self, outcome: str | None) -> None:
        """It was done, or never will be."""
        if (wish := self._close()) is not None:
            wish.outcome.set_result(outcome)

    def _close(self) -> Wish | None:
        """The wish that was open, which is open no longer."""
        wish, self.open = self.open, None
        if wish is not None:
            self.granted = wish.number
        return wish
