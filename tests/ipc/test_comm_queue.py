"""Comm messages that wait are merged, and keep their order."""

from __future__ import annotations

from typing import Any

from nbdist.ipc.comm_queue import CommQueue
from nbdist.wire import CommMessage


def update(comm: str, **state: Any) -> CommMessage:
    data = {"method": "update", "state": state, "buffer_paths": []}
    return CommMessage("comm_msg", comm, data)


def custom(comm: str, content: object) -> CommMessage:
    return CommMessage("comm_msg", comm, {"method": "custom", "content": content})


def taken(*messages: CommMessage) -> tuple[CommMessage, ...]:
    queue = CommQueue()
    for message in messages:
        queue.put(message)
    messages = queue.take()
    assert queue.take() == ()
    return messages


def test_the_last_value_of_each_key_remains() -> None:
    messages = taken(
        *(update("a", value=step, max=100) for step in range(1000)),
        update("b", value=1),
        update("a", description="end"),
    )
    assert messages == (
        update("a", value=999, max=100, description="end"),
        update("b", value=1),
    )


def test_updates_are_not_merged_across_other_messages() -> None:
    opened = CommMessage("comm_open", "c", {"state": {}}, target="jupyter.widget")
    messages = [
        update("a", value=1),
        custom("a", "between"),
        update("a", value=2),
        opened,
        update("a", children=["IPY_MODEL_c"]),
        CommMessage("comm_close", "a", {}),
    ]
    assert taken(*messages) == tuple(messages)


def test_buffers_follow_the_values_that_they_belong_to() -> None:
    def with_buffers(paths: list[list[Any]], *buffers: bytes, **state: Any) -> Any:
        data = {"method": "update", "state": state, "buffer_paths": paths}
        return CommMessage("comm_msg", "a", data, {}, buffers)

    messages = taken(
        with_buffers([["x", "data"], ["y"]], b"old x", b"old y", x={"size": 1}),
        with_buffers([["z", 0], ["x", "data"]], b"z", b"new x", x={}, z=[None]),
        update("a", y="no buffer any more"),
    )
    (message,) = messages
    state = {"x": {}, "z": [None], "y": "no buffer any more"}
    assert message.data["state"] == state
    found = dict(
        zip(map(tuple, message.data["buffer_paths"]), message.buffers, strict=True)
    )
    assert found == {("x", "data"): b"new x", ("z", 0): b"z"}


def test_messages_of_other_libraries_are_left_as_they_are() -> None:
    mine = CommMessage("comm_msg", "a", {"method": "update", "why": "custom"})
    assert taken(mine, mine) == (mine, mine)
