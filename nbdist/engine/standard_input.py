"""Asks the user of the notebook for the lines that a program on this rank reads.

A rank's standard input is /dev/null. `input`, `getpass` and the debuggers that call
`input` send the notebook a request instead, and wait for its reply, which arrives on
the control channel. An interrupt ends the wait.
"""

from __future__ import annotations

import builtins
import getpass
import itertools
import os
import pdb
import queue
import sys
import threading
from typing import Any

from nbdist.engine.cell_names import line_of
from nbdist.engine.rank import this_rank
from nbdist.errors import NoInput
from nbdist.wire import InputReply, InputRequest

__all__ = ["ask", "install", "reply"]

TERMINALS = ("<stdin>", "/dev/stdin")
NO_TERMINAL = (
    "pdb: a rank's own standard input is empty. breakpoint(), or a Pdb() without "
    "arguments, asks in the notebook"
)
_tokens = itertools.count(1)
_waiting: dict[int, queue.SimpleQueue[InputReply]] = {}
"""The open requests, by token."""
_refusal: NoInput | None = None
"""The last refusal, which `cmd.Cmd` turns into the command "EOF"."""


def install() -> None:
    """Replace `input`, `getpass.getpass` and the end of pdb's input."""
    end_of_input = pdb.Pdb.do_EOF

    def do_eof(self: pdb.Pdb, arg: str) -> bool | None:
        global _refusal
        refusal, _refusal = _refusal, None
        if refusal is not None:
            raise refusal
        if not self.use_rawinput and getattr(self.stdin, "name", "") in TERMINALS:
            raise NoInput(NO_TERMINAL)
        return end_of_input(self, arg)

    builtins.input = _input
    getpass.getpass = _getpass
    pdb.Pdb.do_EOF = do_eof  # type: ignore[method-assign]


def _input(prompt: object = "", /) -> str:
    return _line("input", str(prompt))


def _getpass(prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
    return _line("getpass", prompt)


def _line(kind: str, prompt: str) -> str:
    global _refusal
    _refusal = None
    answer = ask(kind, prompt, name=f"{kind}()")
    if answer.refusal:
        _refusal = NoInput(f"{kind}(): {answer.refusal}")
        raise _refusal
    if answer.at_end:
        raise NoInput(f"{kind}(): the user has ended the input")
    return answer.text


def ask(
    kind: str, prompt: str, text: str = "", location: str = "", *, name: str
) -> InputReply:
    """Ask the user for a line, and wait for the reply.

    Args:
        kind, prompt, text, location: As for `InputRequest`. Default location: the
            innermost line of the user's code.
        name: The function that asks, for an error's message.

    Raises:
        NoInput: This thread or process cannot ask.
        KeyboardInterrupt: The cell was interrupted.
    """
    rank = this_rank()
    if os.getpid() != rank.info.pid:
        raise NoInput(
            f"{name}: a child process of rank {rank.info.rank} cannot ask. A loader "
            "without workers runs in the rank itself"
        )
    if threading.get_ident() != rank.main_thread:
        raise NoInput(
            f"{name}: only the main thread of rank {rank.info.rank} can ask, and this "
            f"is {threading.current_thread().name}"
        )
    token = next(_tokens)
    replies = _waiting[token] = queue.SimpleQueue()
    step, rank.step = rank.step, f"at the prompt of {name}"
    try:
        rank.output.drain()
        where = location or _location()
        rank.notify(InputRequest(token, kind, prompt, text, where))
        return replies.get()
    finally:
        rank.step = step
        del _waiting[token]


def reply(token: int, answer: InputReply) -> None:
    """Reply to a request. The notebook calls this on the control channel."""
    replies = _waiting.get(token)
    if replies is not None:  # an interrupt has not ended the wait
        replies.put(answer)


def _location() -> str:
    """The innermost line of the user's code that this thread runs."""
    frame = sys._getframe()
    while frame is not None:
        if line := line_of(frame.f_code.co_filename, frame.f_lineno):
            return line
        frame = frame.f_back  # type: ignore[assignment]
    return ""
