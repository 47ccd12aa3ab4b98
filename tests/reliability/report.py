"""The table of results in docs/reliability.md."""

from __future__ import annotations

from benchmarks.report import put
from nbdist import CellError
from tests.reliability.matrix import CASES, FAULTS, PLACES, RANKS, Case

__all__ = ["Report"]


class Report:
    """Collects how each case has ended."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._said: dict[tuple[str, str], str] = {}

    def add(self, case: Case, seconds: float, error: BaseException) -> None:
        """Record the result of a case."""
        key = case.fault.name, case.place
        self._seconds.setdefault(key, []).append(seconds)
        if isinstance(error, CellError):
            self._said[key] = error.args[0].partition("\n")[0]

    @property
    def complete(self) -> bool:
        """Whether every case has passed."""
        return sum(map(len, self._seconds.values())) == len(CASES)

    def table(self) -> str:
        """Markdown: a row for each fault, a column for each place."""
        head = ["fault", *PLACES]
        rows = [head, ["---"] * len(head)]
        rows += [
            [fault.name, *(self._cell(fault.name, place) for place in PLACES)]
            for fault in FAULTS
        ]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def _cell(self, fault: str, place: str) -> str:
        seconds = self._seconds.get((fault, place))
        if seconds is None:
            return "n/a"
        return f"{len(seconds)} of {len(RANKS)}, {max(seconds):.2f} s"

    def write(self) -> None:
        """Replace the table on the page."""
        put("matrix", f"\n{self.table()}\n\n")
