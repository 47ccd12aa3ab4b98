"""The ports that a cluster opens can be reached only from this host."""

from __future__ import annotations

import socket
from typing import Any

import psutil
import pytest

from nbdist import Cluster
from nbdist.ipc import ports
from tests.security.attack import processes


def test_no_port_can_be_reached_from_another_host(cluster: Cluster):
    if not _can_confine():
        pytest.skip("this kernel does not let a user bind a socket to an interface")
    cluster.execute("pass")
    reachable: list[Any] = []
    for process in processes(cluster):
        for port in process.net_connections("inet"):
            if port.status == psutil.CONN_LISTEN and port.laddr.ip != "127.0.0.1":
                with ports._socket_of(process.pid, port.fd) as listener:
                    name = listener.getsockopt(
                        socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16
                    )
                if name != b"lo\0":
                    reachable.append((process.cmdline()[:3], port.laddr))
    assert reachable == []


def test_the_controller_opens_no_port(cluster: Cluster):
    pid = cluster._started.process_supervisor.pid("controller")
    ports = psutil.Process(pid).net_connections("inet")
    assert [port for port in ports if port.status == psutil.CONN_LISTEN] == []


def _can_confine() -> bool:
    with socket.socket() as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
        except OSError:
            return False
    return True
