"""Many connections over one stream."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from nbdist.ipc.channels import CLOSE, DATA, OPEN, WINDOW_BYTES, Channels
from tests.processes import wait_until

SILENCE_S = 3.0


class Pair:
    """Two ends of a stream, whose loops run in threads. The right end accepts."""

    def __init__(self) -> None:
        self.accepted: dict[str, socket.socket] = {}
        self._mine: list[socket.socket] = []
        there, back = os.pipe(), os.pipe()
        self.endings: list[str] = []
        options = {"timeout_s": SILENCE_S}
        self.left = Channels(back[0], there[1], self._refuse, is_first=True, **options)
        self.right = Channels(
            there[0], back[1], self._accept, is_first=False, **options
        )
        self.threads = [
            threading.Thread(target=self._run, args=(end,))
            for end in (self.left, self.right)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, end: Channels) -> None:
        self.endings.append(end.run())
        end.close()

    def _refuse(self, name: str) -> socket.socket:
        raise ConnectionRefusedError(name)

    def _accept(self, name: str) -> socket.socket:
        if name == "nothing":
            raise FileNotFoundError(name)
        here, self.accepted[name] = socket.socketpair()
        return here

    def open(self, name: str) -> socket.socket:
        """The left end of a new channel."""
        mine, inner = socket.socketpair()
        mine.settimeout(20)
        self._mine.append(mine)
        self.left.call_soon(lambda: self.left.open(name, inner))
        return mine

    def joined(self, name: str) -> tuple[socket.socket, socket.socket]:
        """Both ends of a new channel."""
        mine = self.open(name)
        wait_until(lambda: name in self.accepted)
        self.accepted[name].settimeout(20)
        return mine, self.accepted[name]

    def close(self) -> None:
        for end in (self.left, self.right):
            end.call_soon(lambda end=end: end.end("the test has ended"))
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        for end in (*self._mine, *self.accepted.values()):
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def received(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(1 << 20)
        assert part
        data += part
    return data


def test_what_one_end_writes_the_other_one_receives(pair: Pair):
    for name in ("x", "y"):
        one, other = pair.joined(name)
        one.sendall(b"question")
        assert received(other, 8) == b"question"
        other.sendall(b"answer")
        assert received(one, 6) == b"answer"


def test_large_data_arrives_unchanged_in_both_directions(pair: Pair):
    one, other = pair.joined("x")
    data = random.Random(1).randbytes(3 * WINDOW_BYTES)
    sender = threading.Thread(target=one.sendall, args=(data,))
    echo = threading.Thread(target=lambda: other.sendall(received(other, len(data))))
    sender.start()
    echo.start()
    assert received(one, len(data)) == data
    sender.join()
    echo.join()


def test_a_receiver_that_does_not_read_stops_its_own_channel_only(pair: Pair):
    stuck, _ = pair.joined("stuck")
    stuck.settimeout(0.5)
    with pytest.raises(TimeoutError):
        stuck.sendall(bytes(4 * WINDOW_BYTES))
    one, other = pair.joined("other")
    one.sendall(b"still there")
    assert received(other, 11) == b"still there"


def test_the_end_of_a_connection_reaches_the_other_end(pair: Pair):
    one, other = pair.joined("x")
    one.sendall(b"last")
    one.shutdown(socket.SHUT_WR)
    assert received(other, 4) == b"last"
    assert other.recv(1) == b""
    other.sendall(b"after it")  # the other direction is still open
    assert received(one, 8) == b"after it"
    other.close()
    assert one.recv(1) == b""


def test_a_channel_that_is_refused_is_closed(pair: Pair):
    assert pair.open("nothing").recv(1) == b""


def test_the_end_of_the_stream_ends_both_loops_and_all_channels():
    pair = Pair()
    one, other = pair.joined("x")
    pair.left.call_soon(lambda: pair.left.end("over"))
    for thread in pair.threads:
        thread.join(10)
    assert sorted(pair.endings) == ["it was closed", "over"]
    assert one.recv(1) == b""
    assert other.recv(1) == b""
    pair.close()  # has no effect on loops that have ended


def test_a_stream_that_is_silent_has_been_cut():
    source, _other = os.pipe()
    _unread, sink = os.pipe()
    channels = Channels(source, sink, socket.socket, is_first=True, timeout_s=1.5)
    begun = time.monotonic()
    assert channels.run() == "nothing was heard for 1.5 s"
    assert time.monotonic() - begun > 1.4
    channels.close()
    os.close(_other)
    os.close(_unread)


def test_what_is_no_frame_ends_the_stream():
    source, other = os.pipe()
    unread, sink = os.pipe()
    channels = Channels(source, sink, socket.socket, is_first=True, timeout_s=5)
    os.write(other, b"Welcome to server1!\n")
    assert channels.run() == "it has carried what is no frame"
    channels.close()
    os.close(other)
    os.close(unread)


def frame(kind: int, body: bytes = b"") -> bytes:
    """A frame of channel 1."""
    return struct.pack("!BII", kind, 1, len(body)) + body


def test_a_channel_that_ends_leaves_its_descriptor_to_the_next_one() -> None:
    stream, other = socket.socketpair()
    users: list[socket.socket] = []
    descriptors: list[int] = []

    def accept(name: str) -> socket.socket:
        inner, user = socket.socketpair()
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        users.append(user)
        descriptors.append(inner.fileno())
        if name == "second":
            channels.call_soon(lambda: channels.end("ended"))  # in the next round
        return inner

    with accept("") as room:
        room.setblocking(False)
        size = room.send(bytes(1 << 20))
    descriptor = stream.detach()
    channels = Channels(
        descriptor, descriptor, accept, is_first=False, timeout_s=SILENCE_S
    )

    def end_and_begin() -> None:
        # In the next round, the stream can be read, and then the socket be written.
        channels.unwatch(probe)
        other.sendall(frame(DATA, b"x") + frame(CLOSE) + frame(OPEN, b"second"))
        assert len(users[1].recv(size)) == size

    probe, trigger = socket.socketpair()
    channels.watch(probe, end_and_begin)
    other.sendall(frame(OPEN, b"first") + frame(DATA, bytes(size + 100)))
    trigger.sendall(b"x")
    assert channels.run() == "ended"
    assert descriptors[1] == descriptors[2]
    channels.close()
    for each in (other, probe, trigger, *users):
        each.close()
