"""What the cells of a kernel have shown, for a page that is loaded while they run.

A front end knows the output of a cell from the messages that have arrived in the page.
A page that is loaded later has the notebook's file only. `labextension/` asks on the
kernel's control channel, which also answers while a cell runs. The kernel then
publishes what each cell has shown, between its other messages, so that no message is
lost or shown twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

__all__ = ["CellOutputs"]

REQUEST = "nbdist_outputs_request"
OUTPUTS = "nbdist_outputs"
DELIMITER = b"<IDS|MSG>"
MOST_ENDED = 20
"""The number of ended cells that are kept, for a page that is loaded after their end.
They are cells that have used the ranks."""
MOST_CHARACTERS = 5_000_000
"""The most characters of a cell's output that are kept."""
CUT = "[nbdist] the output after this was not kept when the page was loaded\n"
Content = dict[str, Any]


class CellOutputs:
    """Keeps the messages with which a kernel publishes the output of its cells.

    Args:
        shell: The kernel's shell.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._kernel: Any = shell.kernel  # type: ignore[attr-defined]
        self._publish: Callable[..., None] = self._kernel.iopub_thread.send_multipart
        self._lock = threading.RLock()
        self._cells: dict[str, _Cell] = {}
        """By the id of the request, in the order of the requests."""

    def install(self) -> None:
        """Begin with the next cell."""
        self._kernel.iopub_thread.send_multipart = self._send
        self._kernel.control_handlers[REQUEST] = self._show

    def remove(self) -> None:
        """Undo `install`."""
        del self._kernel.control_handlers[REQUEST]
        del self._kernel.iopub_thread.send_multipart  # its class's is back

    def keep(self) -> Callable[[], None]:
        """Keep the output of the running cell after its end.

        A page shows it instead of what the notebook's file has.

        Returns:
            Is to be called when what the cell has begun has ended, in the background.
        """
        with self._lock:
            cell = self._cells.get(self._request_id())
            if cell is None:
                return lambda: None
            # The notebook's file may have been saved before the end.
            cell.is_kept = cell.is_live = True
            cell.unfinished += 1

        def finish() -> None:
            with self._lock:  # another thread may call, while a cell begins more
                cell.finish()

        return finish

    def keep_display(self) -> None:
        """Keep the output of the running cell, whose displays are updated later.

        A page shows it instead of what the notebook's file has.
        """
        with self._lock:
            cell = self._cells.get(self._request_id())
            if cell is not None:
                cell.is_kept = cell.is_live = True

    def _request_id(self) -> str:
        parent: Content = self._shell.get_parent()  # type: ignore[attr-defined]
        return str(parent.get("header", {}).get("msg_id", ""))

    def _send(self, frames: list[Any], *args: Any, **options: Any) -> None:
        """Publish a message, as the kernel's own method does, and keep it."""
        with self._lock:
            try:
                ends_other = self._take(frames)
            except (KeyError, TypeError, ValueError):
                ends_other = False  # it is no message of Jupyter's, and published as is
            self._publish(frames, *args, **options)
            if ends_other:
                self._stay_busy()

    def _stay_busy(self) -> None:
        """Publish that the kernel runs a cell, after another request has ended."""
        kernel = self._kernel
        for cell in self._cells.values():
            if cell.is_executing:
                status = {"execution_state": "busy"}
                kernel.session.send(
                    kernel.iopub_socket, "status", status, parent=cell.request
                )

    def _take(self, frames: list[Any]) -> bool:
        """Begin with a cell, end it, or keep its output.

        Returns:
            Whether a request has ended that is not a cell's.
        """
        at = (i for i, frame in enumerate(frames) if bytes(frame) == DELIMITER)
        first = 1 + next(at, len(frames))
        _signature, header, parent, _metadata, content = frames[first : first + 5]
        kind = json.loads(bytes(header))["msg_type"]
        key = json.loads(bytes(parent)).get("msg_id", "")
        if kind == "execute_input":
            self._begin(key, json.loads(bytes(content))["execution_count"])
        elif kind == "status":
            if json.loads(bytes(content))["execution_state"] == "idle":
                if key not in self._cells:
                    return True
                self._end(key)
        elif kind == "update_display_data":
            for cell in self._cells.values():  # any cell may update a display
                cell.add(kind, json.loads(bytes(content)))
        elif kind in _Cell.KINDS and key in self._cells:
            self._cells[key].add(kind, json.loads(bytes(content)))
        return False

    def _begin(self, key: str, count: int) -> None:
        request: Content = self._shell.get_parent()  # type: ignore[attr-defined]
        cell_id = request.get("metadata", {}).get("cellId")
        if cell_id is not None:  # it is a notebook's cell
            cells = self._cells.items()
            self._cells = {k: cell for k, cell in cells if cell.cell_id != cell_id}
            self._cells[key] = _Cell(request["header"], cell_id, count)

    def _end(self, key: str) -> None:
        """An execution has ended. What it has begun in the background may go on."""
        self._cells[key].is_executing = False
        self._cells[key].finish()
        if not self._cells[key].is_kept:
            del self._cells[key]
        ended = [key for key, each in self._cells.items() if not each.is_running]
        for key in ended[:-MOST_ENDED]:
            del self._cells[key]

    def _show(self, _stream: object, _ident: object, request: Content) -> None:
        """Publish what each cell has shown. Runs on the control channel's thread."""
        kernel, session = self._kernel, request["header"]["session"]
        with self._lock:
            for cell in self._cells.values():
                content = {**cell.content, "session": session}
                kernel.session.send(
                    kernel.iopub_socket, OUTPUTS, content, parent=cell.request
                )


class _Cell:
    """The output of one execution of a cell.

    Args:
        header: The request's.
        cell_id: The cell's id in the notebook.
        count: The execution's number.
    """

    KINDS = (
        "stream", "display_data", "execute_result", "error", "update_display_data",
        "clear_output",
    )  # fmt: skip

    def __init__(self, header: Content, cell_id: str, count: int) -> None:
        self.request = {"header": header}
        self.cell_id = cell_id
        self._count = count
        self._messages: list[tuple[str, Content]] = []
        self._characters = 0
        self._clears = False
        """Whether the next output replaces what there is."""
        self.is_kept = self.is_live = False
        self.is_executing = True
        self.unfinished = 1
        """The execution, and what it has begun in the background."""

    @property
    def is_running(self) -> bool:
        return self.unfinished > 0

    def finish(self) -> None:
        """Note that the execution, or what it has begun, has ended."""
        self.unfinished -= 1

    @property
    def content(self) -> Content:
        """What a page needs to show the output."""
        messages = [{"msg_type": k, "content": c} for k, c in self._messages]
        return {
            "cell_id": self.cell_id,
            "execution_count": self._count,
            "is_running": self.is_running,
            "is_live": self.is_live,
            "messages": messages,
        }

    def add(self, kind: str, content: Content) -> None:
        """Take a message, as a front end does."""
        if kind == "clear_output":
            self._clears = bool(content.get("wait"))
            if not self._clears:
                self._clear()
            return
        if kind == "update_display_data":
            self._update(content)
            return
        if self._clears:
            self._clears = False
            self._clear()
        if self._characters > MOST_CHARACTERS:
            return
        self._characters += _size(content)
        if self._characters > MOST_CHARACTERS:
            kind, content = "stream", {"name": "stderr", "text": CUT}
        last_kind, last = self._messages[-1] if self._messages else ("", {})
        if kind == last_kind == "stream" and content["name"] == last["name"]:
            last["text"] += content["text"]
        else:
            self._messages.append((kind, content))

    def _clear(self) -> None:
        self._messages.clear()
        self._characters = 0

    def _update(self, content: Content) -> None:
        identifier = content.get("transient", {}).get("display_id")
        for _, shown in self._messages:
            if shown.get("transient", {}).get("display_id") == identifier is not None:
                self._characters += _size(content) - _size(shown)
                shown |= {"data": content["data"], "metadata": content["metadata"]}


def _size(content: Content) -> int:
    """About the number of characters of a message."""
    if "text" in content:
        return len(content["text"])
    return sum(len(str(value)) for value in content.get("data", {}).values())
