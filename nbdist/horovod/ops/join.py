"""join and barrier: calls without a tensor."""

from __future__ import annotations

from nbdist.collectives import signature
from nbdist.horovod.handles import complete
from nbdist.horovod.negotiation import Request
from nbdist.horovod.process_sets import ProcessSet, coordinator_of, global_process_set

__all__ = ["barrier", "join"]


def join(device: int = -1) -> int:
    """Declare that this rank has no more data, and wait until all ranks have joined.

    Meanwhile the other ranks can call `allreduce` and step a `DistributedOptimizer`.
    This rank takes part in their reductions with zeros, and for Min, Max and Product
    with a value that does not change the result. An Average is divided by the number
    of all ranks. Any other call raises UnsupportedCollective on the ranks that make it.

    Args:
        device: Part of Horovod's signature; not used.

    Returns:
        The last rank that joined.
    """
    return coordinator_of(global_process_set).join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called `barrier`."""
    coordinator = coordinator_of(process_set)
    kind = signature("barrier", None, None, None, (), "none")
    key = coordinator.name("barrier", None)
    complete(coordinator, Request(key, kind, _nothing, coordinator.abort), lambda: None)


def _nothing() -> None:
    pass
