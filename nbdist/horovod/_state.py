"""One rank's parameters, optimizer state and objects, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from nbdist.errors import UsageError

from ._allgather import allgather
from ._broadcast import broadcast_, broadcast_async_
from ._handles import synchronize
from ._process_sets import ProcessSet, global_process_set
from ._world import rank

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
        params: Such as `model.state_dict()`, `model.named_parameters()` or
            `model.parameters()`; what is no tensor in it is passed over.
        root_rank: A world rank.
        process_set: The ranks.
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
    """Give all ranks a copy of rank `root_rank`'s optimizer state. All must call.

    No step is taken anywhere. An optimizer without state on the root has none on the
    others afterwards. Tensors go to the device that `load_state_dict` gives them.

    Args:
        optimizer: Any, distributed or not, over the same parameters on all ranks.
        root_rank: A world rank.
        model: Of Horovod's signature; not needed.
        process_set: The ranks.
    """
    is_root = rank() == root_rank
    tensors: list[Tensor] = []
    plan = _unfilled(optimizer.state_dict(), tensors) if is_root else None
    plan = broadcast_object(plan, root_rank, process_set=process_set)
    if not is_root:
        plan = _made(plan, tensors)
    handles = [
        broadcast_async_(tensor, root_rank, None, process_set) for tensor in tensors
    ]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.load_state_dict(plan)


class _Place:
    """Where a tensor of the state goes: all of it but its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.device = tensor.device.type

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _unfilled(value: Any, tensors: list[Tensor]) -> Any:
    """A state with places instead of its tensors, which are collected."""

    def take(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        tensors.append(tensor.detach())
        return _Place(tensor)

    return _mapped(value, take)


def _made(value: Any, tensors: list[Tensor]) -> Any:
    """The reverse: a state with new tensors in its places."""

    def make(place: Any) -> Any:
        if not isinstance(place, _Place):
            return place
        tensors.append(place.make())
        return tensors[-1]

    return _mapped(value, make)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    return change(value)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s object, on all ranks. Every rank of the set must call.

    Args:
        obj: What cloudpickle can pickle on the root; not looked at elsewhere.
        root_rank: A world rank.
        name: As for `broadcast`.
        process_set: The ranks.

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
    """`broadcast_object` with all arguments but the object."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, in rank order. Every rank of the set must call.

    Args:
        obj: What cloudpickle can pickle.
        name: As for `allgather`.
        process_set: The ranks.
    """
    data = _packed(obj)
    lengths = allgather(
        torch.tensor([len(data)], device="cpu"), name and f"{name}.length", process_set
    )
    joined = allgather(data, name and f"{name}.data", process_set)
    return [_unpacked(part) for part in joined.split(lengths.tolist())]


def _packed(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return cloudpickle.loads(bytes(data.numpy()))
