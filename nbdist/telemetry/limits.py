"""What of this machine a process may use: its own share, not all that is there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cores", "memory_limit"]


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
