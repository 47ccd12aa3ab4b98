"""The hosts of the other tests are hosts: what one has, no other one has."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace

import pytest

from tests.hosts import traits
from tests.hosts.network import HostNetwork
from tests.processes import HANG_S, wait_until

ECHO = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("", 7000))
print("ready", flush=True)
while True:
    sock.sendto(*sock.recvfrom(100))
"""
SEND = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(1)
for _ in range(100):
    sock.sendto(str(time.monotonic()).encode(), (sys.argv[1], 7000))
try:
    while True:
        print(-float(sock.recv(100)) + time.monotonic())
except TimeoutError:
    pass
"""


def test_hosts_reach_each_other_by_ssh_and_have_their_own_names(hosts: HostNetwork):
    for first, command in (("a", "ssh b hostname"), ("laptop", "ssh a ssh b hostname")):
        *_banners, name = hosts[first].run("sh", "-c", command).stdout.split("\n")[:-1]
        assert name == "b"


@pytest.mark.parametrize("folder", ["~", "/tmp", "/var/tmp", "/run", "/dev/shm"])
def test_no_host_sees_a_file_of_another_one(hosts: HostNetwork, folder: str):
    is_roots = folder == "/run"
    hosts["a"].write(f"{folder}/seen", "a", as_root=is_roots)
    look = ("sh", "-c", f"cat {folder}/seen")
    assert hosts["b"].run(*look, as_root=is_roots, check=False).returncode == 1
    hosts["a"].run("sh", "-c", f"rm {folder}/seen", as_root=is_roots)


def test_a_host_cannot_write_where_others_read(hosts: HostNetwork):
    script = f"touch {__file__}.new"
    done = hosts["a"].run("sh", "-c", script, as_root=True, check=False)
    assert "Read-only" in done.stderr


def test_a_host_has_its_own_processes(hosts: HostNetwork):
    with hosts["a"].console() as console:
        pid = console.value("__import__('os').getpid()")
        assert any("console.py" in line for line in hosts["a"].processes())
        assert not any("console.py" in line for line in hosts["b"].processes())
        assert pid < 10_000


def test_a_console_keeps_its_variables_and_raises(hosts: HostNetwork):
    with hosts["b"].console(COLOUR="red") as console:
        assert console.do("import os; x = 3; print(os.environ['COLOUR'])") == "red\n"
        assert console.value("x + 1") == 4
        assert "ZeroDivisionError" in console.error("x / 0")


def test_a_cut_link_passes_nothing_until_it_is_restored(hosts: HostNetwork):
    ping = ("ssh", "-o", "ConnectTimeout=1", "b", "true")
    hosts["b"].cut()
    assert hosts["a"].run(*ping, check=False).returncode == 255
    hosts["b"].restore()
    hosts["a"].run(*ping)


def test_a_blocked_port_is_blocked(hosts: HostNetwork):
    ssh = ("ssh", "-o", "ConnectTimeout=1", "b", "true")
    hosts["b"].block(f"tcp dport {hosts['b'].traits.port}")
    assert hosts["a"].run(*ssh, check=False).returncode == 255
    hosts["b"].unblock()
    hosts["a"].run(*ssh)


def test_a_slow_link_takes_the_time_that_its_rate_says(hosts: HostNetwork):
    send = "head -c 4000000 /dev/zero | ssh b 'cat > /dev/null'"
    hosts["b"].slow("20mbit")
    begun = time.monotonic()
    hosts["a"].run("sh", "-c", send)
    assert time.monotonic() - begun > 1.2  # 4 MB at 2.5 MB/s


def test_a_link_delays_and_loses_packets_and_a_clock_is_ahead():
    """As drawn, in both directions, also after a start again."""
    bad = {"delay_s": 0.05, "loss": 0.2, "clock_s": 3600.0}
    alike = traits.equal(2)
    with HostNetwork(("a", "b"), [alike[0], replace(alike[1], **bad)]) as network:
        network["b"].kill()
        network["b"].start()
        ssh = ("ssh", "-o", "ConnectTimeout=5", "b", "date +%s")
        wait_until(  # the first packets may be lost
            lambda: network["a"].run(*ssh, check=False).returncode == 0, HANG_S, str
        )
        ahead = float(network["a"].run(*ssh).stdout) - time.time()
        assert 3590 < ahead < 3610
        command = network["b"].command(network["b"].python, "-c", ECHO)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as echo:
            assert echo.stdout is not None
            echo.stdout.readline()
            address = network["b"].addresses[0]
            argv = (network["a"].python, "-c", SEND, address)
            times = [float(each) for each in network["a"].run(*argv).stdout.split()]
            echo.kill()
        assert 30 < len(times) < 90, "each packet goes one way and the other"
        assert min(times) >= 0.1


def test_a_killed_host_ends_at_once_and_can_be_started_again(hosts: HostNetwork):
    with hosts["b"].console() as console:
        console.begin("import time; time.sleep(100)")
        hosts["b"].kill()
        with pytest.raises(AssertionError, match="the interpreter has ended"):
            console.result()
    hosts["b"].start()
    assert hosts["a"].run("ssh", "b", "hostname").stdout.endswith("b\n")
