"""Waits for calls, and releases ranks that wait for a rank that never arrives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from nbdist.clusters.call import Call
from nbdist.clusters.ipp_client import Answer
from nbdist.clusters.options import check_timeout
from nbdist.clusters.parted_nccl import PartedNccl
from nbdist.clusters.port_clash import PortClash
from nbdist.clusters.prompts import DebuggerQuit, Prompts, Reader
from nbdist.clusters.rank_registry import ANSWER_TIMEOUT_S, RankRegistry
from nbdist.clusters.recovery import Recovery
from nbdist.clusters.stall_detector import StallDetector
from nbdist.clusters.uneven_nccl import UnevenNccl, own_gpus
from nbdist.errors import (
    CellError,
    CellInterrupted,
    CellTimeout,
    NcclMismatch,
    PortInUse,
    UsageError,
)
from nbdist.ipc import endpoints
from nbdist.ipc.left_over import LeftOver, describe, left_over
from nbdist.ipc.locks import Future, await_all
from nbdist.widgets.user_input import UserInput
from nbdist.wire import (
    CollectiveCall,
    NcclTotal,
    RankInfo,
    differ_in_nccl,
    format_ranks,
)

if TYPE_CHECKING:
    from nbdist.clusters.elastic import Elastic

__all__ = ["CallSupervisor"]

INTERRUPT_GRACE_S = 5.0
RELEASE_AFTER_S = 0.5
"""Seconds after an interrupt in which a rank may end its cell by itself, before it is
released from what it may wait in."""
RELEASE_AFTER_QUIT_S = 0.1
"""The same for a rank that waits in a collective after "quit" in a debugger. It waits
in C++ then, because it would have handled the interrupt."""
PROBE_S = 0.1
"""Seconds between two checks of what ranks wait for, while a rank is missing."""
STEADY_S = 0.3
"""Seconds that a rank waits in one collective for a missing rank before it is released.
The data of a collective that can complete arrives sooner."""
STEADY_BETWEEN_HOSTS_S = 5.0
"""The same for ranks on several hosts, between which data may be under way for long."""
RENEW_TIMEOUT_S = 20.0
RELEASE_S = 0.5
"""Seconds between two releases of ranks from a renewal that has failed. A release that
comes before a rank waits has no effect."""
MOVING_S = 2.0
"""Seconds in which the calls of a user's threads may change what is left over."""
MOST_TOLD = 3
"""The most operations that one note names."""
TOGETHER_GRACE_S = 1.0
"""Seconds in which further ranks may fail by themselves, before the failure of one ends
them."""


Waiting = dict[int, tuple[CollectiveCall, set[int], float]]
"""For each rank, the collective in which it waits, the members that never arrive, and
the time on the monotonic clock since which neither has changed."""


class _Deadline:
    """When a call must have ended.

    Args:
        timeout_s: Seconds from now; None for no limit.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._begun = time.monotonic()
        self.at_prompts_s = 0.0
        """Seconds for which prompts were open. They do not count."""

    @property
    def time(self) -> float | None:
        """The time on the monotonic clock; None for no limit."""
        if self.timeout_s is None:
            return None
        return self._begun + self.timeout_s + self.at_prompts_s

    @property
    def has_passed(self) -> bool:
        end = self.time
        return end is not None and time.monotonic() >= end


class _Watch:
    """What watches a call that has not ended within the first tick."""

    def __init__(self, registry: RankRegistry, call: Call, reader: Reader) -> None:
        self.prompts = Prompts(registry, call, reader)
        self.stall_detector = StallDetector(registry, call)
        self.port_clash = PortClash(registry, call)
        self.nccl = UnevenNccl(registry)
        self.parted_nccl = PartedNccl(registry)
        self.waiting: Waiting = {}
        self.failed_at: float | None = None
        """When a rank had failed whose failure is to end the others."""
        self.is_released = False
        """Whether ranks were released from what may be calls of mpi4py."""


class CallSupervisor:
    """Waits for calls, ends those that cannot finish, and repairs groups afterwards."""

    def __init__(self, registry: RankRegistry, recovery: Recovery) -> None:
        self._registry = registry
        self._recovery = recovery
        self._unfinished: list[Call] = []
        self._broken = False
        self._groups: dict[str, int] = {}
        """The number of process groups that each engine has last reported."""
        self._nccl: dict[str, Mapping[str, NcclTotal]] = {}
        """What each engine has last reported of its collectives of NCCL."""
        self._compared = 0
        """The number of replies with tallies at the last comparison."""
        self._kept: list[LeftOver] = []
        """What is left over, and was told or begun by calls that have succeeded."""
        self._ended_badly = ""
        """The call that has failed or was stopped since the last comparison."""
        self._acknowledged: set[str] = set()
        """UUIDs of dead engines. Living ranks were released from calls with them."""
        self._interrupted_at: float | None = None
        """When another thread has interrupted the ranks during this call."""
        self.is_waiting = False
        """Whether a thread waits for a call, whose error then reports what happens."""
        self.reader: Reader = UserInput()
        """Asks the user for the lines that ranks read."""
        self.seconds_at_prompts = 0.0
        """Seconds for which prompts were open, in all calls."""
        self.elastic: Elastic | None = None
        """Continues elastic runs after failures."""
        self.repair: Callable[[], None] = lambda: None
        """Makes the ranks a working world again."""
        self.tell: Callable[[str], None] = lambda _: None
        """Shows a note to the user."""
        self.take_interrupt: Callable[[], bool] = lambda: False
        """Whether the call of this thread, which gets no SIGINT, is to be interrupted.
        A call clears the request."""

    def admit(self, ranks: Iterable[int]) -> None:
        """Check before a call that its ranks are idle, and repair their groups.

        Raises:
            UsageError: A rank is still busy with an earlier cell.
        """
        busy = self._busy()
        if busy & set(ranks):
            raise UsageError(
                "still busy with an earlier cell: "
                f"{self._positions(busy & set(ranks))}. "
                f"Wait for it, or {self._replacing(busy & set(ranks))}"
            )
        self._compare_what_is_left()
        self._renew_if_broken()
        if self._recovery.is_broken:
            self.repair()

    @property
    def busy_ranks(self) -> set[int]:
        """The living ranks that are still busy."""
        return self._busy()

    def note_interrupt(self) -> None:
        """Note that this thread, which does not wait for the call, interrupts it."""
        self._interrupted_at = time.monotonic()

    def repaired(self) -> None:
        """Note that the ranks have formed a new world, whose groups are not broken."""
        self._broken = False
        self._groups.clear()
        self._nccl.clear()
        self.forget_what_was_left()

    def see_through(self, call: Call, timeout_s: float | None) -> CellError | None:
        """Begin a call, and wait until it has ended on all its ranks.

        Returns:
            The error of a call that was interrupted or timed out, else None.

        Raises:
            UsageError: The time-out is not above 0; nothing was sent.
        """
        check_timeout(timeout_s)
        self._interrupted_at = None
        self._unfinished.append(call)
        self.is_waiting = True
        deadline = _Deadline(timeout_s)
        stopped: CellError | None = None
        try:
            if self.elastic is not None:
                self.elastic.begin(call, deadline.time)
            self._check_interrupt(call)
            call.begin()
            if not call.wait(deadline.time, tick_s=PROBE_S):
                stopped = self._attend(call, deadline)
            if stopped is None:
                stopped = self._compare_nccl(call)
        except DebuggerQuit as quit_:
            stopped = self._interrupt(call, quit_)
        except KeyboardInterrupt:
            self.take_interrupt()  # it may have ended a recovery
            if deadline.has_passed:
                stopped = self._time_out(call, deadline)
            else:
                stopped = self._interrupt(call)
        finally:
            self.is_waiting = False
            self.seconds_at_prompts += deadline.at_prompts_s
            if self.elastic is not None:
                self.elastic.end(call)
        self._conclude(call, stopped is not None)
        return stopped

    def _attend(self, call: Call, deadline: _Deadline) -> CellError | None:
        """Act on what happens to a call until it has ended.

        Returns:
            As `see_through`.
        """
        watch = _Watch(self._registry, call, self.reader)
        has_ended = False
        while not has_ended:
            self._check_interrupt(call)
            if call.requests:
                self._ask_user(call, watch.prompts, deadline)
            elif call.lost:
                self._end(call)
                return None
            elif deadline.has_passed:
                return self._time_out(call, deadline)
            elif self._is_interrupt_over():
                return self._interrupt(call)
            elif (clash := watch.port_clash.look()) is not None:
                self._end(call)
                return PortInUse(f"{clash}{self._left_behind(call)}")
            elif self._is_to_end_together(call, watch):
                self._end(call)
                return None
            else:
                call.end_lost_output()
                watch.stall_detector.look()
                self._release_from_mpi(call, watch)
                self._release_from_dead()
                watch.waiting = self._release_waiting(call, watch.waiting)
                self._release_from_nccl(call, watch.nccl)
                self._release_parted(call, watch)
                if self.elastic is not None:
                    self.elastic.attend(call)
            has_ended = call.wait(deadline.time, tick_s=PROBE_S)
        return None

    def _is_interrupt_over(self) -> bool:
        """Whether the ranks have had the time to react to an interrupt."""
        at = self._interrupted_at
        return at is not None and time.monotonic() > at + INTERRUPT_GRACE_S

    def _ask_user(self, call: Call, prompts: Prompts, deadline: _Deadline) -> None:
        """Ask the user for the lines that ranks read."""
        try:
            prompts.attend()
        finally:
            deadline.at_prompts_s = prompts.seconds
        if self.elastic is not None:
            self.elastic.postpone(call, deadline.time)

    def _is_to_end_together(self, call: Call, watch: _Watch) -> bool:
        """Whether a rank's failure ends the others, which have had time to fail too."""
        if not call.ends_together or not _has_failed(call):
            return False
        now = time.monotonic()
        watch.failed_at = now if watch.failed_at is None else watch.failed_at
        return now >= watch.failed_at + TOGETHER_GRACE_S

    def _conclude(self, call: Call, is_stopped: bool) -> None:
        """Note what a call has left behind, and renew groups that it has broken."""
        if call.succeeded:
            if call in self._unfinished:
                self._unfinished.remove(call)
        else:
            self._unfinished = [each for each in self._unfinished if each.unfinished]
            self._broken |= call.broken or call in self._unfinished
        self._broken |= self._differ_after(call) or _are_late(call.nccl.values())
        if is_stopped or (not call.succeeded and call.failed):
            self._broken |= self._differ_in_nccl()
        if is_stopped or not call.succeeded:
            how = "was stopped" if is_stopped else "has failed"
            self._ended_badly = f"{call.what} {how}"
        with contextlib.suppress(KeyboardInterrupt):  # the next call does it then
            self._compare_what_is_left(call.what)
            self._renew_if_broken()

    def _check_interrupt(self, call: Call) -> None:
        """Raise KeyboardInterrupt if the call runs in the background and is to end."""
        if self.take_interrupt():
            if self.elastic is not None:
                self.elastic.release(call)
            raise KeyboardInterrupt

    # -- ranks that never arrive ---------------------------------------------------

    def _release_from_dead(self) -> None:
        """Release living ranks from calls with ranks that have died since the last."""
        dead = [
            info
            for info in map(self._registry.__getitem__, self._registry.died)
            if info.engine_uuid not in self._acknowledged
        ]
        if dead:
            self._acknowledged |= {info.engine_uuid for info in dead}
            ranks = [info.rank for info in dead]
            reason = f"rank {format_ranks(ranks)} has died"
            self._registry.tell(endpoints.RELEASE_FROM, ranks, reason)

    def _release_waiting(
        self, call: Call, before: Waiting, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> Waiting:
        """Release ranks that wait in a collective for a rank that never arrives.

        The cell of that rank has ended or paused, or was not sent to it.

        Args:
            call: The call.
            before: The result of the last call of this method.
            timeout_s: Seconds within which a rank answers, if it can.

        Returns:
            The collectives in which ranks wait now.
        """
        busy = self._busy() - call.paused.keys()
        if busy >= {info.rank for info in self._registry.infos}:
            return {}
        ranks = busy & {info.rank for info in call.unfinished}
        collectives = self._registry.ask(
            endpoints.WAITING, ranks=ranks, timeout_s=timeout_s
        )
        now = time.monotonic()
        waiting: Waiting = {}
        for rank, collective in collectives.items():
            if collective is None:
                continue
            missing = set(collective.members) - busy
            if collective.has_met:  # what is missing is under way from these ranks
                missing &= self._broken_on(call)
            seen, since = (collective, missing), now
            if rank in before and before[rank][:2] == seen:
                since = before[rank][2]
            waiting[rank] = *seen, since
            if missing and now >= since + self._steady_s(collective):
                reason = self._reason(collective, missing, set(call.processes))
                self._release(reason, [rank])
        return waiting

    def _steady_s(self, collective: CollectiveCall) -> float:
        members = set(collective.members)
        hosts = {info.host for info in self._registry.infos if info.rank in members}
        return STEADY_S if len(hosts) == 1 else STEADY_BETWEEN_HOSTS_S

    def _broken_on(self, call: Call) -> set[int]:
        """The ranks that have answered, and have left a collective in the middle."""
        calls = [call, *self._unfinished]
        return {
            rank
            for each in calls
            for rank, answer in each.answers.items()
            if answer.broken
        }

    def _release_from_nccl(self, call: Call, nccl: UnevenNccl) -> None:
        """End the cells of ranks that wait in NCCL in vain, or too long."""
        busy = self._busy()
        idle = {info.rank for info in self._registry.living} - busy
        asked = {info.rank for info in call.unfinished} - call.paused.keys()
        waits = nccl.look(asked & busy, idle)
        for stuck in waits:
            if stuck.late_s:
                why = f"its time-out of {stuck.late_s:g} s has passed"
                if stuck.missing:
                    why += f", and rank {format_ranks(stuck.missing)} has not called it"
            else:
                why = self._whys(set(stuck.missing), set(call.processes))
            released = self._registry.ask(
                endpoints.RELEASE_FROM_NCCL,
                stuck.group,
                why,
                bool(stuck.late_s),
                not stuck.late_s,
                ranks=[stuck.rank],
            )
            self._broken |= released[stuck.rank] is not False
        late = {stuck.rank for stuck in waits if stuck.late_s}
        if late:
            # Nothing else would release a rank that calls the collective later.
            why = f"the time-out of rank {format_ranks(late)} has passed"
            self._registry.ask(endpoints.ABORT_NCCL, why, ranks=busy - late)

    def _release_parted(self, call: Call, watch: _Watch) -> None:
        """End the cells of ranks that have queued different collectives with NCCL."""
        parting = watch.parted_nccl.look(watch.stall_detector.quiet_s)
        if parting is not None:
            self._broken = True
            unfinished = {info.rank for info in call.unfinished}
            self._registry.ask(
                endpoints.RELEASE_FROM_NCCL,
                parting.group,
                str(parting),
                ranks=parting.ranks & unfinished,
            )

    def _release_from_mpi(self, call: Call, watch: _Watch) -> None:
        """Release ranks that make no progress after a failure, from calls of mpi4py.

        A rank in such a call cannot be told from one that computes, which this does not
        disturb.
        """
        if watch.is_released or not _has_failed(call):
            return
        if watch.stall_detector.is_outside_collectives:
            watch.is_released = True
            ranks = [info.rank for info in call.unfinished]
            self._release("another rank has failed", ranks)

    def _release(self, reason: str, ranks: Iterable[int]) -> None:
        """Release ranks from their collectives.

        A rank may have answered in the meantime. Its answer then does not report that
        the release has broken its groups.
        """
        self._broken = True
        self._registry.ask(endpoints.RELEASE, reason, ranks=ranks)

    def _reason(
        self, collective: CollectiveCall, missing: set[int], asked: set[int]
    ) -> str:
        whys = self._whys(missing, asked)
        return f"released from {collective.operation}: {whys}"

    def _whys(self, missing: set[int], asked: set[int]) -> str:
        """Why ranks never arrive in a collective."""
        dead = missing & self._registry.died.keys()
        ended = missing - dead
        whys = [f"rank {format_ranks(dead)} has died"] if dead else []
        if ended & asked:
            whys.append(f"the cell of rank {format_ranks(ended & asked)} has ended")
        if ended - asked:
            whys.append(f"rank {format_ranks(ended - asked)} was not asked to run it")
        return " and ".join(whys)

    def _busy(self) -> set[int]:
        """The living ranks that have not answered every call."""
        if not self._unfinished:
            return set()
        for call in self._unfinished:
            call.wait(time.monotonic())  # handle answers that have arrived
        self._unfinished = [call for call in self._unfinished if call.unfinished]
        # The registry sees a death a moment before the calls do.
        living = {info.engine_uuid for info in self._registry.living}
        return {
            info.rank
            for call in self._unfinished
            for info in call.unfinished
            if info.engine_uuid in living
        }

    # -- ending a call --------------------------------------------------------------

    def _time_out(self, call: Call, deadline: _Deadline) -> CellError:
        where = self._positions(info.rank for info in call.unfinished)
        self._end(call, "timed out")
        return CellTimeout(
            f"not finished after {deadline.timeout_s:g} s{where and ': '}{where}. "
            f"{_survivors(call).capitalize()} were interrupted and keep their variables"
            f"{self._left_behind(call)}"
        )

    def _interrupt(self, call: Call, quit_: DebuggerQuit | None = None) -> CellError:
        self._end(call, is_quit=quit_ is not None)
        how = f"{quit_}, and the others were interrupted" if quit_ else "interrupted"
        return CellInterrupted(
            f"{how}; {_survivors(call)} keep their variables{self._left_behind(call)}"
        )

    def _end(
        self, call: Call, outcome: str = "interrupted", *, is_quit: bool = False
    ) -> None:
        """Interrupt the ranks of a call, and wait a few seconds for them."""
        start = time.monotonic()
        end = start + INTERRUPT_GRACE_S
        try:
            call.interrupt(outcome)
            if is_quit and not call.wait(start + RELEASE_AFTER_QUIT_S):
                ranks = [info.rank for info in call.unfinished]
                calls = self._registry.ask(endpoints.WAITING, ranks=ranks)
                if waiting_ranks := [rank for rank in ranks if calls[rank]]:
                    self._release("interrupted", waiting_ranks)
            if not call.wait(start + RELEASE_AFTER_S):
                # A rank that waits in C++, as in DDP's backward, handles no signal.
                self._release("interrupted", [info.rank for info in call.unfinished])
            waiting: Waiting = {}
            while not call.wait(end, tick_s=PROBE_S):
                left_s = end - time.monotonic()
                if left_s <= 0:
                    break
                # It may begin to wait after that.
                timeout_s = min(left_s, ANSWER_TIMEOUT_S)
                waiting = self._release_waiting(call, waiting, timeout_s)
            # A rank that has answered is not busy, whatever has become of its output.
            call.end_lost_output(after_s=0.0)
            call.wait(time.monotonic())
        except KeyboardInterrupt:
            return  # a second interrupt: stop waiting

    def _left_behind(self, call: Call) -> str:
        left = call.unfinished
        if not left:
            return ""
        ranks = format_ranks(info.rank for info in left)
        return (
            f". Rank {ranks} did not react within {INTERRUPT_GRACE_S:g} s "
            f"({self._positions(info.rank for info in left)}): it runs no cell until "
            "it does. %dist_stacks shows more; "
            + self._replacing({info.rank for info in left})
        )

    def _replacing(self, ranks: Collection[int]) -> str:
        """The way to replace ranks that do not answer, and what it loses."""
        if set(ranks) >= {info.rank for info in self._registry.living}:
            return (
                "%dist_restart starts all ranks again, without their variables and "
                "with the setup cells"
            )
        return (
            f"%dist_restart -r {format_ranks(ranks)} replaces it by a new process, and "
            "the other ranks keep their variables"
        )

    def _positions(self, ranks: Iterable[int]) -> str:
        positions = self._registry.ask(endpoints.WHERE, ranks=ranks)
        return "; ".join(
            f"rank {rank} at {position}" if position else f"rank {rank} does not answer"
            for rank, position in positions.items()
        )

    # -- broken groups ---------------------------------------------------------------

    def _differ_after(self, call: Call) -> bool:
        """Whether some ranks have created process groups that other ranks have not."""
        groups = call.groups
        if groups.items() <= self._groups.items():
            return False
        self._groups |= groups
        living = [info.engine_uuid for info in self._registry.living]
        return len({self._groups.get(uuid, 0) for uuid in living}) > 1

    def _differ_in_nccl(self) -> bool:
        """Whether some ranks have queued work of NCCL that other ranks have not.

        The GPUs of those ranks wait for the others.
        """
        if not own_gpus(self._registry):
            return False
        answers = self._registry.ask(endpoints.NCCL_CALLS)
        known = {rank: calls for rank, calls in answers.items() if calls is not None}
        return differ_in_nccl(known) or _are_late(known.values())

    def _compare_nccl(self, call: Call) -> CellError | None:
        """The error of a call in which ranks have queued different work of NCCL.

        NCCL may have completed it, without a sign that it was different.
        """
        if not call.nccl:
            return None
        self._nccl |= call.nccl
        if not call.succeeded:
            return None  # its error is told
        living = {info.engine_uuid for info in self._registry.living}
        digests = [calls for uuid, calls in self._nccl.items() if uuid in living]
        parted = PartedNccl(self._registry).look_back(digests)
        if not parted:
            return None
        return NcclMismatch(
            f"NCCL was given different collectives, and compares none: {parted}. The "
            "results of that group are undefined from there on. All ranks keep their "
            "variables, and NCCL's groups are made again"
        )

    def _compare_what_is_left(self, what: str = "") -> None:
        """Compare what the ranks have begun, once all are idle.

        What a failed call has left over would meet the next call's operations, so the
        groups are renewed. What other calls have left over may be meant for the next
        one: it stays, and is told once.

        Args:
            what: The call that has ended.
        """
        client, failed = self._registry.client, bool(self._ended_badly)
        if client.told == self._compared and not failed:
            return
        if self._broken or self._registry.died or self._busy():
            return
        told = client.told
        uuids = {info.rank: info.engine_uuid for info in self._registry.living}
        left = left_over({r: client.tallies.get(uuids[r], {}) for r in uuids})
        new = [each for each in left if each not in self._kept]
        if new and failed:
            left = self._steadily_left(left)
            self._broken = any(each not in self._kept for each in left)
        elif new:
            self._tell_left(new, what)
        if not self._broken:
            self._kept, self._ended_badly, self._compared = left, "", told

    def _steadily_left(self, left: list[LeftOver]) -> list[LeftOver]:
        """What remains of it for a while. Threads of the user's may make their calls.

        Nothing remains of what changes all the time.
        """
        since, end = time.monotonic(), time.monotonic() + MOVING_S
        while left and time.monotonic() < since + STEADY_S:
            if time.monotonic() > end:
                return []
            time.sleep(PROBE_S)
            found = self._registry.ask(endpoints.IN_FLIGHT)
            now = left_over({r: each[0] for r, each in found.items() if each})
            if now != left:
                left, since = now, time.monotonic()
        return left

    def _tell_left(self, left: Sequence[LeftOver], what: str) -> None:
        """Tell what a call that has succeeded has left over."""
        found = self._registry.ask(endpoints.IN_FLIGHT)
        begun = {rank: each[1] for rank, each in found.items() if each}
        texts = [describe(each, begun) for each in left[:MOST_TOLD]]
        more = f"; and {len(left) - MOST_TOLD} more" if len(left) > MOST_TOLD else ""
        self.tell(
            f"{what or 'a call'} has left in flight: {'; '.join(texts)}{more}. It "
            "meets the next calls of these ranks there"
        )

    def forget_what_was_left(self) -> None:
        """Forget the tallies of groups that were renewed or closed.

        Each renewed group has another name.
        """
        self._kept, self._ended_badly = [], ""
        self._compared = self._registry.client.told
        self._registry.client.tallies.clear()

    def _renew_if_broken(self) -> None:
        """Renew the groups of the ranks once all are idle, if groups are broken.

        Groups with a dead rank cannot be renewed. They need a recovery first.
        """
        if not self._broken or self._registry.died or self._busy():
            return
        client = self._registry.client
        replies = {
            info: client.send(
                info.engine_uuid, endpoints.RENEW, self._ended_badly, what="renew"
            ).reply
            for info in self._registry.living
        }
        self._await_renewal(replies)
        answers = {}
        for info, reply in replies.items():
            answer = _answer(reply)
            if answer is None or not answer.ok:
                self._recovery.is_broken = True  # a recovery rebuilds the world
                return
            answers[info.engine_uuid] = answer
        self._registry.update(answer.value for answer in answers.values())
        self._groups = {uuid: answer.groups for uuid, answer in answers.items()}
        self._nccl = {uuid: answer.nccl for uuid, answer in answers.items()}
        self._broken = False
        self.forget_what_was_left()

    def _await_renewal(self, replies: Mapping[RankInfo, Future[Answer]]) -> None:
        """Wait for all ranks; release those that wait for a rank that has failed."""
        end = time.monotonic() + RENEW_TIMEOUT_S
        while not await_all(replies.values(), RELEASE_S) and time.monotonic() < end:
            answers = {info.rank: _answer(reply) for info, reply in replies.items()}
            failed = [r for r, answer in answers.items() if answer and not answer.ok]
            left = [r for r, answer in answers.items() if answer is None]
            if failed and left:
                reason = f"rank {format_ranks(failed)} could not renew its groups"
                self._registry.tell(endpoints.RELEASE_FROM, failed, reason, ranks=left)


def _answer(reply: Future[Answer]) -> Answer | None:
    """The rank's answer; None if it has died or is late."""
    if not reply.done() or reply.exception() is not None:
        return None
    return reply.result()


def _are_late(calls: Iterable[Mapping[str, NcclTotal]]) -> bool:
    """Whether a group of NCCL reports a time-out. It does so until it is made again."""
    return any(total.late_s for each in calls for total in each.values())


def _survivors(call: Call) -> str:
    """The ranks that have kept their variables."""
    return "the surviving ranks" if call.died or call.restarts else "all ranks"


def _has_failed(call: Call) -> bool:
    """Whether a rank has failed or died, outside an elastic run, which continues."""
    return (call.failed or bool(call.died)) and not call.elastic
