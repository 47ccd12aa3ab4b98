"""Recovery from the deaths of ranks, and changes of the world's size."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from nbdist.clusters.hosts.machine import this_host
from nbdist.clusters.ipp_client import Answer
from nbdist.clusters.membership import Ask, Membership
from nbdist.clusters.placement import assign_devices
from nbdist.clusters.rank_registry import RankRegistry
from nbdist.clusters.resize import Resize
from nbdist.config import ClusterConfig
from nbdist.errors import (
    CellInterrupted,
    ChangeFailed,
    RankDied,
    ScaleFailed,
    TransferError,
    UsageError,
)
from nbdist.ipc import endpoints
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.ipc.locks import Future, await_all
from nbdist.ipc.resources import few_descriptors
from nbdist.wire import RankInfo, format_ranks

__all__ = ["Recovery"]

DESCRIBE_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0
"""Seconds within which a living rank answers."""
NEWS_TIMEOUT_S = 1.0
"""The most seconds between a failure and the notice of the death that caused it."""
MOST_TRIES = 2
"""The most attempts in which newcomers end while they start."""


class Recovery:
    """Makes the living ranks a working world again, and prepares newcomers.

    Args:
        registry: The ranks.
        assignments: The device assignment of each rank, by rank; changed in place.
        config: The configuration that the cluster was started with.
        on_change: Called after each change of the ranks.
    """

    def __init__(
        self,
        registry: RankRegistry,
        assignments: list[DeviceAssignment],
        config: ClusterConfig,
        on_change: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._assignments = assignments
        self._config = config
        self._on_change = on_change
        self._interrupted = False
        self.is_interrupt_asked: Callable[[], bool] = lambda: False
        """Whether the call of this thread, which gets no SIGINT, is to be interrupted.
        """
        self._deadline: float | None = None
        self._newcomers = Newcomers(registry, lambda: self.is_interrupted)
        self._membership = Membership(
            registry, assignments, config.timeout_s, lambda: self.is_interrupted
        )
        self._unprepared: set[str] = set()
        """UUIDs of engines that have joined and lack the setup cells and variables."""
        self.is_broken = False
        """Whether the ranks have no working world. All ranks may be alive."""
        self.setup: list[tuple[str, int]] = []
        """The setup cells, which each newcomer runs first, with their In[] numbers."""

    @property
    def size(self) -> int:
        """The world size."""
        return len(self._assignments)

    @property
    def is_needed(self) -> bool:
        """Whether a rank has died, is unprepared, or has no working world."""
        return bool(self._registry.died or self.is_broken or self._unprepared)

    def recover(self, ask: Ask | None = None) -> str:
        """Make the living ranks a working world again.

        Dead ranks are replaced or dropped, as configured, and so are ranks that die
        during the recovery. A rank that cannot be replaced is dropped.

        Args:
            ask: Calls a function in the main thread of a rank. Needed if ranks have
                paused in an elastic run.

        Returns:
            A description of what was done.

        Raises:
            ChangeFailed: No rank is left, or a living rank does not answer.
            CellInterrupted: The ranks have a working world, but the user has
                interrupted the preparation of newcomers.
        """
        ask = ask or self._registry.send
        self._newcomers.remember_numbers()
        outcomes: list[str] = []
        # The caller reports these deaths.
        heard = [death.summary for death in self._registry.died.values()]
        problem = ""
        failed = 0
        while True:
            died = self._registry.died.keys()
            try:
                outcomes += self._end_silent()
                outcomes += self._meet(ask, problem, heard)
                outcomes = self._bring_up_to_date(outcomes, ask)
                if not self._registry.died:
                    return "; ".join(outcomes)
            except ChangeFailed as error:
                failed += 1
                if not self._may_succeed(error, died, failed):
                    raise
                if error.newcomer and failed >= MOST_TRIES:
                    problem = str(error)
                first_line = str(error).partition("\n")[0]
                if error.newcomer and first_line not in outcomes:
                    outcomes.append(first_line)

    @contextlib.contextmanager
    def interruptible(self, deadline: float | None) -> Iterator[None]:
        """Defer an interrupt in a `with` block, in which the ranks are changed.

        The interrupt or the deadline ends the change with KeyboardInterrupt, once the
        ranks have left it.

        Args:
            deadline: On the monotonic clock; None for no limit.
        """

        def interrupt() -> None:
            self._interrupted = True

        self._deadline = deadline
        try:
            with defer_interrupts(interrupt):
                yield
        finally:
            self._interrupted, self._deadline = False, None

    @property
    def is_interrupted(self) -> bool:
        """Whether the change that is being made must end with KeyboardInterrupt."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._interrupted or late or self.is_interrupt_asked()

    def _may_succeed(
        self, error: ChangeFailed, died: Collection[int], failed: int
    ) -> bool:
        """Whether another attempt can succeed."""
        news = self._await_news(error, died)
        if error.stuck or self._registry.lost or not self._registry.living:
            return False
        return news or failed <= MOST_TRIES

    def _await_news(self, error: ChangeFailed, died: Collection[int]) -> bool:
        """Whether more ranks have died. Waits, because a death may be noticed late."""
        timeout_s = 0.0 if error.newcomer else NEWS_TIMEOUT_S
        return self._registry.await_deaths(lambda now: bool(now - set(died)), timeout_s)

    def _end_silent(self) -> list[str]:
        """End the ranks that live and do not answer. Returns what was done.

        They cannot take part in a change, and their variables cannot be saved.

        Raises:
            ChangeFailed: No rank is left, no rank answers, or one cannot be ended.
        """
        if not self._registry.living:
            raise ChangeFailed("no rank is left")
        ranks = [info.rank for info in self._registry.living]
        answers = self._registry.ask(
            endpoints.WHERE,
            ranks=ranks,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        died = self._registry.died
        silent = [r for r, where in answers.items() if where is None and r not in died]
        if not silent:
            return []
        why = (
            f"rank {format_ranks(silent)} did not answer for {ANSWER_TIMEOUT_S:g} s "
            "(its process was stopped, or ran C code that holds Python's GIL)"
        )
        if len(silent) == len(ranks):
            raise ChangeFailed(why, stuck=True)
        try:
            self._registry.kill(silent)
        except RankDied as error:
            raise ChangeFailed(f"{why}. {error}", stuck=True) from error
        return [f"{why} and was ended"]

    def _meet(self, ask: Ask, problem: str, heard: list[str]) -> list[str]:
        """Replace or drop the dead ranks.

        Args:
            ask: Calls a function in the main thread of a rank.
            problem: Why ranks cannot be replaced; "" to replace them, if configured.
            heard: Deaths that were reported before. Those reported here are added.

        Returns:
            How the ranks died, and what was done.
        """
        died = self._registry.died
        if not died and not self.is_broken:
            return []
        dead = format_ranks(died)
        self.is_broken = True  # until the change is complete
        if died and not problem and self._config.on_failure == "replace":
            done = self._replace(ask)
        else:
            size = self.size
            self._membership.drop_dead(ask)
            done = (
                f"rank {dead} was dropped" if died else "the ranks formed a world again"
            )
            if problem:
                done = f"rank {dead} could not be replaced and was dropped ({problem})"
            done += f": the world has {self.size} ranks now"
            if problem:
                done += f"; %dist_scale -n {size} tries again"
        self.is_broken = False
        self._on_change()
        causes = [death.summary for death in died.values()]
        news = [cause for cause in causes if cause not in heard]
        heard += news
        return [*news, done, *filter(None, [few_descriptors()])]

    def _replace(self, ask: Ask) -> str:
        """Replace the dead ranks. Those of a lost host move to free slots of others.

        Returns:
            A description of what was done.
        """
        died, size, hosts = self._registry.died, self.size, self._registry.hosts
        moved = {} if hosts is None else hosts.moved(died, self._assignments)
        newcomers = self._membership.replace_dead(ask, moved)
        self._unprepared |= {info.engine_uuid for info in newcomers}
        dropped = [rank for rank, assignment in moved.items() if assignment is None]
        done = []
        if replaced := died.keys() - set(dropped):
            pids = ", ".join(str(info.pid) for info in newcomers)
            names = ", ".join(dict.fromkeys(info.host for info in newcomers))
            where = f" on {names}" if moved else ""
            done.append(
                f"rank {format_ranks(replaced)} was replaced (pid {pids}{where})"
            )
        if dropped:
            done.append(
                f"rank {format_ranks(dropped)} was dropped, because the other hosts "
                f"have no free slots: the world has {self.size} ranks now; "
                f"%dist_scale -n {size} tries its host again"
            )
        return "; ".join(done)

    def _bring_up_to_date(self, done: list[str], ask: Ask) -> list[str]:
        """Prepare newcomers. Returns `done` with a description of it."""
        newcomers = [
            info
            for info in self._registry.living
            if info.engine_uuid in self._unprepared
        ]
        self._unprepared.clear()
        done = [*done, *(note for info in newcomers for note in info.notes)]
        if not newcomers or len(newcomers) == len(self._registry.living):
            return done
        try:
            return [*done, self._newcomers.prepare(newcomers, self.setup, ask)]
        except CellInterrupted as stopped:
            raise CellInterrupted("; ".join([*done, str(stopped)])) from stopped

    def drop(self, ask: Ask | None = None) -> None:
        """Continue with the living ranks only.

        Raises:
            ChangeFailed: Another rank has died.
        """
        self._membership.drop_dead(ask or self._registry.send)
        self.is_broken = False
        self._on_change()

    def check(self, resize: Resize, drop: bool) -> None:
        """Check that the world can be changed so.

        Args:
            resize: The change.
            drop: Allow the loss of variables that only leaving ranks have.

        Raises:
            UsageError: The size is not possible, or variables would be lost.
        """
        more = resize.more(self.size)
        if more >= 0:
            if self._registry.hosts is not None:
                self._registry.hosts.make_room(more, self._assignments)
            self._added(more)
        if resize.leaving and not drop:
            self._refuse_loss(resize.leaving)

    def scale(self, resize: Resize, ask: Ask | None = None) -> str:
        """Add ranks to the world, remove some, or both. Returns a description.

        Raises:
            ScaleFailed: A rank died or did not start. The living ranks form a world.
            ChangeFailed: The living ranks form no world.
        """
        ask = ask or self._registry.send
        self._newcomers.remember_numbers()
        outcomes = [f"the world has {resize.size} ranks now"]
        self.is_broken = True  # until the change is complete
        try:
            if (more := resize.more(self.size)) > 0:
                newcomers = self._membership.grow(self._added(more), ask)
                self._unprepared |= {info.engine_uuid for info in newcomers}
                self._on_change()
                outcomes = self._bring_up_to_date(outcomes, ask)
            if resize.leaving or more <= 0:
                self._membership.remove(resize.leaving, ask)
        except ChangeFailed as error:
            if error.stuck:
                raise
            self._await_news(error, ())
            causes = [death.summary for death in self._registry.died.values()]
            why = "; ".join(causes) or str(error)
            raise ScaleFailed(f"{why}\n{self.recover(ask)}") from error
        self.is_broken = False
        self._on_change()
        if self._registry.hosts is not None:
            self._registry.hosts.disconnect_unused(self._assignments)
        return "; ".join(outcomes)

    def _added(self, more: int) -> list[DeviceAssignment]:
        """The device assignments of ranks that are added."""
        if self._registry.hosts is not None:
            return self._registry.hosts.assign(more, self._assignments)
        config = replace(self._config, n=self.size + more)
        return assign_devices(config, this_host(), self._assignments)

    def _refuse_loss(self, leaving: Collection[int]) -> None:
        described = self._registry.ask(
            endpoints.VARIABLES, timeout_s=DESCRIBE_TIMEOUT_S
        )
        ranks = format_ranks(leaving)
        kept: set[str] = set()
        lost: set[str] = set()
        for rank, variables in described.items():
            if variables is None:
                raise UsageError(
                    f"rank {rank} does not report its variables: add --yes to remove "
                    f"rank {ranks} anyway"
                )
            names = {variable.name for variable in variables}
            (lost if rank in leaving else kept).update(names)
        if lost - kept:
            raise UsageError(
                f"rank {ranks} has variables that no other rank has "
                f"({', '.join(sorted(lost - kept))}): add --yes to remove them anyway"
            )


SETUP_TIMEOUT_S = 600.0
"""Seconds that one setup cell may take."""
COPY_TIMEOUT_S = 60.0
"""Seconds for the copy of all variables. The ranks also limit each variable."""
GRACE_S = 5.0
"""Seconds within which an interrupted rank answers."""
SETUP_LOOK_S = 0.5
"""Seconds between two checks whether a setup cell waits in a collective, and whether
the preparation was interrupted."""

Replies = Mapping[RankInfo, "Future[Answer]"]


class Newcomers:
    """Prepares ranks that have joined: setup cells, then another rank's variables.

    A failure is described, not raised, so that the world continues.

    Args:
        registry: The ranks.
        is_interrupted: Called often: whether the preparation must end with
            CellInterrupted.
    """

    def __init__(
        self, registry: RankRegistry, is_interrupted: Callable[[], bool]
    ) -> None:
        self._registry = registry
        self._is_interrupted = is_interrupted
        self._before: dict[str, int] = {}
        """The ranks' numbers before the change, by the UUIDs of their engines."""

    def remember_numbers(self) -> None:
        """Remember the numbers of the ranks, which a change may give others."""
        self._before = {info.engine_uuid: info.rank for info in self._registry.infos}

    def prepare(
        self,
        newcomers: Sequence[RankInfo],
        setup: Sequence[tuple[str, int]],
        ask: Ask,
    ) -> str:
        """Run the setup cells, then copy the lowest old rank's variables.

        Args:
            newcomers: Ranks that have joined and are idle.
            setup: The setup cells, with their In[] numbers.
            ask: Calls a function in the main thread of another rank.

        Returns:
            A description of what was done.

        Raises:
            CellInterrupted: The user has interrupted it. The message says where.
        """
        failed: list[str] = []
        doing = "the setup cells were"
        try:
            failed = self._run_setup(newcomers, setup, ask)
            doing = "the copy of variables was"
            return ", ".join([self._copy_variables(newcomers, ask), *failed])
        except KeyboardInterrupt as interrupt:
            outcome = f"{doing} {interrupt}"
            raise CellInterrupted(", ".join([outcome, *failed])) from interrupt

    # -- setup cells ---------------------------------------------------------------

    def _run_setup(
        self, newcomers: Sequence[RankInfo], setup: Sequence[tuple[str, int]], ask: Ask
    ) -> list[str]:
        """Run the setup cells. Returns a description of each failure."""
        failed = []
        broken = False
        for code, number in setup:
            replies = {
                info: self._registry.send(info, endpoints.RUN_CELL, code, number)
                for info in newcomers
            }
            for answer in self._answers(replies, SETUP_TIMEOUT_S, release=True):
                broken |= answer.broken
                error = _why(answer)
                if answer.ok and answer.value[0] is not None:
                    error = f"{answer.value[0].ename}: {answer.value[0].evalue}"
                if error:
                    failed.append(f"setup cell In[{number}] failed on it: {error}")
        if broken:  # a collective in a setup cell was interrupted
            asked = {info: ask(info, endpoints.RENEW) for info in self._registry.living}
            answers = self._answers(asked, COPY_TIMEOUT_S)
            self._registry.update(answer.value for answer in answers if answer.ok)
        return failed

    def _release(self, ranks: Sequence[RankInfo]) -> None:
        """Release ranks that wait in a collective for ranks without a setup cell."""
        calls = self._registry.ask(
            endpoints.WAITING,
            ranks=[info.rank for info in ranks],
        )
        for rank, call in calls.items():
            if call is not None and len(call.members) > len(ranks):
                reason = (
                    f"released from {call.operation}: a setup cell runs only on the "
                    "rank that joins, so it cannot call collectives"
                )
                self._registry.tell(endpoints.RELEASE, reason, ranks=[rank])

    # -- variables -----------------------------------------------------------------

    def _copy_variables(self, newcomers: Sequence[RankInfo], ask: Ask) -> str:
        """Copy the variables of the lowest old rank. Returns a description.

        If a newcomer cannot unpickle a variable, the other variables are sent again
        without it.
        """
        new = {info.rank for info in newcomers}
        others = [info for info in self._registry.living if info.rank not in new]
        if not others:
            return "it has no variables, because no rank is left that has some"
        source = others[0]
        end = time.monotonic() + COPY_TIMEOUT_S
        lost: dict[str, str] = {}
        while True:
            replies = {source: ask(source, endpoints.EXPORT_VARIABLES, list(lost))}
            (answer,) = self._answers(replies, end - time.monotonic())
            if error := _why(answer):
                if source.rank in self._registry.died:
                    return self._copy_variables(newcomers, ask)
                return f"it has none of the variables of rank {source.rank}: {error}"
            shipment, unpicklable, position, settings = answer.value
            lost |= unpicklable
            carrier = self._registry.carrier
            try:
                shipment = carrier.here(shipment)
                replies = {
                    info: self._registry.send(
                        info,
                        endpoints.ADOPT_VARIABLES,
                        carrier.to(info.host, shipment),
                        position,
                        settings,
                    )
                    for info in newcomers
                }
                answers = self._answers(replies, end - time.monotonic())
            except TransferError as lost_host:
                return (
                    f"it has none of the variables of rank {source.rank}: {lost_host}"
                )
            finally:
                carrier.discard(shipment)
            if error := next(filter(None, map(_why, answers)), ""):
                return f"it has none of the variables of rank {source.rank}: {error}"
            refused = [answer.value for answer in answers if answer.value is not None]
            if not refused:
                break
            lost |= dict(refused)
        outcome = f"it has the variables of rank {source.rank}"
        if (was := self._before.get(source.engine_uuid, source.rank)) != source.rank:
            outcome += f" (rank {was} before)"
        if lost:
            names = "; ".join(f"{name} ({why})" for name, why in lost.items())
            outcome += f", but these cannot be copied: {names}"
        return outcome

    # -- waiting -------------------------------------------------------------------

    def _answers(
        self, replies: Replies, timeout_s: float, *, release: bool = False
    ) -> list[Answer]:
        """Wait for the ranks' answers, and interrupt ranks that are late.

        Args:
            replies: The future answers.
            timeout_s: Seconds until the ranks are interrupted.
            release: Release ranks that wait in a collective for other ranks.

        Raises:
            KeyboardInterrupt: The ranks were interrupted; the message says where.
        """
        try:
            if not self._wait(replies, timeout_s, release=release):
                self._interrupt(replies)
        except KeyboardInterrupt:
            self._interrupt(replies)
            answers = [_answer(reply) for reply in replies.values()]
            why = next(filter(None, map(_why, answers)), "interrupted")
            raise KeyboardInterrupt(why) from None
        return [_answer(reply) for reply in replies.values()]

    def _wait(self, replies: Replies, timeout_s: float, *, release: bool) -> bool:
        """Wait for all replies; False if time was up first."""
        end = time.monotonic() + timeout_s
        while left := max(0.0, end - time.monotonic()):
            if await_all(replies.values(), min(left, SETUP_LOOK_S)):
                return True
            if self._is_interrupted():
                raise KeyboardInterrupt
            if release:
                self._release(list(replies))
        return all(reply.done() for reply in replies.values())

    def _interrupt(self, replies: Replies) -> None:
        ranks = [info.rank for info, reply in replies.items() if not reply.done()]
        self._registry.tell(endpoints.INTERRUPT, ranks=ranks)
        await_all(replies.values(), GRACE_S)


def _answer(reply: Future[Answer]) -> Answer:
    if not reply.done():
        return Answer(False, ("TimeoutError", "it took too long", []), broken=False)
    try:
        return reply.result()
    except RankDied as error:
        return Answer(False, ("RankDied", str(error), []), broken=False)


def _why(answer: Answer) -> str:
    """The error of an answer; "" if it has none."""
    return "" if answer.ok else str(answer.value[1] or answer.value[0])
