"""Replacing, dropping and adding ranks of a running cluster."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from nbdist.cluster.ipp_client import Answer
from nbdist.cluster.rank_registry import Roster
from nbdist.cluster.startup_status import Arrival
from nbdist.errors import ChangeFailed, RankDied
from nbdist.ipc import endpoints
from nbdist.ipc.device_assignment import DeviceAssignment, write_assignments
from nbdist.ipc.process_files import JOINING
from nbdist.wire import Change, Join, RankInfo, format_ranks

__all__ = ["Ask", "Membership"]

Ask = Callable[..., "Future[Answer]"]
"""Has a rank's main thread call a function: `ask(info, target, *args)`."""

POLL_S = 0.02
MEET_TIMEOUT_S = 30.0
"""For what the ranks do in a change, apart from the start of new processes."""
CANCEL_TIMEOUT_S = 5.0
"""Until every rank has left a change that was cancelled."""


class Membership:
    """Leads the living ranks from one generation to the next.

    Each method takes `ask`, which reaches the main threads of the ranks. A method that
    fails leaves the ranks without a working world, but with all their variables:
    another change makes them a world again.

    Args:
        roster: The ranks; it is brought up to date.
        assignments: What each rank may use, by rank; changed in place.
        timeout_s: Seconds until newcomers must be up.
    """

    def __init__(
        self, roster: Roster, assignments: list[DeviceAssignment], timeout_s: float
    ) -> None:
        self._roster = roster
        self._assignments = assignments
        self._timeout_s = timeout_s
        self._base = self._generation = 0
        self._reserve = Reserve(roster.run_dir)
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """End the change that is under way with KeyboardInterrupt. From any thread."""
        self._interrupted.set()

    def replace_dead(self, ask: Ask) -> list[RankInfo]:
        """Put a new process in the place of each dead rank; the newcomers.

        Raises:
            ChangeFailed: A further rank has died, or a newcomer did not come up.
        """
        numbers = {info.engine_uuid: info.rank for info in self._roster.living}
        return self._change(numbers, self._assignments, sorted(self._roster.died), ask)

    def drop_dead(self, ask: Ask) -> None:
        """Go on with the living, renumbered in their old order.

        Raises:
            ChangeFailed: A further rank has died.
        """
        living = self._roster.living
        numbers = {info.engine_uuid: rank for rank, info in enumerate(living)}
        self._change(
            numbers, [self._assignments[info.rank] for info in living], [], ask
        )

    def grow(self, assignments: Sequence[DeviceAssignment], ask: Ask) -> list[RankInfo]:
        """Add ranks with these assignments; the newcomers.

        Raises:
            ChangeFailed: A rank has died, or a newcomer did not come up.
        """
        numbers = {info.engine_uuid: info.rank for info in self._roster.living}
        joins = range(len(self._assignments), len(self._assignments) + len(assignments))
        return self._change(numbers, [*self._assignments, *assignments], joins, ask)

    def cut(self, size: int, ask: Ask) -> None:
        """Let all ranks from `size` on go.

        Raises:
            ChangeFailed: A rank has died.
        """
        living = self._roster.living
        numbers = {info.engine_uuid: info.rank for info in living if info.rank < size}
        self._change(numbers, self._assignments[:size], [], ask)
        for info in living:
            if info.rank >= size:
                target = endpoints.END
                self._roster.link.send(info.engine_uuid, target, control=True)

    def _change(
        self,
        numbers: Mapping[str, int],
        assignments: Sequence[DeviceAssignment],
        joins: Sequence[int],
        ask: Ask,
    ) -> list[RankInfo]:
        """Have all ranks that live carry out one change; the newcomers."""
        with self._reserve.released():  # newcomers write files, to a full disk too
            return self._carry_out(numbers, assignments, joins, ask)

    def _carry_out(
        self,
        numbers: Mapping[str, int],
        assignments: Sequence[DeviceAssignment],
        joins: Sequence[int],
        ask: Ask,
    ) -> list[RankInfo]:
        self._interrupted.clear()
        write_assignments(self._roster.run_dir, assignments)
        self._generation = 1 + max(
            [self._generation, *(info.generation for info in self._roster.infos)]
        )
        plan = Change(
            generation=self._generation,
            base=self._base,
            numbers=dict(numbers),
            joins=tuple(Join(rank) for rank in joins),
        )
        attempt = _Attempt(self._roster, plan, self._timeout_s, self._interrupted)
        try:
            infos, newcomers = attempt.carry_out(ask)
        except BaseException as error:
            attempt.cancel(error)
            raise
        self._base = plan.generation
        self._assignments[:] = assignments
        self._roster.begin(sorted([*infos, *newcomers], key=lambda info: info.rank))
        return newcomers


class _Attempt:
    """One change, from the sending of the plan until all have carried it out."""

    def __init__(
        self,
        roster: Roster,
        plan: Change,
        timeout_s: float,
        interrupted: threading.Event,
    ) -> None:
        self._roster = roster
        self._plan = plan
        self._timeout_s = timeout_s
        self._begun = self._progress = time.monotonic()
        self._stages: list[str | None] = []
        self._interrupted = interrupted
        self._living = roster.living
        self._died_before = roster.died.keys()
        self._known = set(roster.link.engines().values())
        self._arrivals = [
            Arrival(roster.run_dir, join.rank, plan.generation) for join in plan.joins
        ]
        self._replies: dict[int, Future[Answer]] = {}

    def carry_out(self, ask: Ask) -> tuple[list[RankInfo], list[RankInfo]]:
        """Those who stay, and the newcomers.

        Raises:
            ChangeFailed: A rank has died or could not follow; time is up.
        """
        target = endpoints.CHANGE
        for info in self._living:
            self._replies[info.rank] = ask(info, target, self._plan)
        self._wait(lambda: len(self._arrived()) >= len(self._arrivals))
        hellos = [
            self._roster.link.send(uuid, endpoints.STATUS).reply
            for uuid in self._arrived()
        ]
        answers = [*self._replies.values(), *hellos]
        self._wait(lambda: all(map(Future.done, answers)))
        stayed = [reply.result().value for reply in self._replies.values()]
        newcomers = [_value(hello)["info"] for hello in hellos]
        return [info for info in stayed if info is not None], newcomers

    def cancel(self, error: BaseException) -> None:
        """Release all ranks from the change, and end those that were to join.

        Raises:
            ChangeFailed: A rank does not leave the change.
        """
        for arrival in self._arrivals:
            arrival.refuse()
        reason = str(error) or type(error).__name__
        target = endpoints.CANCEL_CHANGE
        self._roster.tell(target, self._plan.generation, reason)
        for uuid in self._arrived():
            # It has registered, so that its number may be another's by now.
            self._roster.link.fail(uuid, RankDied("a rank that joined was ended"))
        wait(self._replies.values(), CANCEL_TIMEOUT_S)
        stuck = [rank for rank, reply in self._replies.items() if not reply.done()]
        if stuck:
            raise ChangeFailed(
                f"{error}; rank {format_ranks(stuck)} does not answer", stuck=True
            ) from error

    def _arrived(self) -> set[str]:
        return set(self._roster.link.engines().values()) - self._known

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds.

        Raises:
            ChangeFailed: A rank that is awaited, or another, has ended; a rank could
                not carry the change out; or time is up.
        """
        while not condition():
            self._check_newcomers()
            self._check_members()
            if self._interrupted.is_set():
                raise KeyboardInterrupt
            self._check_time()
            time.sleep(POLL_S)  # other processes' files raise no event
        self._check_members()

    def _check_newcomers(self) -> None:
        for arrival in self._arrivals:
            if (end := arrival.end()) is not None:
                raise ChangeFailed(
                    f"new rank {arrival.rank} ended with {end.how} while coming up; "
                    f"its last lines:\n{end.last_lines}",
                    newcomer=True,
                )

    def _check_members(self) -> None:
        died = self._roster.died
        if self._roster.lost:
            raise ChangeFailed(self._roster.lost)
        for rank in died.keys() - self._died_before:
            raise ChangeFailed(f"{died[rank]} while the ranks were meeting")
        for reply in self._replies.values():
            if reply.done():
                _value(reply)

    def _check_time(self) -> None:
        """New processes may take as long as a start, and what is done together less.

        Raises:
            ChangeFailed: Time is up.
        """
        now = time.monotonic()
        stages = [arrival.stage for arrival in self._arrivals]
        if stages != self._stages:
            self._stages, self._progress = stages, now
        ranks = format_ranks(arrival.rank for arrival in self._arrivals)
        if now > self._begun + self._timeout_s:
            raise ChangeFailed(
                f"new rank {ranks} was not up after {self._timeout_s:g} s",
                newcomer=bool(stages),
            )
        starting = [s for s in stages if s is not None and s != JOINING]
        if not starting and now > self._progress + MEET_TIMEOUT_S:
            silent = [rank for rank, reply in self._replies.items() if not reply.done()]
            raise ChangeFailed(
                f"rank {format_ranks(silent)} did not meet the others within "
                f"{MEET_TIMEOUT_S:g} s"
            )


def _value(reply: Future[Answer]) -> Any:
    try:
        answer = reply.result()
    except RankDied as error:
        raise ChangeFailed(f"{error} while the ranks were meeting") from error
    if not answer.ok:
        ename, evalue, _lines = answer.value
        raise ChangeFailed(f"a rank could not join the others: {ename}: {evalue}")
    return answer.value


RESERVE_BYTES = 4 << 20
"""A rank that joins writes about 0.1 MB to the run folder: what it is doing, where its
torch meets the others', and Open MPI's tables."""


class Reserve:
    """A file in the run folder that holds space, and gives it back while ranks join.

    So ranks can be replaced after the disk has become full. Where there is no room for
    the file either, there is no reserve.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "reserve"
        self._take()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the space back for the time of a `with`."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # no room, or the cluster is gone already
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
