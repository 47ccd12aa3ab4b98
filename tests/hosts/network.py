"""Hosts for tests: network namespaces that are connected by switches.

Each host has its own network interfaces and addresses, host name, users, processes,
temporary folders, home folder and shared memory, and an sshd that accepts the key of
the others. It sees the file system of this machine read-only, so that no file is shared
that a test has written. Programs run as its user. Links can be slowed, cut and
restored, and hosts killed and started again.

Only root on Linux can make the namespaces. They end with this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from nbdist.ipc.prctl import die_with_parent
from tests.clusters import fake_clock
from tests.hosts.console import Console
from tests.hosts.traits import Traits
from tests.processes import HANG_S, left_in, wait_until

__all__ = ["HostNetwork", "TestHost", "why_not"]

ROOT = Path(__file__).parents[2]
SSHD = "/usr/sbin/sshd"
NETWORKS = ("10.77.0", "10.78.0")
PROGRAMS = ("ip", "tc", "nft", "nsenter", "unshare", "ssh", "ssh-keygen", SSHD)
PRIVATE = {
    "/home": "755", "/root": "711", "/run": "755", "/srv": "755", "/var/tmp": "1777",
    "/dev/shm": "1777", "/tmp": "1777",
}  # fmt: skip
"""The folders that each host has for itself, and their modes. The last has the files of
this process."""
BRIDGE_ADDRESS = "172.17.0.1/16"
CLOCK = {"LD_PRELOAD": "/run/fake_clock.so", "FAKE_CLOCK": "/run/clock"}
CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), 0.5).close()
        print(port)
    except OSError:
        pass
"""


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


class TestHost:
    """One host of a `HostNetwork`, which makes it.

    Args:
        name: Its name, by which the others find it.
        number: The last part of its IPv4 addresses.
        traits: How it differs from the others.
        folder: A folder of this machine, for the files that it begins with.
        switch: The pid of a process in the network namespace of the switches.
    """

    __test__ = False  # no class of tests

    def __init__(
        self, name: str, number: int, traits: Traits, folder: Path, switch: int
    ) -> None:
        self.name, self.traits = name, traits
        self.home = traits.home
        self.prefix = Path(sys.prefix)
        """The folder of the Python environment."""
        if traits.environment:
            self.prefix = Path(traits.environment.replace("~", str(traits.home)))
        self.python = str(self.prefix / Path(sys.executable).relative_to(sys.prefix))
        self.addresses = [f"{net}.{number}" for net in NETWORKS[: traits.networks]]
        self._number = number
        self._folder, self._switch = folder, switch
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._links: list[subprocess.Popen[bytes]] = []

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
        private = {path: self._folder / f"{self.name}{path}" for path in PRIVATE}
        for path, mode in PRIVATE.items():
            lines.append(f"mkdir -p {private[path]}")
            size = self.traits.shared_memory if path == "/dev/shm" else "50%"
            lines.append(
                f"mount -t tmpfs -o mode={mode},size={size} host {private[path]}"
            )
            lines += [
                f"mkdir -p {private[path]}/{kept.relative_to(path)} && "
                f"mount --bind {kept} {private[path]}/{kept.relative_to(path)}"
                for kept in _installed()
                if kept.is_relative_to(path)
            ]
        etc = self._write_etc()
        lines += [f"mount --bind {etc}/{each} /etc/{each}" for each in os.listdir(etc)]
        run = private["/run"]
        above = next(path for path in PRIVATE if self.home.is_relative_to(path))
        home = private[above] / self.home.relative_to(above)
        owner = f"{self.traits.uid}:{self.traits.gid}"
        lines += [
            f"until [ -e {go} ]; do sleep 0.01; done",
            f"mkdir -p {run}/sshd {home}",
            f"cp {self._folder}/hostkey {run}/ && cp -r {self._folder}/ssh {home}/.ssh",
            f"sed 's/^Port .*/Port {self.traits.port}/' "
            f"{self._folder}/sshd_config > {run}/sshd_config",
            *self._set_clock(run),
            f"cat > {home}/.bashrc <<'END'\numask {self.traits.umask}\n"
            f"{self.traits.banner}\nEND",
            f"chown -R {owner} {home} && chmod 700 {home}",
            "mount -o remount,bind,ro /",
        ]
        lines += [f"mount --rbind {private[path]} {path}" for path in PRIVATE]
        if self.traits.environment:
            lines += [
                f"mkdir -p {self.prefix}",
                f"mount --bind {sys.prefix} {self.prefix}",
                f"mount -t tmpfs away {sys.prefix}",
            ]
        lines.append(f"exec {SSHD} -D -e -f /run/sshd_config")
        return "\n".join(lines) + "\n"

    def _set_clock(self, run: Path) -> Iterator[str]:
        """Give all programs a wall clock that is ahead."""
        if self.traits.clock_s:
            offset = self._folder / f"{self.name}.clock"
            offset.write_bytes(struct.pack("d", self.traits.clock_s))
            yield f"cp {offset} {run}/clock"
            yield f"cp {fake_clock.library(self._folder)} {run}/fake_clock.so"
            variables = " ".join(f"{k}={v}" for k, v in CLOCK.items())
            yield f"echo SetEnv {variables} >> {run}/sshd_config"

    def _write_etc(self) -> Path:
        """Write its own files of /etc. Returns their folder."""
        folder = self._folder / f"{self.name}-etc"
        folder.mkdir(exist_ok=True)
        has = self.traits
        user = f"{has.user}:x:{has.uid}:{has.gid}::{has.home}:{has.shell}\n"
        for name, line in (("passwd", user), ("group", f"{has.user}:x:{has.gid}:\n")):
            (folder / name).write_text(Path(f"/etc/{name}").read_text() + line)
        own = f"{has.knows_itself_as} {self.name}\n" if has.knows_itself_as else ""
        (folder / "hosts").write_text(own + (self._folder / "hosts").read_text())
        return folder

    def _connect(self) -> None:
        """Plug the host into the switches."""
        here = self._here("ip")
        for number, address in enumerate(self.addresses):
            device, port = f"eth{number}", self._ports[number]
            # Linux removes that of a killed host some time later.
            old = self._in_switch("ip", "link", "del", port)
            subprocess.run(old, capture_output=True, check=False)
            if self.traits.delay_s or self.traits.loss:
                self._connect_badly(device, port)
            else:
                _run(
                    *self._in_switch("ip", "link", "add", port, "type", "veth"),
                    *("peer", "name", device, "netns", str(self._init)),
                )
            _run(
                *self._in_switch("ip", "link", "set", port),
                *("master", f"switch{number}", "up"),
            )
            # The same after a start again, because the other hosts remember it.
            mac = f"02:00:00:00:{number:02x}:{self._number:02x}"
            _run(*here, "link", "set", device, "address", mac)
            _run(*here, "addr", "add", f"{address}/24", "dev", device)
            _run(*here, "link", "set", device, "up")
        _run(*here, "link", "set", "lo", "up")
        if self.traits.has_bridge:  # of containers, one of which runs
            _run(*here, "link", "add", "docker0", "type", "bridge")
            peer = ("type", "veth", "peer", "name", "veth1")
            _run(*here, "link", "add", "veth0", *peer)
            _run(*here, "link", "set", "veth0", "master", "docker0", "up")
            _run(*here, "link", "set", "veth1", "up")
            _run(*here, "addr", "add", BRIDGE_ADDRESS, "dev", "docker0")
            _run(*here, "link", "set", "docker0", "up")

    def _connect_badly(self, device: str, port: str) -> None:
        """Connect a device by a link that delays packets and loses some of them."""
        ends = (str(self._switch), port, str(self._init), device)
        has = self.traits
        link = subprocess.Popen(
            [
                sys.executable, "-S", str(Path(__file__).with_name("lossy_link.py")),
                *ends, str(has.delay_s), str(has.loss), f"{has.user} {device}",
            ],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )  # fmt: skip
        self._links.append(link)
        assert link.stdout is not None
        assert link.stdout.readline() == b"plugged in\n"

    @property
    def _ports(self) -> list[str]:
        """Its ports of the switches."""
        return [f"to-{self.name}-{number}" for number in range(len(self.addresses))]

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
            while self._links:
                with self._links.pop() as link:
                    link.kill()

    # -- running programs ------------------------------------------------------------

    def command(self, *argv: str, as_root: bool = False) -> list[str]:
        """The command line that runs a program on this host."""
        enter = ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p"]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        ids = [f"--reuid={self.traits.uid}", f"--regid={self.traits.gid}"]
        become = [] if as_root else ["setpriv", *ids, "--init-groups"]
        shell = ["sh", "-c", f'umask {self.traits.umask}; cd; exec "$@"', "sh"]
        return [*enter, "env", "-i", *variables, *become, *shell, *argv]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its user, who has logged in."""
        kept = {"NBDIST_PRELOAD", "PIP_CONFIG_FILE", "PYTHONDONTWRITEBYTECODE"}
        has = self.traits
        return {
            "HOME": str(has.home),
            "USER": has.user,
            "LOGNAME": has.user,
            "SHELL": has.shell,
            "LANG": has.locale,
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            **(CLOCK if has.clock_s else {}),
            **{name: os.environ[name] for name in kept & os.environ.keys()},
        }

    def run(
        self,
        *argv: str,
        as_root: bool = False,
        check: bool = True,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this host, and wait for its end."""
        done = subprocess.run(
            self.command(*argv, as_root=as_root),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **{"stdin": subprocess.DEVNULL, **options},
        )
        if check:
            assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done

    def write(
        self, path: str | Path, text: str, mode: str = "600", as_root: bool = False
    ) -> None:
        """Write a file of this host."""
        script = f"mkdir -p $(dirname {path}) && cat > {path} && chmod {mode} {path}"
        self.run("sh", "-c", script, as_root=as_root, stdin=None, input=text)

    def console(self, *wrapper: str, **variables: str) -> Console:
        """Start a Python interpreter on this host, which a test speaks to.

        Args:
            wrapper: A command line that runs the one that follows it.
            variables: Additional environment variables.
        """
        more = [f"{name}={value}" for name, value in variables.items()]
        program = [self.python, str(ROOT / "tests" / "hosts" / "console.py")]
        return Console(self.command("env", *more, *wrapper, *program))

    def processes(self) -> list[str]:
        """The command lines of its processes, except those of its sshd."""
        listed = self.run("ps", "-eo", "args", "--no-headers").stdout.splitlines()
        unrelated = ("sshd", "ps -eo", "nsenter", "[")
        return [line for line in listed if not line.startswith(unrelated)]

    def open_ports(self) -> set[str]:
        """The TCP ports on which its programs listen, without that of its sshd."""
        listed = self.run("ss", "-Hlnt").stdout.split()
        ports = {word.rpartition(":")[2] for word in listed[3::5]}
        return ports - {str(self.traits.port)}

    def reached(self, address: str, ports: set[str]) -> list[str]:
        """Those ports of another host to which a program on this one can connect."""
        argv = (self.python, "-c", CONNECT, address, *sorted(ports))
        return self.run(*argv).stdout.split()

    def left_behind(self) -> set[str]:
        """What is in its /tmp and /dev/shm, except what every host must have."""
        root = Path(f"/proc/{self._init}/root")
        left = {path.name for path in left_in(root / "tmp")}
        left |= set(os.listdir(root / "dev/shm"))
        tmp = Path("/tmp")
        installed = [path for path in _installed() if path.is_relative_to(tmp)]
        left -= {path.relative_to(tmp).parts[0] for path in installed}
        return left - {f"torchinductor_{self.traits.user}"}

    # -- its link --------------------------------------------------------------------

    def cut(self) -> None:
        """Cut its links. No packet arrives or leaves any longer."""
        for port in self._ports:
            _run(*self._in_switch("ip", "link", "set", port, "down"))

    def restore(self) -> None:
        """Restore the links after `cut`."""
        for port in self._ports:
            _run(*self._in_switch("ip", "link", "set", port, "up"))

    def slow(self, rate: str) -> None:
        """Limit its links in both directions to a rate, such as "100mbit"."""
        self.unslow()
        way = ("tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
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
        self.run("nft", f"table inet test {{\nchain c {{\n{chain}}}\n}}", as_root=True)

    def unblock(self) -> None:
        """Undo `block`."""
        self.run("nft", "delete table inet test", as_root=True, check=False)

    def _in_switch(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self._switch), "-n", *argv]

    def _here(self, *argv: str) -> list[str]:
        return ["nsenter", "-t", str(self._init), "-n", *argv]

    def _ends(self) -> Iterator[tuple[list[str], str]]:
        """Both ends of each link: how to run a program there, and the device."""
        for number, port in enumerate(self._ports):
            yield self._here(), f"eth{number}"
            yield self._in_switch(), port


class HostNetwork:
    """Some hosts and the switches that connect them. Use it in a `with` block.

    Args:
        names: The hosts' names.
        traits: How each of them differs from the others.
    """

    def __init__(self, names: Sequence[str], traits: Sequence[Traits]) -> None:
        self._stack = contextlib.ExitStack()
        self._names, self._traits = names, traits
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
            for number in range(max(each.networks for each in self._traits)):
                name = f"switch{number}"
                _run(*in_switch, "ip", "link", "add", name, "type", "bridge")
                _run(*in_switch, "ip", "link", "set", name, "up")
            self._write_files(folder)
            for number, name in enumerate(self._names, 1):
                traits = self._traits[number - 1]
                self.hosts[name] = TestHost(name, number, traits, folder, switch.pid)
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

    def _write_files(self, folder: Path) -> None:
        """Write what all hosts begin with: keys, names, and the options of sshd."""
        ssh = folder / "ssh"
        ssh.mkdir(mode=0o700)
        for path in (ssh / "id_ed25519", folder / "hostkey"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        key = (folder / "hostkey.pub").read_text()
        addresses = [f"{NETWORKS[0]}.{n}" for n, _ in enumerate(self._names, 1)]
        known = "".join(f"{name} {key}" for name in self._names)
        (ssh / "known_hosts").write_text(known)
        (ssh / "config").write_text(
            "".join(
                f"Host {name}\n  HostName {address}\n  HostKeyAlias {name}\n"
                f"  User {has.user}\n  Port {has.port}\n"
                for name, address, has in zip(
                    self._names, addresses, self._traits, strict=True
                )
            )
        )
        names = zip(addresses, self._names, strict=True)
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {name}\n" for address, name in names)
        )
        (folder / "sshd_config").write_text(
            "Port 22\nHostKey /run/hostkey\nPidFile none\nUsePAM no\n"
            "StrictModes no\nPasswordAuthentication no\nMaxStartups 100\n"
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
