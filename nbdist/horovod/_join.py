"""join and barrier: the ranks wait for each other."""

from __future__ import annotations

from nbdist.collectives import signature

from ._handles import complete
from ._process_sets import ProcessSet, coordinator_of, global_process_set
from ._request import Request

__all__ = ["barrier", "join"]


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Meanwhile the others can go on with `allreduce`, and with a `DistributedOptimizer`:
    this rank takes part in their reductions with zeros (for Min, Max and Product, with
    what changes no result). An Average is divided by all ranks, those that have joined
    among them. Other calls raise UnsupportedCollective on the ranks that make them.

    Args:
        device: Of Horovod's signature. The stand-ins lie where the others' tensors do.

    Returns:
        The rank that was the last to join.
    """
    return coordinator_of(global_process_set).join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has come."""
    coordinator = coordinator_of(process_set)
    kind = signature("barrier", None, None, None, (), "none")
    key = coordinator.name("barrier", None)
    complete(coordinator, Request(key, kind, _nothing, coordinator.abort), lambda: None)


def _nothing() -> None:
    pass
