"""Revokes communicators from threads that must not wait for MPI."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

__all__ = ["revoke"]

WAIT_S = 1.0


def revoke(comm: Any) -> None:
    """Revoke an mpi4py communicator, if MPI can do that. Any thread may call.

    A call of Open MPI can wait for ever for a process that died before it was
    connected, and hold a lock that every other call takes. The control thread must
    answer even then. This therefore returns after 1 s, and leaves a thread behind.
    """
    thread = threading.Thread(
        target=_revoke, args=(comm,), name="nbdist-revoke", daemon=True
    )
    thread.start()
    thread.join(WAIT_S)


def _revoke(comm: Any) -> None:
    with contextlib.suppress(NotImplementedError):
        comm.Revoke()
