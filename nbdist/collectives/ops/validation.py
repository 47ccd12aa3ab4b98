"""Checks and conversions of arguments, before an operation sends anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nbdist.collectives.flat import Flat, unwrapped
from nbdist.collectives.group import Group
from nbdist.collectives.registry import default_group
from nbdist.errors import UnsupportedCollective, UsageError

__all__ = [
    "Flat",
    "check_contiguous",
    "check_kind",
    "check_list",
    "flat_for_each_rank",
    "flat_on_root",
    "flatten",
    "resolve",
    "resolve_with_root",
    "root_position",
    "split_evenly",
]


def flatten(tensors: Sequence[Tensor], *, writes: bool = False) -> list[Flat]:
    """A `Flat` of each tensor."""
    return [Flat(tensor, writes=writes) for tensor in tensors]


def flat_for_each_rank(
    name: str,
    tensors: Sequence[Tensor] | None,
    like: Tensor,
    group: Group,
    *,
    writes: bool = False,
) -> list[Flat]:
    """A list of one tensor for each member, checked and flat.

    Args:
        name: The argument's name, for errors.
        tensors: The argument.
        like: A tensor with the dtype, kind of device and length that all must have.
        group: The group of the call.
        writes: Whether the call writes to the tensors.
    """
    tensors = check_list(name, tensors, group)
    check_kind(name, tensors, like)
    for tensor in tensors:
        if tensor.numel() != like.numel():
            raise UsageError(
                f"{name}: expected {like.numel()} elements as the other tensor has, "
                f"got {tensor.numel()}"
            )
    return flatten(tensors, writes=writes)


def flat_on_root(
    name: str,
    tensors: Sequence[Tensor] | None,
    like: Tensor,
    group: Group,
    root: int,
    *,
    writes: bool = False,
) -> list[Flat] | None:
    """`flat_for_each_rank` on the root; None on other ranks.

    Args:
        name, tensors, like, group, writes: As for `flat_for_each_rank`.
        root: The position of the root in the group.
    """
    if group.rank != root:
        return None
    return flat_for_each_rank(name, tensors, like, group, writes=writes)


def resolve(tensor: object, group: Group | None) -> Group:
    """Check that a tensor can be sent, and return the group of the call.

    Raises:
        UsageError: `tensor` is not a tensor, or is on the meta device.
        UnsupportedCollective: It is sparse or quantized, or has no memory.
        WrongProcess: This process is not a rank.
    """
    if not isinstance(tensor, Tensor):
        raise UsageError(f"expected a tensor, got {type(tensor).__name__}")
    unwrapped(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedCollective(
            f"a {tensor.layout} {tensor.dtype} tensor: expected a dense one; "
            "pass tensor.to_dense(), or the tensors of which it consists"
        )
    if tensor.is_meta:
        raise UsageError("a tensor on meta has no values: expected one on a device")
    return group if group is not None else default_group()


def resolve_with_root(
    tensor: object, group: Group | None, rank: int
) -> tuple[Group, int]:
    """`resolve`, and the position of the world rank that sends or receives."""
    group = resolve(tensor, group)
    return group, root_position(group, rank)


def root_position(group: Group, rank: int) -> int:
    """The position of a world rank in the group."""
    try:
        return group.ranks.index(rank)
    except ValueError:
        raise UsageError(f"rank {rank}: expected one of {list(group.ranks)}") from None


def check_list(
    name: str, tensors: Sequence[Tensor] | None, group: Group
) -> Sequence[Tensor]:
    """Check that there is one tensor for each member, and return the tensors."""
    if tensors is None or len(tensors) != group.size:
        got = "none" if tensors is None else len(tensors)
        raise UsageError(f"{name}: expected {group.size} tensors, got {got}")
    return tensors


def check_kind(name: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    """Check that the tensors have the dtype and kind of device of `like`."""
    for tensor in tensors:
        if tensor.dtype != like.dtype or tensor.device.type != like.device.type:
            raise UsageError(
                f"{name}: expected {like.dtype} on {like.device.type}, "
                f"got {tensor.dtype} on {tensor.device.type}"
            )


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Check that a tensor is contiguous."""
    if not tensor.is_contiguous():
        raise UsageError(
            f"{name} has strides {tensor.stride()}: expected a contiguous tensor"
        )


def split_evenly(
    name: str, tensor: Tensor, part: Tensor, group: Group
) -> Sequence[Tensor]:
    """Divide `tensor`, flat, into one part per member, each as long as `part`."""
    if tensor.numel() != part.numel() * group.size:
        raise UsageError(
            f"{name}: expected {group.size} x {part.numel()} elements, "
            f"got {tensor.numel()}"
        )
    if part.numel() == 0:
        return [tensor.reshape(-1)] * group.size
    parts: Sequence[Tensor] = tensor.reshape(-1).split(part.numel())
    return parts
