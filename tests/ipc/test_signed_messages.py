"""A gate admits a message that is signed over all frames, for this socket, and new."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
import zmq
from jupyter_client.session import DELIM, Session

from nbdist.ipc.signed_messages import (
    WINDOW,
    Gate,
    SignedSession,
    _Numbers,
    addressed,
)

KEY = b"a key of this cluster"


class Wire:
    """Replaces a socket, and keeps the frames that are sent."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send_multipart(self, frames: list[Any], copy: bool = True) -> None:
        self.frames = [bytes(frame) for frame in frames]


@pytest.fixture
def sender() -> SignedSession:
    return SignedSession(key=KEY)


@pytest.fixture
def gate() -> Gate:
    return Gate(SignedSession(key=KEY))


def sent(sender: Session, kind: str = "kind", **options: Any) -> list[bytes]:
    wire = Wire()
    sender.send(wire, kind, {"x": 1}, **options)
    return wire.frames


def test_an_authentic_message_is_admitted_once_as_bytes_or_frames(
    sender: SignedSession, gate: Gate
):
    plain = sent(sender, ident=b"somebody", buffers=[b"one", memoryview(b"two")])
    assert gate.admits(plain)
    assert not gate.admits([zmq.Frame(frame) for frame in plain])
    assert gate.admits([zmq.Frame(frame) for frame in sent(sender, buffers=[b""])])
    assert gate.refused == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([b"one", b"two"], [b"one", b"twO"]),
        ([b"one", b"two"], [b"onet", b"wo"]),
        ([b"one", b"two"], [b"one"]),
        ([b"one"], [b"one", b""]),
        ([], [b"one"]),
    ],
    ids=str,
)
def test_changed_buffers_are_refused(
    sender: SignedSession, gate: Gate, before: list[bytes], after: list[bytes]
):
    frames = sent(sender, buffers=before)
    assert not gate.admits([*frames[: len(frames) - len(before)], *after])
    assert gate.admits(frames)


def test_another_address_or_type_and_plain_sessions_are_refused(sender: SignedSession):
    session = SignedSession(key=KEY)
    here = Gate(session, "here")
    to_here = sent(sender, metadata=addressed("here"))
    assert not here.admits(sent(sender, metadata=addressed("there")))
    assert not here.admits(sent(sender))
    assert not Gate(session).admits(to_here)
    assert not Gate(session, "here", {"other"}).admits(to_here)
    assert here.admits(to_here)
    assert here.admits(sent(sender, metadata=addressed("there", "here")))
    assert not Gate(session).admits(sent(Session(key=KEY)))
    assert not Gate(session).admits(sent(SignedSession(key=b"another key")))


def test_messages_may_arrive_in_another_order_and_are_admitted_once(
    sender: SignedSession, gate: Gate
):
    messages = [sent(sender) for _ in range(200)]
    rng = random.Random(1)
    rng.shuffle(messages)
    assert all(gate.admits(message) for message in messages)
    rng.shuffle(messages)
    assert not any(gate.admits(message) for message in messages)


def test_an_old_message_is_refused_after_any_number_of_messages(
    sender: SignedSession, gate: Gate
):
    old, late = sent(sender), sent(sender)
    assert gate.admits(old)
    for _ in range(WINDOW + 2):
        frames = sent(sender)
    assert gate.admits(frames)
    assert not gate.admits(old)
    assert not gate.admits(late)
    assert gate.admits(sent(SignedSession(key=KEY)))  # another one counts from 1


def test_the_numbers_of_the_last_messages_are_kept():
    numbers, newest = _Numbers(), 3 * WINDOW
    for number in range(0, newest + 1, 2):
        assert numbers.take(number + 1)
    newest += 1
    assert numbers._taken.bit_length() <= WINDOW
    assert [numbers.take(newest - WINDOW + n) for n in (-1, 0, 1, 1, 2)] == [
        False, False, True, False, False,
    ]  # fmt: skip


def test_forgeries_do_not_make_a_gate_forget(sender: SignedSession, gate: Gate):
    genuine = sent(sender)
    assert gate.admits(genuine)
    for number in range(70_000):  # more than Jupyter's history holds
        gate.admits([DELIM, b"%064x" % number, b"{}", b"{}", b"{}", b"{}"])
    assert not gate.admits(genuine)


def test_a_callback_that_raises_does_not_stop_the_stream(
    sender: SignedSession, gate: Gate, caplog: pytest.LogCaptureFixture
):
    taken: list[Any] = []

    def take(frames: list[bytes]) -> None:
        taken.append(frames)
        raise ValueError("what is this?")

    callback = gate.before(take)
    callback([b"noise"])
    assert taken == []
    callback(sent(sender))
    assert len(taken) == 1
    assert "what is this?" in caplog.text


def test_text_that_utf8_cannot_encode_is_sent_escaped(sender: SignedSession):
    content = {"text": "kept é \ud800", "data": {"\udfff": ["\udbff", 1, None]}}
    assert sender.unpack(sender.pack(content)) == {
        "text": r"kept é \ud800",
        "data": {r"\udfff": [r"\udbff", 1, None]},
    }


def test_a_message_that_is_serialized_without_send_is_authentic(
    sender: SignedSession, gate: Gate
):
    welcome = sender.msg("iopub_welcome", {"subscription": ""})
    frames = [b"", *sender.serialize(welcome)]
    assert gate.admits(frames)
    assert not gate.admits(frames)
    assert not gate.admits([*sender.serialize(welcome), b"a buffer"])


@pytest.mark.parametrize(
    "number", [-(10**9), 10**30, 0.5, "1", None, [1]], ids=lambda number: repr(number)
)
def test_a_huge_message_number_takes_no_time_or_memory(
    sender: SignedSession, gate: Gate, number: object
):
    genuine = sender.msg("kind")
    assert gate.admits(sender.serialize(genuine))
    seal = {**sender._seal(()), "number": number}
    odd = sender.msg("kind", metadata={"nbdist": seal})
    tracemalloc.start()
    gate.admits(sender.serialize(odd))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    other = SignedSession(key=KEY)
    assert gate.admits(other.serialize(other.msg("kind")))
