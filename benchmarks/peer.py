"""The peer: ipyparallel, started as its manual says, with what Open MPI asks for."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["allow_open_mpi", "ipyparallel_client"]


@contextmanager
def allow_open_mpi() -> Iterator[None]:
    """Let Open MPI run as root, with more ranks than cores, in a session of its own."""
    saved = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="bench-") as session:
        os.environ.update(
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
            PRTE_MCA_prte_tmpdir_base=session,
            OMP_NUM_THREADS="1",
            PATH=os.pathsep.join(
                [str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
        )
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(saved)


@contextmanager
def ipyparallel_client(n: int) -> Iterator[Any]:
    """A connected `ipyparallel.Client` with n MPI engines."""
    import ipyparallel

    with allow_open_mpi(), tempfile.TemporaryDirectory(prefix="ipp-") as profile:
        cluster = ipyparallel.Cluster(
            engines="mpi", n=n, profile_dir=profile, log_level=40
        )
        try:
            yield cluster.start_and_connect_sync()
        finally:
            cluster.stop_cluster_sync()
