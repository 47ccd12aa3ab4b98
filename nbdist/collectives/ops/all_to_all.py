"""all_to_all: sends a tensor of each rank to each other rank."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.ops.validation import (
    Flat,
    check_contiguous,
    check_kind,
    check_list,
    flatten,
    resolve,
)
from nbdist.collectives.signature import signature
from nbdist.errors import CollectiveMismatch, UsageError

__all__ = ["all_to_all", "all_to_all_single"]


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Copy `input_tensor_list[r]` to rank r. Every rank must call.

    Rank r receives it in the entry of its `output_tensor_list` for this rank.

    Args:
        output_tensor_list: one tensor per rank; overwritten. Entry r has as many
            elements as rank r sends to this rank.
        input_tensor_list: one tensor per rank, on a device as for `all_reduce`; not
            changed. All tensors of all ranks have one dtype.
        group, async_op, timeout: as for `all_reduce`.

    Raises:
        CollectiveMismatch: also if a rank sends another number of elements than the
            other rank expects. No data has changed.
    """
    like = next(iter(input_tensor_list), None)
    group = resolve(like, group)
    assert like is not None  # or resolve had raised
    check_list("input_tensor_list", input_tensor_list, group)
    check_list("output_tensor_list", output_tensor_list, group)
    check_kind("input_tensor_list", input_tensor_list, like)
    check_kind("output_tensor_list", output_tensor_list, like)
    outputs, inputs = (
        flatten(output_tensor_list, writes=True),
        flatten(input_tensor_list),
    )
    return _exchange(group, outputs, inputs, async_op, timeout)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """`all_to_all` of consecutive rows of one tensor. Every rank must call.

    Args:
        output: a contiguous tensor; overwritten.
        input: a tensor with the same dtype and row shape; not changed.
        output_split_sizes: the rows of `output` from each rank. None or an empty list
            means equal numbers.
        input_split_sizes: the rows of `input` for each rank. None or an empty list
            means equal numbers.
        group, async_op, timeout: as for `all_reduce`.
    """
    group = resolve(input, group)
    check_kind("output", [output], input)
    check_contiguous("output", output)
    outputs = _runs("output", output, output_split_sizes, group)
    inputs = _runs("input", input.contiguous(), input_split_sizes, group)
    return _exchange(
        group, flatten(outputs, writes=True), flatten(inputs), async_op, timeout
    )


def _runs(
    name: str, tensor: Tensor, sizes: Sequence[int] | None, group: Group
) -> Sequence[Tensor]:
    rows = len(tensor) if tensor.dim() else 0
    wanted = list(sizes or [rows // group.size] * group.size)
    if len(wanted) != group.size or sum(wanted) != rows:
        raise UsageError(
            f"{name}: {rows} rows cannot be cut into {wanted}: expected "
            f"{group.size} sizes that add up to {rows}"
        )
    runs: Sequence[Tensor] = tensor.split(wanted)
    return runs


def _exchange(
    group: Group,
    outputs: Sequence[Flat],
    inputs: Sequence[Flat],
    async_op: bool,
    timeout: float | timedelta | None,
) -> Handle | None:
    like = inputs[0].tensor
    device = like.device.type
    transport = group.transport(like.device)
    kind = signature("all_to_all", None, None, like.dtype, (), device)

    def body() -> None:
        longest = _agree_on_lengths(group, outputs, inputs)
        transport.all_to_all(
            [each.tensor for each in outputs], [each.tensor for each in inputs], longest
        )
        for each in outputs:
            each.write_back()

    return group.run(kind, body, async_op=async_op, timeout=timeout)


def _agree_on_lengths(
    group: Group, outputs: Sequence[Flat], inputs: Sequence[Flat]
) -> int:
    """The largest number of elements of any pair. All ranks compare all numbers.

    Raises:
        CollectiveMismatch: A rank sends another number than the other rank expects.
    """
    rows = [[len(each.tensor) for each in row] for row in (inputs, outputs)]
    mine = torch.tensor(rows, device="cpu")
    table = mine.new_empty(group.size, 2, group.size)
    group.transport("cpu").all_gather([row.view(-1) for row in table], mine.view(-1))
    sent, expected = table[:, 0], table[:, 1].T
    if not torch.equal(sent, expected):
        source, target = (sent != expected).nonzero()[0].tolist()
        raise CollectiveMismatch(
            f"all_to_all: rank {group.ranks[source]} sends "
            f"{int(sent[source, target])} elements to rank {group.ranks[target]}, "
            f"which expects {int(expected[source, target])}; no data was touched"
        )
    return int(sent.max())
