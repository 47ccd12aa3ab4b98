"""The collectives of elastic training, in each kind of world.

In a notebook and under `mpiexec` these are nbdist's collectives. Under `torchrun` they
are those of torch's default process group. A process without a world is a world of one.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nbdist import collectives
from nbdist.collectives import Group, default_group, signature
from nbdist.errors import WrongProcess
from nbdist.training.elastic import tree

__all__ = ["Ranks", "broadcast_tree", "ranks"]


class Ranks(Protocol):
    """The ranks of the current world. Every rank must make each call."""

    rank: int
    size: int

    def barrier(self, what: str) -> None:
        """Wait for all ranks.

        Args:
            what: the operation's name in errors.
        """

    def any(self, wanted: bool) -> bool:
        """Whether any rank passes True."""

    def all_gather(self, value: Any) -> list[Any]:
        """The value of each rank, in rank order."""

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of the source rank."""

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrite a tensor with the source rank's tensor."""


def ranks() -> Ranks:
    """The world of this process."""
    try:
        return _World(default_group())
    except WrongProcess:
        return _Torch() if dist.is_available() and dist.is_initialized() else _Alone()


def broadcast_tree(value: Any, source: int) -> Any:
    """Send the source rank's tree to all ranks. Every rank must call.

    A tensor arrives on a device of the same type. Other ranks' values are ignored.
    """
    world = ranks()
    is_source = world.rank == source
    skeleton, tensors = tree.split(value) if is_source else (None, [])
    skeleton, slots = world.broadcast(
        (skeleton, [_slot(i, each) for i, each in enumerate(tensors)]), source
    )
    if not is_source:
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in slots]
    for tensor in tensors:
        # Bytes can be sent for every dtype.
        octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if octets.numel():
            world.broadcast_tensor(octets, source)
    return tree.unite(skeleton, tensors)


def _slot(number: int, tensor: Tensor) -> tree.Slot:
    return tree.Slot(number, tuple(tensor.shape), tensor.dtype, tensor.device.type)


class _World:
    """The ranks of nbdist's default group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self._flag = torch.zeros(1, dtype=torch.int64, device="cpu")

    def barrier(self, what: str) -> None:
        kind = signature(what, None, None, None, (), "none")
        self._group.run(kind, lambda: None)

    def any(self, wanted: bool) -> bool:
        self._flag[0] = wanted
        collectives.all_reduce(self._flag, "max", group=self._group)
        return bool(self._flag[0])

    def all_gather(self, value: Any) -> list[Any]:
        return collectives.all_gather_object(value, group=self._group)

    def broadcast(self, value: Any, source: int) -> Any:
        return collectives.broadcast_object(value, source, group=self._group)

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        collectives.broadcast(tensor, source, group=self._group)


class _Torch:
    """The ranks of torch's default process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self, what: str) -> None:
        dist.barrier()

    def any(self, wanted: bool) -> bool:
        on_gpu = dist.get_backend() == "nccl"
        flag = torch.tensor([int(wanted)], device="cuda" if on_gpu else "cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any, source: int) -> Any:
        values = [value]
        dist.broadcast_object_list(values, source)
        return values[0]

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        if dist.get_backend() != "nccl" or tensor.is_cuda:
            dist.broadcast(tensor, source)
            return
        on_gpu = tensor.cuda()
        dist.broadcast(on_gpu, source)
        tensor.copy_(on_gpu)


class _Alone:
    """A process without a world."""

    rank, size = 0, 1

    def barrier(self, what: str) -> None:
        pass

    def any(self, wanted: bool) -> bool:
        return wanted

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, source: int) -> Any:
        return value

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        pass
