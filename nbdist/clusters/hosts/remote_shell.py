"""How a program is run on another host, with its standard input and output here."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from nbdist.clusters.hosts.remote_python import RemotePython

__all__ = ["Problem", "RemoteShell", "Ssh", "problem_in_job"]


class Problem(NamedTuple):
    """Why a host cannot take part, and what to do about it."""

    what: str
    remedy: str


class RemoteShell(ABC):
    """Runs programs on other hosts."""

    @abstractmethod
    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line on this host that runs `command` on another one.

        It passes standard input and output on, and ends when one of them closes. It
        asks the user nothing.
        """

    @abstractmethod
    def problem(
        self, host: str, code: int | None, log: str, python: RemotePython
    ) -> Problem:
        """Why `argv` did not run a Python program.

        Args:
            host: The host.
            code: The exit code; None if it did not end in time.
            log: What was printed on standard error.
            python: Where Python was looked for.
        """


class Ssh(RemoteShell):
    """OpenSSH, with the user's own configuration and keys.

    Args:
        command: The command, such as "ssh -p 2222".
        timeout_s: Seconds in which a host accepts a connection.
    """

    def __init__(self, command: str = "ssh", timeout_s: float = 10.0) -> None:
        self._command = shlex.split(command)
        self._timeout_s = timeout_s

    def argv(self, host: str, command: Sequence[str]) -> list[str]:
        # A password could not be asked for, and must not be waited for.
        options = {"BatchMode": "yes", "ConnectTimeout": f"{self._timeout_s:.0f}"}
        flags = [f"-o{name}={value}" for name, value in options.items()]
        # The login shell of the host may be any.
        return [*self._command, "-T", *flags, "--", host, shlex.join(command)]

    def problem(
        self, host: str, code: int | None, log: str, python: RemotePython
    ) -> Problem:
        ssh = f"{shlex.join(self._command)} {host}"
        if code is None:
            return Problem("does not answer", f"look whether `{ssh} true` returns")
        for pattern, what, remedy in OF_SSH:
            if found := re.search(pattern, log):
                line = found[0] if what == "" else what
                by = re.search(r"^(\S+): No module", log, re.M)  # Python's own message
                path = by[1] if by else str(python)
                _, _, name = host.rpartition("@")
                names = {"host": host, "name": name, "ssh": ssh, "python": path}
                return Problem(line, remedy.format(**names))
        if code in (126, 127):
            what = "has no" if code == 127 else "cannot run"
            return Problem(f"{what} {python}", NAME_ONE.format(host=host))
        last = log.strip().splitlines()[-1:] or [f"exit code {code}"]
        look = f"look what `{ssh} {python.paths[0]} --version` prints"
        return Problem(last[0], look)


def problem_in_job(
    command: str, code: int | None, log: str, python: RemotePython
) -> Problem:
    """Why a job's own shell did not run a Python program.

    Args:
        command: A command of the job's system that runs something on the host.
        code, log, python: As for `RemoteShell.problem`.
    """
    see = f"look what `{command} {python.paths[0]} --version` prints"
    if code is None:
        return Problem("does not answer", see)
    if "No module named" in log and "nbdist" in log:
        remedy = f"install nbdist for {python} there, or name another with --python"
        return Problem("its Python has no nbdist", remedy)
    if code == 127 or "No such file" in log:
        return Problem(f"has no {python}", "name one that it has with --python")
    last = log.strip().splitlines()[-1:] or [f"exit code {code}"]
    return Problem(last[0], see)


NAME_ONE = "name one that it has by {host}:SLOTS:python=PATH"
OF_SSH = (
    (
        r"FileNotFoundError: .* '(.+)'",
        "this host has no such program to reach it",
        "install openssh-client here, or correct --ssh",
    ),
    (
        r"Host key for \S+ has changed",
        "its key has changed",
        "if the host was installed again, run `ssh-keygen -R {name}`",
    ),
    (
        "Host key verification failed",
        "its key is not known",
        "run `{ssh}` once, and compare the key that it shows",
    ),
    (
        r"Permission denied \(",  # not the words of a shell
        "refuses this user's key",
        "run `ssh-copy-id {host}`, or name the user and the key in ~/.ssh/config; with "
        "a passphrase, run `ssh-add` before Jupyter starts",
    ),
    (
        "Could not resolve hostname",
        "its name is not known",
        "correct the name, or describe the host in ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "refuses the connection",
        "start sshd there, or correct its port in ~/.ssh/config or --ssh",
    ),
    (
        "Connection timed out|Operation timed out|No route to host|Network is unreach",
        "cannot be reached",
        "look whether it runs, and whether a firewall drops ssh's port",
    ),
    (
        "No module named '?nbdist",
        "its Python has no nbdist",
        "install nbdist for {python} there as here, of the same commit or wheel; or "
        + NAME_ONE,
    ),
    (
        r"No module named '?[\w.]+",
        "",
        "run `{python} -m pip install nbdist` there again, which brings what it needs",
    ),
)
"""Patterns in the messages of ssh and Python, what they mean ("" for the match itself),
and what to do."""
