"""The table of draws in docs/reliability.md."""

from __future__ import annotations

from benchmarks.report import put
from tests.chaos.draw import FAULTS, Draw

__all__ = ["Report"]


class Report:
    """Counts the draws that were played, and those that ended as expected."""

    def __init__(self) -> None:
        self._tried: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], int] = {}

    def tried(self, draw: Draw) -> None:
        """Count a draw that begins."""
        key = draw.process, draw.fault
        self._tried[key] = self._tried.get(key, 0) + 1

    def held(self, draw: Draw) -> None:
        """Count a draw that has ended as expected."""
        key = draw.process, draw.fault
        self._held[key] = self._held.get(key, 0) + 1

    def table(self) -> str:
        """Markdown: a row for each process, a column for each fault."""
        faults = list(dict.fromkeys(f for each in FAULTS.values() for f in each))
        rows = [["process", *faults], ["---"] * (1 + len(faults))]
        rows += [[p, *(self._cell(p, fault) for fault in faults)] for p in FAULTS]
        total = f"{sum(self._held.values())} of {sum(self._tried.values())} draws held."
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([total, "", *lines])

    def _cell(self, process: str, fault: str) -> str:
        key = process, fault
        if fault not in FAULTS[process]:
            return "n/a"
        return f"{self._held.get(key, 0)} of {self._tried.get(key, 0)}"

    def write(self) -> None:
        """Write the table into the page."""
        put("chaos", f"\n{self.table()}\n\n")
