"""The request to reduce tensors in place, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nbdist.collectives import Group
from nbdist.collectives.ops.validation import Flat, resolve
from nbdist.collectives.reduction import parse_op
from nbdist.errors import UsageError
from nbdist.training.adasum import adasum

from ._coordinator import Coordinator
from ._reduce_ops import Adasum
from ._request import Request, StandIn, named
from ._scaling import Scaling, finish, scale

__all__ = ["reduction"]


def reduction(
    coordinator: Coordinator,
    tensors: Sequence[Tensor],
    scaling: Scaling,
    operation: str,
    name: str | None,
) -> Request:
    """The request to reduce tensors in place."""
    group, on_leave = coordinator.group, coordinator.abort
    for tensor in tensors:
        resolve(tensor, group)
        if scaling.op is Adasum:
            _check_adasum(tensor)
        else:
            parse_op(scaling.transport_op(tensor.dtype), tensor.dtype)
    for tensor in tensors:
        scale(tensor.detach(), scaling.before)
    first = tensors[0]
    shape = tuple(first.shape) if len(tensors) == 1 else _all_sizes(tensors)
    kind = named(operation, name, scaling.op.value, None, first, shape)
    key = coordinator.name(operation, name)
    if scaling.op is Adasum:
        return Request(key, kind, _adasum_body(group, tensors, scaling), on_leave)
    flats = _fused(tensors)
    transport = group.transport(first.device.type)
    ops = [scaling.transport_op(flat.tensor.dtype) for flat, _ in flats]

    def body() -> None:
        for (flat, _), op in zip(flats, ops, strict=True):
            transport.all_reduce(flat.tensor, op)
        for flat, parts in flats:
            finish(flat.tensor, scaling, group.size)
            flat.write_back()
            for part, fused in parts:
                part.copy_(fused)

    stand_in = None
    if len(set(ops)) == 1:
        stand_in = StandIn.of(ops[0], [flat.tensor for flat, _ in flats])
    meets = transport.meets and len(flats) == 1
    return Request(key, kind, body, on_leave, meets=meets, stand_in=stand_in)


def _all_sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def _fused(
    tensors: Sequence[Tensor],
) -> list[tuple[Flat, list[tuple[Tensor, Tensor]]]]:
    """Tensors laid out as few flat ones, with what is to be copied back from them."""
    if len(tensors) == 1:
        return [(Flat(tensors[0]), [])]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    fused = []
    for alike in by_dtype.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in alike])
        parts = joined.split([tensor.numel() for tensor in alike])
        views = [part.view(each.shape) for part, each in zip(parts, alike, strict=True)]
        fused.append((Flat(joined), list(zip(alike, views, strict=True))))
    return fused


def _check_adasum(tensor: Tensor) -> None:
    if not tensor.dtype.is_floating_point:
        raise UsageError(f"Adasum of {tensor.dtype}: expected a floating dtype")


def _adasum_body(
    group: Group, tensors: Sequence[Tensor], scaling: Scaling
) -> Callable[[], None]:
    flats = [Flat(tensor) for tensor in tensors]

    def body() -> None:
        adasum([flat.tensor for flat in flats], group)
        for flat in flats:
            scale(flat.tensor, scaling.after)
            flat.write_back()

    return body
