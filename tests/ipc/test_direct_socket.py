"""Messages between two ends of a direct socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.ipc.direct_socket import (
    MOST_BYTES,
    DirectSocket,
    brief_packet,
    head_of,
    listen,
)

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "SOCK_SEQPACKET"), reason="the system has no such sockets"
)

Ends = tuple[DirectSocket, DirectSocket]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    listener = listen(tmp_path / "socket")
    assert listener is not None
    with listener:
        one = DirectSocket.connect(tmp_path / "socket")
        other = DirectSocket(listener.accept()[0])
        yield one, other
        one.close()
        other.close()


def received(end: DirectSocket) -> list[bytes] | None:
    frames = end.receive()
    return None if frames is None else [bytes(frame) for frame in frames]


def test_messages_arrive_whole_and_in_order(ends: Ends):
    messages = [[b"first"], [b"", b"second", b""], [memoryview(b"third"), bytearray(9)]]
    for message in messages:
        ends[0].send_multipart(message)
    for message in messages:
        assert received(ends[1]) == [bytes(frame) for frame in message]
    with pytest.raises(BlockingIOError):
        ends[1].receive()


def test_a_brief_message_has_a_head_and_frames(ends: Ends):
    ends[0].send(brief_packet(("name", None, 1, "\udcff"), [b"frame", b""]))
    frames = ends[1].receive()
    assert frames is not None
    assert head_of(frames) == ("name", None, 1, "\udcff")
    assert frames[2:] == [b"frame", b""]


def test_other_messages_have_no_head(ends: Ends):
    for message in ([b"<IDS|MSG>", b"[]"], [b"<nbdist>"], [b""]):
        ends[0].send_multipart(message)
        frames = ends[1].receive()
        assert frames is not None
        assert head_of(frames) is None


def test_a_message_that_exceeds_a_packet_is_not_sent(ends: Ends):
    with pytest.raises(OSError, match="exceeds one packet"):
        ends[0].send_multipart([bytes(MOST_BYTES)])
    ends[0].send_multipart([bytes(MOST_BYTES - 8)])
    assert received(ends[1]) == [bytes(MOST_BYTES - 8)]


def test_a_full_socket_takes_no_part_of_a_message(ends: Ends):
    sent = 0
    with pytest.raises(BlockingIOError):  # noqa: PT012 - the loop fills the socket
        while True:
            ends[0].send_multipart([bytes(30_000), b"%d" % sent])
            sent += 1
    assert sent > 1
    for number in range(sent):
        assert received(ends[1]) == [bytes(30_000), b"%d" % number]
    with pytest.raises(BlockingIOError):
        ends[1].receive()


def test_a_closed_end_is_noticed(ends: Ends):
    ends[0].send_multipart([b"last"])
    ends[0].close()
    assert received(ends[1]) == [b"last"]
    assert received(ends[1]) is None
    with pytest.raises(BrokenPipeError):
        ends[1].send_multipart([b"nobody reads it"])


@pytest.mark.parametrize("noise", [b"x", b"\xff" * 4, b"\xff" * 500], ids=len)
def test_bytes_that_are_no_message_do_not_raise(ends: Ends, noise: bytes):
    ends[0]._end.send(noise)
    assert received(ends[1]) is not None


def test_a_path_that_is_too_long_is_not_listened_on(tmp_path: Path):
    assert listen(tmp_path / ("x" * 108)) is None
    with pytest.raises(OSError, match="too long"):
        DirectSocket.connect(tmp_path / ("x" * 108))
