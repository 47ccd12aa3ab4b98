"""Failures of several ranks, said once each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nbdist.wire import Failure, format_ranks

__all__ = ["group", "render", "summary"]

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def group(failures: Sequence[Failure]) -> list[list[Failure]]:
    """Failures that read the same, together; in the order of their first rank."""
    groups: dict[tuple[str, str, str], list[Failure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        text = ANSI.sub("", "\n".join(failure.traceback))
        groups.setdefault((failure.ename, failure.evalue, text), []).append(failure)
    return list(groups.values())


def summary(failures: Sequence[Failure], world_size: int) -> str:
    """One line for each distinct failure, such as "rank 2 of 4: ValueError: ..."."""
    return "\n".join(
        f"{_who(alike, world_size)}: {_error(alike[0])}" for alike in group(failures)
    )


def render(failures: Sequence[Failure], world_size: int) -> list[str]:
    """One traceback for each distinct failure, headed by its ranks and hosts."""
    lines = []
    for alike in group(failures):
        hosts = ", ".join(sorted({failure.host for failure in alike}))
        lines.append(f"\x1b[1;31m[{_who(alike, world_size)} on {hosts}]\x1b[0m")
        lines += alike[0].traceback or (f"\x1b[31m{_error(alike[0])}\x1b[39m",)
    return lines


def _who(alike: Sequence[Failure], world_size: int) -> str:
    ranks = format_ranks(failure.rank for failure in alike)
    return f"rank{'s' if len(alike) > 1 else ''} {ranks} of {world_size}"


def _error(failure: Failure) -> str:
    return f"{failure.ename}: {failure.evalue}" if failure.evalue else failure.ename
