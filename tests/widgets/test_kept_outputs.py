"""What a kernel keeps of its cells' output: how much, and under which lock."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from nbdist.widgets.cell_outputs import DELIMITER, MOST_ENDED, CellOutputs
from tests.guarded import guarded, is_held


class Kernel:
    """A kernel that publishes into a list."""

    def __init__(self) -> None:
        self.published: list[list[bytes]] = []
        self.shown: list[dict[str, Any]] = []
        self.request: dict[str, Any] = {}
        self.control_handlers: dict[str, Any] = {}
        self.iopub_socket = None
        self.iopub_thread = SimpleNamespace(send_multipart=self._publish)
        self.session = SimpleNamespace(send=self._send)
        shell: Any = SimpleNamespace(kernel=self, get_parent=lambda: self.request)
        self.outputs = CellOutputs(shell)

    def _publish(self, frames: list[bytes]) -> None:
        assert is_held(self.outputs._lock)
        self.published.append(frames)

    def _send(self, _socket: object, kind: str, content: Any, **_: object) -> None:
        assert is_held(self.outputs._lock)
        self.shown.append(content)

    def say(self, number: int, kind: str, **content: object) -> None:
        self.request = {
            "header": {"msg_id": str(number)},
            "metadata": {"cellId": f"cell {number}"},
        }
        header, parent = {"msg_type": kind}, {"msg_id": str(number)}
        parts = (json.dumps(each).encode() for each in (header, parent, {}, content))
        self.outputs._send([DELIMITER, b"signature", *parts])

    def cells(self) -> list[str]:
        """The cells whose output a page gets."""
        self.shown.clear()
        self.outputs._show(None, None, {"header": {"session": "page"}})
        return [content["cell_id"] for content in self.shown]


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_the_last_ended_cells_are_kept_and_those_that_run(kernel: Kernel) -> None:
    assert MOST_ENDED == 20
    kernel.say(0, "execute_input", execution_count=0)
    for number in range(1, MOST_ENDED + 6):
        kernel.say(number, "execute_input", execution_count=number)
        kernel.outputs.keep()()
        kernel.say(number, "status", execution_state="idle")
    last = [f"cell {number}" for number in range(6, MOST_ENDED + 6)]
    assert kernel.cells() == ["cell 0", *last]
    assert len(kernel.published) == 1 + 2 * (MOST_ENDED + 5)


def test_the_cells_are_read_and_changed_with_the_lock(kernel: Kernel) -> None:
    outputs = kernel.outputs
    outputs._cells = guarded(outputs._cells, lambda: outputs._lock)
    kernel.say(1, "stream", name="stdout", text="before a cell")
    kernel.say(1, "update_display_data", transient={}, data={}, metadata={})
    outputs.keep()
    outputs.keep_display()
    assert kernel.cells() == []


def test_what_a_cell_has_begun_ends_with_the_lock(kernel: Kernel) -> None:
    class Finishing:
        unfinished = 1

        def finish(self) -> None:
            assert is_held(kernel.outputs._lock)
            self.unfinished -= 1

    cell: Any = Finishing()
    kernel.request = {"header": {"msg_id": "1"}}
    kernel.outputs._cells["1"] = cell
    finish = kernel.outputs.keep()
    assert cell.unfinished == 2
    finish()
    assert cell.unfinished == 1
