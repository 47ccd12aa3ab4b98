"""One rank per GPU: NCCL, as torch.distributed brings it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ._transport import Transport

__all__ = ["NcclTransport"]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class NcclTransport(Transport):
    """A NCCL communicator of the group's own. Work is queued on the current stream."""

    description: ClassVar[str] = "NCCL"

    def __init__(
        self,
        rank: int,
        size: int,
        swap: Callable[[str], list[str]],
        fallback: Transport,
    ) -> None:
        """Every rank must call; each has a GPU of its own as its current device.

        The ranks find each other through a file, so that no port is opened for it.

        Args:
            rank: this process's in the group.
            size: number of ranks.
            swap: gives every rank's string, in rank order.
            fallback: for the reductions that NCCL lacks.
        """
        folder = tempfile.mkdtemp(prefix="nbdist") if rank == 0 else ""
        c10d: Any = dist  # ProcessGroupNCCL exists in CUDA builds of torch alone
        store = c10d.FileStore(str(Path(swap(folder)[0]) / "nccl"), size)
        options = c10d.ProcessGroupNCCL.Options()
        self._group: Any = c10d.ProcessGroupNCCL(store, rank, size, options)
        self._fallback = fallback

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        if op not in _OPS:
            self._fallback.all_reduce(tensor, op)
            return
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        self._group.allreduce([tensor], options).wait()

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        if op not in _OPS:
            self._fallback.reduce(tensor, op, root)
            return
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = _OPS[op], root
        self._group.reduce([tensor], options).wait()

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        if op not in _OPS:
            self._fallback.reduce_scatter(output, inputs, op)
            return
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        self._group.reduce_scatter([output], [list(inputs)], options).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([tensor], options).wait()

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        self._group.allgather([list(outputs)], [tensor]).wait()

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        options = dist.GatherOptions()
        options.rootRank = root
        wanted = [] if outputs is None else [list(outputs)]
        self._group.gather(wanted, [tensor], options).wait()

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        options = dist.ScatterOptions()
        options.rootRank = root
        offered = [] if inputs is None else [list(inputs)]
        self._group.scatter([tensor], offered, options).wait()

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        options = dist.AllToAllOptions()
        self._group.alltoall(list(outputs), list(inputs), options).wait()

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()
