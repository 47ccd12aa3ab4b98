"""Connections are accepted again after a process had no free descriptor."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from nbdist.ipc.listening import Acceptor
from tests.processes import HANG_S


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in taken:
            os.close(each)


def test_a_connection_is_refused_while_there_is_no_descriptor(
    listener: socket.socket,
) -> None:
    acceptor = Acceptor(listener)
    assert acceptor.accept() is None, "nobody connects"
    ends = [socket.create_connection(listener.getsockname()) for _ in range(3)]
    with no_free_descriptor():
        assert acceptor.accept() is None
        assert acceptor.accept() is None
    for refused in ends[:2]:
        refused.settimeout(HANG_S)
        assert refused.recv(1) == b""
    connection = acceptor.accept()
    assert connection is not None
    connection.sendall(b"x")
    ends[2].settimeout(HANG_S)
    assert ends[2].recv(1) == b"x"
    for end in (connection, *ends):
        end.close()
    acceptor.close()
    acceptor.close()


def test_the_end_of_the_listener_is_no_refusal(listener: socket.socket) -> None:
    acceptor = Acceptor(listener)
    listener.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        acceptor.accept()
    acceptor.close()
