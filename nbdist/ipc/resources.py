"""What of this machine a process may use: its own share, not all that is there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nbdist.errors import UsageError

__all__ = ["cores", "memory_available", "memory_fraction", "memory_limit"]

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores of our affinity mask, or fewer where a cgroup gives less time."""
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
    """Bytes of memory this process may use: the machine's `total`, or its container's.

    The file is that of a container; one that is not there sets no limit.
    """
    try:
        limit = limit_file.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def memory_available(
    total: int, available: int, folder: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes of memory that this process may still take.

    Args:
        total: The machine's memory, and
        available: what of it nobody uses, as psutil has them.
        folder: The control group's, with its limit and what its processes use. The
            cached files among that are given up when memory runs short.
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


def memory_fraction(
    cap: str | float, total: int, option: str = "--gpu-memory", what: str = "card"
) -> float:
    """The part of `total` bytes that a cap such as 0.25, "8GiB" or 2**33 allows.

    Args:
        option: what the cap was given as, and
        what: what has those bytes; for the message of an error.

    Raises:
        UsageError: Not a fraction in (0, 1] nor a size, or more than there is.
    """
    text = str(cap).strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)", text)
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(
            f"{option} {text!r} is neither a fraction such as 0.25 nor a size "
            "such as 8GiB"
        )
    number = float(match[1])
    if match[2] or number > 1:
        number = number * UNITS[match[2].upper()] / total
    if not 0 < number <= 1:
        raise UsageError(
            f"{option} {text} is not within the {what}'s {total / 2**30:.1f} GiB: "
            "give a fraction between 0 and 1 or a smaller size"
        )
    return number
