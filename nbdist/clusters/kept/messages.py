"""The messages between a notebook and the server of a kept cluster.

They are pickled, and travel on a Unix socket in a folder of mode 0700. Both ends check
that the process at the other end belongs to the same user.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.clusters.observer import Event
from nbdist.ipc.fork_messages import peer_user, socket_address
from nbdist.ipc.private_files import check_folder
from nbdist.wire import CommBatch, CommMessage, InputReply, MarkKind, RankInfo

__all__ = [
    "SOCKET",
    "Answer",
    "Call",
    "Cell",
    "Comms",
    "CommsEnded",
    "CommsKept",
    "Description",
    "Follow",
    "Goodbye",
    "Hello",
    "Holder",
    "Interrupt",
    "Item",
    "Look",
    "Marked",
    "Note",
    "Order",
    "Question",
    "Ranks",
    "Refusal",
    "Reply",
    "Seen",
    "SendComms",
    "ShowWidgets",
    "Shown",
    "Values",
    "Welcome",
    "Withdrawn",
    "connected",
    "connection_of",
]

SOCKET = "server"
"""The name of the server's socket in its folder."""


class Holder(NamedTuple):
    """The process that is attached to a kept cluster."""

    pid: int
    since: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Description:
    """The state of a kept cluster."""

    name: str
    host: str
    pid: int
    """The server's."""
    folder: str
    """The working folder of the ranks."""
    begun: float
    """When it was started, in seconds since the epoch."""
    hours: float
    """The hours that it runs while no notebook is attached."""
    size: int = 0
    """The number of ranks; 0 until all have started."""
    died: tuple[int, ...] = ()
    """The ranks whose processes have ended."""
    doing: str = ""
    """The calls that run or wait for their turn."""
    holder: Holder | None = None
    ends: float | None = None
    """When it ends unless a notebook attaches, in seconds since the epoch."""


@dataclass(frozen=True)
class Cell:
    """A cell whose end no notebook has seen yet."""

    key: int
    number: int
    """The In[] number in the notebook that has sent it."""
    ranks: tuple[int, ...]
    code: str
    is_done: bool = False


# -- from the notebook -----------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """What the server is to start. The notebook writes it to its standard input."""

    name: str
    hours: float
    server_folder: str
    folder: str
    """The working folder of the ranks."""
    path: tuple[str, ...]
    """The notebook's `sys.path`."""
    options: dict[str, Any]
    """The options of `Cluster`."""
    shows_widgets: bool = False
    """Whether the notebook shows widgets, so that the ranks make them."""


@dataclass(frozen=True)
class Hello:
    """The first message of a connection."""

    purpose: str
    """"attach", "visit", "describe" or "stop"."""
    pid: int = 0
    by_force: bool = False
    """Whether to detach another notebook that is attached."""


@dataclass(frozen=True)
class Look:
    """Have the server return an attribute of the cluster, or call a method at once."""

    number: int
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call(Look):
    """Have the server call a method of the cluster, in turn with its other calls."""

    cell: Cell | None = None
    """The cell that the method runs, whose output is recorded."""
    at_once: bool = False
    """Whether to call it beside the calls that run."""


@dataclass(frozen=True)
class Interrupt:
    """Interrupt a call."""

    number: int


@dataclass(frozen=True)
class Follow:
    """Send what a cell has shown so far, and what it will show, and its end."""

    number: int
    key: int


@dataclass(frozen=True)
class Seen:
    """The end of a cell was shown to the user."""

    key: int


@dataclass(frozen=True)
class Answer:
    """The user's answer to a `Question`."""

    token: int
    reply: InputReply | None
    """None if the user cannot be asked now."""


@dataclass(frozen=True)
class ShowWidgets:
    """Send the widgets of the ranks, and what becomes of them."""


@dataclass(frozen=True)
class SendComms:
    """Pass messages of the front end to the widgets of a rank."""

    number: int
    engine: str
    messages: tuple[CommMessage, ...]


# -- from the server -------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome:
    """The answer to a `Hello`."""

    description: Description
    values: bytes = b""
    """The ranks' values so far, of `Collector.state`."""
    cells: tuple[Cell, ...] = ()
    notes: tuple[str, ...] = ()
    """What has happened while no notebook was attached."""


@dataclass(frozen=True)
class Refusal:
    """The answer to a `Hello` that cannot be met."""

    why: str


@dataclass(frozen=True)
class Shown:
    """What a call shows."""

    number: int
    item: Item


@dataclass(frozen=True)
class Reply:
    """The end of a call."""

    number: int
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Comms:
    """Messages of the comms of a rank."""

    engine: str
    batch: CommBatch


@dataclass(frozen=True)
class CommsEnded:
    """A rank has died, and its comms with it."""

    engine: str


@dataclass(frozen=True)
class CommsKept:
    """Only the comms of these engines are left."""

    engines: frozenset[str]


@dataclass(frozen=True)
class Values:
    """A batch of the ranks' logged values."""

    batch: Any


@dataclass(frozen=True)
class Marked:
    """An event for the charts. The fields are those of `wire.Mark`."""

    kind: MarkKind
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a new world."""

    infos: tuple[RankInfo, ...]


@dataclass(frozen=True)
class Note:
    """Ranks were replaced, or something else has happened."""

    text: str


@dataclass(frozen=True)
class Goodbye:
    """The server ends the connection."""

    why: str


@dataclass(frozen=True)
class Question:
    """A request for a line from the user: the value of an item of kind "ask"."""

    token: int
    prompt: str
    hidden: bool


@dataclass(frozen=True)
class Withdrawn:
    """A question needs no answer any longer."""

    token: int


class Item(NamedTuple):
    """A call of an observer's method, or the progress of a start."""

    kind: str
    """"take", "notice", "make_room", "progress", "key" with the key of a cell,
    "debugger" with a text, "ask" with a `Question`, or "output" with a message of a
    widget's callback."""
    value: Any = None

    @classmethod
    def of(cls, event: Event) -> Item:
        """The item of an event, without what cannot be pickled."""
        if event.output is None:
            return cls("take", event)
        output = {name: event.output[name] for name in ("msg_type", "content")}
        return cls("take", Event(event.rank, output, event.seconds, event.process))


def connected(folder: Path) -> Connection:
    """Connect to the server of a kept cluster.

    Args:
        folder: The server's folder.

    Raises:
        OSError: No server listens there, or it is another user's.
    """
    check_folder(folder)
    with socket.socket(socket.AF_UNIX) as end:
        with socket_address(folder / SOCKET) as address:
            end.connect(address)
        return connection_of(end)


def connection_of(end: socket.socket) -> Connection:
    """The connection of a socket, which it takes over.

    Raises:
        PermissionError: The process at the other end is another user's.
    """
    if peer_user(end) not in (os.geteuid(), 0):
        raise PermissionError("the process at the other end belongs to another user")
    return Connection(end.detach())
