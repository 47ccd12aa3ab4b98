"""Device tensors by way of pinned host memory, where there is no better way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ._transport import Transport

__all__ = ["StagedTransport"]


class StagedTransport(Transport):
    """Copies to the host, a host transport, and copies back.

    The host waits for the device once, before the transfer: what is queued on the
    current stream comes first, and later work on it sees the result.
    """

    description: ClassVar[str] = "staged through pinned host memory"

    def __init__(self, host: Transport) -> None:
        self._host = host
        self.meets = host.meets  # type: ignore[misc]

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        staged = _to_host([tensor])
        self._host.all_reduce(staged[0], op)
        _to_device(staged, [tensor])

    def reduce(self, tensor: Tensor, op: str, root: int) -> None:
        staged = _to_host([tensor])
        self._host.reduce(staged[0], op, root)
        _to_device(staged, [tensor])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str) -> None:
        staged = _room([output])
        self._host.reduce_scatter(staged[0], _to_host(inputs), op)
        _to_device(staged, [output])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        staged = _to_host([tensor])
        self._host.broadcast(staged[0], root)
        _to_device(staged, [tensor])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        staged = _room(outputs)
        self._host.all_gather(staged, _to_host([tensor])[0])
        _to_device(staged, outputs)

    def gather(
        self, outputs: Sequence[Tensor] | None, tensor: Tensor, root: int
    ) -> None:
        staged = None if outputs is None else _room(outputs)
        self._host.gather(staged, _to_host([tensor])[0], root)
        _to_device(staged or (), outputs or ())

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor] | None, root: int
    ) -> None:
        staged = _room([tensor])
        offered = None if inputs is None else _to_host(inputs)
        self._host.scatter(staged[0], offered, root)
        _to_device(staged, [tensor])

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], longest: int
    ) -> None:
        staged = _room(outputs)
        self._host.all_to_all(staged, _to_host(inputs), longest)
        _to_device(staged, outputs)

    def close(self) -> None:
        pass  # the host transport is its group's


def _room(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    staged = _room(tensors)
    for target, source in zip(staged, tensors, strict=True):
        target.copy_(source, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return staged


def _to_device(staged: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    # The pinned allocator keeps a block until the copy that reads it is done.
    for source, target in zip(staged, tensors, strict=True):
        target.copy_(source, non_blocking=True)
