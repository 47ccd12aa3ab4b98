"""Which transports a group has for tensors on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mpi4py import MPI

from nbdist.collectives._copier import CudaCopier
from nbdist.collectives._pipeline import Pipeline
from nbdist.collectives._transport import Transport
from nbdist.collectives._transport_device import DeviceTransport
from nbdist.collectives._transport_direct import DirectTransport
from nbdist.collectives._transport_local import LocalTransport
from nbdist.collectives._transport_nccl import NcclTransport
from nbdist.collectives._transport_staged import StagedTransport
from nbdist.collectives.sync.barrier import Gate
from nbdist.collectives.sync.cuda_aware import takes_device_memory
from nbdist.collectives.sync.cuda_events import settle
from nbdist.collectives.sync.cuda_peers import Swap, identity
from nbdist.collectives.sync.shared_barrier import SharedGate
from nbdist.collectives.sync.wait import Hooks
from nbdist.config import CollectiveConfig
from nbdist.errors import UsageError

__all__ = ["gpu_transports"]


def gpu_transports(
    host: dict[str, Transport],
    gate: Gate,
    config: CollectiveConfig,
    hooks: Hooks,
    comm: MPI.Comm,
    swap: Swap,
) -> dict[str, Transport]:
    """By algorithm; "auto" is the best. Every rank must call, on its current device.

    NCCL where each rank owns a GPU; CUDA IPC where ranks of one host share them, or
    torch has no NCCL; between hosts a CUDA-aware MPI; pinned host memory otherwise.

    Args:
        host: the transports for CPU tensors.
        gate: the group's.
        config: the group's.
        hooks: the group's.
        comm: among the group's ranks.
        swap: gives every rank's item, in rank order; all ranks must call.
    """
    rank, size, piece = comm.rank, comm.size, config.staging_bytes
    pipeline = Pipeline(CudaCopier(hooks.check), piece)
    found: dict[str, Transport] = {
        name: StagedTransport(transport, pipeline, piece, rank, size)
        for name, transport in host.items()
    }
    found["staged"] = found["auto"]
    if size == 1:
        found["auto"] = LocalTransport()
        return found
    one_host = isinstance(gate, SharedGate)
    direct = all(swap(takes_device_memory()))
    if direct:
        own = DirectTransport(comm, hooks.check, partial(settle, hooks.check))
        found["mpi"] = found["ring"] = own
    cards, wanted = swap(identity()), config.transport
    if wanted in ("auto", "nccl") and len(set(cards)) == size:
        nccl = NcclTransport.connect(rank, size, swap, found["staged"])
        if nccl is not None:
            found["nccl"] = nccl
    # Beside NCCL, its slots would take memory for nothing.
    needs_ipc = wanted == "ipc" or (wanted == "auto" and "nccl" not in found)
    if needs_ipc and isinstance(gate, SharedGate):
        ipc = DeviceTransport.connect(gate, hooks, config.gpu_slot_bytes, swap)
        if ipc is not None:
            found["ipc"] = ipc
    between_hosts = ["mpi"] if direct and not one_host else []
    best_first = ["nccl", "ipc", *between_hosts, "staged"]
    found["auto"] = found[_chosen(wanted, best_first, found)]
    return found


def _chosen(
    wanted: str, best_first: Sequence[str], found: Mapping[str, Transport]
) -> str:
    if wanted == "auto":
        return next(name for name in best_first if name in found)
    if wanted not in found:
        names = ", ".join(sorted(found))
        raise UsageError(f"transport {wanted!r} for CUDA tensors: expected {names}")
    return wanted
