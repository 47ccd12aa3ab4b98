"""The notebook's connection to the server of a kept cluster."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nbdist.clusters.futures import BackgroundCalls
from nbdist.clusters.kept.messages import (
    Answer,
    Comms,
    CommsEnded,
    CommsKept,
    Follow,
    Goodbye,
    Hello,
    Interrupt,
    Item,
    Look,
    Marked,
    Note,
    Question,
    Ranks,
    Refusal,
    Reply,
    SendComms,
    Shown,
    Values,
    Welcome,
    Withdrawn,
    connected,
)
from nbdist.clusters.kept.peer import shut_down
from nbdist.clusters.observer import Observer
from nbdist.clusters.prompts import Reader, ask_user
from nbdist.clusters.supervisor_client import HelperWatch
from nbdist.errors import AlreadyRunning, CellInterrupted, ClusterError
from nbdist.ipc.interrupts import defer_interrupts
from nbdist.ipc.locks import Condition, Future
from nbdist.widgets.live_text import is_kernel_ending
from nbdist.wire import InputReply

__all__ = ["Callbacks", "Link", "Pending", "Unasked", "ask"]

Unasked = Values | Marked | Ranks | Note | Comms | CommsEnded | CommsKept
"""A message that belongs to no call."""

GREETING_TIMEOUT_S = 10.0
"""Seconds in which a server answers a `Hello`."""
GOODBYE_TIMEOUT_S = 2.0
"""Seconds in which a server notices that a notebook has left."""
KERNEL_END_S = 0.5
"""Seconds from the interrupt of a kernel that is to end until it is asked or killed."""
POLL_S = 0.1
"""Seconds between two looks at whether a call in the background is to end."""


class _GoesOn(Exception):
    """This process is ending, and a call goes on without it."""


class Pending:
    """A call or look, until its reply has arrived."""

    def __init__(self) -> None:
        self._messages: deque[Shown | Reply] = deque()
        self._changed = Condition()
        self.key: int | None = None
        """The key of the cell that the call runs."""

    def put(self, message: Shown | Reply) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there is a message, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages, timeout_s)

    def reply(self, timeout_s: float) -> Reply | None:
        """The reply of a look, which shows nothing; None if there is none in time."""
        self.wait(timeout_s)
        message = self.next()
        assert not isinstance(message, Shown)
        return message

    def next(self) -> Shown | Reply | None:
        """The next message, which is then forgotten; None if there is none."""
        return self._messages.popleft() if self._messages else None


class Callbacks:
    """The callbacks of widgets that the user's action has called.

    Args:
        on_output: Called with what they show, on the link's thread.
    """

    def __init__(self, on_output: Callable[[dict[str, Any]], None]) -> None:
        self._on_output = on_output
        self.done: Future[Any] = Future()
        """Resolved when they have ended."""

    def put(self, message: Shown | Reply) -> None:
        if isinstance(message, Shown):
            self._on_output(message.item.value)
        else:
            self.done.set_result(None)


class Link:
    """A connection. A thread receives what the server sends.

    Args:
        folder: The server's folder.
        hello: The first message.
        name: The cluster's name.
        receive: Called with each message that belongs to no call, on the thread.
        on_end: Called with the reason when the server has ended the connection.
        timeout_s: Seconds in which the server answers.

    Raises:
        AlreadyRunning: Another notebook is attached.
        ClusterError: The server does not answer.
        OSError: There is no server.
    """

    def __init__(
        self,
        folder: Path,
        hello: Hello,
        name: str,
        receive: Callable[[Unasked], None],
        on_end: Callable[[str], None],
        timeout_s: float = GREETING_TIMEOUT_S,
    ) -> None:
        self._connection, self.welcome = _greeted(folder, hello, name, timeout_s)
        self._name = name
        self._receive, self._on_end = receive, on_end
        self._numbers = itertools.count(1)
        self._pending: dict[int, Pending | Callbacks] = {}
        self._lock = threading.Lock()
        self._withdrawn: set[int] = set()
        """The tokens of the questions that need no answer."""
        self._withdrawals: dict[int, Callable[[], None]] = {}
        """What ends the read of an open question, by token."""
        self._is_closed = False
        self.ending = ""
        """Why the connection has ended; "" while it has not."""
        self._thread = threading.Thread(
            target=self._receive_all, name="nbdist-link", daemon=True
        )
        self._watch = HelperWatch(lambda note: receive(Note(note)))
        self._watch.add("the cluster's server", self.welcome.description.pid)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def close(self) -> None:
        """End the connection, and wait until the server has no notebook.

        A server that does not answer is given up after `GOODBYE_TIMEOUT_S`.
        """
        self._is_closed = True
        self._watch.close()
        if threading.current_thread() is self._thread:
            shut_down(self._connection)
            return
        shut_down(self._connection, socket.SHUT_WR)
        self._thread.join(GOODBYE_TIMEOUT_S)
        shut_down(self._connection)
        self._thread.join()

    def request(self, make: Callable[[int], Look | Follow]) -> tuple[int, Pending]:
        """Send a request.

        Args:
            make: Makes the request of its number.

        Raises:
            ClusterError: The connection has ended.
        """
        number, pending = next(self._numbers), Pending()
        with self._lock:
            self._pending[number] = pending
        self.send(make(number))
        return number, pending

    def call_back(self, make: Callable[[int], SendComms], callbacks: Callbacks) -> None:
        """Send a request whose outcome is given to `callbacks`.

        Raises:
            ClusterError: The connection has ended.
        """
        number = next(self._numbers)
        with self._lock:
            self._pending[number] = callbacks
        self.send(make(number))

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ClusterError: The connection has ended.
        """
        with defer_interrupts(), self._lock:
            try:
                if not self.ending:
                    self._connection.send(message)
                    return
            except OSError:
                pass
        raise self._error()

    def see_through(
        self,
        make: Callable[[int], Look | Follow],
        observer: Observer,
        background: BackgroundCalls,
        reader: Reader,
        on_progress: Callable[[Any], None] = lambda _: None,
        *,
        asks: bool = True,
    ) -> tuple[Reply, int | None]:
        """Make a call, and wait until it has ended.

        An interrupt interrupts the call, which then ends with an error. A front end
        also interrupts a kernel that it is about to end. The call is therefore
        interrupted after half a second, if this process lives and is not ending, or at
        once by a second interrupt.

        Args:
            make: As for `request`.
            observer: Receives what the call shows, on this thread.
            background: The calls that this process makes in the background.
            reader: Asks the user for the lines that ranks read.
            on_progress: Called with the progress of a start.
            asks: Whether to ask the user. If not, the server does without an answer.

        Returns:
            The reply, and the key of the cell that was run.

        Raises:
            ClusterError: The connection has ended before the call was made.
            CellInterrupted: This process is ending. The call goes on.
        """
        with defer_interrupts():
            number, pending = self.request(make)
        interrupt_at: float | None = None
        while True:
            try:
                due_s = observer.due()
                if background.is_this_thread or interrupt_at is not None:
                    due_s = POLL_S if due_s is None else min(due_s, POLL_S)
                pending.wait(due_s)
                if interrupt_at is not None and is_kernel_ending():
                    raise _GoesOn
                is_due = interrupt_at is not None and time.monotonic() >= interrupt_at
                if is_due or background.take_interrupt():
                    interrupt_at = None
                    self.send(Interrupt(number))
                with defer_interrupts():
                    message = pending.next()
                    if isinstance(message, Reply):
                        return message, pending.key
                    if message is not None and message.item.kind != "ask":
                        _show(message.item, observer, pending, reader, on_progress)
                if message is not None and message.item.kind == "ask":
                    self._ask(message.item.value, reader if asks else None)
            except _GoesOn:
                raise CellInterrupted(
                    "the notebook's kernel is ending, and the ranks go on: "
                    f"%dist_attach {self._name} comes back to them"
                ) from None
            except KeyboardInterrupt:
                if interrupt_at is None:
                    interrupt_at = time.monotonic() + KERNEL_END_S
                else:
                    interrupt_at = 0.0

    def _ask(self, question: Question, reader: Reader | None) -> None:
        """Ask the user, and send the answer.

        Raises:
            KeyboardInterrupt: The interrupt button was pressed.
        """
        reply: InputReply | None = None
        if reader is not None and reader.refusal:
            reply = InputReply(refusal=reader.refusal)
        elif reader is not None:
            reply = ask_user(
                reader,
                question.prompt,
                lambda end: self._on_withdrawal(question.token, end),
                hidden=question.hidden,
            )
        with self._lock:
            self._withdrawals.pop(question.token, None)
            self._withdrawn.discard(question.token)
        self.send(Answer(question.token, reply))

    def _on_withdrawal(self, token: int, end: Callable[[], None]) -> None:
        """Call back when a question is withdrawn, on any thread; at once if it is."""
        with self._lock:
            is_withdrawn = token in self._withdrawn or bool(self.ending)
            self._withdrawals[token] = end
        if is_withdrawn:
            end()

    def _withdraw(self, token: int) -> None:
        with self._lock:
            self._withdrawn.add(token)
            end = self._withdrawals.get(token)
        if end is not None:
            end()

    def _error(self) -> ClusterError:
        return ClusterError(
            f"{self.ending or f'{self._name} cannot be reached'}: %dist_clusters lists "
            "the clusters that run"
        )

    def _receive_all(self) -> None:
        ending = "the cluster's server has ended, and all ranks with it"
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Goodbye):
                    ending = message.why
                elif isinstance(message, Shown | Reply):
                    self._deliver(message)
                elif isinstance(message, Withdrawn):
                    self._withdraw(message.token)
                else:
                    self._receive(message)
        except (OSError, EOFError):
            pass
        with self._lock:
            self.ending = "this notebook has detached" if self._is_closed else ending
            pending, self._pending = self._pending, {}
            reads = list(self._withdrawals.values())
        for end in reads:
            end()
        for number, each in pending.items():
            each.put(Reply(number, error=self._error()))
        self._connection.close()
        if not self._is_closed:
            self._watch.close()
            self._on_end(ending)

    def _deliver(self, message: Shown | Reply) -> None:
        with self._lock:
            pending: Pending | Callbacks | None
            if isinstance(message, Reply):
                pending = self._pending.pop(message.number, None)
            else:
                pending = self._pending.get(message.number)
        if pending is not None:
            pending.put(message)


def _show(
    item: Item,
    observer: Observer,
    pending: Pending,
    reader: Reader,
    on_progress: Callable[[Any], None],
) -> None:
    if item.kind == "take":
        observer.take(item.value)
    elif item.kind == "notice":
        observer.notice(item.value)
    elif item.kind == "make_room":
        observer.make_room()
    elif item.kind == "debugger":
        reader.show(item.value)
    elif item.kind == "key":
        pending.key = item.value
    else:
        on_progress(item.value)


def ask(
    folder: Path, hello: Hello, name: str, timeout_s: float = GREETING_TIMEOUT_S
) -> Welcome:
    """Send a server one message, and return its answer.

    Args:
        folder, hello, name, timeout_s: As for `Link`.

    Raises:
        ClusterError, OSError: As for `Link`.
    """
    connection, welcome = _greeted(folder, hello, name, timeout_s)
    connection.close()
    return welcome


def _greeted(
    folder: Path, hello: Hello, name: str, timeout_s: float
) -> tuple[Connection, Welcome]:
    connection = connected(folder)
    with contextlib.ExitStack() as on_error:
        on_error.callback(connection.close)
        connection.send(hello)
        if not connection.poll(timeout_s):
            raise ClusterError(
                f"the server of {name} does not answer within {timeout_s:g} s"
            )
        try:
            answer = connection.recv()
        except EOFError as error:
            raise ConnectionError(f"the server of {name} has ended") from error
        if isinstance(answer, Refusal):
            raise AlreadyRunning(answer.why)
        on_error.pop_all()
    return connection, answer
