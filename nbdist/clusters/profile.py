"""The profile of a cell: what took the time on the ranks, and who waited for whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from nbdist.clusters.collective_history import HistoryRow
from nbdist.clusters.profile_trace import write_trace
from nbdist.errors import ClusterError, UsageError
from nbdist.widgets.table import Table
from nbdist.wire import RankProfile, format_ranks

__all__ = ["Profile", "Wait", "check_steps", "checked_path"]

MOST_OPERATIONS = 10
MOST_WAITS = 10
WHY_MISSING = "it has died, has not ended a cell, or torch could not profile it"
SUFFIXES = (".json", ".json.gz")


@dataclass
class Wait:
    """The collectives of one line, and for how long ranks waited in them for others."""

    operation: str
    location: str
    """Such as "In[7] line 4"; "" if it is not known."""
    calls: int = 0
    seconds: float = 0.0
    """The sum over all ranks, from a rank's call to that of the last rank."""
    caused: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """The seconds for which others waited for a rank, by rank."""


class Profile:
    """What `Cluster.profiling` has measured. It is shown as two tables.

    Args:
        ranks: The ranks that are profiled.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: dict[int, RankProfile] = {}
        """What was measured on each rank."""
        self.missing = list(ranks)
        """The ranks without a profile: they have died, or are still in the cell."""
        self.rows: list[HistoryRow] = []
        """The collectives that all members have made during the profile."""

    def receive(
        self, found: Mapping[int, RankProfile | None], rows: Sequence[HistoryRow]
    ) -> None:
        """Complete this with the ranks' answers and their recorded collectives."""
        self.ranks = {rank: each for rank, each in found.items() if each is not None}
        self.missing = [rank for rank in self.missing if rank not in self.ranks]
        self.rows = [row for row in rows if self._has(row)]

    def _has(self, row: HistoryRow) -> bool:
        if not row.is_agreed or row.calls.keys() != set(row.members):
            return False
        return all(
            rank in self.ranks and self.ranks[rank].covers(call.started_ns)
            for rank, call in row.calls.items()
        )

    @property
    def waits(self) -> list[Wait]:
        """Who waited for whom, by operation and line, the longest first."""
        found: dict[tuple[str, str], Wait] = {}
        for row in self.rows:
            operation = next(iter(row.calls.values())).operation
            key = operation, row.location
            wait = found.setdefault(key, Wait(*key))
            last_ns = row.calls[row.last_rank].started_ns
            waits_ns = [last_ns - call.started_ns for call in row.calls.values()]
            seconds = sum(waits_ns) / 1e9
            wait.calls += 1
            wait.seconds += seconds
            wait.caused[row.last_rank] += seconds
        return sorted(found.values(), key=lambda each: -each.seconds)

    @property
    def operations_table(self) -> Table:
        """The operations that took most time, and the time on each rank."""
        own = {
            rank: {each.name: each for each in profile.operations}
            for rank, profile in self.ranks.items()
        }
        every = [each for operations in own.values() for each in operations.values()]
        on_gpu = any(each.device_s for each in every)
        seconds = attrgetter("device_s" if on_gpu else "cpu_s")
        totals: Counter[str] = Counter()
        for each in every:
            totals[each.name] += seconds(each)
        rows = []
        for name, _ in totals.most_common(MOST_OPERATIONS):
            found = [operations.get(name) for operations in own.values()]
            calls = max(each.calls for each in found if each is not None)
            times = [each and _milliseconds(seconds(each)) for each in found]
            rows.append([name, calls, *times])
        header = ["operation", "calls", *(f"rank {rank}" for rank in self.ranks)]
        where = "on the GPU" if on_gpu else "on the CPU, with its waits"
        return Table(header, rows, f"time {where}, without the operations it calls")

    @property
    def waits_table(self) -> Table:
        """The collectives in which ranks waited longest for others."""
        rows = []
        for wait in self.waits[:MOST_WAITS]:
            rank = max(wait.caused, key=lambda each: wait.caused[each])
            share = wait.caused[rank] / wait.seconds if wait.seconds else 0.0
            rows.append(
                [
                    wait.operation,
                    wait.location,
                    wait.calls,
                    _milliseconds(wait.seconds),
                    f"rank {rank} ({share:.0%})",
                ]
            )
        return Table(
            ["collective", "at", "calls", "waited", "mostly for"],
            rows,
            "from a rank's call to that of the last rank, over all ranks",
        )

    @property
    def summary(self) -> str:
        """What was profiled, in a sentence."""
        lack = f"rank {format_ranks(self.missing)} has no profile: {WHY_MISSING}"
        if not self.ranks:
            return lack
        steps = max(each.steps for each in self.ranks.values())
        longest = max(each.ended_ns - each.begun_ns for each in self.ranks.values())
        text = (
            f"rank {format_ranks(self.ranks)}: {steps} optimizer step"
            f"{'s' * (steps != 1)} in {_milliseconds(longest / 1e9)}"
        )
        return f"{text}; {lack}" if self.missing else text

    def save(self, path: Path) -> None:
        """Write one trace of all ranks, for https://ui.perfetto.dev.

        It has the operations of each rank and, in a row of their own, its collectives.
        Arrows lead from the last rank's call of a collective to those of the others.

        Args:
            path: A file as of `checked_path`.

        Raises:
            ClusterError: No rank has a profile.
            OSError: A file cannot be read or written.
        """
        if not self.ranks:
            raise ClusterError(self.summary)
        write_trace(path, self.ranks, self.rows)

    def __repr__(self) -> str:
        return "\n\n".join([self.summary, *(repr(table) for table in self._tables)])

    def _repr_html_(self) -> str:
        import html

        tables = "".join(table._repr_html_() for table in self._tables)
        return f"<div>{html.escape(self.summary)}</div>{tables}"

    @property
    def _tables(self) -> list[Table]:
        tables = [self.operations_table] if self.ranks else []
        return [*tables, self.waits_table] if self.rows else tables


def check_steps(steps: int) -> None:
    """
    Raises:
        UsageError: It is not a number of steps.
    """
    if steps < 1:
        raise UsageError(f"-n {steps}: expected a number of steps, 1 or more")


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def checked_path(text: str) -> Path:
    """The path of a trace's file.

    Raises:
        UsageError: It is no .json or .json.gz file, or the folder does not exist.
    """
    path = Path(text).expanduser().absolute()
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"--save {text}: expected a .json or .json.gz file")
    if not path.parent.is_dir():
        raise UsageError(f"--save {text}: the folder {path.parent} does not exist")
    return path
