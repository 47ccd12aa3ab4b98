"""Hosts for tests: network namespaces that are connected by a switch.

Each host has its own network interface and address, host name, processes, temporary
folders, home folder and shared memory, and an sshd that accepts the key of the others.
It sees the file system of this machine read-only, so that no file is shared that a test
has written. Links can be slowed, cut and restored, and hosts killed and started again.

Only root on Linux can make the namespaces. They end with this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from nbdist.ipc.prctl import die_with_parent
from tests.hosts.console import Console
from tests.processes import HANG_S, left_in, wait_until

__all__ = ["HostNetwork", "TestHost", "why_no_delay", "why_not"]

ROOT = Path(__file__).parents[2]
HOME = Path(pwd.getpwuid(os.geteuid()).pw_dir)
SSHD = "/usr/sbin/sshd"
NETWORK = "10.77.0"
PROGRAMS = ("ip", "tc", "nft", "nsenter", "unshare", "ssh", "ssh-keygen", SSHD)
PRIVATE = (HOME, Path("/run"), Path("/var/tmp"), Path("/dev/shm"), Path("/tmp"))
"""The folders that each host has for itself. The last has the files of this process."""


@functools.cache
def why_not() -> str:
    """Why no hosts can be made here; "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make network namespaces"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt install openssh-server iproute2 nftables"
    command = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return f"no namespaces here: {tried.stderr}" if tried.returncode else ""


@functools.cache
def why_no_delay() -> str:
    """Why links cannot be delayed here; "" if they can."""
    script = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    command = ["unshare", "--net", "sh", "-c", script]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return f"no tc netem: {tried.stderr.strip()}" if tried.returncode else ""


class TestHost:
    """One host of a `HostNetwork`, which makes it.

    Args:
        name: Its name, by which the others find it.
        address: Its IPv4 address.
        folder: A folder of this machine, for the files that it begins with.
        switch: The pid of a process in the network namespace of the switch.
    """

    __test__ = False  # no class of tests

    def __init__(self, name: str, address: str, folder: Path, switch: int) -> None:
        self.name, self.address = name, address
        self._folder, self._switch = folder, switch
        self._port = f"to-{name}"
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init = 0

    def start(self) -> None:
        """Start the host, and wait until its sshd listens."""
        log = self._folder / f"{self.name}.log"
        script = self._folder / f"{self.name}.sh"
        script.write_text(self._init_script())
        with log.open("ab") as output:
            self._unshare = subprocess.Popen(
                [
                    "unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork",
                    "--mount-proc", "--kill-child", "bash", str(script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        process = psutil.Process(self._unshare.pid)
        wait_until(lambda: bool(process.children()), HANG_S, log.read_text)
        self._init = process.children()[0].pid
        self._connect()
        (self._folder / f"{self.name}.go").touch()
        wait_until(self._listens, HANG_S, log.read_text)

    def _init_script(self) -> str:
        """What becomes the first process of the host: its sshd."""
        go = self._folder / f"{self.name}.go"
        go.unlink(missing_ok=True)
        lines = ["set -e", f"hostname {self.name}"]
        for number, path in enumerate(PRIVATE):
            private = self._folder / f"{self.name}-{number}"
            mode = "700" if path == HOME else "1777"
            lines.append(f"mkdir -p {private}")
            lines.append(f"mount -t tmpfs -o mode={mode} host {private}")
            lines += [
                f"mkdir -p {private}/{kept.relative_to(path)} && "
                f"mount --bind {kept} {private}/{kept.relative_to(path)}"
                for kept in _installed()
                if kept.is_relative_to(path)
            ]
            if path == HOME:
                lines.append(f"cp -r {self._folder}/ssh {private}/.ssh")
        run = self._folder / f"{self.name}-{PRIVATE.index(Path('/run'))}"
        lines += [
            f"mount --bind {self._folder}/hosts /etc/hosts",
            f"until [ -e {go} ]; do sleep 0.01; done",
            f"mkdir -p {run}/sshd",
            f"cp {self._folder}/hostkey {self._folder}/sshd_config {run}/",
            "mount -o remount,bind,ro /",
        ]
        lines += [
            f"mount --rbind {self._folder}/{self.name}-{number} {path}"
            for number, path in enumerate(PRIVATE)
        ]
        lines.append(f"exec {SSHD} -D -e -f /run/sshd_config")
        return "\n".join(lines) + "\n"

    def _connect(self) -> None:
        """Plug the host into the switch."""
        in_switch = ["nsenter", "-t", str(self._switch), "-n"]
        _run(
            *in_switch, "ip", "link", "add", self._port, "type", "veth",
            "peer", "name", "eth0", "netns", str(self._init),
        )  # fmt: skip
        _run(*in_switch, "ip", "link", "set", self._port, "master", "switch", "up")
        here = ["nsenter", "-t", str(self._init), "-n", "ip"]
        number = int(self.address.rpartition(".")[2])
        # The same after a start again, because the other hosts remember it.
        _run(*here, "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
        _run(*here, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _run(*here, "link", "set", "eth0", "up")
        _run(*here, "link", "set", "lo", "up")

    def _listens(self) -> bool:
        assert self._unshare is not None
        assert self._unshare.poll() is None, f"{self.name} has ended"
        return self.run("ssh", self.name, "true", check=False).returncode == 0

    @property
    def running(self) -> bool:
        """Whether it was started, and neither stopped nor killed."""
        return self._unshare is not None and self._unshare.poll() is None

    def kill(self) -> None:
        """Kill all processes of the host at once, as a lack of power does."""
        if self._unshare is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
            self._unshare.wait()
            self._unshare = None

    # -- running programs ------------------------------------------------------------

    def command(self, *argv: str) -> list[str]:
        """The command line that runs a program on this host."""
        enter = ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p"]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return [*enter, f"--wd={HOME}", "env", "-i", *variables, *argv]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user who has logged in."""
        kept = {"LANG", "NBDIST_PRELOAD", "PIP_CONFIG_FILE", "PYTHONDONTWRITEBYTECODE"}
        return {
            "HOME": str(HOME),
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **{name: os.environ[name] for name in kept & os.environ.keys()},
        }

    def run(
        self, *argv: str, check: bool = True, timeout_s: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host, and wait for its end."""
        done = subprocess.run(
            self.command(*argv),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        if check:
            assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def write(self, path: str, text: str, mode: str = "600") -> None:
        """Write a file of this host."""
        script = f"mkdir -p $(dirname {path}) && cat > {path} && chmod {mode} {path}"
        self.run("sh", "-c", script, stdin=None, input=text)

    def console(self, **variables: str) -> Console:
        """Start a Python interpreter on this host, which a test speaks to.

        Args:
            variables: Additional environment variables.
        """
        more = [f"{name}={value}" for name, value in variables.items()]
        program = [sys.executable, str(ROOT / "tests" / "hosts" / "console.py")]
        return Console(self.command("env", *more, *program))

    def processes(self) -> list[str]:
        """The command lines of its processes, except those of its sshd."""
        listed = self.run("ps", "-eo", "args", "--no-headers").stdout.splitlines()
        unrelated = ("sshd", "ps -eo", "nsenter", "[")
        return [line for line in listed if not line.startswith(unrelated)]

    def left_behind(self) -> set[str]:
        """What is in its /tmp and /dev/shm, except what every host must have."""
        root = Path(f"/proc/{self._init}/root")
        left = {path.name for path in left_in(root / "tmp")}
        left |= set(os.listdir(root / "dev/shm"))
        tmp = Path("/tmp")
        installed = [path for path in _installed() if path.is_relative_to(tmp)]
        left -= {path.relative_to(tmp).parts[0] for path in installed}
        return left - {"torchinductor_root"}

    # -- its link --------------------------------------------------------------------

    def cut(self) -> None:
        """Cut its link. No packet arrives or leaves any longer."""
        _run(*self._in_switch("ip", "link", "set", self._port, "down"))

    def restore(self) -> None:
        """Restore the link after `cut`."""
        _run(*self._in_switch("ip", "link", "set", self._port, "up"))

    def slow(self, rate: str, delay: str | None = None) -> None:
        """Limit its link in both directions.

        Args:
            rate: Such as "100mbit".
            delay: Such as "5ms" in each direction. Check `why_no_delay` first.
        """
        self.unslow()
        way = (
            ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            if delay is None
            else ["netem", "rate", rate, "delay", delay]
        )
        for command, device in self._ends():
            _run(*command, "tc", "qdisc", "add", "dev", device, "root", *way)

    def unslow(self) -> None:
        """Undo `slow`."""
        for command, device in self._ends():
            line = [*command, "tc", "qdisc", "del", "dev", device, "root"]
            subprocess.run(line, capture_output=True, check=False)

    def block(self, rule: str) -> None:
        """Drop packets that arrive at this host.

        Args:
            rule: nft's expression, such as "tcp dport 1024-65535".
        """
        self.unblock()
        chain = f"type filter hook input priority 0\n{rule} drop\n"
        self.run("nft", f"table inet test {{\nchain c {{\n{chain}}}\n}}")

    def unblock(self) -> None:
        """Undo `block`."""
        self.run("nft", "delete table inet test", check=False)

    def _in_switch(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self._switch), "-n", *argv]

    def _ends(self) -> Iterator[tuple[list[str], str]]:
        """Both ends of the link: how to run a program there, and the device."""
        yield ["nsenter", "-t", str(self._init), "-n"], "eth0"
        yield self._in_switch(), self._port


class HostNetwork:
    """Some hosts and the switch that connects them. Use it in a `with` block.

    Args:
        names: The hosts' names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._stack = contextlib.ExitStack()
        self._names = names
        self.hosts: dict[str, TestHost] = {}

    def __enter__(self) -> HostNetwork:
        with contextlib.ExitStack() as stack:
            folder = Path(tempfile.mkdtemp(prefix="nbdist-hosts-"))
            stack.callback(shutil.rmtree, folder)
            switch = subprocess.Popen(
                ["unshare", "--net", "sleep", "infinity"], preexec_fn=die_with_parent
            )
            stack.callback(switch.wait)
            stack.callback(switch.kill)
            in_switch = ["nsenter", "-t", str(switch.pid), "-n"]
            wait_until(lambda: _netns(switch.pid) != _netns(os.getpid()), HANG_S, str)
            _run(*in_switch, "ip", "link", "add", "switch", "type", "bridge")
            _run(*in_switch, "ip", "link", "set", "switch", "up")
            self._write_keys(folder)
            for number, name in enumerate(self._names, 1):
                address = f"{NETWORK}.{number}"
                self.hosts[name] = TestHost(name, address, folder, switch.pid)
            for host in self.hosts.values():
                stack.callback(host.kill)
                host.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> TestHost:
        return self.hosts[name]

    def ready(self) -> None:
        """Restore every host and link for the next test."""
        for host in self.hosts.values():
            if not host.running:
                host.start()
            host.restore()
            host.unslow()
            host.unblock()

    def _write_keys(self, folder: Path) -> None:
        """Write what the hosts begin with: keys, names, and the options of sshd."""
        ssh = folder / "ssh"
        ssh.mkdir(mode=0o700)
        for path in (ssh / "id_ed25519", folder / "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        key = (folder / "hostkey.pub").read_text()
        numbered = list(enumerate(self._names, 1))
        known = "".join(f"{name} {key}" for name in self._names)
        (ssh / "known_hosts").write_text(known)
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{NETWORK}.{number} {name}\n" for number, name in numbered)
        )
        (folder / "sshd_config").write_text(
            "HostKey /run/hostkey\nPidFile none\nUsePAM no\nStrictModes no\n"
            "PermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\n"
            "MaxSessions 100\nUseDNS no\n"
        )


def _installed() -> list[Path]:
    """The folders that every host must have: this checkout, and its Python."""
    wanted = {Path(sys.prefix), Path(sys.base_prefix), ROOT}
    return sorted(path.resolve() for path in wanted)


def _netns(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{shlex.join(argv)}: {done.stderr}"
