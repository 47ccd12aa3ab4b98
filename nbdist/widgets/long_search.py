"""A field in the notebook that searches all lines of a cell's long text."""

from __future__ import annotations

import contextvars
import html
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from IPython.display import display, update_display

__all__ = ["Found", "LongSearch", "search"]

MOST_SHOWN = 200
"""The lines that are shown of those that have the text."""
LINE_LENGTH = 300
"""The most characters that are shown of a line."""
LIMIT_S = 2.0
"""Seconds after which a search of a huge file ends with what it has found."""
CHECK_LINES = 10_000
"""The lines between two looks at the clock."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
LINE = re.compile(r"\[([\d,-]+)\] (.*)", re.DOTALL)
STYLE = "margin:0;max-height:20em;overflow:auto;font-size:13px;white-space:pre-wrap"


class Found(NamedTuple):
    """What a search has found."""

    lines: list[tuple[int, str]]
    """The number, from 1, and the text of the first `MOST_SHOWN` lines."""
    counts: dict[str, int]
    """The number of lines by their ranks, such as "0-3"."""
    searched: int
    """The number of lines that were read."""
    is_whole: bool
    """Whether all lines were read, within the time."""


def search(path: Path, text: str, limit_s: float = LIMIT_S) -> Found:
    """Search a file of lines that begin with their ranks, such as "[0-3] step 7".

    Upper and lower case are the same. The ranks are no part of the line.

    Args:
        path: The file.
        text: What a line must contain.
        limit_s: Seconds after which the search ends.

    Raises:
        OSError: The file cannot be read.
    """
    wanted = text.casefold()
    lines: list[tuple[int, str]] = []
    counts: Counter[str] = Counter()
    number, end = 0, time.monotonic() + limit_s
    with path.open(encoding="utf-8", errors="backslashreplace") as file:
        for number, line in enumerate(file, 1):
            if number % CHECK_LINES == 0 and time.monotonic() > end:
                return Found(lines, dict(counts), number, False)
            plain = COLOUR.sub("", line.rstrip("\n"))
            labelled = LINE.fullmatch(plain)
            ranks, content = labelled.groups() if labelled else ("", plain)
            if wanted in content.casefold():
                counts[ranks] += 1
                if len(lines) < MOST_SHOWN:
                    lines.append((number, plain))
    return Found(lines, dict(counts), number, True)


class LongSearch:
    """A field below the collapsed lines of a cell, and what a search has found.

    The kernel searches the file, so that the notebook need not hold the lines. Make it
    in the context of the notebook's cell.

    Args:
        identifier: A unique name.
        path: The file with all lines.
    """

    def __init__(self, identifier: str, path: Path) -> None:
        import ipywidgets

        self._identifier = identifier
        self._path = path
        self._context = contextvars.copy_context()
        self._field = ipywidgets.Text(
            description="search all lines",
            placeholder="a text, then Enter",
            continuous_update=False,
            style={"description_width": "initial"},
        )
        self._result = ipywidgets.HTML()
        self._box = ipywidgets.VBox([self._field, self._result])
        self._field.observe(self._search, "value")
        self._is_shown = False

    def show(self) -> None:
        """Display the field, unless it is displayed already."""
        if not self._is_shown:
            self._is_shown = True
            bundle = self._box._repr_mimebundle_()
            bundle["text/plain"] = ""
            display(bundle, raw=True, display_id=self._identifier)

    def close(self) -> None:
        """Remove the field: the file is removed, too. Any thread may call this."""
        empty, name = {"text/plain": "", "text/html": ""}, self._identifier
        if self._is_shown:
            self._context.copy().run(update_display, empty, raw=True, display_id=name)
        for widget in (self._field, self._result, self._box):
            widget.close()

    def _search(self, change: Any) -> None:
        text = change["new"]
        if not text:
            self._result.value = ""
            return
        try:
            found = search(self._path, text)
        except OSError as error:
            why = html.escape(error.strerror or str(error))
            self._result.value = f'<p role="status">not searched: {why}</p>'
            return
        self._result.value = _page(found, text)


def _page(found: Found, text: str) -> str:
    """What was found, as HTML."""
    total = sum(found.counts.values())
    summary = f"{total:,} of {found.searched:,} lines"
    if not found.is_whole:
        summary = f"{total:,} of the first {found.searched:,} lines"
    if total > len(found.lines):
        summary += f", of which the first {len(found.lines)} are here"
    per_rank = ", ".join(
        f"[{ranks}] {count:,}" for ranks, count in found.counts.items()
    )
    if len(found.counts) > 1:
        summary += f": {per_rank}"
    mark = re.compile(re.escape(text), re.IGNORECASE)
    width = len(f"{found.lines[-1][0]:,}") if found.lines else 0
    shown = "\n".join(
        f"{number:>{width},}  {_marked(line[:LINE_LENGTH], mark)}"
        for number, line in found.lines
    )
    # A block that scrolls can be reached by the keyboard.
    lines = (
        f'<pre tabindex="0" aria-label="lines found" style="{STYLE}">{shown}</pre>'
        if shown
        else ""
    )
    return f'<div role="status">{html.escape(summary)}</div>{lines}'


def _marked(line: str, mark: re.Pattern[str]) -> str:
    """A line as HTML, with what was searched for marked."""
    parts, last = [], 0
    for found in mark.finditer(line):
        parts.append(html.escape(line[last : found.start()]))
        parts.append(f"<mark>{html.escape(found[0])}</mark>")
        last = found.end()
    return "".join(parts) + html.escape(line[last:])
