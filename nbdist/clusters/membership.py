"""Changes of the members of a running world: replacing, dropping, adding ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbdist.clusters.greeting import Greeting
from nbdist.clusters.ipp_client import Answer
from nbdist.clusters.rank_registry import RankRegistry
from nbdist.clusters.startup_status import StartupStatus
from nbdist.errors import ChangeFailed, RankDied
from nbdist.ipc import endpoints, folders, rank_parent
from nbdist.ipc.busy_host import stretched
from nbdist.ipc.device_assignment import DeviceAssignment, write_assignments
from nbdist.ipc.locks import Event, Future, await_all
from nbdist.ipc.process_files import JOINING
from nbdist.wire import Change, Join, RankInfo, format_ranks

__all__ = ["Ask", "Membership"]

Ask = Callable[..., "Future[Answer]"]
"""`ask(info, target, *args)` calls an endpoint in the main thread of a rank."""
NOTHING: Mapping[int, Any] = {}

POLL_S = 0.02
MEET_TIMEOUT_S = 30.0
"""Seconds in which the ranks carry out a change, without the start of processes. On a
busy host it is longer: ranks that wait in Open MPI use the cores that others need."""
MEET_AGAIN_TIMEOUT_S = 8.0
"""The same after a change that has failed. A spawn that never ends may be left of it,
behind which Open MPI lets up to two further spawns wait for ever."""
MEET_AGAIN_OVER_HOSTS_TIMEOUT_S = 20.0
"""The same over several hosts, whose networks may lose packets. TCP sends one again
after a second, and then after twice as long each time."""
INTERRUPT_GRACE_S = 2.0
"""Seconds for which a change continues after an interrupt. A cancellation can end
ranks: Open MPI is not safe if a communicator is revoked while it is created."""
CANCEL_TIMEOUT_S = 5.0
"""Seconds within which every rank leaves a cancelled change."""


class Membership:
    """Changes the members of the world.

    The argument `ask` of each method calls an endpoint in a rank's main thread. If a
    method fails, the ranks keep all their variables but have no working world, until
    another change succeeds.

    Args:
        registry: The ranks. Each change updates it.
        assignments: The device assignment of each rank, by rank; changed in place.
        timeout_s: Seconds within which newcomers must have started.
        is_interrupted: Called often: whether a change must end with KeyboardInterrupt.
    """

    def __init__(
        self,
        registry: RankRegistry,
        assignments: list[DeviceAssignment],
        timeout_s: float,
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._assignments = assignments
        self._timeout_s = timeout_s
        self._base = self._generation = 0
        self._meet_timeout_s = MEET_TIMEOUT_S
        self._reserve = Reserve(registry.run_dir)
        self._is_interrupted = is_interrupted

    def replace_dead(
        self, ask: Ask, moved: Mapping[int, DeviceAssignment | None] = NOTHING
    ) -> list[RankInfo]:
        """Replace dead ranks by new processes. Returns the newcomers.

        Args:
            moved: The new device assignments of dead ranks that cannot have their old
                one; None for a rank that is dropped.

        Raises:
            ChangeFailed: Another rank has died, or a newcomer did not start.
        """
        wanted = [
            (rank, moved.get(rank, assignment))
            for rank, assignment in enumerate(self._assignments)
        ]
        kept = [(rank, new) for rank, new in wanted if new is not None]
        number_of = {rank: number for number, (rank, _) in enumerate(kept)}
        died = sorted(self._registry.died.keys() & number_of.keys())
        numbers = {
            info.engine_uuid: number_of[info.rank] for info in self._registry.living
        }
        joins = [number_of[rank] for rank in died]
        return self._change(numbers, [new for _, new in kept], joins, ask)

    def drop_dead(self, ask: Ask) -> None:
        """Continue with the living ranks, which keep their order and are renumbered.

        Raises:
            ChangeFailed: Another rank has died.
        """
        living = self._registry.living
        numbers = {info.engine_uuid: rank for rank, info in enumerate(living)}
        self._change(
            numbers, [self._assignments[info.rank] for info in living], [], ask
        )

    def grow(self, assignments: Sequence[DeviceAssignment], ask: Ask) -> list[RankInfo]:
        """Add ranks with these device assignments. Returns the newcomers.

        Raises:
            ChangeFailed: A rank has died, or a newcomer did not start.
        """
        numbers = {info.engine_uuid: info.rank for info in self._registry.living}
        joins = range(len(self._assignments), len(self._assignments) + len(assignments))
        return self._change(numbers, [*self._assignments, *assignments], joins, ask)

    def remove(self, leaving: Collection[int], ask: Ask) -> None:
        """Remove ranks, and end their processes. The others keep their order.

        Raises:
            ChangeFailed: A rank has died.
        """
        living = self._registry.living
        kept = [rank for rank in range(len(self._assignments)) if rank not in leaving]
        number_of = {rank: number for number, rank in enumerate(kept)}
        numbers = {
            info.engine_uuid: number_of[info.rank]
            for info in living
            if info.rank in number_of
        }
        self._change(numbers, [self._assignments[rank] for rank in kept], [], ask)
        for info in living:
            if info.rank in leaving:
                target = endpoints.END
                self._registry.client.send(info.engine_uuid, target, control=True)

    def _change(
        self,
        numbers: Mapping[str, int],
        assignments: Sequence[DeviceAssignment],
        joins: Sequence[int],
        ask: Ask,
    ) -> list[RankInfo]:
        """Make all living ranks carry out one change. Returns the newcomers."""
        with self._reserve.released():  # newcomers write files
            return self._carry_out(numbers, assignments, joins, ask)

    def _carry_out(
        self,
        numbers: Mapping[str, int],
        assignments: Sequence[DeviceAssignment],
        joins: Sequence[int],
        ask: Ask,
    ) -> list[RankInfo]:
        write_assignments(self._registry.run_dir, assignments)
        folders.write(self._registry.run_dir)
        self._generation = 1 + max(
            [self._generation, *(info.generation for info in self._registry.infos)]
        )
        plan = Change(
            generation=self._generation,
            base=self._base,
            numbers=dict(numbers),
            joins=tuple(Join(rank) for rank in joins),
            command=tuple(rank_parent.command()),
            addresses=tuple(sorted({each.address for each in assignments} - {""})),
            lost=self._lost_addresses(),
        )
        timeouts_s = self._timeout_s, stretched(self._meet_timeout_s)
        attempt = _Attempt(self._registry, plan, *timeouts_s, self._is_interrupted)
        try:
            infos, newcomers = attempt.carry_out(ask)
        except BaseException as error:
            over_hosts = any(each.address for each in assignments)
            self._meet_timeout_s = (
                MEET_AGAIN_OVER_HOSTS_TIMEOUT_S if over_hosts else MEET_AGAIN_TIMEOUT_S
            )
            attempt.cancel(error)
            raise
        self._meet_timeout_s = MEET_TIMEOUT_S
        self._base = plan.generation
        self._assignments[:] = assignments
        self._registry.begin(sorted([*infos, *newcomers], key=lambda info: info.rank))
        return newcomers

    def _lost_addresses(self) -> tuple[str, ...]:
        """The addresses of the hosts that were lost."""
        hosts = self._registry.hosts
        if hosts is None:
            return ()
        found = {a.address for a in self._assignments if hosts.why_lost(a.host)}
        return tuple(sorted(found))


class _Attempt:
    """One attempt at a change, from its plan until all ranks have carried it out."""

    def __init__(
        self,
        registry: RankRegistry,
        plan: Change,
        timeout_s: float,
        meet_timeout_s: float,
        is_interrupted: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._plan = plan
        self._timeout_s = timeout_s
        self._meet_timeout_s = meet_timeout_s
        self._begun = self._progress = time.monotonic()
        self._stages: list[str | None] = []
        self._is_interrupted = is_interrupted
        self._interrupted_at: float | None = None
        self._living = registry.living
        self._died_before = registry.died.keys()
        self._known = set(registry.client.engines().values())
        self._statuses = [
            StartupStatus(registry.run_dir, join.rank, plan.generation)
            for join in plan.joins
        ]
        self._replies: dict[int, Future[Answer]] = {}
        self._changed = Event()
        """Set when a rank has answered or a newcomer has registered."""

    def carry_out(self, ask: Ask) -> tuple[list[RankInfo], list[RankInfo]]:
        """Make all ranks carry out the plan.

        Returns:
            The ranks that stay, and the newcomers.

        Raises:
            ChangeFailed: A rank has died, has failed, or was too slow.
        """
        target = endpoints.CHANGE
        for info in self._living:
            self._replies[info.rank] = reply = ask(info, target, self._plan)
            reply.add_done_callback(self._on_reply)
        with self._registry.client.on_registration(self._changed.set):
            self._wait(lambda: len(self._arrived()) >= len(self._statuses))
        greeting = Greeting(self._registry.client, self._arrived(), self._changed.set)
        answers = self._replies.values()
        self._wait(lambda: greeting.is_answered() and all(map(Future.done, answers)))
        stayed = [reply.result().value for reply in self._replies.values()]
        newcomers = [_value(reply) for reply in greeting.replies()]
        return [info for info in stayed if info is not None], newcomers

    def cancel(self, error: BaseException) -> None:
        """Release all ranks from the change, and end the newcomers.

        Raises:
            ChangeFailed: A rank does not leave the change.
        """
        for status in self._statuses:
            status.refuse()
        reason = str(error) or type(error).__name__
        target = endpoints.CANCEL_CHANGE
        self._registry.tell(target, self._plan.generation, reason)
        for uuid in self._arrived():
            # Fail it by UUID, because another engine may have its rank's number now.
            self._registry.client.fail(uuid, RankDied("a rank that joined was ended"))
        await_all(self._replies.values(), CANCEL_TIMEOUT_S)
        silent = [rank for rank, reply in self._replies.items() if not reply.done()]
        if silent:
            raise ChangeFailed(
                f"{error}; rank {format_ranks(silent)} does not answer", stuck=True
            ) from error
        stuck = [rank for rank, reply in self._replies.items() if _is_stuck(reply)]
        if stuck:
            raise ChangeFailed(
                f"{error}; rank {format_ranks(stuck)} cannot make another change",
                stuck=True,
            ) from error

    def _arrived(self) -> set[str]:
        return set(self._registry.client.engines().values()) - self._known

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds.

        Raises:
            ChangeFailed: A rank or newcomer has ended or failed, or time is up.
        """
        while not condition():
            self._check_newcomers()
            self._check_members()
            self._check_interrupt()
            self._check_time()
            # Files of other processes raise no event.
            self._changed.wait(POLL_S)
            self._changed.clear()
        self._check_members()

    def _on_reply(self, _reply: object) -> None:
        self._changed.set()

    def _check_newcomers(self) -> None:
        for status in self._statuses:
            if (end := status.end()) is not None:
                raise ChangeFailed(
                    f"new rank {status.rank} ended with {end.how} while it started"
                    f"{end.ending}",
                    newcomer=True,
                )

    def _check_members(self) -> None:
        died = self._registry.died
        if self._registry.lost:
            raise ChangeFailed(self._registry.lost)
        for rank in died.keys() - self._died_before:
            raise ChangeFailed(f"{died[rank]} while the ranks formed a world")
        for reply in self._replies.values():
            if reply.done():
                _value(reply)

    def _check_interrupt(self) -> None:
        """Raise KeyboardInterrupt some time after an interrupt."""
        if self._is_interrupted():
            now = time.monotonic()
            self._interrupted_at = self._interrupted_at or now
            if now > self._interrupted_at + INTERRUPT_GRACE_S:
                raise KeyboardInterrupt

    def _check_time(self) -> None:
        """Check the time, which is longer for the start of new processes.

        Raises:
            ChangeFailed: Time is up.
        """
        now = time.monotonic()
        stages = [status.stage for status in self._statuses]
        if stages != self._stages:
            self._stages, self._progress = stages, now
        ranks = format_ranks(status.rank for status in self._statuses)
        if now > self._begun + self._timeout_s:
            raise ChangeFailed(
                f"new rank {ranks} had not started after {self._timeout_s:g} s",
                newcomer=bool(stages),
            )
        starting = [s for s in stages if s is not None and s != JOINING]
        if not starting and now > self._progress + self._meet_timeout_s:
            silent = [rank for rank, reply in self._replies.items() if not reply.done()]
            raise ChangeFailed(
                f"rank {format_ranks(silent)} did not join the others within "
                f"{self._meet_timeout_s:.3g} s"
            )


def _is_stuck(reply: Future[Answer]) -> bool:
    """Whether a rank has answered that it cannot make another change."""
    if reply.exception() is not None:  # it has died
        return False
    answer = reply.result()
    return not answer.ok and answer.value[0] == ChangeFailed.__name__


def _value(reply: Future[Answer]) -> Any:
    try:
        answer = reply.result()
    except RankDied as error:
        raise ChangeFailed(f"{error} while the ranks formed a world") from error
    if not answer.ok:
        ename, evalue, _lines = answer.value
        raise ChangeFailed(f"a rank could not join the others: {ename}: {evalue}")
    return answer.value


RESERVE_BYTES = 4 << 20
"""A newcomer writes about 0.1 MB to the run folder: its stage, the file of torch's
rendezvous, and Open MPI's tables."""


class Reserve:
    """A file in the run folder that reserves disk space for newcomers.

    With it, ranks can be replaced when the disk is full. If there is no room for the
    file itself, nothing is reserved.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "reserve"
        self._take()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Free the space for the duration of a `with` block."""
        with contextlib.suppress(OSError):
            os.truncate(self._path, 0)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # no room, or the cluster has ended
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
