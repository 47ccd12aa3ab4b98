"""Runs the transports for CUDA tensors on CPU tensors, without a GPU.

Only CUDA is replaced. Shared memory replaces device memory. Copies between device and
host are delayed until something waits for them. The order of the host replaces the
order of streams.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import nbdist.collectives as nc
from nbdist.collectives.sync.cuda_events import Order
from nbdist.collectives.sync.shared_segment import Segment
from nbdist.collectives.transports.base import Transport
from nbdist.collectives.transports.copy_pipeline import Copier, Pipeline, WaitForCopy
from nbdist.collectives.transports.cuda_ipc import DeviceTransport
from nbdist.collectives.transports.mpi import DirectTransport
from nbdist.collectives.transports.slots import PeerSlots, peer_bytes
from nbdist.collectives.transports.staged import StagedTransport

SLOT_BYTES = 64 * 1024
PIECE_BYTES = 40_000
"""Not a multiple of anything."""


class Alternating(Order):
    """Checks that each step is announced once, before its barrier."""

    def __init__(self) -> None:
        self.open = False
        self.steps = 0

    def before(self) -> None:
        # A call that ended in a mismatch is announced and not completed.
        self.open = True

    def after(self) -> None:
        assert self.open, "a step was completed before it was announced"
        self.open = False
        self.steps += 1


class PutOff(Copier):
    """Delays each copy until something waits for it, so that a missing wait is noticed.

    Copies are made in the order in which they were started. Memory that a copy reads
    must not change before the copy, which is checked by a comparison.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._down: list[Callable[[], None]] = []
        self._up: list[Callable[[], None]] = []
        self._open = False

    def allocate(self, size: int) -> Tensor:
        self.allocations += 1
        return torch.full((size,), 0xA5, dtype=torch.uint8)

    def begin(self, overlap: bool) -> None:
        assert not self._open, "a transfer began within another"
        self._open = True

    def fetch(self, source: Tensor, target: Tensor) -> WaitForCopy:
        return self._put_off(self._down, source, target)

    def store(self, source: Tensor, target: Tensor) -> WaitForCopy:
        return self._put_off(self._up, source, target)

    def end(self) -> None:
        for queue in (self._down, self._up):
            while queue:
                queue[0]()
        self._open = False

    def _put_off(
        self, queue: list[Callable[[], None]], source: Tensor, target: Tensor
    ) -> WaitForCopy:
        assert self._open, "a copy outside of a transfer"
        assert source.numel() == target.numel()
        assert source.dtype == target.dtype
        before = source.clone()

        def copy() -> None:
            queue.remove(copy)
            assert _same(source, before), "changed while it was to be copied"
            target.copy_(source)

        def wait() -> None:
            while copy in queue:
                queue[0]()

        queue.append(copy)
        return wait


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def install(name: str, group: nc.Group) -> None:
    """Make a group use a simulated transport for all tensors. Every rank must call.

    No name is that of a transport: a test of the real one would pass without it.
    """
    group.quick = None  # or small all-reduces would pass by the simulated transport
    transports = group._connection.transports["cpu"]
    made = MAKERS[name](group, transports["auto"], transports["mpi"])
    transports["auto"] = transports["ring"] = transports["mpi"] = made


def _peer(group: nc.Group, best: Transport, mpi: Transport) -> Transport:
    barrier, hooks = group._connection.barrier, group._connection.hooks
    slots = PeerSlots(_memories(), group.rank)
    return DeviceTransport(barrier, slots, hooks, Alternating())  # type: ignore[arg-type]


def _memories() -> list[Tensor]:
    from mpi4py import MPI  # initialises MPI: not in a process that imports `PutOff`

    world = MPI.COMM_WORLD
    size = peer_bytes(world.size, SLOT_BYTES)
    own = Segment.create(size)
    addresses = world.allgather(own.address)
    segments = [
        own if rank == world.rank else Segment.open(address, size)
        for rank, address in enumerate(addresses)
    ]
    world.Barrier()
    own.close_file()
    return [torch.frombuffer(each.memory, dtype=torch.uint8) for each in segments]


def _staged(group: nc.Group, best: Transport, mpi: Transport) -> Transport:
    return _through(best, group)


def _staged_mpi(group: nc.Group, best: Transport, mpi: Transport) -> Transport:
    return _through(mpi, group)


def _through(host: Transport, group: nc.Group) -> Transport:
    pipeline = Pipeline(PutOff(), PIECE_BYTES)
    return StagedTransport(host, pipeline, PIECE_BYTES, group.rank, group.size)


def _direct(group: nc.Group, best: Transport, mpi: Transport) -> Transport:
    """The transport of CUDA-aware MPI. MPI accepts the address of any CPU tensor."""
    return DirectTransport(group._connection.inner, group._check, _nothing)


def _nothing() -> None:
    pass


MAKERS: dict[str, Callable[[nc.Group, Transport, Transport], Transport]] = {
    "ipc-simulated": _peer,
    "staged-simulated": _staged,
    "mpi-simulated": _staged_mpi,
    "direct-simulated": _direct,
}
