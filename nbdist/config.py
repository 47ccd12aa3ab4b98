"""What can be set, and the environment variables that set it.

Every NBDIST_* variable is read here, once, when `from_environment` is called.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["ClusterConfig", "CollectiveConfig", "environment"]


def environment(name: str, default: str) -> str:
    """The value of NBDIST_<name>, or the default where it is unset or empty."""
    return os.environ.get(f"NBDIST_{name}") or default


@dataclass(frozen=True)
class CollectiveConfig:
    """How collectives choose and pace their transports."""

    transport: str = "auto"
    """Force one: "shared", "mpi" or "ring", for tensors on a GPU staged where need be;
    or for those alone "nccl", "ipc" or "staged" (NBDIST_TRANSPORT)."""
    timeout_s: float | None = None
    """Seconds a collective waits for its peers; None waits until it is released
    (NBDIST_COLLECTIVE_TIMEOUT)."""
    slot_bytes: int = 512 * 1024
    """Shared memory each rank writes one block to; it should fit a core's L2 cache with
    the block it was copied from (NBDIST_SLOT_BYTES)."""
    gpu_slot_bytes: int = 16 * 2**20
    """The same of device memory, for CUDA IPC (NBDIST_GPU_SLOT_BYTES)."""
    staging_bytes: int = 4 * 2**20
    """Where tensors on a GPU go through the host, what goes at once: one such piece is
    moved while its neighbours are copied (NBDIST_STAGING_BYTES)."""
    check: bool = True
    """Compare the ranks' calls; off only to measure the cost (NBDIST_CHECK=0)."""
    compiled: bool = True
    """Use the compiled part, where all ranks have it (NBDIST_COMPILED=0)."""

    @classmethod
    def from_environment(cls) -> CollectiveConfig:
        timeout = environment("COLLECTIVE_TIMEOUT", "")
        return cls(
            transport=environment("TRANSPORT", "auto"),
            timeout_s=float(timeout) if timeout else None,
            slot_bytes=int(environment("SLOT_BYTES", str(cls.slot_bytes))),
            gpu_slot_bytes=int(environment("GPU_SLOT_BYTES", str(cls.gpu_slot_bytes))),
            staging_bytes=int(environment("STAGING_BYTES", str(cls.staging_bytes))),
            check=environment("CHECK", "1") != "0",
            compiled=environment("COMPILED", "1") != "0",
        )


@dataclass(frozen=True)
class ClusterConfig:
    """What a user asks of `%dist_start` or `nbdist.Cluster`. None means: decide."""

    n: int | None = None
    """Number of ranks; default one per visible GPU, else min(4, cores)."""
    device: str = "auto"
    """"auto", "cuda" or "cpu"."""
    ranks_per_gpu: int | None = None
    """Ranks that share one GPU, each capped at its share of the memory."""
    gpu_memory: str | float | int | None = None
    """Cap per rank: a fraction of the card (0.25) or a size ("8GiB", or bytes)."""
    threads: int | None = None
    """torch's intra-op threads per rank; default the cores shared evenly."""
    timeout_s: float = 120.0
    """Seconds until every rank must be up (NBDIST_START_TIMEOUT)."""
    on_failure: str = "replace"
    """What follows a rank's death: "replace" it, "shrink" the world, or "stop"."""
    oversubscribe: bool = False
    """Start more ranks than the host's cores or memory carry by estimate."""
    hosts: str | None = None
    """Where, and how many ranks there at most, such as "localhost:4"."""
    resume: str | None = None
    """A file of `State.save`, which every new `State` on the ranks begins from."""
    mpiexec: str | None = None
    """Path of the MPI launcher (NBDIST_MPIEXEC); default the one of the wheel."""

    @classmethod
    def from_environment(cls) -> ClusterConfig:
        return cls(
            timeout_s=float(environment("START_TIMEOUT", "120")),
            mpiexec=environment("MPIEXEC", "") or None,
        )
