"""Collectives by NCCL, for ranks that each have a GPU of their own."""

from __future__ import annotations

import atexit
import contextlib
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from nbdist.collectives.reduction import REDUCE_DTYPES, REDUCE_OPS
from nbdist.collectives.sync.attempt import attempt
from nbdist.collectives.sync.cuda_events import await_device
from nbdist.collectives.sync.wait import Check, Swap
from nbdist.collectives.transports.base import Transport

__all__ = ["NcclTransport", "shut_down"]

_NO_TIMEOUT = timedelta(days=7)
_CLOSE_WITHIN_S = 10.0
"""All ranks close at the same time. A rank that takes longer has died."""
_TAG = 5
_LOSE_NAN = frozenset({"min", "max"})
_DTYPES = REDUCE_DTYPES - {torch.int16}


class NcclTransport(Transport):
    """An NCCL communicator of the group. Work is queued on the current stream."""

    description: ClassVar[str] = "NCCL"
    ends_together: ClassVar[bool] = True
    is_capturable: ClassVar[bool] = True

    @classmethod
    def connect(
        cls, comm: MPI.Comm, swap: Swap, check: Check, fallback: Transport
    ) -> NcclTransport | None:
        """Connect the ranks. Every rank must call, on its own GPU as current device.

        The ranks meet in the store of torch.distributed's default group. Without one
        they meet in a file, if they are on one host.

        Args:
            comm: a communicator over the group's ranks.
            swap: returns every rank's item.
            check: ends a wait by raising.
            fallback: the transport for reductions that NCCL lacks.

        Returns:
            The transport; None, on all ranks, if torch has no NCCL, the ranks have no
            store, or NCCL refuses their devices. Some of its versions refuse two MIG
            devices of one GPU.
        """
        if not all(swap(dist.is_nccl_available())):
            return None
        store = _common_store(comm.rank, comm.size, swap)
        if store is None:
            return None
        transport = cls(store, comm.rank, comm.size, fallback)
        try:
            if all(swap(transport._works(comm, check))):
                return transport
        except BaseException:
            transport.abort()
            raise
        transport.abort()
        return None

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        fallback: Transport,
    ) -> None:
        """Make a transport. The first operation makes the communicator.

        Args:
            store: a store that all ranks share, and that has no other use.
            rank: this process's rank in the group.
            size: number of ranks in the group.
            fallback: the transport for reductions that NCCL lacks.
        """
        c10d: Any = dist  # only CUDA builds of torch have ProcessGroupNCCL
        options = c10d.ProcessGroupNCCL.Options()
        # `abort` releases a collective. torch's watchdog would end the process.
        options._timeout = _NO_TIMEOUT
        self._group: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
        self._fallback = fallback
        self._last: Any = None
        """The work queued last."""
        self._is_closed = False

    def all_reduce_flat(self, tensor: Tensor, op: str) -> None:
        numbers = _as_nccl(tensor, op)
        if numbers is None:
            self._fallback.all_reduce_flat(tensor, op)
            return
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op].nccl
        with self._keeping_nan(numbers, op, [numbers]):
            self._queue(self._group.allreduce([numbers], options))

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        numbers = _as_nccl(tensor, op)
        if numbers is None:
            self._fallback.reduce(tensor, op, root)
            return
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = REDUCE_OPS[op].nccl, root
        outputs = [numbers] if self._group.rank() == root else []
        with self._keeping_nan(numbers, op, outputs):
            self._queue(self._group.reduce([numbers], options))

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        numbers = [_as_nccl(each, op) for each in (output, *inputs)]
        loses_nan = op in _LOSE_NAN and output.is_floating_point()
        if loses_nan or any(each is None for each in numbers):
            self._fallback.reduce_scatter(output, inputs, op)
            return
        options = dist.ReduceScatterOptions()
        options.reduceOp = REDUCE_OPS[op].nccl
        self._queue(self._group.reduce_scatter(numbers[:1], [numbers[1:]], options))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._queue(self._group.broadcast([_as_bytes(tensor)], options))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        wanted = list(map(_as_bytes, outputs))
        self._queue(self._group.allgather([wanted], [_as_bytes(tensor)]))

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        wanted = [] if outputs is None else [list(map(_as_bytes, outputs))]
        self._queue(self._group.gather(wanted, [_as_bytes(tensor)], options))

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        offered = [] if inputs is None else [list(map(_as_bytes, inputs))]
        self._queue(self._group.scatter([_as_bytes(tensor)], offered, options))

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        wanted, offered = (list(map(_as_bytes, each)) for each in (outputs, inputs))
        self._queue(self._group.alltoall(wanted, offered, dist.AllToAllOptions()))

    def finish(self, check: Check) -> None:
        if self._last is not None:
            await_device(self._last.is_completed, check)
            self._last = None

    @property
    def is_finished(self) -> bool:
        return self._last is None or bool(self._last.is_completed())

    def abort(self) -> None:
        self._last = None
        if not self._is_closed:
            self._group.abort()

    def close(self) -> None:
        """Free the communicator.

        Work that is not finished is aborted, because a rank that it needs may be gone.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_finished:
            self._group.abort()
        self._last = None
        shut_down(self._group)

    def _works(self, comm: MPI.Comm, check: Check) -> bool:
        """Whether NCCL connects the ranks' devices. Every rank must call."""
        device = torch.cuda.current_device()

        def sum_one() -> None:
            with torch.cuda.device(device):
                self._queue(self._group.allreduce([torch.ones(1, device="cuda")]))

        try:
            failed = attempt(sum_one, comm, range(comm.size), _TAG, check)
            if not failed:
                self.finish(check)
        except dist.DistBackendError:
            return False
        return not failed

    def _queue(self, work: Any) -> None:
        """Make the current stream wait for NCCL's stream. The host does not wait."""
        work.wait()
        self._last = work

    @contextlib.contextmanager
    def _keeping_nan(
        self, numbers: Tensor, op: str, outputs: Sequence[Tensor]
    ) -> Iterator[None]:
        """Restore NaNs, which NCCL's min and max of floats lose."""
        if op not in _LOSE_NAN or not numbers.is_floating_point():
            yield
            return
        lost = numbers.isnan().to(torch.uint8)
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS["max"].nccl
        self._queue(self._group.allreduce([lost], options))
        yield
        for output in outputs:
            output.masked_fill_(lost.bool(), float("nan"))


def shut_down(group: Any) -> None:
    """Free the communicator of a group of torch's NCCL.

    NCCL waits for unfinished work, and for the other ranks to close. The wait for a
    rank that does not close is left to a thread: `abort` would wait for it, too.
    """
    ending = threading.Thread(
        target=group.shutdown, name="nbdist-nccl-close", daemon=True
    )
    ending.start()
    ending.join(_CLOSE_WITHIN_S)


def _common_store(rank: int, size: int, swap: Swap) -> Store | None:
    """A store of all ranks; None, on all ranks, if they have none."""
    (name, *_) = swap(secrets.token_hex(8) if rank == 0 else "")
    if all(swap(dist.is_initialized())):
        common = distributed_c10d._get_default_store()
        return PrefixStore(f"nbdist-nccl-{name}", common)
    made = tempfile.mkdtemp(prefix="nbdist-nccl-") if rank == 0 else ""
    folder = Path(swap(made)[0])
    if rank == 0:
        # At the exit, and not earlier: threads of NCCL in other ranks poll the file.
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if all(swap(folder.is_dir())):
        return FileStore(str(folder / "nccl"), size)
    return None


def _as_nccl(tensor: Tensor, op: str) -> Tensor | None:
    """A view of the tensor in a dtype that NCCL reduces; None if there is none."""
    if REDUCE_OPS[op].nccl is None or tensor.dtype not in _DTYPES:
        return None
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor) if op in ("sum", "mean") else None


def _as_bytes(tensor: Tensor) -> Tensor:
    # NCCL has neither int16 nor complex numbers, and copies bytes at the same speed.
    return tensor.view(torch.uint8)
