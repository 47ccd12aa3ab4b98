"""The output of a distributed cell in the notebook."""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from IPython.display import clear_output, display, update_display

from nbdist.widgets.arrangement import arrange
from nbdist.widgets.grid import fits_grid, grid
from nbdist.widgets.lines import Item, LineSplitter, merge
from nbdist.widgets.live_text import (
    count_notes,
    flush,
    in_notebook,
    live_text,
    may_clear_output,
)
from nbdist.widgets.long_search import LongSearch
from nbdist.widgets.long_text import LongText
from nbdist.widgets.marimo_cell import in_marimo
from nbdist.widgets.widget_text import WIDGET_VIEW
from nbdist.wire import format_ranks

if TYPE_CHECKING:
    from nbdist.widgets.rank_widgets import RankWidgets
    from nbdist.widgets.widget_board import WidgetBoard

__all__ = ["CellView"]

MERGE_S = 0.2
"""The longest time, in seconds, that a line waits for other ranks' equal line."""
FLUSH_PERIOD_S = 0.05
"""The shortest time, in seconds, between two updates of the text."""
STATUS_AFTER_S = 2.0
STATUS_PERIOD_S = 0.25
STATUS_LINE = 200
"""The most characters of an unfinished line that the status shows."""
MOST_KEPT_ITEMS = 1000
"""The most lines and displays of a cell that its end brings into the order of ranks."""
MOST_LINES = 1000
"""The lines of a cell that a front end shows as ordinary text. The others are
collapsed."""
OWN_NOTE = "[nbdist] "
"""The beginning of a note in a rank's text, which is never collapsed."""
MOST_KEPT_BYTES = 5_000_000
SIGNS = {
    "finished": "✓",
    "failed": "✗",
    "died": "✗",
    "interrupted": "■",
    "timed out": "■",
    "left": "○",
}
Message = dict[str, Any]


class Shown(NamedTuple):
    """A display in the notebook."""

    ranks: tuple[int, ...]
    identifier: str


class CellView:
    """Shows the output of some ranks as it arrives: an observer of a call.

    Each whole line is shown with the numbers of its ranks. Unfinished lines, such as
    progress bars, are shown in a status line, which appears if a cell takes long.

    While the cell runs, output is shown as it arrives. The end of a short output brings
    it into the order of ranks, and joins equal lines and displays of ranks that were
    not in step.

    The status of a cell in the background appears at once. Its methods are then called
    in the context of the notebook's cell, on a thread.

    Args:
        ranks: The ranks that run the cell.
        key: A unique name.
        hint: How a cell in the background can be ended; "" for another cell.
        is_alone: Whether the notebook's cell has no other output than that of the
            ranks, so that it may be replaced.
        remark: A text for the last line, which is then always shown.
        widgets: The live widgets of the ranks; None shows their texts instead.
        path: The file for the lines of a long text; None for no file.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        key: str,
        hint: str = "",
        *,
        is_alone: bool = False,
        remark: str = "",
        widgets: RankWidgets | None = None,
        path: Path | None = None,
    ) -> None:
        self._key = key
        self._remark = remark
        self._kept: dict[int, deque[Item]] | None = {} if is_alone else None
        """All output so far; None if it keeps the order in which it was shown."""
        self._kept_items = self._kept_bytes = 0
        self._written: list[tuple[list[int], str, Hashable]] = []
        """`_names_of` what is in `_kept`, in the order shown."""
        self._notes_before = count_notes()
        self._hint = hint
        self._begun = time.monotonic()
        self._status_after_s = 0.0 if hint else STATUS_AFTER_S
        self._queues: dict[int, deque[Item]] = {}
        self._splitters: dict[tuple[int, str], LineSplitter] = {}
        self._finished: dict[int, tuple[str, float]] = {}
        """For each rank that has ended, `Event.outcome` and the seconds."""
        self._waiting_since: float | None = None
        self._flushed_at = 0.0
        self._status = live_text(f"{key}-status", below_prompt=bool(hint))
        self._status_at = 0.0
        self._notice = ""
        self._shown: dict[int, list[Shown]] = {}
        self._stale: dict[int, list[Shown]] = {}
        self._displays = 0
        self._path = path
        self._lines = 0
        """The number of lines that are shown as ordinary text."""
        self._first: list[tuple[list[int], list[str]]] = []
        """These lines, with their ranks."""
        self._long: LongText | None = None
        """The further lines, once there are some."""
        self._widgets = widgets
        self._board: WidgetBoard | None = None
        """The displays of widgets, once there is one."""
        self._in_board: set[int] = set()
        """The ranks that have displayed a widget."""
        self._callbacks = 0
        for rank in ranks:
            self._add_rank(rank)

    def _add_rank(self, rank: int) -> None:
        self._queues[rank] = deque()
        for name in ("stdout", "stderr"):
            self._splitters[rank, name] = LineSplitter()
        self._shown[rank], self._stale[rank] = [], []

    def announce(self, text: str) -> None:
        """Show what a cell in the background waits for."""
        self._status.show("", text)

    def begin(self) -> None:
        """Show that the cell in the background has begun."""
        self._begun = time.monotonic()
        self._show_status(self._begun)

    def take(self, event: Any) -> None:
        """Handle one event of the call."""
        if event.rank not in self._queues:  # the rank has joined during the call
            self._add_rank(event.rank)
        if event.output is None:
            self._finish_rank(event.rank, event.outcome, event.seconds)
            return
        self._take_message(event.rank, event.output)

    def _take_message(self, rank: int, message: Message) -> None:
        handler = {
            "stream": self._take_stream,
            "display_data": self._take_display,
            "execute_result": self._take_display,
            "update_display_data": self._take_update,
            "clear_output": self._take_clear,
        }.get(message["msg_type"])
        if handler is not None:
            self._finished.pop(rank, None)  # a new process has this rank now
            handler(rank, message["content"])

    def due(self) -> float | None:
        """Show lines that have waited long enough. Returns seconds to the next call."""
        now = time.monotonic()
        if self._waiting_since is not None and now >= self._flush_at():
            self._flush()
        self._show_status(now)
        if self._waiting_since is not None:
            return max(0.0, self._flush_at() - now)
        return STATUS_PERIOD_S if len(self._finished) < len(self._queues) else None

    def notice(self, text: str) -> None:
        """Show a notice under the output; "" removes it."""
        self._notice = text
        self._status_at = 0.0

    def make_room(self) -> None:
        """Show all output so far, and the notice. The user's input comes below it."""
        self._flush()
        if self._notice:
            self._status_at = self._status_after_s = 0.0
            self._show_status(time.monotonic())
        self._make_room()
        self._keep_order()

    def _flush_at(self) -> float:
        """When to show waiting lines: at once if no running rank can print them too."""
        assert self._waiting_since is not None
        silent = [
            r for r, q in self._queues.items() if not q and r not in self._finished
        ]
        if silent:
            return self._waiting_since + MERGE_S
        return max(self._waiting_since, self._flushed_at + FLUSH_PERIOD_S)

    def close(self) -> None:
        """Show all remaining output. Called at the end of the cell."""
        for (rank, name), splitter in self._splitters.items():
            if splitter.unfinished.strip("\r"):
                self._add(rank, Item(name, [splitter.unfinished.strip("\r")]))
        self._flush()
        if self._long is not None:
            self._long.close()
        self._status.close()
        self._arrange()
        if self._board is not None:
            self._board.refresh()
        has_begun = not self._hint or bool(self._finished)
        # The status is above the last output: show it below.
        if (self._status.is_used or self._remark) and has_begun:
            last = "   ".join(filter(None, (self._final_status(), self._remark)))
            self._write([("stdout", [f"\x1b[2m{last}\x1b[0m\n"])])

    def _arrange(self) -> None:
        """Show the output again, in the order of ranks and with equal items once."""
        kept, self._kept = self._kept, None
        if kept is None or count_notes() != self._notes_before:
            return
        if not may_clear_output():
            return
        arranged = arrange(kept)
        if _names_of(arranged) != self._written:
            clear_output(wait=True)
            if self._board is not None:
                self._board.is_shown = False
            self._lines = 0
            self._show(arranged)

    def _keep(self, rank: int, item: Item) -> None:
        """Keep an item for `_arrange`, unless there are too many lines."""
        if self._kept is None:
            return
        self._kept.setdefault(rank, deque()).append(item)
        self._kept_items += len(item.keys)
        self._kept_bytes += sum(len(str(key)) for key in item.keys)
        if self._kept_items > MOST_KEPT_ITEMS or self._kept_bytes > MOST_KEPT_BYTES:
            self._keep_order()

    def _keep_order(self) -> None:
        """Leave the output in the order in which it is shown."""
        self._kept = None
        self._written.clear()

    def _finish_rank(self, rank: int, outcome: str, seconds: float) -> None:
        self._finished[rank] = outcome, seconds
        if len(self._finished) == len(self._queues):
            self._flush()

    def _take_stream(self, rank: int, content: Message) -> None:
        name = content["name"]
        lines = self._splitters[rank, name].feed(content["text"])
        if lines:
            self._add(rank, Item(name, lines))

    def _take_display(self, rank: int, content: Message) -> None:
        data = dict(content["data"])
        if self._take_widget(rank, data.pop(WIDGET_VIEW, None)):
            return
        count = content.get("execution_count")
        if count is not None and data.keys() == {"text/plain"}:
            text = data["text/plain"]
            label = f"Out[{count}]:" + ("\n" if "\n" in text else " ")
            self._add(rank, Item("stdout", [label + text]))
            return
        shown = {**content, "data": data}
        own_id = content.get("transient", {}).get("display_id")
        # A named display is never merged, because one rank alone may change it later.
        name = None if own_id is None else (rank, own_id)
        key = name, repr(sorted(data.items()))
        self._add(rank, Item("display", [key], shown))

    def _take_widget(self, rank: int, view: Message | None) -> bool:
        """Add a displayed widget to the board. Returns whether it is live."""
        if view is None or self._widgets is None:
            return False
        widget = self._widgets.find(view["model_id"])
        if widget is None:
            return False
        if self._board is None:
            self._board = self._new_board(self._widgets)
        self._board.add(widget)
        if rank not in self._in_board:
            self._in_board.add(rank)
            self._add(rank, Item("board", [self._key], self._board))
        return True

    def _new_board(self, widgets: RankWidgets) -> WidgetBoard:
        from nbdist.widgets.widget_board import WidgetBoard

        def new_view(rank: int) -> CellView:
            self._callbacks += 1
            key = f"{self._key}-callback{self._callbacks}"
            return CellView([rank], key, widgets=widgets)

        return WidgetBoard(f"{self._key}-board", widgets, new_view)

    def take_output(self, rank: int, message: Message) -> None:
        """Show what a callback of a widget prints, displays or raises."""
        self._take_message(rank, message)
        self.due()

    def end_output(self, rank: int) -> None:
        """Show the rest of it. The callback has ended."""
        self._finish_rank(rank, "finished", time.monotonic() - self._begun)
        self.close()

    def _take_update(self, rank: int, content: Message) -> None:
        self._flush()
        self._make_room()
        self._keep_order()
        identifier = _named(rank, content["transient"]["display_id"])
        update_display(
            content["data"],
            raw=True,
            metadata=content.get("metadata"),
            display_id=identifier,
        )

    def _take_clear(self, rank: int, content: Message) -> None:
        """Handle `clear_output`: the rank's next displays replace its last ones."""
        self._flush()
        self._keep_order()
        self._blank(self._stale[rank])
        self._stale[rank], self._shown[rank] = self._shown[rank], []
        if not content["wait"]:
            self._blank(self._stale[rank])

    def _add(self, rank: int, item: Item) -> None:
        self._queues[rank].append(item)
        self._keep(rank, item)
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()

    def _flush(self) -> None:
        self._waiting_since = None
        self._flushed_at = time.monotonic()
        if self._kept is None:
            self._show(merge(self._queues))
        else:
            merged = list(merge(self._queues))
            self._written += _names_of(merged)
            self._show(merged)

    def _show(self, merged: Iterable[tuple[list[int], Item]]) -> None:
        texts: list[tuple[str, list[str]]] = []
        for ranks, item in merged:
            if item.kind in ("display", "grid", "board"):
                self._write(texts)
                texts = []
                if item.kind == "grid":
                    display(item.payload, raw=True)
                elif item.kind == "board":
                    self._make_room()
                    cast("WidgetBoard", item.payload).show()
                else:
                    self._display(ranks, item.payload)
                continue
            shown = self._uncollapsed(ranks, item)
            if not shown:
                continue
            if not texts or texts[-1][0] != item.kind:
                texts.append((item.kind, []))
            label = _label(tuple(ranks))
            lines = f"\n{label} ".join(shown)
            texts[-1][1].append(f"{label} {lines}\n")
        self._write(texts)
        if self._long is not None:
            self._make_room()
            self._long.show()

    def _uncollapsed(self, ranks: list[int], item: Item) -> list[str]:
        """The lines of an item that are shown as ordinary text."""
        lines = [*map(str, item.keys)]
        if not in_notebook():
            return lines
        room = max(0, MOST_LINES - self._lines)
        self._lines += len(lines)
        first, rest = lines[:room], lines[room:]
        if not rest:
            self._first.append((ranks, lines))
            return lines
        if self._long is None:
            self._keep_order()
            self._long = LongText(f"{self._key}-long", self._path, self._new_field())
            for earlier, texts in self._first:
                self._long.keep(earlier, texts)
            self._first.clear()
        self._long.keep(ranks, first)
        self._long.add(ranks, rest)
        return [*first, *(line for line in rest if line.startswith(OWN_NOTE))]

    def _new_field(self) -> LongSearch | None:
        """The field that searches the long text; None where no widget can be shown."""
        if self._widgets is None or self._path is None:
            return None
        field = LongSearch(f"{self._key}-search", self._path)
        self._widgets.at_end(field.close)
        return field

    def _display(self, ranks: list[int], content: Any) -> None:
        own_id = content.get("transient", {}).get("display_id")
        arguments = {"raw": True, "metadata": content.get("metadata")}
        self._make_room()
        shown = self._take_stale(tuple(ranks), own_id)
        if shown is not None:
            update_display(content["data"], display_id=shown.identifier, **arguments)
        else:
            self._displays += 1
            anonymous = f"{self._key}-display{self._displays}"
            shown = Shown(
                tuple(ranks), _named(ranks[0], own_id) if own_id else anonymous
            )
            if in_marimo() and fits_grid(content):
                display(grid([(ranks, content)]), raw=True)
            else:
                self._write([("stdout", [f"{_label(tuple(ranks))}\n"])])
                display(content["data"], display_id=shown.identifier, **arguments)
        for rank in ranks:
            self._shown[rank].append(shown)

    def _take_stale(self, ranks: tuple[int, ...], own_id: str | None) -> Shown | None:
        """The display of these ranks to replace, if they displayed it together."""
        displays = {next(iter(self._stale[rank]), None) for rank in ranks}
        shown = displays.pop()
        fits = not displays and shown is not None and shown.ranks == ranks
        if fits and own_id is None:
            for rank in ranks:
                del self._stale[rank][0]
            return shown
        for rank in ranks:
            self._blank(self._stale[rank])
            self._stale[rank].clear()
        return None

    def _blank(self, stale: list[Shown]) -> None:
        for shown in stale:
            self._make_room()
            update_display({"text/plain": ""}, raw=True, display_id=shown.identifier)

    def _show_status(self, now: float) -> None:
        if now < self._status_at or now < self._begun + self._status_after_s:
            return
        self._status_at = now + STATUS_PERIOD_S
        notice = self._notice and f"⚠ {self._notice}"
        text = self._status_text(now - self._begun)
        self._status.show(text, "\n".join(filter(None, (notice, self._hint))))

    def _status_text(self, elapsed: float) -> str:
        parts = [
            f"{SIGNS[outcome]} rank {format_ranks(ranks)} {outcome}"
            for outcome, ranks in self._by_outcome().items()
        ]
        if self._running:
            ranks = format_ranks(self._running)
            parts.append(f"● rank {ranks} running {elapsed:.0f} s")
        lines = ["   ".join(parts)]
        for (rank, _name), splitter in self._splitters.items():
            if line := splitter.unfinished.strip():
                cut = (
                    "" if len(line) <= STATUS_LINE else f"… ({len(line):,} characters)"
                )
                lines.append(f"[{rank}] {line[:STATUS_LINE]}{cut}")
        return "\n".join(lines)

    def _final_status(self) -> str:
        parts = []
        for outcome, ranks in self._by_outcome().items():
            seconds = [self._finished[rank][1] for rank in ranks]
            low, high = min(seconds), max(seconds)
            spread = f"{low:.1f}" if high - low < 0.1 else f"{low:.1f} to {high:.1f}"
            word = "in" if outcome == "finished" else "after"
            sign = SIGNS[outcome]
            parts.append(
                f"{sign} rank {format_ranks(ranks)} {outcome} {word} {spread} s"
            )
        if self._running:
            parts.append(f"● rank {format_ranks(self._running)} did not react")
        return "   ".join(parts)

    def _write(self, texts: list[tuple[str, list[str]]]) -> None:
        if texts:
            self._make_room()
        for kind, parts in texts:
            stream = sys.stdout if kind == "stdout" else sys.stderr
            stream.write("".join(parts))
            flush(stream)

    def _make_room(self) -> None:
        """Remove the status. Called before anything is printed or displayed."""
        if self._status.make_room():
            self._status_at = 0.0

    @property
    def _running(self) -> list[int]:
        return [rank for rank in self._queues if rank not in self._finished]

    def _by_outcome(self) -> dict[str, list[int]]:
        """The ranks that have ended, by their outcome."""
        alike: dict[str, list[int]] = {}
        for outcome in SIGNS:
            for rank, (its_outcome, _seconds) in self._finished.items():
                if its_outcome == outcome:
                    alike.setdefault(outcome, []).append(rank)
        return alike


def _names_of(
    merged: Iterable[tuple[list[int], Item]],
) -> list[tuple[list[int], str, Hashable]]:
    """The ranks, the kind and the key of each line and each display.

    The board of widgets is not among them: it has its order in itself.
    """
    return [
        (ranks, item.kind, key)
        for ranks, item in merged
        for key in item.keys
        if item.kind != "board"
    ]


def _named(rank: int, own_id: str) -> str:
    """The notebook's name for a rank's named display. Later cells use it too."""
    return f"nbdist-{rank}-{own_id}"


@functools.lru_cache
def _label(ranks: tuple[int, ...]) -> str:
    # In bold, because no colour is readable on a light and on a dark background.
    return f"\x1b[1m[{format_ranks(ranks)}]\x1b[0m"
