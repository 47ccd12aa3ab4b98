"""POSIX semaphores in memory that processes share.

Memory written before a post is visible after the wait for it, on every processor.
Python's `_multiprocessing` has only named semaphores, which outlive a killed process.
"""

from __future__ import annotations

import ctypes
import sys
import time

__all__ = [
    "AVAILABLE",
    "SEMAPHORE_BYTES",
    "initialise",
    "is_posted",
    "post",
    "try_wait",
    "wait",
]

AVAILABLE = sys.platform == "linux"
"""macOS has no unnamed semaphores."""
SEMAPHORE_BYTES = 64
"""Bytes of a semaphore: a cache line. A sem_t has 16 or 32 bytes in glibc and musl."""
_BETWEEN_PROCESSES = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _bind(
    library: ctypes.CDLL, name: str, *arguments: type[ctypes._SimpleCData[int]] | type
) -> ctypes._NamedFuncPointer:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


if AVAILABLE:
    # PyDLL keeps the GIL, for calls that never block. CDLL releases it.
    _quick, _slow = ctypes.PyDLL(None), ctypes.CDLL(None)
    post = _bind(_quick, "sem_post", ctypes.c_void_p)
    """post(address): let one wait return."""
    try_wait = _bind(_quick, "sem_trywait", ctypes.c_void_p)
    """try_wait(address): take the semaphore without a wait; 0 if it was taken, else
    -1."""
    _init = _bind(_quick, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    _get_value = _bind(_quick, "sem_getvalue", ctypes.c_void_p, ctypes.c_void_p)
    _timed_wait = _bind(_slow, "sem_timedwait", ctypes.c_void_p, ctypes.c_void_p)
    _clock_wait = (
        _bind(_slow, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        if hasattr(_slow, "sem_clockwait")
        else None  # glibc before 2.30, and musl
    )


def initialise(address: int) -> None:
    """Initialise a semaphore of value 0 at an address in shared memory."""
    if _init(address, _BETWEEN_PROCESSES, 0):
        raise OSError(f"sem_init failed at {address:#x}")


def is_posted(address: int) -> bool:
    """Whether a wait would return at once. This does not take the semaphore."""
    value = ctypes.c_int()
    _get_value(address, ctypes.addressof(value))
    return value.value > 0


def wait(address: int, seconds: float) -> bool:
    """Sleep until the semaphore is taken, a signal arrives or the time is up.

    Returns:
        Whether it was taken.
    """
    if _clock_wait is None:
        when = _timespec(time.time() + seconds)  # the wall clock may be set back
        return bool(_timed_wait(address, ctypes.addressof(when)) == 0)
    when = _timespec(time.monotonic() + seconds)
    ended = _clock_wait(address, time.CLOCK_MONOTONIC, ctypes.addressof(when))
    return bool(ended == 0)


def _timespec(when: float) -> _Timespec:
    return _Timespec(int(when), int(when % 1 * 1e9))
