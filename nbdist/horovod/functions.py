"""Copies one rank's parameters, optimizer state and objects to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.errors import UsageError
from nbdist.horovod.basics import rank
from nbdist.horovod.handles import synchronize
from nbdist.horovod.ops.allgather import allgather
from nbdist.horovod.ops.broadcast import broadcast_, broadcast_async_
from nbdist.horovod.process_sets import ProcessSet, global_process_set
from nbdist.ipc import serialization

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite parameters with rank `root_rank`'s. Every rank of the set must call.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or tensors on the CPU
            or on this rank's GPU, with equal shapes and dtypes on all ranks. Other
            values are skipped.
        root_rank: A world rank.
        process_set: The ranks that take part. Default: all ranks.
    """
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | Tensor):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise UsageError(
            f"broadcast_parameters of a {type(params).__name__}: expected "
            "model.state_dict(), model.named_parameters() or a list of tensors"
        )
    handles = [
        broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in pairs
        if isinstance(tensor, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy rank `root_rank`'s optimizer state to all ranks. Every rank must call.

    If the root's optimizer has no state, the other optimizers have none afterwards.
    Each tensor goes to the device that `load_state_dict` chooses.

    Args:
        optimizer: A `torch.optim.Optimizer`, over the same parameters on all ranks.
        root_rank: A world rank.
        model: Part of Horovod's signature; not used.
        process_set: The ranks that take part. Default: all ranks.
    """
    is_root = rank() == root_rank
    state: Any = optimizer.state_dict() if is_root else None
    layout = tree_map_only(Tensor, _Empty.like, state)
    layout = broadcast_object(layout, root_rank, process_set=process_set)
    if not is_root:
        state = tree_map_only(_Empty, _Empty.make, layout)
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    handles = [
        broadcast_async_(tensor.detach(), root_rank, None, process_set)
        for tensor in tensors
    ]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class _Empty:
    """A tensor of the root's state without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def like(cls, tensor: Tensor) -> _Empty:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rank `root_rank`'s object to all ranks. Every rank of the set must call.

    Args:
        obj: An object that cloudpickle can pickle, on the root; ignored elsewhere.
        root_rank: A world rank.
        name: As for `broadcast`.
        process_set: The ranks that take part. Default: all ranks.

    Returns:
        `obj` itself on the root, a copy elsewhere.
    """
    is_root = rank() == root_rank
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([len(data)], device="cpu")
    broadcast_(length, root_rank, name and f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, name and f"{name}.data", process_set)
    return obj if is_root else _unpacked(data)


def broadcast_object_fn(
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather every rank's object, in rank order. Every rank of the set must call.

    Args:
        obj: An object that cloudpickle can pickle.
        name: As for `allgather`.
        process_set: The ranks that take part. Default: all ranks.
    """
    data = _packed(obj)
    lengths = allgather(
        torch.tensor([len(data)], device="cpu"), name and f"{name}.length", process_set
    )
    joined = allgather(data, name and f"{name}.data", process_set)
    return [_unpacked(part) for part in joined.split(lengths.tolist())]


def _packed(obj: Any) -> Tensor:
    return torch.frombuffer(
        bytearray(serialization.dumps_whole(obj)), dtype=torch.uint8
    )


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(bytes(data.numpy()))
