"""Where results go: out/bench/NAME.json and NAME.md, and docs/benchmarks.md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

__all__ = ["publish", "save", "section_path", "table"]

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out" / "bench"
PAGE = ROOT / "docs" / "benchmarks.md"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def save(name: str, results: Any, markdown: str) -> None:
    """Write out/bench/NAME.json and NAME.md, both with the machine's description."""
    OUT.mkdir(parents=True, exist_ok=True)
    described = machine.describe()
    record = {"machine": described, "results": results}
    (OUT / f"{name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    where = "; ".join(f"{key}: {value}" for key, value in described.items())
    text = f"{markdown.strip()}\n\nMeasured on: {where}.\n"
    section_path(name).write_text(text, encoding="utf-8")
    print(text, flush=True)


def section_path(name: str) -> Path:
    return OUT / f"{name}.md"


def publish(name: str) -> None:
    """Put a saved section between its markers in docs/benchmarks.md.

    Raises:
        ValueError: The page has no such markers.
    """
    begin, end = f"<!-- {name}: measured -->", f"<!-- {name}: end -->"
    section = section_path(name).read_text(encoding="utf-8")
    page, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _match: f"{begin}\n{section}{end}",
        PAGE.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"{PAGE} needs one pair of markers: {begin} {end}")
    PAGE.write_text(page, encoding="utf-8")
