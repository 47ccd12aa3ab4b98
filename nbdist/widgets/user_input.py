"""Asks the user for a line: in the front end of the notebook, or in the terminal."""

from __future__ import annotations

import getpass
import signal
import sys
import threading

from IPython.core.error import StdinNotImplementedError

from nbdist.errors import NoInput
from nbdist.widgets.live_text import in_notebook, print_note

__all__ = ["UserInput"]


IN_BACKGROUND = (
    "a call in the background or in another thread cannot ask: run the cell without "
    "-b, or give the ranks the value with %dist_push"
)


class UserInput:
    """The user, who reads and types in this process's main thread."""

    @property
    def refusal(self) -> str:
        """Why nobody can be asked in this thread; "" if the user can."""
        is_main = threading.current_thread() is threading.main_thread()
        return "" if is_main else IN_BACKGROUND

    def show(self, text: str) -> None:
        """Show what a debugger has printed."""
        print_note(text)

    def read(self, prompt: str, *, hidden: bool = False) -> str:
        """Read a line.

        Args:
            prompt: What the user sees before the line.
            hidden: Do not show what is typed.

        Raises:
            NoInput: Nobody can answer here. The message says what to do.
            EOFError: The user has ended the input.
            KeyboardInterrupt: The interrupt button was pressed.
        """
        if not in_notebook() and not sys.stdin.isatty():
            raise NoInput(
                "this process's standard input is not a terminal: run the program in "
                "a terminal or a notebook"
            )
        try:
            return getpass.getpass(prompt) if hidden else input(prompt)
        except StdinNotImplementedError:
            raise NoInput(
                "this front end cannot ask, as nbconvert and papermill cannot: run "
                "the cell in JupyterLab, or give the ranks the value with %dist_push"
            ) from None

    def interrupt_read(self) -> None:
        """Make a `read` that runs raise KeyboardInterrupt. Any thread may call this."""
        ident = threading.main_thread().ident
        assert ident is not None
        signal.pthread_kill(ident, signal.SIGINT)
