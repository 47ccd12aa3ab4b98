"""Process descriptors of Linux, which become readable when their process ends."""

from __future__ import annotations

import os
import select

__all__ = ["can_open", "ends_within", "opened"]


def opened(pid: int) -> int | None:
    """A process's descriptor; None where there can be none.

    Python may have the call and the kernel may not: a kernel before Linux 5.3, or a
    container whose filter of system calls refuses it. This process may also have as
    many descriptors as it may have. The caller then looks at the process now and then.

    Raises:
        ProcessLookupError: The process has ended and was waited for.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def can_open() -> bool:
    """Whether the kernel gives this process descriptors of processes."""
    descriptor = opened(os.getpid())
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def ends_within(descriptor: int, timeout_s: float) -> bool:
    """Wait until the process of a descriptor has ended; whether it has."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
