"""Asks the user for the lines that ranks of a kept cluster read."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nbdist.clusters.kept.messages import Item, Question, Withdrawn
from nbdist.clusters.kept.peer import Peer
from nbdist.clusters.prompts import UserAbsent
from nbdist.errors import NoInput
from nbdist.wire import InputReply

__all__ = ["RelayedReader"]

ABSENT = (
    "no notebook that can ask is attached: %dist_attach, and give the ranks the value "
    "with %dist_push"
)


class _Left:
    """The notebook has ended, or cannot ask."""


@dataclass
class _Read:
    """A read that has not ended."""

    answers: queue.SimpleQueue[InputReply | _Left | KeyboardInterrupt] = field(
        default_factory=queue.SimpleQueue
    )
    peer: Peer | None = None
    """The notebook that was asked."""


class RelayedReader:
    """A reader in the server, which asks in the notebook that is shown the call.

    The thread that makes the call names the notebook by `through`.

    Args:
        is_served: Whether a notebook is connected.
    """

    refusal = ""

    def __init__(self, is_served: Callable[[Peer], bool]) -> None:
        self._is_served = is_served
        self._of_thread = threading.local()
        self._tokens = itertools.count(1)
        self._reads: dict[int, _Read] = {}

    @contextmanager
    def through(
        self, show: Callable[[Item], None], ask: Callable[[Item], Peer | None]
    ) -> Iterator[None]:
        """Ask for the calls of this thread in a `with` block.

        Args:
            show: Shows an item, now and to notebooks that attach later.
            ask: Sends an item to the notebook. Returns it; None if there is none.
        """
        self._of_thread.show, self._of_thread.ask = show, ask
        try:
            yield
        finally:
            del self._of_thread.show, self._of_thread.ask

    def show(self, text: str) -> None:
        """Show what a debugger has printed."""
        self._of_thread.show(Item("debugger", text))

    def read(self, prompt: str, *, hidden: bool = False) -> str:
        """Read a line.

        Raises:
            UserAbsent: No notebook is attached, or it ends meanwhile.
            NoInput: The notebook cannot ask.
            EOFError: The user has ended the input.
            KeyboardInterrupt: The call was interrupted, or `interrupt_read` called.
        """
        token, read = next(self._tokens), _Read()
        self._reads[token] = read
        is_answered = False
        try:
            read.peer = self._of_thread.ask(
                Item("ask", Question(token, prompt, hidden))
            )
            if read.peer is None or not self._is_served(read.peer):
                raise UserAbsent(ABSENT)
            answer = read.answers.get()
            is_answered = isinstance(answer, InputReply)
        finally:
            del self._reads[token]
            if read.peer is not None and not is_answered:
                read.peer.send(Withdrawn(token))
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        if isinstance(answer, _Left):
            raise UserAbsent(ABSENT)
        if answer.refusal:
            raise NoInput(answer.refusal)
        if answer.at_end:
            raise EOFError
        return answer.text

    def interrupt_read(self) -> None:
        """Make a `read` that runs raise KeyboardInterrupt. Any thread may call this."""
        for read in list(self._reads.values()):
            read.answers.put(KeyboardInterrupt())

    def answer(self, token: int, reply: InputReply | None) -> None:
        """Take a notebook's answer; None if it cannot ask the user now."""
        read = self._reads.get(token)
        if read is not None:
            read.answers.put(_Left() if reply is None else reply)

    def leave(self, peer: Peer) -> None:
        """Note that a notebook is not served any longer."""
        for read in list(self._reads.values()):
            if read.peer is peer:
                read.answers.put(_Left())
