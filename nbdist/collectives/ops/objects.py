"""Collectives of picklable objects."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.ops.validation import root_position
from nbdist.collectives.registry import default_group
from nbdist.collectives.signature import signature

__all__ = ["all_gather_object", "broadcast_object"]


def broadcast_object(
    obj: Any,
    src: int = 0,
    *,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> Any:
    """Send rank `src`'s object to all ranks. Every rank must call.

    Args:
        obj: on `src`, a picklable object; ignored on other ranks.
        src: the world rank that sends.
        group, timeout: as for `all_reduce`.

    Returns:
        `obj` itself on `src`, a copy on other ranks.
    """
    group = group if group is not None else default_group()
    root = root_position(group, src)
    mine = _packed(obj if group.rank == root else None)
    received: list[Tensor] = []

    def body() -> None:
        transport = group.transport("cpu")
        length = torch.tensor([len(mine)], device="cpu")
        transport.broadcast(length, root)
        data = mine if group.rank == root else _room(int(length))
        transport.broadcast(data, root)
        received.append(data)

    kind = signature("broadcast_object", None, src, None, (), "cpu")
    group.run(kind, body, timeout=timeout)
    return obj if group.rank == root else _unpacked(received[0])


def all_gather_object(
    obj: Any,
    *,
    group: Group | None = None,
    timeout: float | timedelta | None = None,
) -> list[Any]:
    """Gather every rank's object on all ranks, in rank order. Every rank must call.

    Args:
        obj: a picklable object.
        group, timeout: as for `all_reduce`.
    """
    group = group if group is not None else default_group()
    mine = _packed(obj)
    received: list[Tensor] = []

    def body() -> None:
        transport = group.transport("cpu")
        lengths = torch.empty(group.size, dtype=torch.int64, device="cpu")
        transport.all_gather(lengths.split(1), torch.tensor([len(mine)], device="cpu"))
        outputs = [_room(length) for length in lengths.tolist()]
        longest = max(lengths.tolist())
        transport.all_to_all(outputs, [mine] * group.size, longest)
        received.extend(outputs)

    kind = signature("all_gather_object", None, None, None, (), "cpu")
    group.run(kind, body, timeout=timeout)
    return [_unpacked(data) for data in received]


def _packed(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(bytes(data.numpy()))


def _room(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8, device="cpu")
