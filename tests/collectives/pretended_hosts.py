"""Groups on one machine that believe that their ranks are on several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HOSTS_OF_TWO = "two ranks on a host"


@contextmanager
def pretending_hosts(how: str) -> Iterator[None]:
    """Have groups that are made in this block believe that two ranks share a host.

    Ranks of different hosts then share no memory.

    Args:
        how: `HOSTS_OF_TWO`; another text has no effect.
    """
    from mpi4py import MPI  # initialises MPI: not in the process of the tests

    from nbdist.collectives.transports import select

    host = f"host {MPI.COMM_WORLD.rank // 2}"
    with pytest.MonkeyPatch.context() as patch:
        if how == HOSTS_OF_TWO:
            patch.setattr(select, "host_identity", lambda: host)
        yield
