"""Continues an elastic run when its ranks die or its size changes.

A rank of an elastic run that is released from a collective pauses and sends the
notebook a notice. When every living rank has paused, the notebook changes the members
of the world. The main threads of the paused ranks carry the change out. The notebook
then sends the same cell to new ranks, and ends the pause.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace

from nbdist.clusters.call import Call
from nbdist.clusters.ipp_client import Answer
from nbdist.clusters.rank_registry import RankRegistry
from nbdist.clusters.recovery import Recovery
from nbdist.clusters.resize import Resize
from nbdist.config import ClusterConfig
from nbdist.errors import (
    CellInterrupted,
    ChangeFailed,
    RankDied,
    ScaleFailed,
    UsageError,
)
from nbdist.ipc import endpoints
from nbdist.ipc.locks import Future
from nbdist.wire import ElasticCall, RankInfo, Verdict, format_ranks

__all__ = ["Elastic"]

GRACE_S = 0.5
"""The most seconds between a failure and the notice of the death that caused it."""
DEFER_TIMEOUT_S = 5.0
POLL_S = 0.2


@dataclass
class _Progress:
    """The progress of an elastic run."""

    call: Call
    """The call that the run is part of."""
    deadline: float | None
    """When the call must have ended, on the monotonic clock; None for no limit."""
    index: int = -1
    """Position of the run among the elastic runs of its cell; -1 before the first."""
    still_since: float | None = None
    """When all ranks had paused, on the monotonic clock."""
    short_since: float | None = None
    """When the run began to wait for more ranks, on the monotonic clock."""
    joined: set[str] = field(default_factory=set)
    """UUIDs of the engines that joined after the run began."""


class Elastic:
    """Decides how an elastic run continues when its ranks have paused.

    Args:
        registry: The ranks.
        recovery: Changes the members of the world.
        config: The configuration that the cluster was started with.
        on_note: Called with a description of each change.
        survives: Whether the other ranks survive the death of one.
    """

    def __init__(
        self,
        registry: RankRegistry,
        recovery: Recovery,
        config: ClusterConfig,
        on_note: Callable[[str], None],
        *,
        survives: bool,
    ) -> None:
        self._registry = registry
        self._recovery = recovery
        self._config = config
        self._on_note = on_note
        self._survives = survives
        self._followed: dict[Call, _Progress] = {}
        self._resizes = ResizeRequests()

    # -- from another thread -------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a call is in an elastic run."""
        return any(call.elastic for call in list(self._followed))

    def scale(self, resize: Resize, *, drop: bool) -> str | None:
        """Change the ranks of the running elastic run at its next commit, and wait.

        Returns:
            A description of the change; None if no elastic run is running.

        Raises:
            UsageError: The run's limits forbid the size, or variables would be lost.
        """
        call = next((call for call in list(self._followed) if call.elastic), None)
        if call is None:
            return None
        for notice in call.elastic.values():
            _check_limits(notice.call, resize.size)
        size = self._recovery.size
        if resize == Resize(size) and not self._registry.died:
            return f"the world has {size} ranks already"
        if len(resize.leaving) == size:
            raise UsageError("one rank must stay, which has the run's last commit")
        self._recovery.check(resize, drop)
        request = self._resizes.make(call, resize)
        self._registry.tell(endpoints.ELASTIC_WANT_RESIZE, request.number)
        return self._resizes.await_outcome(request, lambda: call in self._followed)

    def save(self) -> None:
        """Have rank 0 write the next commit of a run to the file of its state."""
        self._registry.tell(endpoints.ELASTIC_WANT_SAVE)

    # -- from the thread that waits for the call ------------------------------------

    def begin(self, call: Call, deadline: float | None) -> None:
        """Follow a call, which may contain elastic runs.

        Args:
            deadline: When the call must have ended, on the monotonic clock; None for no
                limit.
        """
        self._followed[call] = _Progress(call, deadline)

    def postpone(self, call: Call, deadline: float | None) -> None:
        """Set another deadline for a call that is followed."""
        self._followed[call].deadline = deadline

    def end(self, call: Call) -> None:
        """Stop following a call that has ended."""
        self._followed.pop(call, None)
        request = self._resizes.pending
        if request is not None and request.call is call:
            self._resizes.complete(None)

    def attend(self, call: Call) -> None:
        """Decide how the run continues, if every living rank of the call has paused.

        Raises:
            ChangeFailed: The ranks could not form a world again.
            KeyboardInterrupt: The user has interrupted the call, or its time is up.
        """
        progress, paused = self._followed[call], call.paused
        if not paused or len(paused) < len(call.unfinished):
            return
        run = next(iter(paused.values())).call
        if progress.index != run.index:
            if progress.index >= 0:
                call.restarts = 0
            progress.index = run.index
        try:
            verdict = self._judge(progress, run)
        except KeyboardInterrupt:
            self.release(call)
            raise
        if verdict is not None:
            verdict = replace(verdict, completed_resize=self._resizes.completed)
            progress.still_since = progress.short_since = None
            call.decide(verdict)

    def release(self, call: Call) -> None:
        """End the pauses of a call's ranks, which defer SIGINT, by an interrupt."""
        call.decide(Verdict("interrupt"))

    def _judge(self, progress: _Progress, run: ElasticCall) -> Verdict | None:
        """The verdict; None to wait longer."""
        call, paused = progress.call, progress.call.paused
        reasons = {notice.reason for notice in paused.values()}
        if call.failed:
            return Verdict("give up")
        if call.answers:
            if reasons == {"finished"}:
                return Verdict("finish")
            ended = format_ranks(call.answers)
            return Verdict("give up", f"the cell of rank {ended} has ended already")
        absent = {info.rank for info in self._registry.living} - paused.keys()
        if absent:
            return Verdict(
                "give up",
                f"{run.name} is an elastic run, which needs every rank: rank "
                f"{format_ranks(absent)} takes no part",
            )
        if reasons == {"resize"} and not self._registry.died:
            return self._resize(progress)
        return self._restart(progress, run)

    def _restart(self, progress: _Progress, run: ElasticCall) -> Verdict | None:
        """The verdict after a failure; None to wait longer."""
        now = time.monotonic()
        dead = self._registry.died
        progress.still_since = progress.still_since or now
        if not dead and now < progress.still_since + GRACE_S:
            return None
        if dead and not self._survives:
            return None  # the other ranks are about to die too
        why = "; ".join(death.summary for death in dead.values()) or next(
            notice.text for notice in progress.call.paused.values()
        )
        if self._config.on_failure == "stop":
            return Verdict("give up", f"{why}; and --on-failure is stop")
        if progress.call.restarts >= run.max_restarts:
            return Verdict(
                "give up", f"max_restarts={progress.call.restarts} are used up: {why}"
            )
        if self._too_few(run):
            return self._wait_for_ranks(progress, run, why)
        self._check_survivors(progress)
        if not self._defer_interrupts(progress.call):
            return (
                None  # another rank has died: wait until all living ranks have paused
            )
        progress.call.restarts += 1

        def recover() -> str:
            try:
                note = self._recovery.recover(self._ask_in(progress.call))
            except CellInterrupted as stopped:
                self._on_note(f"{why}\n{stopped}")
                raise
            if not self._recovery.is_interrupted:  # else the cell ends after this
                note += f"; {run.name} continues"
            self._on_note(f"{why}\n{note}")
            return note

        self._change_members(progress, recover)
        return Verdict("continue")

    def _check_survivors(self, progress: _Progress) -> None:
        """Check that a rank has the last commit. A rank that has joined may lack it.

        Raises:
            ChangeFailed: No rank has the last commit.
        """
        processes = progress.call.processes
        if all(
            processes[rank] in progress.joined and not notice.commit
            for rank, notice in progress.call.paused.items()
        ):
            raise ChangeFailed("no rank is left that has the last commit")

    def _too_few(self, run: ElasticCall) -> bool:
        shrinks = self._config.on_failure == "shrink"
        return shrinks and len(self._registry.living) < run.min_ranks

    def _wait_for_ranks(
        self, progress: _Progress, run: ElasticCall, why: str
    ) -> Verdict | None:
        """Wait for `scale` while fewer ranks live than the run needs."""
        living = len(self._registry.living)
        now = time.monotonic()
        if progress.short_since is None:
            progress.short_since = now
            self._on_note(
                f"{why}\n{living} ranks are left, and {run.name} needs "
                f"{run.min_ranks}: it waits {run.timeout_s:g} s for cluster.scale"
            )
        if now > progress.short_since + run.timeout_s:
            return Verdict(
                "give up",
                f"{living} ranks were left for {run.timeout_s:g} s, fewer than "
                f"min_ranks={run.min_ranks}: {why}",
            )
        if self._resizes.pending is None or not self._defer_interrupts(progress.call):
            return None
        progress.call.restarts += 1
        return self._resize(progress, is_deferred=True)

    def _resize(
        self, progress: _Progress, *, is_deferred: bool = False
    ) -> Verdict | None:
        request = self._resizes.pending
        if request is None:
            return Verdict("continue")
        if not is_deferred and not self._defer_interrupts(progress.call):
            return None
        ask = self._ask_in(progress.call)

        def change() -> str:
            resize = request.resize
            if self._registry.died:
                self._recovery.drop(ask)
                # The ranks have other numbers now.
                resize = Resize.to(resize.size, self._recovery.size)
            return self._recovery.scale(resize, ask)

        try:
            note = self._change_members(progress, change)
        except ScaleFailed as error:
            self._resizes.refuse(error)
        else:
            self._resizes.complete(note)
        return Verdict("continue")

    # -- changing the members ------------------------------------------------------

    def _ask_in(self, call: Call) -> Callable[..., Future[Answer]]:
        """A function that sends paused ranks orders, and other ranks requests."""
        paused = set(call.processes.values())

        def ask(info: RankInfo, target: str, *args: object) -> Future[Answer]:
            if info.engine_uuid in paused:
                return call.order(info, target, *args)
            return self._registry.send(info, target, *args)

        return ask

    def _defer_interrupts(self, call: Call) -> bool:
        """Make all ranks defer interrupts; False if a rank died or did not answer."""
        answers = [
            call.order(info, endpoints.ELASTIC_DEFER) for info in call.unfinished
        ]
        try:
            for future in answers:
                future.result(DEFER_TIMEOUT_S)
        except (RankDied, NotYet):
            return False
        return True

    def _change_members(self, progress: _Progress, change: Callable[[], str]) -> str:
        """Change the members of the world, and add new ranks to the call."""
        call = progress.call
        run = next(iter(call.paused.values())).call

        def follow() -> None:
            known = set(call.processes.values())
            call.follow(self._registry.infos)
            new = [i for i in self._registry.living if i.engine_uuid not in known]
            for info in new:
                # Wait, because the cell, on the other channel, must not arrive first.
                self._registry.ask(endpoints.ELASTIC_EXPECT, run, ranks=[info.rank])
                progress.joined.add(info.engine_uuid)
                call.join(info, run)

        with self._recovery.interruptible(progress.deadline):
            try:
                return change()
            finally:
                follow()


def _check_limits(run: ElasticCall, size: int) -> None:
    if size < run.min_ranks:
        raise UsageError(f"-n {size}: {run.name} has min_ranks={run.min_ranks}")
    if run.max_ranks is not None and size > run.max_ranks:
        raise UsageError(f"-n {size}: {run.name} has max_ranks={run.max_ranks}")


@dataclass
class ResizeRequest:
    """A request to change the ranks of an elastic run."""

    call: Call
    resize: Resize
    number: int
    """The number of the request, from 1."""
    outcome: Future[str | None] = field(default_factory=Future)
    """A description of the change; None if the call ended before it."""


class ResizeRequests:
    """The resize requests of a cluster. At most one is pending.

    One thread makes a request and waits for its outcome. The thread that waits for the
    call completes the request.
    """

    def __init__(self) -> None:
        self.pending: ResizeRequest | None = None
        self.completed = 0
        """Number of the last request that was completed."""

    def make(self, call: Call, resize: Resize) -> ResizeRequest:
        """Make a request to change the ranks of a call.

        Raises:
            UsageError: Another request is pending.
        """
        if self.pending is not None:
            raise UsageError(
                f"a change to {self.pending.resize.size} ranks is under way: wait for "
                "it"
            )
        self.pending = ResizeRequest(call, resize, self.completed + 1)
        return self.pending

    def await_outcome(
        self, request: ResizeRequest, is_running: Callable[[], bool]
    ) -> str | None:
        """Wait for a request.

        Args:
            request: The request.
            is_running: Whether the call is still running.

        Returns:
            A description of the change; None if the call has ended.
        """
        while True:
            with contextlib.suppress(NotYet):
                return request.outcome.result(POLL_S)
            if not is_running() and self.pending is request:
                self.complete(None)  # the call ended before it saw the request

    def refuse(self, error: Exception) -> None:
        """Complete the pending request with an error, which `await_outcome` raises."""
        if (request := self._close()) is not None:
            request.outcome.set_exception(error)

    def complete(self, outcome: str | None) -> None:
        """Complete the pending request."""
        if (request := self._close()) is not None:
            request.outcome.set_result(outcome)

    def _close(self) -> ResizeRequest | None:
        """Remove and return the pending request."""
        request, self.pending = self.pending, None
        if request is not None:
            self.completed = request.number
        return request
