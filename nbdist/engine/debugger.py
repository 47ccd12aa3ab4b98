"""pdb on a rank, whose prompt is in the notebook."""

from __future__ import annotations

import bdb
import os
import pdb
import re
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from nbdist.engine import cells
from nbdist.engine.cell_names import line_of
from nbdist.engine.rank import this_rank
from nbdist.engine.standard_input import ask
from nbdist.errors import NoInput, UsageError
from nbdist.ipc.stacks import Frame, cell_of, from_user_code, location_of

__all__ = ["Debugger", "end_tracing", "install", "post_mortem"]

CELL_FILE = re.compile(r"<ipython-input-(\d+)-\w+>(?:\((\d+)\))?")
"""A cell's file in pdb's words, with or without a line."""


def install() -> None:
    """Make `breakpoint` and `pdb.set_trace` open a `Debugger`."""
    sys.breakpointhook = _breakpoint
    pdb.set_trace = _set_trace


def _breakpoint(*args: Any, **options: Any) -> Any:
    chosen = os.environ.get("PYTHONBREAKPOINT", "")
    if chosen not in ("", "pdb.set_trace"):  # such as one that listens on a port
        return sys.__breakpointhook__(*args, **options)
    return Debugger("breakpoint()").set_trace(sys._getframe(1), *args, **options)


def _set_trace(*args: Any, **options: Any) -> None:
    Debugger("pdb.set_trace()").set_trace(sys._getframe(1), *args, **options)


def end_tracing() -> None:
    """End the stepping of a debugger, which must not stop in the engine's code."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)


def post_mortem() -> None:
    """Open a debugger where the last cell has failed on this rank.

    Raises:
        UsageError: The cell has not failed here, or before it ran a line.
    """
    rank, error = this_rank(), cells.last_error()
    trace = None if error is None else _from_user_code(error.__traceback__)
    if trace is None:
        what = "has no failure" if error is None else "failed before it ran a line"
        raise UsageError(f"the last cell {what} on rank {rank.info.rank}")
    with rank.output.during("%dist_debug"), rank.interrupts.armed():
        debugger = Debugger("%dist_debug", is_post_mortem=True)
        debugger.reset()
        debugger.interaction(None, trace)


class Debugger(pdb.Pdb):
    """pdb that asks the notebook for its commands.

    It stops at the line that calls it, as Python 3.13's does. It shows the stack from
    the user's first frame on, and steps from one statement of a cell to the next
    without a stop in IPython, which runs each statement by itself.

    Args:
        name: The function that opens it, for the message of an error.
        is_post_mortem: Whether the program has failed, so that "quit" only ends the
            debugger.
    """

    def __init__(self, name: str, *, is_post_mortem: bool = False) -> None:
        terminal = Terminal(name)
        super().__init__(stdin=terminal, stdout=terminal, nosigint=True)  # type: ignore[arg-type]
        self._terminal = terminal
        self._is_post_mortem = is_post_mortem
        self._is_between_statements = False
        self._last_level: FrameType | None = None
        """The outermost frame of the user's code."""

    def set_trace(
        self, frame: FrameType | None = None, *_: Any, **options: Any
    ) -> None:
        """Open the debugger in a frame; options as for `pdb.set_trace`."""
        frame = frame or sys._getframe(1)
        outermost = _user_frames(frame)[0]
        super().set_trace(frame)
        sys.settrace(None)
        # Python 3.14 has every frame from here on stop at each opcode, IPython's too,
        # and resets only those from `enterframe` on.
        self.enterframe = frame
        self.set_step()
        _untrace_below(outermost)
        self.botframe = self._last_level = outermost
        if header := options.get("header"):
            self.message(header)
        self.interaction(frame, None)
        never_stops = self.stopframe is outermost and self.stoplineno == -1
        if self.breaks or not never_stops:
            sys.settrace(self.trace_dispatch)

    # -- where it stops ------------------------------------------------------------

    def stop_here(self, frame: FrameType) -> bool:
        if self._is_between_statements and not self._is_level(frame):
            return False
        return self._is_next_statement(frame) or super().stop_here(frame)

    def _is_next_statement(self, frame: FrameType) -> bool:
        """Whether "next" has ended with a statement that awaits.

        bdb does not notice the end of a coroutine.
        """
        before = self.stopframe
        if before is None or before is frame or self.stoplineno == -1:
            return False
        return self._is_level(before) and self._is_level(frame)

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        if not self._is_level(frame):
            super().user_call(frame, argument_list)

    def user_line(self, frame: FrameType) -> None:
        self._is_between_statements = False
        super().user_line(frame)

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        # Here and not in `user_return`, which bdb does not call for a statement that
        # awaits.
        self._is_between_statements |= self._is_level(frame)
        return super().dispatch_return(frame, arg)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        if not self._is_level(frame):
            super().user_return(frame, return_value)

    def user_exception(self, frame: FrameType, exc_info: Any) -> None:
        # Python 3.14 also calls it for the end of such a statement, in IPython's frame.
        if not self._is_between_statements or self._is_level(frame):
            super().user_exception(frame, exc_info)

    def _is_level(self, frame: FrameType) -> bool:
        """Whether a frame is a cell's statement, or the user's outermost function."""
        code = frame.f_code
        if frame is self._last_level:
            return True
        return code.co_name == "<module>" and cell_of(code.co_filename) is not None

    # -- what it shows and reads ---------------------------------------------------

    def interaction(self, frame: FrameType | None, *trace: Any) -> None:
        if frame is not None:
            lines = [(each, each.f_lineno) for each in _user_frames(frame)]
        else:
            lines = list(traceback.walk_tb(trace[0]))
        self._terminal.location = _location(lines)
        super().interaction(frame, *trace)

    def get_stack(
        self, f: FrameType | None, t: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        if f is None:
            return stack, index
        users = _user_frames(f)
        first = next(i for i, (each, _) in enumerate(stack) if each is users[0])
        return stack[first:], index - first

    def _cmdloop(self) -> None:
        self.cmdloop()  # pdb's own catches an interrupt, and asks again

    def do_quit(self, arg: str) -> bool | None:
        """q(uit)
        End the debugger, and the cell on all ranks.
        """
        if self._is_post_mortem:
            return super().do_quit(arg)
        self._terminal.quit()
        return True

    do_q = do_exit = do_EOF = do_quit

    def do_ranks(self, arg: str) -> None:
        """ranks all CMD, ranks 0,2 CMD
        Send a command to all ranks that have stopped, or to some.
        """
        self.message("the notebook runs `ranks` only as the first word of a line")


class Terminal:
    """The standard input and output of a debugger.

    Args:
        name: The function that opened the debugger.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._written: list[str] = []
        self.location = ""

    def write(self, text: str) -> int:
        self._written.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def readline(self) -> str:
        """Show what was written, whose last line is the prompt, and read a line."""
        text, _, prompt = self._taken().rpartition("\n")
        reply = ask("debugger", prompt, text, self.location, name=self._name)
        if reply.is_interrupted:
            raise KeyboardInterrupt
        if reply.refusal:
            raise NoInput(f"{self._name}: {reply.refusal}")
        return "" if reply.at_end else f"{reply.text}\n"

    def quit(self) -> None:
        """Make the notebook interrupt the cell on all ranks.

        Raises:
            KeyboardInterrupt: In any case.
        """
        ask("quit", "", self._taken(), self.location, name=self._name)
        raise KeyboardInterrupt

    def _taken(self) -> str:
        text = "".join(self._written)
        self._written.clear()
        return CELL_FILE.sub(_in_words, text)


def _in_words(found: re.Match[str]) -> str:
    return f"In[{found[1]}]" + (f" line {found[2]}, " if found[2] else "")


def _user_frames(frame: FrameType) -> list[FrameType]:
    """The frames from the user's first on, outermost first."""
    frames: list[FrameType] = []
    each: FrameType | None = frame
    while each is not None:
        frames.append(each)
        each = each.f_back
    frames.reverse()
    stack = [Frame(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
    return frames[-len(from_user_code(stack)) :]


def _untrace_below(outermost: FrameType) -> None:
    """Leave the frames of IPython and the engine untraced."""
    below = outermost.f_back
    while below is not None:
        below.f_trace = None
        below = below.f_back


def _location(lines: Sequence[tuple[FrameType, int]]) -> str:
    """The innermost line, and for a library's line the user's that leads to it."""
    files = [(frame.f_code.co_filename, line) for frame, line in lines]
    users = next(filter(None, (line_of(*each) for each in reversed(files))), "")
    innermost = location_of(*files[-1])
    via = f", called in {users}" if users not in ("", innermost) else ""
    return innermost + via


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first line of a cell on."""
    while trace is not None and cell_of(trace.tb_frame.f_code.co_filename) is None:
        trace = trace.tb_next
    return trace
