"""Replacing, dropping and adding ranks of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

from nbdist.cluster.arrival import Arrival
from nbdist.cluster.link import Answer
from nbdist.cluster.placement import Place
from nbdist.cluster.reserve import Reserve
from nbdist.cluster.roster import Roster
from nbdist.cluster.start import write_places
from nbdist.errors import RankDied, StartError
from nbdist.wire import Change, Join, RankInfo, format_ranks

__all__ = ["Ask", "Membership"]

Ask = Callable[..., "Future[Answer]"]
"""Has a rank's main thread call a function: `ask(info, target, *args)`."""

POLL_S = 0.05


class Membership:
    """Leads the living ranks from one generation to the next.

    Each method takes `ask`, which reaches the main threads of the ranks.

    Args:
        roster: The ranks; it is brought up to date.
        places: Where each rank runs, by rank; changed in place.
        timeout_s: Seconds until newcomers must be up.
    """

    def __init__(self, roster: Roster, places: list[Place], timeout_s: float) -> None:
        self._roster = roster
        self._places = places
        self._timeout_s = timeout_s
        self._generation = 0
        self._reserve = Reserve(roster.run_dir)

    def replace_dead(self, ask: Ask) -> list[RankInfo]:
        """Put a new process in the place of each dead rank; the newcomers."""
        dead = sorted(self._roster.died)
        numbers = {info.rank: info.rank for info in self._roster.living}
        return self._change(numbers, dead, ask)

    def drop_dead(self, ask: Ask) -> None:
        """Go on with the living, renumbered in their old order."""
        living = [info.rank for info in self._roster.living]
        self._places[:] = [self._places[rank] for rank in living]
        self._change({old: new for new, old in enumerate(living)}, [], ask)

    def grow(self, places: Sequence[Place], ask: Ask) -> list[RankInfo]:
        """Add ranks at these places; the newcomers."""
        size = len(self._places)
        self._places.extend(places)
        numbers = {rank: rank for rank in range(size)}
        try:
            return self._change(numbers, range(size, len(self._places)), ask)
        except BaseException:
            del self._places[size:]
            raise

    def cut(self, size: int, ask: Ask) -> None:
        """Let all ranks from `size` on go."""
        leaving = [info for info in self._roster.living if info.rank >= size]
        self._change({rank: rank for rank in range(size)}, [], ask)
        for info in leaving:
            self._roster.link.send(
                info.engine_uuid, "nbdist.engine.agent:end", control=True
            )
        del self._places[size:]

    def _change(
        self, numbers: dict[int, int], joins: Sequence[int], ask: Ask
    ) -> list[RankInfo]:
        with self._reserve.released():  # newcomers write files, to a full disk too
            return self._carry_out(numbers, joins, ask)

    def _carry_out(
        self, numbers: dict[int, int], joins: Sequence[int], ask: Ask
    ) -> list[RankInfo]:
        write_places(self._roster.run_dir, self._places)
        self._generation = 1 + max(
            [self._generation, *(info.generation for info in self._roster.infos)]
        )
        plan = Change(
            generation=self._generation,
            numbers=numbers,
            joins=tuple(Join(rank) for rank in joins),
            broken=bool(self._roster.died),
        )
        link = self._roster.link
        arrivals = [
            Arrival(self._roster.run_dir, j.rank, plan.generation) for j in plan.joins
        ]
        known = set(link.engines().values())
        replies = [
            ask(info, "nbdist.engine.membership:change", plan)
            for info in self._roster.living
        ]
        deadline = time.monotonic() + self._timeout_s
        newcomers = self._await_newcomers(arrivals, known, deadline)
        stayed = [self._answer(reply, deadline) for reply in replies]
        infos = [info for info in [*stayed, *newcomers] if info is not None]
        self._roster.begin(sorted(infos, key=lambda info: info.rank))
        return newcomers

    def _await_newcomers(
        self, arrivals: Sequence[Arrival], known: set[str], deadline: float
    ) -> list[RankInfo]:
        link = self._roster.link

        def arrived() -> set[str]:
            return set(link.engines().values()) - known

        self._wait(lambda: len(arrived()) >= len(arrivals), arrivals, deadline)
        hellos = [
            link.send(uuid, "nbdist.engine.agent:status").reply for uuid in arrived()
        ]
        self._wait(lambda: all(map(Future.done, hellos)), arrivals, deadline)
        return [self._answer(hello, deadline)["info"] for hello in hellos]

    def _wait(
        self,
        condition: Callable[[], bool],
        arrivals: Sequence[Arrival],
        deadline: float,
    ) -> None:
        """Until the condition holds.

        Raises:
            StartError: A rank that is awaited, or another, has ended; or time is up.
        """
        mourned = self._roster.died.keys()
        while not condition():
            for arrival in arrivals:
                if (end := arrival.end()) is not None:
                    raise StartError(
                        f"new rank {arrival.rank} ended with {end.how} while coming "
                        f"up; its last lines:\n{end.last_lines}"
                    )
            for rank in self._roster.died.keys() - mourned:
                error = self._roster.died[rank]
                raise StartError(f"{error} while a new rank was coming up")
            if time.monotonic() > deadline:
                ranks = format_ranks(arrival.rank for arrival in arrivals)
                raise StartError(
                    f"new rank {ranks} was not up after {self._timeout_s:g} s"
                )
            time.sleep(POLL_S)  # other processes' files raise no event

    def _answer(self, reply: Future[Answer], deadline: float) -> Any:
        try:
            answer = reply.result(max(0.1, deadline - time.monotonic()))
        except NoAnswer as error:
            raise StartError(
                f"a rank did not join the others within {self._timeout_s:g} s"
            ) from error
        except RankDied as error:
            raise StartError(f"{error} while the ranks were meeting anew") from error
        if not answer.ok:
            _ename, _evalue, lines = answer.value
            raise StartError(f"a rank could not join the others: {''.join(lines)}")
        return answer.value
