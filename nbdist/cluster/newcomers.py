"""What ranks that have joined get: the setup cells, then another rank's variables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait

from nbdist.cluster.ipp_client import Answer
from nbdist.cluster.membership import Ask
from nbdist.cluster.rank_registry import Roster
from nbdist.errors import CellInterrupted, RankDied
from nbdist.ipc import endpoints
from nbdist.ipc.shm_payload import discard
from nbdist.wire import RankInfo

__all__ = ["Newcomers"]

SETUP_TIMEOUT_S = 600.0
"""Seconds that one setup cell may take."""
COPY_TIMEOUT_S = 60.0
"""Seconds that the copy of the variables may take; the ranks limit each variable."""
GRACE_S = 5.0
"""Seconds until ranks that were interrupted must have answered."""
LOOK_S = 0.5
"""How often ranks that run a setup cell are asked whether they wait for another."""
RENEW = endpoints.RENEW
RUN_CELL = endpoints.RUN_CELL
EXPORT = endpoints.EXPORT_VARIABLES
ADOPT = endpoints.ADOPT_VARIABLES

Replies = Mapping[RankInfo, "Future[Answer]"]


class Newcomers:
    """Brings ranks that have joined up to date.

    Nothing here fails: what could not be done is said, and the world goes on.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def prepare(
        self,
        newcomers: Sequence[RankInfo],
        setup: Sequence[tuple[str, int]],
        ask: Ask,
    ) -> str:
        """Run the setup cells, then copy the lowest old rank's variables.

        Args:
            newcomers: Ranks that have joined; they are idle.
            setup: Cells, with their In[] numbers.
            ask: Reaches the main threads of the other ranks.

        Returns:
            What was done, in words.

        Raises:
            CellInterrupted: The user has interrupted it; the message says at what.
        """
        failed: list[str] = []
        doing = "the setup cells were"
        try:
            failed = self._run_setup(newcomers, setup, ask)
            doing = "the copy of variables was"
            return ", ".join([self._copy_variables(newcomers, ask), *failed])
        except KeyboardInterrupt as interrupt:
            told = f"{doing} {interrupt}"
            raise CellInterrupted(", ".join([told, *failed])) from interrupt

    # -- setup cells ---------------------------------------------------------------

    def _run_setup(
        self, newcomers: Sequence[RankInfo], setup: Sequence[tuple[str, int]], ask: Ask
    ) -> list[str]:
        """Run the setup cells; what failed, in words."""
        failed = []
        spent = False
        for code, number in setup:
            replies = {
                info: self._send(info, RUN_CELL, code, number) for info in newcomers
            }
            for answer in self._answers(replies, SETUP_TIMEOUT_S, release=True):
                spent |= answer.spent
                error = _why(answer)
                if answer.ok and answer.value[0] is not None:
                    error = f"{answer.value[0].ename}: {answer.value[0].evalue}"
                if error:
                    failed.append(f"setup cell In[{number}] failed on it: {error}")
        if spent:  # such a cell has left a collective
            asked = {info: ask(info, RENEW) for info in self._roster.living}
            answers = self._answers(asked, COPY_TIMEOUT_S)
            self._roster.update(answer.value for answer in answers if answer.ok)
        return failed

    def _release(self, ranks: Sequence[RankInfo]) -> None:
        """Release ranks that wait in a collective for ranks which run no setup cell."""
        calls = self._roster.ask(
            endpoints.WAITING,
            ranks=[info.rank for info in ranks],
        )
        for rank, call in calls.items():
            if call is not None and len(call.members) > len(ranks):
                reason = (
                    f"released from {call.operation}: a setup cell runs on a rank that "
                    "joins alone, and no other rank comes"
                )
                self._roster.tell(endpoints.RELEASE, reason, ranks=[rank])

    # -- variables -----------------------------------------------------------------

    def _copy_variables(self, newcomers: Sequence[RankInfo], ask: Ask) -> str:
        """Give them the variables of the lowest old rank; what was done, in words.

        What a newcomer cannot unpickle is left out, and the rest is sent again.
        """
        new = {info.rank for info in newcomers}
        others = [info for info in self._roster.living if info.rank not in new]
        if not others:
            return "it has no variables, for no rank is left that has some"
        source = others[0]
        end = time.monotonic() + COPY_TIMEOUT_S
        lost: dict[str, str] = {}
        while True:
            replies = {source: ask(source, EXPORT, list(lost))}
            (answer,) = self._answers(replies, end - time.monotonic())
            if error := _why(answer):
                return f"it has none of the variables of rank {source.rank}: {error}"
            shipment, unpicklable = answer.value
            lost |= unpicklable
            try:
                replies = {
                    info: self._send(info, ADOPT, shipment) for info in newcomers
                }
                answers = self._answers(replies, end - time.monotonic())
            finally:
                discard(shipment)
            if error := next(filter(None, map(_why, answers)), ""):
                return f"it has none of the variables of rank {source.rank}: {error}"
            refused = [answer.value for answer in answers if answer.value is not None]
            if not refused:
                break
            lost |= dict(refused)
        told = f"it has the variables of rank {source.rank}"
        if lost:
            names = "; ".join(f"{name} ({why})" for name, why in lost.items())
            told += f", but these cannot be copied: {names}"
        return told

    # -- waiting -------------------------------------------------------------------

    def _send(self, info: RankInfo, target: str, *args: object) -> Future[Answer]:
        return self._roster.link.send(info.engine_uuid, target, *args).reply

    def _answers(
        self, replies: Replies, timeout_s: float, *, release: bool = False
    ) -> list[Answer]:
        """The ranks' answers; those that are late are interrupted.

        Args:
            release: Release ranks that wait in a collective for others.

        Raises:
            KeyboardInterrupt: The ranks were interrupted; the message says in what.
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
        """Whether all have answered in time."""
        end = time.monotonic() + timeout_s
        while left := max(0.0, end - time.monotonic()):
            if not wait(replies.values(), min(left, LOOK_S)).not_done:
                return True
            if release:
                self._release(list(replies))
        return all(reply.done() for reply in replies.values())

    def _interrupt(self, replies: Replies) -> None:
        ranks = [info.rank for info, reply in replies.items() if not reply.done()]
        self._roster.tell(endpoints.INTERRUPT, ranks=ranks)
        wait(replies.values(), GRACE_S)


def _answer(reply: Future[Answer]) -> Answer:
    if not reply.done():
        return Answer(False, ("TimeoutError", "it took too long", []), spent=False)
    try:
        return reply.result()
    except RankDied as error:
        return Answer(False, ("RankDied", str(error), []), spent=False)


def _why(answer: Answer) -> str:
    """What went wrong; "" where nothing did."""
    return "" if answer.ok else str(answer.value[1] or answer.value[0])
