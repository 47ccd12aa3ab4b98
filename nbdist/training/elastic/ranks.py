"""What elastic training asks of the other ranks, in whichever world it runs.

In a notebook and under `mpiexec` these are nbdist's collectives, which are checked and
can be released; under `torchrun` they are those of torch's own process group; and a
process alone is a world of one.
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
    """The ranks of the world, as it is now."""

    rank: int
    size: int

    def barrier(self, what: str) -> None:
        """Wait for all ranks, which all must be in this call."""

    def any(self, wanted: bool) -> bool:
        """Whether any rank wants it; the same on all. All must call."""

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. All must call."""

    def broadcast(self, value: Any, source: int) -> Any:
        """The source's value, on all ranks. All must call."""

    def broadcast_tensor(self, tensor: Tensor, source: int) -> None:
        """Overwrite the tensor with the source's. All must call."""


def ranks() -> Ranks:
    """The world that this process is in."""
    try:
        return _World(default_group())
    except WrongProcess:
        return _Torch() if dist.is_available() and dist.is_initialized() else _Alone()


def broadcast_tree(value: Any, source: int) -> Any:
    """The source's tree, on all ranks; its tensors on the same kind of device there.

    Every rank must call; what the others give is not looked at.
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
        # As bytes: no dtype is special.
        octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if octets.numel():
            world.broadcast_tensor(octets, source)
    return tree.unite(skeleton, tensors)


def _slot(number: int, tensor: Tensor) -> tree.Slot:
    return tree.Slot(number, tuple(tensor.shape), tensor.dtype, tensor.device.type)


class _World:
    """Over nbdist's collectives."""

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
    """Over the default process group of torch.distributed."""

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
    """A process that is no rank."""

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
