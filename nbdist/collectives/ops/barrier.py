"""barrier: waits until every rank has called."""

from __future__ import annotations

from datetime import timedelta

from nbdist.collectives.group import Group
from nbdist.collectives.handle import Handle
from nbdist.collectives.registry import default_group
from nbdist.collectives.signature import signature

__all__ = ["barrier"]


def barrier(
    *,
    group: Group | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
) -> Handle | None:
    """Wait until every rank of the group has called `barrier`.

    Args:
        group, async_op, timeout: as for `all_reduce`.
    """
    group = group if group is not None else default_group()
    kind = signature("barrier", None, None, None, (), "none")
    return group.run(kind, _nothing, async_op=async_op, timeout=timeout)


def _nothing() -> None:
    pass
