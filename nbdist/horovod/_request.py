"""One call of this rank's, from its submission until all ranks have made it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbdist.collectives import Handle, Signature, signature
from nbdist.collectives.call_site import CallSite, find_call_site
from nbdist.collectives.sync.cuda_events import on_side_stream
from nbdist.collectives.transports.base import Transport
from nbdist.errors import UsageError

from ._reduce_ops import neutral

__all__ = ["Request", "StandIn", "copied", "named"]


@dataclass(frozen=True)
class StandIn:
    """What a rank that has joined needs to know to take part in a reduction."""

    op: str
    parts: tuple[tuple[torch.dtype, int], ...]
    """Data type and number of elements of each tensor that is reduced."""
    device: str

    @classmethod
    def of(cls, op: str, tensors: Sequence[Tensor]) -> StandIn:
        """For a reduction of these flat tensors."""
        parts = tuple((each.dtype, each.numel()) for each in tensors)
        return cls(op, parts, tensors[0].device.type)

    def body(self, transport: Transport) -> Callable[[], None]:
        """Takes part in the reduction with elements that change nothing."""
        device = torch.device(self.device)
        tensors = [
            torch.full((length,), neutral(self.op, dtype), dtype=dtype, device=device)
            for dtype, length in self.parts
        ]

        def stand_in() -> None:
            for tensor in tensors:
                transport.all_reduce(tensor, self.op)

        return stand_in


class Request:
    """A collective that waits for its turn.

    Args:
        name: What the other ranks know it by.
        kind: What must agree between the ranks.
        body: Moves the data. Until all ranks have met it changes nothing, so that it
            can be begun again.
        on_leave: As for `Handle`.
        meets: As for `Group.run`.
        stand_in: For a reduction that goes on without the ranks that have joined.
    """

    __slots__ = ("body", "handle", "kind", "meets", "name", "place", "stand_in")

    def __init__(
        self,
        name: str,
        kind: Signature,
        body: Callable[[], object],
        on_leave: Callable[[BaseException], object],
        *,
        meets: bool = False,
        stand_in: StandIn | None = None,
    ) -> None:
        self.name, self.kind = name, kind
        self.meets, self.stand_in = meets, stand_in
        self.handle = Handle(kind.operation, on_leave)
        on_gpu = kind.device == "cuda"
        self.body = on_side_stream(body, _nothing) if on_gpu else body
        self.place: CallSite = find_call_site(sys._getframe())


def _nothing() -> None:
    """A device is done by itself: with NCCL, once its group was aborted."""


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy without gradients, to be worked on in place.

    Raises:
        UsageError: It is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise UsageError(f"expected a tensor, got {type(tensor).__name__}")
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def named(
    operation: str,
    name: str | None,
    op: str | None,
    root: int | None,
    like: Tensor,
    shape: tuple[int, ...],
) -> Signature:
    """The signature of a call; a name that the user gave is a part of it."""
    label = operation if name is None else f"{operation}[{name}]"
    return signature(label, op, root, like.dtype, shape, like.device.type)
