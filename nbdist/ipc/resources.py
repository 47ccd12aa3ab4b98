"""This host: its name, and the cores and memory that a process may use."""

from __future__ import annotations

import os
import re
import resource
import socket
from pathlib import Path

from nbdist.errors import UsageError

__all__ = [
    "cores",
    "few_descriptors",
    "host_name",
    "is_this_host",
    "memory_available",
    "memory_cap",
    "memory_fraction",
    "memory_limit",
]

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


def host_name() -> str:
    """The name of this host in messages and tables."""
    return socket.gethostname()


def is_this_host(name: str) -> bool:
    """Whether a host's name is that of this host. The domain is ignored."""
    own = host_name().partition(".")[0].lower()
    return name in LOOPBACK or name.partition(".")[0].lower() == own


def cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The number of cores in the affinity mask; fewer if a cgroup limits CPU time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    count = count or os.cpu_count() or 1
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def memory_limit(
    total: int, limit_file: Path = Path("/sys/fs/cgroup/memory.max")
) -> int:
    """Bytes of memory that this process may use: the machine's, or its container's.

    Args:
        total: The machine's memory in bytes.
        limit_file: The file with the control group's limit. If it does not exist, there
            is no limit.
    """
    try:
        limit = limit_file.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def memory_available(
    total: int, available: int, folder: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes of memory that this process may still allocate.

    Args:
        total: The machine's memory in bytes.
        available: The part of it that is free, as psutil reports it.
        folder: The control group's folder, with its limit and its processes' use. The
            use includes cached files, which the kernel frees when memory is short.
    """
    limit = memory_limit(total, folder / "memory.max")
    if limit == total:
        return available
    try:
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return min(limit, available)
    cached = sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", stat, re.M)))
    return max(0, min(limit - used + cached, available))


def memory_cap(
    cap: str | float,
    total: int | None,
    option: str = "--gpu-memory",
    what: str = "card",
) -> float | int:
    """A cap on memory such as 0.25, "8GiB" or 2**33, read and checked.

    Args:
        cap: The cap.
        total: The bytes of the device or machine; None if they are not known.
        option: The option that gave the cap, for an error's message.
        what: The device or machine that has the bytes, for an error's message.

    Returns:
        A float in (0, 1], a fraction of the memory; or an int, bytes.

    Raises:
        UsageError: The cap is neither a fraction in (0, 1] nor a size, or is more than
            `total`, or a size while the total is not known.
    """
    text = str(cap).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(
            f"{option} {text!r} is neither a fraction such as 0.25 nor a size "
            "such as 8GiB"
        )
    number, most = float(match[1]), 1
    if match[2] or number > 1:
        if total is None:
            raise UsageError(
                f"{option} {text} is a size, and the driver does not tell the memory "
                f"of this {what}: pass a fraction between 0 and 1"
            )
        number, most = int(number * UNITS[match[2].upper()]), total
    if not 0 < number <= most:
        whole = "memory" if total is None else f"{total / 2**30:.1f} GiB"
        raise UsageError(
            f"{option} {text} is not within the {what}'s {whole}: "
            "pass a fraction between 0 and 1 or a smaller size"
        )
    return number


def memory_fraction(
    cap: str | float,
    total: int | None,
    option: str = "--gpu-memory",
    what: str = "card",
) -> float:
    """The fraction of `total` bytes that a cap allows. The arguments and the errors are
    those of `memory_cap`."""
    checked = memory_cap(cap, total, option, what)
    if isinstance(checked, float):
        return checked
    assert total is not None
    return checked / total


FEW_DESCRIPTORS = 32
"""The free descriptors below which a user is warned. A replacement needs some ten."""


def few_descriptors() -> str:
    """A sentence, if this process has few free descriptors; else ""."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:  # another system
        return ""
    except OSError:  # none is left for the list
        used = most
    if most == resource.RLIM_INFINITY or used <= most - FEW_DESCRIPTORS:
        return ""
    return (
        f"process {os.getpid()} has {used} of the {most} files open that it may have, "
        "and cannot watch ranks without: close some, or raise ulimit -n before Jupyter "
        "starts"
    )
