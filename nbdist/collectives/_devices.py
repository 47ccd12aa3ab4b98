"""Which transports a group has for tensors on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nbdist.config import CollectiveConfig

from ._gate import Gate
from ._gate_shared import SharedGate
from ._hooks import Hooks
from ._transport import Transport
from ._transport_device import DeviceTransport
from ._transport_local import LocalTransport
from ._transport_nccl import NcclTransport
from ._transport_staged import StagedTransport

__all__ = ["gpu_transports"]

Swap = Callable[[Any], list[Any]]


def gpu_transports(
    host: dict[str, Transport],
    gate: Gate,
    config: CollectiveConfig,
    hooks: Hooks,
    rank: int,
    swap: Swap,
) -> dict[str, Transport]:
    """By algorithm; "auto" is the best. Every rank must call, on its current device.

    NCCL where each rank owns a GPU, CUDA IPC where ranks of one host share them,
    pinned host memory otherwise.

    Args:
        host: the transports for CPU tensors.
        gate: the group's.
        config: the group's.
        hooks: the group's.
        rank: this process's in the group.
        swap: gives every rank's item, in rank order; all ranks must call.
    """
    found: dict[str, Transport] = {
        name: StagedTransport(transport) for name, transport in host.items()
    }
    found["staged"] = found["auto"]
    identities = swap(str(torch.cuda.get_device_properties().uuid))
    size = len(identities)
    if size == 1:
        found["auto"] = LocalTransport()
    elif len(set(identities)) == size and dist.is_nccl_available():
        found["nccl"] = NcclTransport(rank, size, swap, found["staged"])
        found["auto"] = found["nccl"]
    elif isinstance(gate, SharedGate):
        shared = DeviceTransport.connect(gate, hooks, config.gpu_slot_bytes, swap)
        if shared is not None:
            found["ipc"] = found["auto"] = shared
    if config.transport != "auto":
        found["auto"] = found[config.transport]
    return found
