"""Connects the ranks of a communicator, and selects their transports."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from mpi4py import MPI

from nbdist.collectives.compression import CODECS, codec_of
from nbdist.collectives.signature import signature
from nbdist.collectives.sync.barrier import Barrier, MessageBarrier
from nbdist.collectives.sync.cuda_aware import takes_device_memory
from nbdist.collectives.sync.cuda_events import settle
from nbdist.collectives.sync.cuda_peers import identity
from nbdist.collectives.sync.semaphore_barrier import NAP_S, YIELDS
from nbdist.collectives.sync.shared_barrier import SharedBarrier
from nbdist.collectives.sync.shared_segment import host_identity, share
from nbdist.collectives.sync.wait import Check, Hooks, Swap, complete
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.compressed_sum import CompressedSum
from nbdist.collectives.transports.copy_pipeline import (
    BlockingCopier,
    Copier,
    CudaCopier,
    Pipeline,
)
from nbdist.collectives.transports.cuda_ipc import DeviceTransport
from nbdist.collectives.transports.hierarchical import HierarchicalTransport
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
from nbdist.errors import CollectiveError, UsageError

__all__ = [
    "Connection",
    "connect",
    "gpu_transports",
]

_Item = TypeVar("_Item")
_ITEM_BYTES = 4096
_ERROR_LETTERS = 500
"""Longest text of an error that a rank tells the others."""
_SPINS = 300
_SPINS_IN_C = 20
"""Number of checks that the compiled barrier makes in the time of one in Python."""
_MESSAGES = frozenset({"mpi", "ring"})
"""Transports that send messages and share no memory."""
_END = signature("close", None, None, None, (), "none").fingerprint
_UNFINISHED = signature("abort", None, None, None, (), "none").fingerprint
_TRANSPORTS = frozenset({"auto", "shared", "nccl", "ipc", "staged"}) | _MESSAGES


@dataclass(frozen=True)
class _Failed:
    """A rank's item when it has failed."""

    error: str


@dataclass
class Connection:
    """The communicators, barrier and transports of one group."""

    config: CollectiveConfig
    hooks: Hooks
    barrier: Barrier
    inner: MPI.Comm
    """For all operations except the user's point-to-point messages."""
    mail: MPI.Comm
    """For the user's point-to-point messages."""
    transports: dict[str, dict[str, Transport]]
    """The transports by type of device and name of algorithm. "auto" is the fastest."""
    hosts: tuple[int, ...]
    """The number of each rank's host. Hosts are numbered from 0, in rank order."""
    reductions: CompiledReductions | None = None
    """The compiled reductions, for tensors in host memory."""
    comms: tuple[MPI.Comm, ...] = ()
    """Further communicators, of the ranks of a host and of the hosts' leaders."""
    gpu: torch.device | None = None
    """The device of this rank's first CUDA tensor; later ones must be on it too."""

    def transport(self, device: str, algorithm: str) -> Transport:
        """The transport for a type of device and an algorithm's name.

        Raises:
            UsageError: The algorithm is not available for the device.
        """
        of_device = self.transports[device]
        if algorithm not in of_device:
            names = ", ".join(sorted(of_device))
            raise UsageError(f"algorithm {algorithm!r} on {device}: expected {names}")
        return of_device[algorithm]

    def add_gpu(self) -> None:
        """Connect the transports for the current GPU. Every rank must call."""

        def swap(item: _Item) -> list[_Item]:
            items = _swap_items(self.inner, item, self.hooks.check)
            for rank, each in enumerate(items):
                if isinstance(each, _Failed):
                    raise CollectiveError(
                        f"rank {rank} could not connect its GPU: {each.error}"
                    )
            return items

        try:
            found = gpu_transports(
                self.transports["cpu"],
                self.barrier,
                self.config,
                self.hooks,
                self.inner,
                swap,
            )
            swap(None)  # all have connected
        except CollectiveError:
            raise
        except Exception as error:
            # The others wait in their next swap.
            failed = _Failed(f"{type(error).__name__}: {error}"[:_ERROR_LETTERS])
            _swap_items(self.inner, failed, self.hooks.check)
            raise
        self.transports["cuda"] = found
        self.gpu = torch.device("cuda", torch.cuda.current_device())

    def add_device(self, kind: str) -> None:
        """Make the transports for a type of device that is neither "cpu" nor "cuda"."""
        rank, size = self.inner.rank, self.inner.size
        self.transports[kind] = staged_transports(
            self.transports["cpu"], BlockingCopier(), self.config, rank, size
        )

    def largest(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """The largest number that a rank has passed, by name. Every rank must call."""
        found: dict[str, int] = {}
        for each in _swap_items(self.inner, numbers, self.hooks.check):
            for name, number in each.items():
                found[name] = max(number, found.get(name, number))
        return found

    def describe(self) -> str:
        """The transports in words."""
        parts = [
            f"{of_device['auto'].description} ({device.upper()})"
            for device, of_device in self.transports.items()
        ]
        if self.gpu is not None and takes_device_memory():
            parts.append("CUDA-aware MPI (messages)")
        if isinstance(self.barrier, SharedBarrier) and self.barrier.compiled is None:
            parts.append("no compiled reductions")
        return ", ".join(parts)

    def finish(self, check: Check) -> None:
        """Wait for the work that the transports have queued on devices."""
        for transport in self._all_transports():
            transport.finish(check)

    def end_together(self, check: Check) -> None:
        """Close the transports that all ranks must close together.

        Every rank must call. Nothing is closed if a rank's work is not finished: the
        rank waits for a rank that makes no call, and closing would wait with it.

        Args:
            check: called while waiting for the other ranks; ends the wait by raising.
        """
        ending = [each for each in self._all_transports() if each.ends_together]
        if not ending:
            return
        is_finished = all(transport.is_finished for transport in ending)
        word = _END if is_finished else _UNFINISHED
        # A rank that has given up waiting in the first barrier is not in the second.
        agreed = all(self.barrier.arrive(word, check) for _ in range(2))
        if agreed and is_finished:
            for transport in ending:
                transport.close()

    def abort(self) -> None:
        """Release this process's waiting thread. Any thread may call."""
        self.barrier.wake()
        for transport in self._all_transports():
            transport.abort()

    def close(self) -> None:
        """Free communicators, barrier and transports. Safe to call twice."""
        self._close_parts()
        for comm in (self.inner, self.mail, *self.comms):
            if comm != MPI.COMM_NULL:
                comm.Free()

    def discard(self) -> None:
        """Close a broken group without its other members.

        Communicators are revoked if MPI supports it, which ends their pending messages.
        They are not freed, because that would wait for the other ranks. Transports are
        aborted for the same reason.
        """
        self.abort()
        self._close_parts()
        for comm in (self.inner, self.mail, *self.comms):
            with contextlib.suppress(NotImplementedError, MPI.Exception):
                comm.Revoke()

    def _close_parts(self) -> None:
        self.barrier.close()
        for transport in self._all_transports():
            transport.close()

    def _all_transports(self) -> list[Transport]:
        tables = list(self.transports.values())
        return [transport for table in tables for transport in set(table.values())]


def connect(comm: MPI.Comm, config: CollectiveConfig, hooks: Hooks) -> Connection:
    """Agree on a barrier and transports with the other ranks of `comm`.

    Every rank of `comm` must call, with the same configuration.

    Raises:
        UsageError: The configured transport is unknown or cannot be used here.
    """
    if config.transport not in _TRANSPORTS:
        known = ", ".join(sorted(_TRANSPORTS))
        raise UsageError(f"transport {config.transport!r}: expected one of {known}")
    if config.compression is not None:
        codec_of(config.compression)  # raises for an unknown name
    inner, mail = _duplicate(comm, hooks.check), _duplicate(comm, hooks.check)

    def swap(item: _Item) -> list[_Item]:
        return _swap_items(inner, item, hooks.check)

    ranks = swap(_own_capabilities(config, comm.size))
    names = [rank.host for rank in ranks]
    hosts = tuple(map(list(dict.fromkeys(names)).index, names))
    ring = RingTransport(inner, hooks.check)
    mpi = MpiTransport(inner, hooks.check)
    cpu: dict[str, Transport] = {"ring": ring, "mpi": mpi, "auto": mpi}
    reductions = shared = None
    comms: tuple[MPI.Comm, ...] = ()
    if config.transport not in _MESSAGES:
        shared = _share_memory(inner, config, hooks, ranks, swap)
        if len(set(hosts)) > 1:
            comms = _connect_hosts(cpu, inner, config, hooks, ranks, hosts)
    if comm.size == 1:
        cpu["auto"] = LocalTransport()
    elif shared is not None:
        reductions = _compiled_reductions(shared.barrier, shared.slots)
        cpu["auto"] = cpu["shared"] = shared.transport(hooks, reductions)
    elif config.transport == "shared":
        raise UsageError("transport 'shared': the ranks are not all on one host")
    if config.transport in _MESSAGES:
        cpu["auto"] = cpu[config.transport]
    own = shared.barrier if shared is not None else MessageBarrier(inner)
    transports = {"cpu": cpu}
    return Connection(
        config, hooks, own, inner, mail, transports, hosts, reductions, comms
    )


def _connect_hosts(
    cpu: dict[str, Transport],
    comm: MPI.Comm,
    config: CollectiveConfig,
    hooks: Hooks,
    ranks: Sequence[_Capabilities],
    hosts: Sequence[int],
) -> tuple[MPI.Comm, ...]:
    """Add the hierarchical transports of ranks on several hosts. Every rank must call.

    Args:
        cpu: the transports for CPU tensors, by algorithm.
        comm: a communicator over the group's ranks.
        config, hooks: those of the group.
        ranks: the capabilities of each rank.
        hosts: the number of each rank's host.

    Returns:
        The communicators that the transports use.
    """
    host = hosts[comm.rank]
    local = comm.Split(host, comm.rank)
    leaders = comm.Split(0 if local.rank == 0 else MPI.UNDEFINED, comm.rank)
    between = None if leaders == MPI.COMM_NULL else MpiTransport(leaders, hooks.check)
    beside = [each for each, number in zip(ranks, hosts, strict=True) if number == host]
    within = _within_host(local, config, hooks, beside)

    def transport(compression: str | None) -> HierarchicalTransport:
        compressed = None
        if compression is not None and between is not None:
            compressed = CompressedSum(leaders, codec_of(compression), hooks.check)
        return HierarchicalTransport(comm, hooks.check, within, between, compressed)

    cpu.update({name: transport(name) for name in CODECS})
    is_nested = len(set(hosts)) < len(hosts)
    if is_nested:
        cpu["hierarchical"] = transport(None)
        cpu["auto"] = cpu["hierarchical"]
    if config.compression is not None:
        cpu["auto"] = cpu[config.compression]
    return (local,) if between is None else (local, leaders)


def _within_host(
    comm: MPI.Comm,
    config: CollectiveConfig,
    hooks: Hooks,
    ranks: Sequence[_Capabilities],
) -> Transport:
    """The transport of the ranks of one host, of which a communicator is given."""
    if comm.size == 1:
        return LocalTransport()

    def swap(item: _Item) -> list[_Item]:
        return _swap_items(comm, item, hooks.check)

    shared = _share_memory(comm, config, hooks, ranks, swap)
    if shared is None:
        return MpiTransport(comm, hooks.check)
    barrier = shared.barrier
    # The group has compared the calls of all its ranks before.
    own = Hooks(
        lambda: barrier.pass_through(hooks.check),
        hooks.differ,
        hooks.check,
        hooks.on_late,
    )
    return shared.transport(own, _compiled_reductions(barrier, shared.slots))


def _duplicate(comm: MPI.Comm, check: Check) -> MPI.Comm:
    duplicate, request = comm.Idup()
    complete([request], check, duplicate)
    return duplicate


@dataclass(frozen=True)
class _Capabilities:
    """The properties of a rank that decide which transports can be used."""

    host: str
    """The rank's `host_identity`."""
    cores: frozenset[int]
    """The cores that the rank may run on."""
    compiled: bool
    """Whether the rank has the compiled module, which also supports so many ranks."""


@dataclass(frozen=True)
class _SharedMemory:
    """A barrier and slots in memory that all ranks of a communicator map."""

    barrier: SharedBarrier
    slots: Slots

    def transport(
        self,
        hooks: Hooks,
        compiled: CompiledReductions | None,
    ) -> SharedTransport:
        """The transport that uses them."""
        return SharedTransport(self.barrier, self.slots, hooks, compiled)


def _own_capabilities(config: CollectiveConfig, size: int) -> _Capabilities:
    native = find_compiled() if config.compiled else None
    compiled = native is not None and size <= native.MOST_RANKS
    return _Capabilities(host_identity(), _cores(), compiled)


def _share_memory(
    comm: MPI.Comm,
    config: CollectiveConfig,
    hooks: Hooks,
    ranks: Sequence[_Capabilities],
    swap: Swap,
) -> _SharedMemory | None:
    """Make a barrier and slots in memory that all ranks of `comm` map.

    Returns:
        The memory; None, on all ranks, if they cannot share memory.
    """
    pages = -(-SharedBarrier.bytes_needed(comm.size) // mmap.PAGESIZE)
    head = pages * mmap.PAGESIZE
    size = head + slots_bytes(comm.size, config.slot_bytes)
    segment = share(size, comm.rank, [rank.host for rank in ranks], swap)
    if segment is None:
        return None
    cores = {core for rank in ranks for core in rank.cores}
    spins = _SPINS if len(cores) >= comm.size else 0
    native = find_compiled()
    compiled = None  # unless all ranks have it: the same code gives the same bits
    if native is not None and all(rank.compiled for rank in ranks):
        compiled = native.Barrier(
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
    view = memoryview(segment.memory)
    barrier = SharedBarrier(
        view[:head], comm.rank, comm.size, spins, hooks.on_late, compiled
    )
    barrier.prepare()
    swap(None)  # all ranks have called `prepare`
    memory = torch.frombuffer(view[head:], dtype=torch.uint8)
    return _SharedMemory(barrier, Slots(memory, comm.rank, comm.size))


def _compiled_reductions(
    barrier: SharedBarrier, slots: Slots
) -> CompiledReductions | None:
    """The compiled reductions over a barrier; None on all ranks if one lacks them."""
    if barrier.compiled is None:
        return None
    native = find_compiled()
    assert native is not None
    most = min(AT_ONCE_BYTES, slots.capacity(torch.uint8))
    return CompiledReductions(native, barrier.compiled, most)


def _swap_items(comm: MPI.Comm, item: _Item, check: Check) -> list[_Item]:
    """Every rank's item, in rank order. Every rank must call.

    Args:
        comm: The communicator.
        item: This rank's item. Its pickle has at most `_ITEM_BYTES` bytes.
        check: called while waiting; ends the wait by raising.
    """
    mine = np.frombuffer(pickle.dumps(item).ljust(_ITEM_BYTES, b"\0"), np.uint8)
    items = np.zeros((comm.size, _ITEM_BYTES), np.uint8)
    complete([comm.Iallgather(mine, items)], check, mine, items)
    return [pickle.loads(each.tobytes()) for each in items]


def _cores() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def gpu_transports(
    host: dict[str, Transport],
    barrier: Barrier,
    config: CollectiveConfig,
    hooks: Hooks,
    comm: MPI.Comm,
    swap: Swap,
) -> dict[str, Transport]:
    """The transports for CUDA tensors, by algorithm. "auto" is the fastest one.

    "auto" is NCCL if each rank has its own GPU. It is CUDA IPC if ranks of one host
    share GPUs, or if torch has no NCCL. Between hosts it is a CUDA-aware MPI. Otherwise
    tensors go through pinned host memory. Every rank must call, on its current device.

    Args:
        host: the transports for CPU tensors, by algorithm.
        barrier: the group's barrier.
        config: the group's configuration.
        hooks: the group's hooks.
        comm: a communicator over the group's ranks.
        swap: returns every rank's item.

    Raises:
        UsageError: The configured transport cannot be used here.
    """
    rank, size = comm.rank, comm.size
    found = staged_transports(host, CudaCopier(hooks.check), config, rank, size)
    if size == 1:
        return found
    one_host = isinstance(barrier, SharedBarrier)
    direct = all(swap(takes_device_memory()))
    if direct:
        own = DirectTransport(comm, hooks.check, partial(settle, hooks.check))
        found["mpi"] = found["ring"] = own
    gpus, wanted = swap(identity()), config.transport
    if wanted in ("auto", "nccl") and len(set(gpus)) == size:
        nccl = NcclTransport.connect(comm, swap, hooks.check, found["staged"])
        if nccl is not None:
            found["nccl"] = nccl
    # CUDA IPC's slots use device memory, which NCCL does not need.
    needs_ipc = wanted == "ipc" or (wanted == "auto" and "nccl" not in found)
    if needs_ipc and isinstance(barrier, SharedBarrier):
        ipc = DeviceTransport.connect(barrier, hooks, config.gpu_slot_bytes, swap)
        if ipc is not None:
            found["ipc"] = ipc
    between_hosts = ["mpi"] if direct and not one_host else []
    best_first = ["nccl", "ipc", *between_hosts, "staged"]
    found["auto"] = found[_chosen(wanted, best_first, found)]
    return found


def staged_transports(
    host: Mapping[str, Transport],
    copier: Copier,
    config: CollectiveConfig,
    rank: int,
    size: int,
) -> dict[str, Transport]:
    """Transports through host memory, by algorithm, for one kind of device.

    Args:
        host: the transports for CPU tensors, by algorithm.
        copier: copies between the device and the host.
        config: the group's configuration, equal on all ranks.
        rank: this process's rank in the group.
        size: number of ranks in the group.
    """
    piece = config.staging_bytes
    pipeline = Pipeline(copier, piece)
    found: dict[str, Transport] = {
        name: StagedTransport(transport, pipeline, piece, rank, size)
        for name, transport in host.items()
    }
    found["staged"] = found["auto"]
    if size == 1:
        found["auto"] = LocalTransport()
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
