"""alltoall: sends some rows of each rank to each other rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nbdist.collectives import Group
from nbdist.collectives.ops.validation import resolve
from nbdist.errors import UsageError
from nbdist.horovod.handles import begin, complete
from nbdist.horovod.negotiation import Request, named
from nbdist.horovod.process_sets import ProcessSet, coordinator_of, global_process_set

__all__ = ["alltoall", "alltoall_async"]

Splits = Tensor | Sequence[int] | None


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to each rank and join the received rows. Every rank must call.

    Gradients flow back to the ranks that sent the rows.

    Args:
        tensor: With at least one dimension, on a device as for `allreduce`; not
            changed. The dtype and all dimensions but the first are equal on all ranks.
        splits: The number of rows for each rank, in rank order. Default: equal numbers.
        name, process_set: As for `allreduce`.

    Returns:
        The received rows, in the order of the ranks that sent them. If `splits` was
        given, also the number of rows received from each rank.

    Raises:
        UsageError: The splits do not add up to the number of rows.
    """
    output, received = _Alltoall.apply(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an `alltoall`; returns a handle. `synchronize` returns both values."""
    handle: int = _start(begin, tensor, splits, name, process_set)
    return handle


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Splits,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        output, received = _start(complete, tensor, splits, name, process_set)
        ctx.received, ctx.process_set = received, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back, _ = alltoall(gradients[0], ctx.received, process_set=ctx.process_set)
        return back, None, None, None


def _start(
    how: Callable[..., Any],
    tensor: Tensor,
    splits: Splits,
    name: str | None,
    process_set: ProcessSet,
) -> Any:
    coordinator = coordinator_of(process_set)
    group = coordinator.group
    resolve(tensor, group)
    sent = _checked(tensor, splits, group)
    kind = named("alltoall", name, None, None, tensor, (-1, *tensor.shape[1:]))
    rows = tensor.detach().contiguous()
    like = (
        splits
        if isinstance(splits, Tensor)
        else torch.empty(0, dtype=torch.int32, device="cpu")
    )
    results: list[Tensor] = []

    def body() -> None:
        table = torch.empty(group.size, group.size, dtype=torch.int64, device="cpu")
        group.transport("cpu").all_gather(list(table), torch.tensor(sent, device="cpu"))
        received = table[:, group.rank].tolist()
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        group.transport(rows.device).all_to_all(
            [piece.reshape(-1) for piece in output.split(received)],
            [piece.reshape(-1) for piece in rows.split(sent)],
            int(table.max()) * rows.shape[1:].numel(),
        )
        results[:] = output, like.new_tensor(received)

    request = Request(coordinator.name("alltoall", name), kind, body, coordinator.abort)
    return how(coordinator, request, lambda: tuple(results))


def _checked(tensor: Tensor, splits: Splits, group: Group) -> list[int]:
    """The number of rows for each rank."""
    if tensor.dim() == 0:
        raise UsageError("alltoall of a 0-d tensor: pass tensor.view(1)")
    if splits is None:
        if len(tensor) % group.size:
            raise UsageError(
                f"alltoall: {len(tensor)} rows cannot be split evenly among "
                f"{group.size} ranks: pass the rows of each rank as splits="
            )
        return [len(tensor) // group.size] * group.size
    counts = [int(count) for count in splits]
    if len(counts) != group.size or min(counts) < 0 or sum(counts) != len(tensor):
        raise UsageError(
            f"alltoall: splits {counts}: expected {group.size} numbers that add up to "
            f"the {len(tensor)} rows"
        )
    return counts
