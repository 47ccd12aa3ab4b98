"""A short text that changes while a cell runs, in a front end or a terminal."""

from __future__ import annotations

import html
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol, TextIO

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from nbdist.config import OutputConfig, read_file
from nbdist.errors import encodable, message_of
from nbdist.ipc.interrupts import defer_interrupts

__all__ = [
    "LiveText",
    "count_notes",
    "flush",
    "in_notebook",
    "live_text",
    "may_clear_output",
    "print_note",
    "show_error",
    "shows_widgets",
]

Bundle = Mapping[str, str]
"""A text by media type, "text/plain" among them."""
_notes = 0
_EMPTY = {"text/plain": "", "text/html": ""}
STYLE = "margin:0;color:var(--jp-ui-font-color2,#666);white-space:pre-wrap"


class LiveText(Protocol):
    """A text that `show` replaces until `close`."""

    is_used: bool
    """Whether it has been shown."""

    def show(self, text: str, notice: str = "") -> None:
        """Show a text of one or more lines, and a notice below it."""

    def make_room(self) -> bool:
        """Make room for other output. Call it before anything else is printed.

        Returns:
            Whether the text was removed, until it is shown again.
        """

    def close(self, last: Bundle | None = None) -> None:
        """Remove the text, or replace it by `last`."""


def in_notebook() -> bool:
    """Whether displays go to a front end, which can update them and show HTML."""
    return getattr(get_ipython(), "kernel", None) is not None


def is_kernel_ending() -> bool:
    """Whether a front end has asked this process, a kernel, to end or restart."""
    shell = get_ipython()
    return shell is not None and bool(getattr(shell, "exit_now", False))


def shows_widgets() -> bool:
    """Whether the front end of the running cell can show widgets, and is to do so.

    A kernel cannot ask. nbconvert and papermill, which show none, are recognised by
    their refusal of input; for others, the user sets `OutputConfig.widgets`.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    can_show = kernel is not None and bool(kernel._allow_stdin)
    return can_show and OutputConfig.read(read_file()).widgets


def live_text(identifier: str, *, below_prompt: bool = False) -> LiveText:
    """Make a text for this process's output: a display, or a line of a terminal.

    Args:
        identifier: A unique name.
        below_prompt: Whether the user may type meanwhile. A terminal then shows notices
            only.
    """
    if in_notebook():
        return DisplayText(identifier)
    return TerminalText(redraws=sys.stdout.isatty() and not below_prompt)


def show_error(error: BaseException) -> None:
    """Show an error as that of the cell in whose context this runs.

    A thread may call, also when the cell has ended.
    """
    render = getattr(error, "_render_traceback_", None)
    lines = render() if render else traceback.format_exception(error)
    shell = get_ipython()
    if shell is None or not in_notebook():
        print("\n".join(lines), file=sys.stderr, flush=True)
        return
    hook: Any = shell.displayhook
    # Before ipykernel 7, only the streams know the cell of a thread's context.
    parent = getattr(sys.stdout, "parent_header", None) or hook.parent_header
    flush(sys.stdout)
    content = {
        "ename": type(error).__name__,
        "evalue": message_of(error),
        "traceback": [*map(encodable, lines)],
    }
    hook.session.send(hook.pub_socket, "error", content, parent=parent, ident=b"error")


def print_note(text: str) -> None:
    """Print a note, also while the last line of the terminal is a `TerminalText`."""
    global _notes
    _notes += 1
    if TerminalText.drawn is not None:
        TerminalText.drawn.make_room()
    print(text)
    flush(sys.stdout)


def flush(stream: TextIO) -> None:
    """Flush `sys.stdout` or `sys.stderr`.

    ipykernel's streams wait for a `threading.Event` of the thread that sends the
    kernel's output. An interrupt in there could block that thread forever; see
    `nbdist.ipc.locks`.
    """
    with defer_interrupts():
        stream.flush()


def count_notes() -> int:
    """The number of notes that this process has printed."""
    return _notes


def may_clear_output() -> bool:
    """Whether `clear_output` clears this cell's output: in a front end, not captured.

    In a thread this needs ipykernel 7, which knows the cell of the thread's context.
    """
    shell = get_ipython()
    if shell is None or not in_notebook() or not hasattr(sys.stdout, "parent_header"):
        return False
    publisher: Any = shell.display_pub
    if threading.current_thread() is threading.main_thread():
        return hasattr(publisher, "session")
    return isinstance(getattr(publisher, "_parent_header", None), ContextVar)


class DisplayText:
    """A display that is updated in place."""

    def __init__(self, identifier: str) -> None:
        self._identifier = identifier
        self._shown: Bundle = {}
        self.is_used = False

    def show(self, text: str, notice: str = "") -> None:
        text = "\n".join(filter(None, (text, notice)))
        page = f'<pre role="status" style="{STYLE}">{html.escape(text)}</pre>'
        self._replace({"text/plain": text, "text/html": page})

    def make_room(self) -> bool:
        return False

    def close(self, last: Bundle | None = None) -> None:
        if self.is_used:
            self._replace(_EMPTY)
        if last:
            # Not an update: some front ends, such as jupyter console, show none.
            display(last, raw=True)

    def _replace(self, bundle: Bundle) -> None:
        if bundle == self._shown:
            return
        if self.is_used:
            update_display(bundle, raw=True, display_id=self._identifier)
        else:
            display(bundle, raw=True, display_id=self._identifier)
        self.is_used, self._shown = True, bundle


class TerminalText:
    """One line at the end of a terminal, which is drawn again when the text changes.

    A notice is printed once, when its first line changes, and stays.

    Args:
        redraws: Whether the output is a terminal. Otherwise only notices are printed.
    """

    drawn: ClassVar[TerminalText | None] = None
    """The text that was drawn last."""
    above: ClassVar[Callable[[int, int], str] | None] = None
    """Makes lines that are drawn above the line, from the terminal's width and height:
    the monitor's."""

    def __init__(self, *, redraws: bool) -> None:
        self._redraws = redraws
        self._drawn: list[str] = []
        self._notice = ""
        self.is_used = False

    def show(self, text: str, notice: str = "") -> None:
        self.is_used = True
        head = notice.partition("\n")[0]
        if head and head != self._notice:
            self.make_room()
            print(notice, flush=True)
        self._notice = head
        if not self._redraws:
            return
        width, height = shutil.get_terminal_size()
        above = TerminalText.above
        lines = [] if above is None else above(width - 1, height).splitlines()
        lines.append("   ".join(text.splitlines())[: width - 1])
        if lines != self._drawn:
            up = self._to_first_line()
            TerminalText.drawn, self._drawn = self, lines
            print(up + "\x1b[K\n".join(lines) + "\x1b[K", end="", flush=True)

    def make_room(self) -> bool:
        if not any(self._drawn):
            return False
        below = "\x1b[J" if len(self._drawn) > 1 else ""
        print(f"{self._to_first_line()}\x1b[K{below}", end="", flush=True)
        self._drawn = []
        return True

    def _to_first_line(self) -> str:
        """The codes that move the cursor to the first of the drawn lines."""
        up = len(self._drawn) - 1
        return f"\x1b[{up}A\r" if up > 0 else "\r"

    def close(self, last: Bundle | None = None) -> None:
        self.make_room()
        if last:
            print(last["text/plain"], flush=True)
