"""Lists of hosts and slots, as in `horovodrun -H` and in hostfiles."""

from __future__ import annotations

import contextlib
import getpass
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.config import ClusterConfig
from nbdist.errors import UsageError
from nbdist.ipc.resources import is_this_host

__all__ = [
    "HostSlots",
    "are_here",
    "discover_hosts",
    "gpus_of",
    "hosts_of",
    "nodes_of",
    "parse_hosts",
    "read_hostfile",
]

DISCOVERY_TIMEOUT_S = 20.0

_ENTRY = re.compile(
    r"(?P<name>(?:[\w.-]+@)?(?:[\w.-]+|\[[\da-fA-F:]+\]))"
    r"(?::(?P<slots>\d+))?(?::python=(?P<python>\S+))?"
)
_COLUMN = re.compile(r"slots=\d+|python=\S+")


@dataclass(frozen=True)
class HostSlots:
    """One entry of a list of hosts."""

    name: str
    """As ssh takes it, such as "server1" or "carol@server1"."""
    slots: int
    """The most ranks that run on the host."""
    python: str | None = None
    """The path of Python on the host; None for the cluster's."""

    @property
    def is_here(self) -> bool:
        """Whether it is this host, and its user this one."""
        user, _, host = self.name.rpartition("@")
        if not is_this_host(host):
            return False
        with contextlib.suppress(KeyError, OSError):  # this user has no name
            return not user or user == getpass.getuser()
        return False


def parse_hosts(text: str, source: str = "-H") -> list[HostSlots]:
    """Parse hosts such as "server1:4,carol@server2:4:python=~/env/bin/python".

    A host without a number has one slot.

    Args:
        text: The text.
        source: Where it comes from, for an error's message.

    Raises:
        UsageError: The text is malformed, or names a host twice.
    """
    hosts = []
    for part in text.split(","):
        found = _ENTRY.fullmatch(part.strip())
        slots = int(found["slots"] or 1) if found else 0
        if found is None or slots < 1:
            raise UsageError(
                f"{source} {text!r}: {part.strip()!r} is not a host and its slots: "
                "expected such as localhost:4, or server1:4,server2:4, or "
                "carol@server1:4:python=~/env/bin/python"
            )
        hosts.append(HostSlots(found["name"], slots, found["python"]))
        if hosts[-1].is_here and found["python"]:
            raise UsageError(
                f"{source} {text!r}: {part.strip()!r} is this host, whose ranks run "
                "the notebook's Python: leave out python="
            )
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"{source} {text!r} names {', '.join(twice)} more than once")
    return hosts


def read_hostfile(path: str) -> list[HostSlots]:
    """Read a file of hosts, as Open MPI and horovodrun do.

    Each line names a host, and may name its slots as "slots=4" or ":4", and its Python
    as "python=~/env/bin/python". A "#" begins a comment.

    Raises:
        UsageError: The file cannot be read, a line is malformed, or names no host.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {error}") from error
    return _parse_lines(text, f"--hostfile {path}")


def discover_hosts(script: str) -> list[HostSlots]:
    """Run a script that prints hosts, as horovodrun's --host-discovery-script.

    Raises:
        UsageError: It does not exist, fails, or prints something else.
    """
    source = f"--host-discovery {script}"
    path = Path(script).expanduser().absolute()
    try:
        done = subprocess.run(
            [str(path)],
            capture_output=True,
            text=True,
            timeout=DISCOVERY_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        last = "".join(error.stderr.strip().splitlines()[-1:])
        code = error.returncode
        raise UsageError(f"{source} ended with exit code {code}: {last}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{source}: {error}") from error
    return _parse_lines(done.stdout, source)


def _parse_lines(text: str, source: str) -> list[HostSlots]:
    """The hosts of the lines of a text, such as "server1 slots=4" or "server1:4".

    Args:
        text: The text.
        source: Where it comes from, for an error's message.

    Raises:
        UsageError: A line is malformed, or there is no host.
    """
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        columns = dict(w.split("=", 1) for w in words[1:] if _COLUMN.fullmatch(w))
        if len(words) != 1 + len(columns):
            raise UsageError(
                f"{source}, line {number}: {line.strip()!r} is not a host and its "
                "slots: expected such as server1 slots=4 python=~/env/bin/python"
            )
        entry = [words[0], *filter(None, [columns.get("slots")])]
        if "python" in columns:
            entry.append(f"python={columns['python']}")
        entries.append(":".join(entry))
    if not entries:
        raise UsageError(f"{source} names no host")
    return parse_hosts(",".join(entries), source)


def hosts_of(config: ClusterConfig) -> list[HostSlots]:
    """The hosts that the options name, with their slots; [] if they name none.

    Raises:
        UsageError: The options exclude each other, or are malformed.
    """
    given = {
        "-H": config.hosts,
        "--hostfile": config.hostfile,
        "--host-discovery": config.host_discovery,
    }
    named = [f"{option} {value}" for option, value in given.items() if value]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: name the hosts once")
    if config.hosts is not None:
        return parse_hosts(config.hosts)
    if config.hostfile is not None:
        return read_hostfile(config.hostfile)
    script = config.host_discovery
    return [] if script is None else discover_hosts(script)


def nodes_of(text: str | None) -> tuple[int | None, int | None]:
    """The fewest and the most hosts, of "3" or "1:3"; None for no such limit.

    Raises:
        UsageError: The text has another form.
    """
    if text is None:
        return None, None
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    least = int(found[1]) if found else 0
    most = int(found[2] or least) if found else 0
    if not 0 < least <= most:
        raise UsageError(
            f"--nnodes {text!r}: expected a number of hosts, or such as 1:3"
        )
    return least, most


def gpus_of(gres: str | None) -> int:
    """The number of GPUs in a list of resources, such as 4 of "gpu:a100:4"."""
    found = re.search(r"\bgpu(?::[^:,]+)*?(?::(\d+))?(?:,|$)", gres or "")
    return int(found[1] or 1) if found else 0


def are_here(hosts: Sequence[HostSlots]) -> bool:
    """Whether all of the hosts are this host."""
    return all(host.is_here for host in hosts)
