"""Describes failures of several ranks: each failure once, causes before effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.errors import CellError
from nbdist.wire import Failure, format_ranks

if TYPE_CHECKING:
    from nbdist.clusters.call import Call

__all__ = [
    "EFFECTS",
    "cell_error",
    "failures_of",
    "group",
    "is_effect",
    "render",
    "summary",
    "with_causes",
]

ANSI = re.compile(r"\x1b\[[0-9;]*m")
ENDED = "Ended"
EFFECTS = ("CollectiveAborted", ENDED)
"""Failures that are effects of another rank's."""


def group(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Group failures with the same text.

    Groups are in the order of their first rank. Failures that are effects of other
    failures come last, as of ranks that were released from a collective.
    """
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        text = ANSI.sub("", "\n".join(failure.traceback))
        groups.setdefault((failure.ename, failure.evalue, text), []).append(failure)
    return sorted(groups.values(), key=lambda alike: alike[0].ename in EFFECTS)


def summary(failures: Sequence[Failure], world_size: int) -> str:
    """One line for each distinct failure, such as "rank 2 of 4: ValueError: ..."."""
    return "\n".join(
        f"{_who(alike, world_size)}{_where(alike[0])}: {_error(alike[0], first=True)}"
        for alike in group(failures)
    )


def render(failures: Sequence[Failure], world_size: int) -> list[str]:
    """One traceback for each distinct failure, headed by its ranks and hosts."""
    lines = []
    groups = group(failures)
    causes = [alike for alike in groups if alike[0].ename not in EFFECTS]
    for alike in causes or groups:
        hosts = ", ".join(sorted({failure.host for failure in alike}))
        head = f"{_who(alike, world_size)} on {hosts}{_where(alike[0])}"
        lines.append(f"\x1b[1;31m[{head}]\x1b[0m")
        lines += alike[0].traceback or (f"\x1b[31m{_error(alike[0])}\x1b[39m",)
    return lines


def cell_error(failures: Sequence[Failure], world_size: int) -> CellError:
    """The error that describes these failures."""
    return CellError(summary(failures, world_size), render(failures, world_size))


def failures_of(call: Call, host_of: Callable[[int], str]) -> list[Failure]:
    """The failures of a call, other than a cell's own exceptions.

    Args:
        host_of: The host of a rank.
    """
    failures = []
    for rank, answer in call.answers.items():
        if not answer.ok:
            ename, evalue, lines = answer.value
            failures.append(
                Failure(rank, host_of(rank), ename, evalue, traceback=tuple(lines))
            )
    for rank, error in call.died.items():
        failures.append(
            Failure(rank, host_of(rank), "RankDied", str(error), ending=error.ending)
        )
    failures += [
        Failure(info.rank, info.host, "Unfinished", "still busy")
        for info in call.unfinished
    ]
    return failures


def with_causes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures, after one rank's has ended the others.

    A rank that was interrupted for it says so.
    """
    causes = [failure.rank for failure in failures if not is_effect(failure)]
    if not causes:
        return list(failures)
    ranks = format_ranks(causes)
    why = f"interrupted, because rank {ranks} has failed"
    return [
        replace(failure, ename=ENDED, evalue=why, traceback=())
        if failure.ename == "KeyboardInterrupt"
        else failure
        for failure in failures
    ]


def is_effect(failure: Failure) -> bool:
    """Whether it is the effect of another rank's failure, or of an interrupt."""
    return failure.ename in ("KeyboardInterrupt", "Unfinished", *EFFECTS)


def _who(alike: Sequence[Failure], world_size: int) -> str:
    ranks = format_ranks(failure.rank for failure in alike)
    return f"rank{'s' if len(alike) > 1 else ''} {ranks} of {world_size}"


def _where(failure: Failure) -> str:
    return f" in {failure.location}" if failure.location else ""


def _error(failure: Failure, *, first: bool = False) -> str:
    message = failure.evalue
    if first:
        message = message.strip().partition("\n")[0]
    return f"{failure.ename}: {message}" if message else failure.ename
