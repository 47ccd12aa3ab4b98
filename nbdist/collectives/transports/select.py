"""How the ranks of a communicator find each other, and what they may use."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from nbdist.collectives.sync import semaphore as _semaphore
from nbdist.collectives.sync.barrier import Barrier, MessageBarrier
from nbdist.collectives.sync.cuda_aware import takes_device_memory
from nbdist.collectives.sync.cuda_events import settle
from nbdist.collectives.sync.cuda_peers import Swap, identity
from nbdist.collectives.sync.semaphore_barrier import NAP_S, YIELDS
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.sync.shared_segment import Segment
from nbdist.collectives.sync.wait import Check, Hooks, complete
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.copy_pipeline import CudaCopier, Pipeline
from nbdist.collectives.transports.cuda_ipc import DeviceTransport
from nbdist.collectives.transports.local import LocalTransport
from nbdist.collectives.transports.mpi import (
    DirectTransport,
    MpiTransport,
    RingTransport,
)
from nbdist.collectives.transports.native import CompiledReductions, find_compiled
from nbdist.collectives.transports.nccl import NcclTransport
from nbdist.collectives.transports.shared_memory import AT_ONCE_BYTES, SharedTransport
from nbdist.collectives.transports.slots import Slots, rounded_slot, slots_bytes
from nbdist.collectives.transports.staged import StagedTransport
from nbdist.config import CollectiveConfig
from nbdist.errors import UsageError

__all__ = [
    "Connection",
    "connect",
    "gpu_transports",
]

_Item = TypeVar("_Item")
_CARD_BYTES = 4096
_SPINS = 300
_SPINS_IN_C = 20
"""Looks of the compiled barrier in the time of one look in Python."""
_MESSAGES = frozenset({"mpi", "ring"})
"""Transports that share no memory."""
_TRANSPORTS = frozenset({"auto", "shared", "nccl", "ipc", "staged"}) | _MESSAGES


@dataclass
class Connection:
    """What one group holds for as long as it lives."""

    config: CollectiveConfig
    hooks: Hooks
    gate: Barrier
    inner: MPI.Comm
    """For everything but the user's messages."""
    mail: MPI.Comm
    """For point-to-point messages of the user's."""
    transports: dict[str, dict[str, Transport]]
    """By device kind and algorithm; "auto" is the best."""
    hosts: tuple[int, ...]
    """The number of each rank's host, from 0 in the ranks' order."""
    reductions: CompiledReductions | None = None
    """The compiled ones, for tensors in host memory."""
    gpu: torch.device | None = None
    """Where this rank's CUDA tensors must lie, from the first one on."""

    def transport(self, device: str, algorithm: str) -> Transport:
        """The transport for a kind of device and an algorithm's name."""
        of_device = self.transports[device]
        if algorithm not in of_device:
            names = ", ".join(sorted(of_device))
            raise UsageError(f"algorithm {algorithm!r} on {device}: expected {names}")
        return of_device[algorithm]

    def add_gpu(self) -> None:
        """Find the transports for CUDA tensors. Every rank must call.

        They are for the device that is current.
        """

        def swap(item: _Item) -> list[_Item]:
            return _swap_cards(self.inner, item, self.hooks.check)

        self.transports["cuda"] = gpu_transports(
            self.transports["cpu"],
            self.gate,
            self.config,
            self.hooks,
            self.inner,
            swap,
        )
        self.gpu = torch.device("cuda", torch.cuda.current_device())

    def largest(self, number: int) -> int:
        """The largest number that any rank gives. Every rank must call."""
        return max(_swap_cards(self.inner, number, self.hooks.check))

    def describe(self) -> str:
        """The transports in words."""
        parts = [
            f"{of_device['auto'].description} ({device.upper()})"
            for device, of_device in self.transports.items()
        ]
        if self.gpu is not None and takes_device_memory():
            parts.append("CUDA-aware MPI (messages)")
        if isinstance(self.gate, SharedBarrier) and self.gate.compiled is None:
            parts.append("nothing compiled")
        return ", ".join(parts)

    def finish(self, check: Check) -> None:
        """Wait for what the transports have queued on devices."""
        for transport in self._all_transports():
            transport.finish(check)

    def abort(self) -> None:
        """Release this process's waiting thread. May be called from any thread."""
        self.gate.wake()
        for transport in self._all_transports():
            transport.abort()

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        self._close_parts()
        for comm in (self.inner, self.mail):
            if comm != MPI.COMM_NULL:
                comm.Free()

    def discard(self) -> None:
        """Give up everything, with what is still under way, on a group that is spent.

        Communicators are revoked where MPI can do so, which ends their pending
        messages; they are not freed, for that waits for peers.
        """
        self._close_parts()
        for comm in (self.inner, self.mail):
            with contextlib.suppress(NotImplementedError, MPI.Exception):
                comm.Revoke()

    def _close_parts(self) -> None:
        self.gate.close()
        for transport in self._all_transports():
            transport.close()

    def _all_transports(self) -> list[Transport]:
        tables = list(self.transports.values())
        return [transport for table in tables for transport in set(table.values())]


def connect(comm: MPI.Comm, config: CollectiveConfig, hooks: Hooks) -> Connection:
    """Meet the other ranks of `comm` and agree on gate and transports.

    Every rank of `comm` must call, with the same configuration.
    """
    if config.transport not in _TRANSPORTS:
        known = ", ".join(sorted(_TRANSPORTS))
        raise UsageError(f"transport {config.transport!r}: expected one of {known}")
    inner, mail = _duplicate(comm, hooks.check), _duplicate(comm, hooks.check)
    names = _swap_cards(inner, _host(), hooks.check)
    distinct = list(dict.fromkeys(names))
    hosts = tuple(map(distinct.index, names))
    ring = RingTransport(inner, hooks.check)
    mpi = MpiTransport(inner, hooks.check)
    cpu: dict[str, Transport] = {"ring": ring, "mpi": mpi, "auto": mpi}
    reductions = shared = None
    if config.transport not in _MESSAGES:
        shared = _share(inner, config, hooks)
    if comm.size == 1:
        cpu["auto"] = LocalTransport()
    elif shared is not None:
        gate, memory = shared
        slots = Slots(memory, comm.rank, comm.size)
        if gate.compiled is not None:
            native = find_compiled()
            assert native is not None
            reductions = CompiledReductions(native, gate.compiled, AT_ONCE_BYTES)
        cpu["shared"] = SharedTransport(gate, slots, hooks, reductions)
        cpu["auto"] = cpu["shared"]
    elif config.transport == "shared":
        raise UsageError("transport 'shared': the ranks are not all on one host")
    if config.transport in _MESSAGES:
        cpu["auto"] = cpu[config.transport]
    meeting = shared[0] if shared is not None else MessageBarrier(inner)
    transports = {"cpu": cpu}
    return Connection(
        config, hooks, meeting, inner, mail, transports, hosts, reductions
    )


def _duplicate(comm: MPI.Comm, check: Check) -> MPI.Comm:
    duplicate, request = comm.Idup()
    complete([request], check, duplicate)
    return duplicate


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others about itself."""

    host: str
    cores: frozenset[int]
    segment: str | None
    compiled: bool


def _share(
    comm: MPI.Comm, config: CollectiveConfig, hooks: Hooks
) -> tuple[SharedBarrier, Tensor] | None:
    """Memory that all ranks of `comm` map, and the gate in it.

    None where they cannot: the same answer on all ranks.
    """
    pages = -(-SharedBarrier.bytes_needed(comm.size) // mmap.PAGESIZE)
    head = pages * mmap.PAGESIZE
    size = head + slots_bytes(comm.size, config.slot_bytes)
    segment = _create(size) if comm.rank == 0 and _semaphore.AVAILABLE else None
    compiled = find_compiled() if config.compiled else None
    if compiled is not None and comm.size > compiled.MOST_RANKS:
        compiled = None
    address = segment.address if segment else None
    card = _Card(_host(), _cores(), address, compiled is not None)
    cards = _swap_cards(comm, card, hooks.check)
    if len({each.host for each in cards}) == 1 and cards[0].segment and segment is None:
        segment = _open(cards[0].segment, size)
    reached = _swap_cards(comm, segment is not None, hooks.check)
    if segment is None or not all(reached):
        return None
    cores = {core for each in cards for core in each.cores}
    spins = _SPINS if len(cores) >= comm.size else 0
    view = memoryview(segment.memory)
    barrier = None  # all ranks reduce with the same code, to the same bits
    if compiled is not None and all(each.compiled for each in cards):
        barrier = compiled.Barrier(
            segment.descriptor,
            comm.rank,
            comm.size,
            slots_at=head,
            slot_bytes=rounded_slot(comm.size, config.slot_bytes),
            spins=spins * _SPINS_IN_C,
            yields=YIELDS,
            nap_s=NAP_S,
        )
    segment.close_file()
    gate = SharedBarrier(
        view[:head], comm.rank, comm.size, spins, hooks.on_late, barrier
    )
    gate.prepare()
    _swap_cards(comm, True, hooks.check)
    return gate, torch.frombuffer(view[head:], dtype=torch.uint8)


def _create(size: int) -> Segment | None:
    try:
        return Segment.create(size)
    except OSError:  # no room to share: MPI's messages do it
        return None


def _open(address: str, size: int) -> Segment | None:
    try:
        return Segment.open(address, size)
    except OSError:  # another container, or another user
        return None


def _swap_cards(comm: MPI.Comm, card: _Item, check: Check) -> list[_Item]:
    """An all-gather of something small, released by `check`."""
    mine = np.frombuffer(pickle.dumps(card).ljust(_CARD_BYTES, b"\0"), np.uint8)
    cards = np.zeros((comm.size, _CARD_BYTES), np.uint8)
    complete([comm.Iallgather(mine, cards)], check, mine, cards)
    return [pickle.loads(each.tobytes()) for each in cards]


def _host() -> str:
    """Equal for processes that can share memory by way of /proc."""
    namespace = Path("/proc/self/ns/pid")
    processes = namespace.stat().st_ino if namespace.exists() else 0
    return f"{MPI.Get_processor_name()}/{processes}"


def _cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def gpu_transports(
    host: dict[str, Transport],
    gate: Barrier,
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
    one_host = isinstance(gate, SharedBarrier)
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
    if needs_ipc and isinstance(gate, SharedBarrier):
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
