"""A plain table: HTML in a notebook, aligned text elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["Table", "bytes_text", "seconds_text"]

CELL = "text-align:left;vertical-align:top;padding:2px 10px;white-space:pre-wrap"
UNBROKEN = CELL.removesuffix("-wrap")
"""For a cell of a few words, such as a number with its unit."""
UNBROKEN_LENGTH = 16
ALIGNED = f"{UNBROKEN};font-family:var(--jp-code-font-family,monospace)"
"""For a cell of several lines, whose columns are aligned by spaces."""


class Table:
    """Rows of text under a header, with an optional caption.

    A table without rows shows its caption, and without that its header.
    """

    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[object]],
        caption: str = "",
    ) -> None:
        self._header = list(header)
        self._rows = [
            ["" if cell is None else str(cell) for cell in row] for row in rows
        ]
        self._caption = caption
        self._is_caption = bool(caption) and not rows

    def __repr__(self) -> str:
        if self._is_caption:
            return self._caption
        table = [_lines_of(row) for row in [self._header, *self._rows]]
        widths = [
            max(len(cell) for cell in column)
            for column in zip(*(line for row in table for line in row), strict=True)
        ]
        lines = [
            "  ".join(
                cell.ljust(width) for cell, width in zip(line, widths, strict=True)
            )
            for row in table
            for line in row
        ]
        lines.insert(len(table[0]), "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in [*lines, self._caption] if line)

    def _repr_html_(self) -> str:
        lines = self._caption.splitlines()
        caption = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        if self._is_caption:
            return caption
        head = "".join(
            f'<th scope="col" style="{CELL}">{html.escape(cell)}</th>'
            for cell in self._header
        )
        body = "".join(
            "<tr>"
            + "".join(f'<td style="{_style(c)}">{html.escape(c)}</td>' for c in row)
            + "</tr>"
            for row in self._rows
        )
        head = f"<thead><tr>{head}</tr></thead>"
        return f"<table>{head}<tbody>{body}</tbody></table>{caption}"


def _style(cell: str) -> str:
    if "\n" in cell:
        return ALIGNED
    return UNBROKEN if len(cell) <= UNBROKEN_LENGTH else CELL


def _lines_of(row: Sequence[str]) -> list[tuple[str, ...]]:
    """The lines of a row whose cells may have several."""
    cells = [cell.split("\n") for cell in row]
    return list(zip_longest(*cells, fillvalue=""))


def bytes_text(size: int | None) -> str:
    """A size in bytes, as text in KiB, MiB or GiB; "" for None."""
    if size is None:
        return ""
    if 0 < size < 2**20:
        return f"{math.ceil(size / 2**10)} KiB"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def seconds_text(seconds: float | None) -> str:
    """A duration, as text such as "1.5 s" or "2 h 01 min"; "" for None."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
