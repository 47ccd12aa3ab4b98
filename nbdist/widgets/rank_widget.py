"""The counterparts of a rank's comms in the notebook's kernel.

The front end knows only the counterpart, which has the same id. That of a widget keeps
the widget's state, so that it answers a page that was reloaded, and echoes what the
user does, also while the rank is busy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import ipywidgets
from comm import create_comm

from nbdist.wire import CommMessage

__all__ = ["Counterpart", "Forward", "RankComm", "RankWidget", "counterpart"]

WIDGET_TARGET = "jupyter.widget"

Message = dict[str, Any]
Forward = Callable[[CommMessage], None]


class Counterpart(Protocol):
    """The counterpart of a comm."""

    engine: str
    rank: int
    name: str

    def take(self, message: CommMessage) -> None:
        """Pass a message of the rank on to the front end."""

    def close(self) -> None:
        """Close it in the front end."""


def counterpart(
    engine: str, rank: int, message: CommMessage, forward: Forward
) -> Counterpart:
    """Open the counterpart of a comm.

    Args:
        engine, rank: Where the comm is.
        message: The message that has opened it.
        forward: Passes a message of the front end on to the rank.
    """
    is_widget = message.target == WIDGET_TARGET and "state" in message.data
    kind = RankWidget if is_widget else RankComm
    return kind(engine, rank, message, forward)


class RankWidget(ipywidgets.Widget):  # type: ignore[misc]
    """The counterpart of a widget: its state, without its behaviour."""

    def __init__(
        self, engine: str, rank: int, message: CommMessage, forward: Forward
    ) -> None:
        self.engine, self.rank, self.name = engine, rank, message.comm
        self._forward = forward
        self.state = _state_in(message)
        super().__init__(model_id=message.comm)

    # `ipywidgets.Widget` reads these, to describe the widget to a reloaded page.
    @property
    def _model_name(self) -> str:
        return str(self.state["_model_name"])

    @property
    def _model_module(self) -> str:
        return str(self.state["_model_module"])

    @property
    def _model_module_version(self) -> str:
        return str(self.state["_model_module_version"])

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Message:
        """The state, with the data of its buffers."""
        return dict(self.state)

    def take(self, message: CommMessage) -> None:
        """Pass a message of the rank on to the front end."""
        if message.data.get("method") == "update":
            self.state.update(_state_in(message))
        if self.comm is not None:
            self.comm.send(message.data, message.metadata, list(message.buffers))

    def _handle_msg(self, msg: Message) -> None:
        """Take a message of the front end, and pass it on to the rank."""
        message = _received(self.name, msg)
        method = message.data.get("method")
        if method == "request_state":
            self.send_state()
            return
        if method == "update":
            self.state.update(_state_in(message))
            self._send({**message.data, "method": "echo_update"}, message.buffers)
        self._forward(message)


class RankComm:
    """The counterpart of a comm that belongs to no widget."""

    def __init__(
        self, engine: str, rank: int, message: CommMessage, forward: Forward
    ) -> None:
        self.engine, self.rank, self.name = engine, rank, message.comm
        self._comm = create_comm(
            target_name=message.target,
            comm_id=message.comm,
            data=message.data,
            metadata=message.metadata,
            buffers=list(message.buffers),
        )
        self._comm.on_msg(lambda msg: forward(_received(message.comm, msg)))

    def take(self, message: CommMessage) -> None:
        """Pass a message of the rank on to the front end."""
        self._comm.send(message.data, message.metadata, list(message.buffers))

    def close(self) -> None:
        """Close it in the front end."""
        self._comm.close()


def _received(comm: str, msg: Message) -> CommMessage:
    """A message that the kernel has received from the front end."""
    buffers = tuple(map(bytes, msg.get("buffers") or ()))
    return CommMessage("comm_msg", comm, msg["content"]["data"], {}, buffers)


def _state_in(message: CommMessage) -> Message:
    """The state in a message, with the data of its buffers."""
    state: Message = message.data["state"]
    paths = message.data.get("buffer_paths", [])
    if not paths:
        return dict(state)
    state = copy.deepcopy(state)
    for path, buffer in zip(paths, message.buffers, strict=False):
        holder: Any = state
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = buffer
    return state
