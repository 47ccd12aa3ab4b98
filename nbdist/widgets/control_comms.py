"""Comms on the kernel's control channel, which also answers while a cell runs.

A front end sends comms on the shell channel, where they wait for the end of the running
cell. The extension in `labextension/` sends two kinds of them on the control channel:
those of monitors, and the request of a page that was loaded for the states of all
widgets. Their handlers run in the thread of that channel.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ControlComms"]

PRESENCE_REQUEST = "nbdist_presence_request"
PRESENCE = "nbdist_presence"
KINDS = ("comm_open", "comm_msg", "comm_close")
Message = dict[str, Any]


class ControlComms:
    """Takes comms on the control channel, and says that it does.

    The magics install it. A monitor does too, because Python code can show it without
    them.

    Args:
        kernel: An IPython kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def install(self) -> None:
        """Begin to take comms. Safe to call twice."""
        handlers = self._kernel.control_handlers
        handlers[PRESENCE_REQUEST] = self._say_present
        for kind in KINDS:
            handlers[kind] = self._take

    def remove(self) -> None:
        """Undo `install`."""
        for kind in (PRESENCE_REQUEST, *KINDS):
            self._kernel.control_handlers.pop(kind, None)

    def _say_present(self, _stream: object, _ident: object, request: Message) -> None:
        kernel = self._kernel
        kernel.session.send(kernel.iopub_socket, PRESENCE, {}, parent=request)

    def _take(self, stream: object, ident: object, message: Message) -> None:
        handle = getattr(self._kernel.comm_manager, message["header"]["msg_type"])
        handle(stream, ident, message)
