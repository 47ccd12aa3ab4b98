"""Where results go: out/bench/NAME.json and NAME.md, and a page of docs/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

__all__ = ["publish", "put", "save", "section_path", "table"]

ROOT = Path(__file__).parent.parent
OUT = ROOT / "out" / "bench"
PAGES = ROOT / "docs"


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
    """Put a saved section into its page, as `put` does."""
    put(name, section_path(name).read_text(encoding="utf-8"))


def put(name: str, section: str) -> None:
    """Put a text between its markers, into the page of docs/ that has them.

    Raises:
        ValueError: No page has one pair of such markers.
    """
    begin, end = f"<!-- {name}: measured -->", f"<!-- {name}: end -->"
    for path in sorted(PAGES.glob("*.md")):
        page, count = re.subn(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _match: f"{begin}\n{section}{end}",
            path.read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        if count == 1:
            path.write_text(page, encoding="utf-8")
            return
    raise ValueError(f"a page of {PAGES} needs the markers {begin} {end}, once")
