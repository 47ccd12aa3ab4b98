"""A rank's calls, and the offers that the ranks exchange when their calls differ."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbdist.collectives import Handle, Signature, signature
from nbdist.collectives.call_site import CallSite, find_call_site
from nbdist.collectives.reduction import neutral_element
from nbdist.collectives.sync.device_work import for_any_thread
from nbdist.collectives.transports.base import Transport
from nbdist.errors import CollectiveMismatch, UnsupportedCollective, UsageError

__all__ = [
    "JOIN",
    "Offer",
    "Offers",
    "Request",
    "StandIn",
    "copied",
    "in_common",
    "named",
    "needs_all",
    "nothing_in_common",
]

JOIN = "join"


# -- one call --------------------------------------------------------------------------


@dataclass(frozen=True)
class StandIn:
    """A joined rank's part in a reduction of the other ranks."""

    op: str
    parts: tuple[tuple[torch.dtype, int], ...]
    """Data type and number of elements of each tensor that is reduced."""
    device: str

    @classmethod
    def of(cls, op: str, tensors: Sequence[Tensor]) -> StandIn:
        """The stand-in for a reduction of these flat tensors."""
        parts = tuple((each.dtype, each.numel()) for each in tensors)
        return cls(op, parts, tensors[0].device.type)

    def body(self, transport: Transport, device: torch.device) -> Callable[[], None]:
        """A function that reduces elements that do not change the result.

        Args:
            transport: Reduces tensors on the device.
            device: This rank's device of the type `self.device`.
        """
        tensors = [
            torch.full(
                (length,), neutral_element(self.op, dtype), dtype=dtype, device=device
            )
            for dtype, length in self.parts
        ]

        def stand_in() -> None:
            for tensor in tensors:
                transport.all_reduce(tensor, self.op)

        return stand_in


class Request:
    """A collective call of this rank, from its submission until it has completed.

    Args:
        name: The name that identifies the call on all ranks.
        kind: The signature, which must agree between the ranks.
        body: Moves the data. It changes nothing before all ranks have passed the
            barrier, so that it can be started again.
        on_leave: As for `Handle`.
        has_barrier: As for `Group.run`.
        reduces: The op and the flat tensors of a reduction that can continue after a
            rank has joined; None for any other call.
    """

    __slots__ = (
        "body",
        "call_site",
        "handle",
        "has_barrier",
        "kind",
        "name",
        "reduces",
        "submitted_ns",
    )

    def __init__(
        self,
        name: str,
        kind: Signature,
        body: Callable[[], object],
        on_leave: Callable[[BaseException], object],
        *,
        has_barrier: bool = False,
        reduces: tuple[str, Sequence[Tensor]] | None = None,
    ) -> None:
        self.name, self.kind = name, kind
        self.has_barrier, self.reduces = has_barrier, reduces
        self.handle = Handle(kind.operation, on_leave)
        self.body = body
        self.submitted_ns = time.perf_counter_ns()
        self.call_site: CallSite = find_call_site(sys._getframe())

    def use_gpu(self, gpu: torch.device | None) -> None:
        """Let any thread make the call, after the work that is queued on its device.

        Args:
            gpu: The GPU of the call's group, for a call on CUDA tensors.
        """
        kind = self.kind.device
        on_gpu = torch.cuda.device(gpu) if kind == "cuda" else contextlib.nullcontext()
        with on_gpu:
            self.body = for_any_thread(self.body, kind, _nothing)

    @property
    def offer(self) -> Offer:
        """The description of the call that is sent to the other ranks."""
        stand_in = None if self.reduces is None else StandIn.of(*self.reduces)
        return Offer(self.kind, self.has_barrier, stand_in)


def _nothing() -> None:
    """Check nothing. NCCL's group ends a wait for the device when it is aborted."""


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy without gradients, for an operation that works in place.

    Raises:
        UsageError: The argument is not a tensor.
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
    """The signature of a call. It includes the name if the user has given one."""
    label = operation if name is None else f"{operation}[{name}]"
    return signature(label, op, root, like.dtype, shape, like.device.type)


# -- offers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """Describes a call that a rank has submitted and that has not completed."""

    kind: Signature
    has_barrier: bool
    stand_in: StandIn | None


@dataclass(frozen=True)
class Offers:
    """The calls of one rank, as described to the other ranks."""

    calls: dict[str, Offer]
    """The calls by name, in the order in which they were submitted."""
    waits: bool
    """Whether the rank submits no further call before one of these has completed."""
    unnamed: Counter[str]
    """The number of calls without a name that the rank has made, by operation."""

    @property
    def joined(self) -> bool:
        return JOIN in self.calls


def in_common(table: Sequence[Offers]) -> dict[str, Offer]:
    """The calls that all of these ranks have made, in the first rank's order."""
    first = table[0].calls
    return {
        name: offer
        for name, offer in first.items()
        if all(name in each.calls for each in table)
    }


def needs_all(kind: Signature) -> UnsupportedCollective:
    """The error of a call in which a rank that has joined cannot take part."""
    return UnsupportedCollective(
        f"{kind.operation}: a rank has joined, and only reductions with Sum, Average, "
        "Min, Max and Product can continue: make this call before any rank joins"
    )


def nothing_in_common(
    table: list[Offers],
    ranks: tuple[int, ...],
    mismatch: CollectiveMismatch | None,
) -> CollectiveMismatch:
    """The error of all calls when every rank waits and no call is common to all.

    Args:
        table: The offers of every rank.
        ranks: The world ranks, in the order of the table.
        mismatch: The barrier's error, if it has found that the calls differ.
    """
    lines = ["every rank waits, and no call was made by all of them:"]
    for rank, offers in zip(ranks, table, strict=True):
        lines.append(f"rank {rank} waits for {', '.join(offers.calls)}")
    if mismatch is not None:
        lines.append(str(mismatch))
    return CollectiveMismatch("\n".join(lines))
