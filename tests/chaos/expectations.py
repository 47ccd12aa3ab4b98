"""How each draw must end: a pure function of the draw.

docs/reliability.md describes `TABLE` in words. The first row that fits a draw counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.chaos.draw import CHANGES, RANKS, Draw

__all__ = ["TABLE", "Expectation", "expected"]

START_S = 30.0
"""A start of three ranks on a loaded machine of two cores; 8 s on a quiet one."""
RECOVERY_S = 2 * START_S
LONG = 2 * RECOVERY_S
"""Seconds if a first recovery may fail, and all ranks are started again."""

WHOLE = "whole"
"""Every rank is the same process as before, and has its variables."""
REPLACED = "replaced"
"""The victims are new processes. The other ranks are the same as before."""
RENEWED = "renewed"
"""All ranks are new processes, which have run the setup cells."""
ENDED = "ended"
"""The cluster has ended completely. An error says so, and a new start works."""

DEATHS = ("SIGKILL", "exit code 7")
IN_CELL = ("cell", "collective", "push", "pull", "save")


@dataclass(frozen=True)
class Row:
    """The outcome of a kind of draws. An empty tuple matches everything."""

    process: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    moment: tuple[str, ...] = ()
    count: tuple[str, ...] = ()
    ends: tuple[str, ...] = (WHOLE,)
    """The states in which the cluster may be afterwards."""
    says: tuple[str, ...] = ()
    """Patterns that the errors and notes must have; `{rank}` for each victim, `{fault}`
    for how it ended."""
    raises: bool | None = None
    """Whether the notebook's call raises; None if it may or may not."""
    within_s: float = RECOVERY_S
    """The most seconds for the notebook's call, and for the cell after it."""

    def fits(self, draw: Draw) -> bool:
        return all(
            not wanted or value in wanted
            for wanted, value in (
                (self.process, draw.process),
                (self.fault, draw.fault),
                (self.moment, draw.moment),
                (self.count, draw.count),
            )
        )


DIED = (r"rank {rank}\b.*{fault}",)
ONE_DIED = (r"rank {any}\b.*{fault}",)
ENDS = (r"{process}.*{fault}",)
RANK = ("rank", "rank parent")
HELPER = ("controller", "mpiexec", "process supervisor")
FEW = ("one", "two")
STOP = ("SIGSTOP",)

TABLE = (
    # A start with a fault fails as a whole, names the fault, and leaves nothing.
    Row(RANK, DEATHS, ("start",), (), (ENDED,), ONE_DIED, True),
    Row(HELPER, DEATHS, ("start",), (), (ENDED,), ENDS, True),
    # Dead ranks are replaced: at once after a cell, else by the next cell. If all are
    # dead, all are started again. A rank whose parent dies also dies, but no other.
    Row(RANK, DEATHS, ("commit",), FEW, (REPLACED, RENEWED), DIED, False, LONG),
    Row(RANK, DEATHS, ("commit",), (), (RENEWED,), DIED, False, LONG),
    Row(RANK, DEATHS, CHANGES, FEW, (REPLACED, RENEWED), DIED, None, LONG),
    Row(RANK, DEATHS, CHANGES, (), (RENEWED,), DIED, None, LONG),
    Row(RANK, DEATHS, ("idle",), FEW, (REPLACED,), DIED, False),
    Row(RANK, DEATHS, ("idle",), (), (RENEWED,), DIED, None),
    Row(RANK, DEATHS, IN_CELL, FEW, (REPLACED,), DIED, True),
    Row(RANK, DEATHS, IN_CELL, (), (RENEWED,), DIED, True),
    # A rank that is stopped and continued costs only time.
    Row(RANK, STOP, (), (), (WHOLE,), (), False),
    # The ranks need the helpers. Without one, all ranks end, and the next cell starts
    # new ranks or says how. An elastic training continues from its last commit.
    Row(HELPER, DEATHS, ("commit",), (), (RENEWED, ENDED), ENDS, None, LONG),
    Row(HELPER, DEATHS, (), (), (RENEWED, ENDED), ENDS, None, LONG),
    # A helper that is stopped is continued, and a note says so.
    Row(HELPER, STOP, ("start",), (), (WHOLE,), (), False),
    Row(HELPER, STOP, (), (), (WHOLE,), (r"{process}.*stopped",), False),
    # A message from outside the cluster has no effect.
    Row((), ("wrong message",), (), (), (WHOLE,), (), False),
    # The death of a loader's worker fails the loop over that loader.
    Row(("worker",), DEATHS, (), (), (WHOLE,), (r"DataLoader worker \(pid",), True),
    Row(("worker",), STOP, (), (), (WHOLE,), (), False),
    # A full folder may fail a call that writes to it, and ends no rank.
    Row((), ("disk full",), ("start",), (), (WHOLE, ENDED)),
    Row((), ("disk full",), (), (), (WHOLE,)),
)


@dataclass(frozen=True)
class Expectation:
    """How one draw must end."""

    ends: tuple[str, ...]
    new: tuple[int, ...]
    """The ranks that are new processes afterwards, if the outcome is "replaced"."""
    says: tuple[str, ...]
    raises: bool | None
    within_s: float


def expected(draw: Draw) -> Expectation:
    """The row of the draw, with its names filled in."""
    row = next(row for row in TABLE if row.fits(draw))
    died = draw.process in RANK and draw.fault in DEATHS
    replaces = draw.moment in ("restart", "recovery")
    replaced = {draw.first} if replaces else set()
    new = replaced | (set(draw.victims) if died else set())
    ends = row.ends
    if replaced and WHOLE in ends:
        ends = tuple(REPLACED if end == WHOLE else end for end in ends)
    return Expectation(
        ends=ends,
        new=tuple(sorted(rank for rank in new if rank < RANKS)),
        says=tuple(_filled(row.says, draw)),
        raises=row.raises,
        within_s=row.within_s,
    )


def _filled(patterns: Iterable[str], draw: Draw) -> Iterable[str]:
    for pattern in patterns:
        # A rank whose parent was killed ends with it, and no process reports its exit.
        how = draw.fault if draw.process != "rank parent" else ""
        text = pattern.replace("{fault}", how).replace("{process}", draw.process)
        if "{any}" in text:
            yield text.replace("{any}", f"[{''.join(map(str, draw.victims))}]")
        elif "{rank}" in text:
            yield from (text.replace("{rank}", str(rank)) for rank in _named(draw))
        else:
            yield text


def _named(draw: Draw) -> Iterable[int]:
    """The victims that must be named.

    A rank that starts is not in the world yet. It is named only if it dies alone.
    """
    members = [r for r in draw.victims if draw.moment not in CHANGES or r != draw.first]
    return members or draw.victims
