"""The further text of a cell that prints many lines: collapsed, with its end."""

from __future__ import annotations

import html
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from IPython.display import display, update_display

from nbdist.widgets.long_search import LongSearch
from nbdist.wire import format_ranks

__all__ = ["LongText"]

SHOWN_LINES = 800
"""Lines of all ranks together that the notebook keeps of the further text."""
PERIOD_S = 1.0
LINE_LENGTH = 1000
"""The most characters of a line that the notebook keeps."""
SUMMARY_LENGTH = 80
COLOUR = re.compile(r"\x1b\[[\d;]*m")
STYLE = "margin:0;padding:0 8px;font-size:13px;white-space:pre-wrap"


class LongText:
    """A display that counts each rank's lines, and has the last of them.

    The lines are in a `<details>` element, which also works in a notebook that is not
    trusted. A file has all lines.

    Args:
        identifier: A unique name.
        path: The file; None for no file.
        field: The field that searches the file; None where no widget can be shown.
    """

    def __init__(
        self, identifier: str, path: Path | None, field: LongSearch | None = None
    ) -> None:
        self._identifier = identifier
        self._path = path
        self._field = field
        self._problem = ""
        """Why the file is not complete."""
        self._file = self._opened()
        self._counts: dict[int, int] = {}
        self._last: dict[int, deque[str]] = {}
        self._is_shown = self._is_new = False
        self._shown_at = 0.0

    def keep(self, ranks: Sequence[int], lines: Sequence[str]) -> None:
        """Write lines to the file that are shown as ordinary text."""
        if self._file is None:
            return
        label = f"[{format_ranks(ranks)}]"
        try:
            self._file.writelines(f"{label} {line}\n" for line in lines)
        except OSError as error:
            self._fail(error)

    def add(self, ranks: Sequence[int], lines: Sequence[str]) -> None:
        """Add lines that some ranks have printed."""
        self.keep(ranks, lines)
        self._is_new = True
        for rank in ranks:
            self._counts[rank] = self._counts.get(rank, 0) + len(lines)
            last = self._last.setdefault(rank, deque(maxlen=SHOWN_LINES))
            last.extend(lines[-SHOWN_LINES:])

    def show(self, *, now: bool = False) -> None:
        """Show what is new, at most once a second unless `now` is set."""
        due = now or time.monotonic() >= self._shown_at + PERIOD_S
        if not self._is_new or not due:
            return
        self._is_new, self._shown_at = False, time.monotonic()
        self._flush()
        bundle, name = self._bundle(), self._identifier
        if self._is_shown:
            update_display(bundle, raw=True, display_id=name)
        else:
            self._is_shown = True
            display(bundle, raw=True, display_id=name)
            if self._field is not None and not self._problem:
                self._field.show()

    def close(self) -> None:
        """Show the rest, and close the file."""
        self._flush()  # the display says what has not been written
        self.show(now=True)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> TextIO | None:
        if self._path is None:
            return None
        try:
            self._path.parent.mkdir(exist_ok=True)
            return self._path.open("w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._problem = str(error)
            return None

    def _flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._problem = error.strerror or str(error)
        self._file = None

    def _bundle(self) -> dict[str, str]:
        texts, pages, where = [], [], self._where()
        number = max(10, SHOWN_LINES // len(self._counts))
        for rank, count in sorted(self._counts.items()):
            last = [*self._last[rank]][-number:]
            lines = [COLOUR.sub("", line)[:LINE_LENGTH] for line in last]
            title = f"[{rank}] {count:,} more lines"
            if len(lines) < count:
                title += f", of which the last {len(lines)} are here"
            text = "\n".join(lines)
            texts.append(f"{title}:\n{text}")
            end = html.escape(lines[-1][:SUMMARY_LENGTH])
            pages.append(
                f"<details><summary><code><b>{title}</b>: {end}</code></summary>"
                f'<pre style="{STYLE}">{html.escape(text)}</pre></details>'
            )
        if where:
            texts.append(where)
            pages.append(f'<pre style="{STYLE}">{html.escape(where)}</pre>')
        return {"text/plain": "\n".join(texts), "text/html": "".join(pages)}

    def _where(self) -> str:
        if self._problem:
            return f"the other lines are lost: {self._problem}"
        if self._path is None:
            return ""
        where = f"all lines, until the cluster stops: {self._path}"
        if self._field is not None:
            return where
        return f"{where}\nto search them: !grep -n TEXT '{self._path}'"
