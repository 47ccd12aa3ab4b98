"""Runs a program whose system calls `pidfd_open` fail, as in a strict container.

    python tests/without_pidfd.py ERRNO PROGRAM [ARGUMENT ...]

The filter is of the kernel, and each process that the program starts has it too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
PIDFD_OPEN = 434
"""The number of the system call, the same on every architecture."""


def refuse(number: int) -> None:
    """Have the system call fail with an error number from now on."""
    program = [
        (LOAD, 0, 0, 0),  # the number of the system call
        (EQUAL, 0, 1, PIDFD_OPEN),
        (RETURN, 0, 0, FAIL | number),
        (RETURN, 0, 0, ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *each) for each in program)
    memory = ctypes.create_string_buffer(packed)
    filters = struct.pack("HP", len(program), ctypes.addressof(memory))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(filters), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


if __name__ == "__main__":
    refuse(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
