"""Makes `input`, `getpass`, `breakpoint` and pdb raise NoInput on a rank.

A rank's standard input is /dev/null. There, `input` raises EOFError without a reason,
and a debugger ends itself silently, so that the program continues.
"""

from __future__ import annotations

import builtins
import getpass
import os
import pdb
import sys
from typing import Any, NoReturn

from nbdist.errors import NoInput

__all__ = ["install"]

TERMINALS = ("<stdin>", "/dev/stdin")
NO_ANSWER = (
    "a rank has no standard input. Ask in a cell of the notebook, and copy the answer "
    "to the ranks with %dist_push"
)
NO_DEBUGGER = (
    "a rank has no standard input, so that a debugger reads no commands. print() shows "
    "the variables of a function; %dist_vars and %dist_inspect show those of all cells"
)


def install() -> None:
    """Replace `input`, `getpass.getpass`, `breakpoint` and the end of pdb's input."""
    end_of_input = pdb.Pdb.do_EOF

    def do_eof(self: pdb.Pdb, arg: str) -> bool | None:
        if _reads_terminal(self):
            raise NoInput(f"pdb: {NO_DEBUGGER}")
        return end_of_input(self, arg)  # the debugger reads from a socket or a file

    builtins.input = _input
    getpass.getpass = _getpass
    sys.breakpointhook = _breakpoint
    pdb.Pdb.do_EOF = do_eof  # type: ignore[method-assign]


def _input(prompt: object = "", /) -> NoReturn:
    raise NoInput(f"input(): {NO_ANSWER}")


def _getpass(prompt: str = "", stream: Any = None, **_: Any) -> NoReturn:
    raise NoInput(f"getpass(): {NO_ANSWER}")


def _breakpoint(*args: Any, **options: Any) -> Any:
    chosen = os.environ.get("PYTHONBREAKPOINT", "")
    if chosen not in ("", "pdb.set_trace"):  # such as one that listens on a port
        return sys.__breakpointhook__(*args, **options)
    raise NoInput(f"breakpoint(): {NO_DEBUGGER}")


def _reads_terminal(debugger: pdb.Pdb) -> bool:
    if debugger.use_rawinput:
        return True
    return getattr(debugger.stdin, "name", "") in TERMINALS
