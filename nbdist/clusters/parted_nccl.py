"""Detects ranks that have queued different collectives with NCCL.

NCCL compares no calls: with different ones it waits forever, or gives a wrong result.
torch records the last calls of each rank. These records are compared when no rank of a
call makes progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.clusters.rank_registry import RankRegistry
from nbdist.clusters.uneven_nccl import STEADY_S, own_gpus
from nbdist.ipc import endpoints
from nbdist.wire import NcclCall, format_ranks

__all__ = ["PartedNccl", "Parting"]

Trace = Mapping[str, Mapping[int, NcclCall]]
"""The calls of one rank, by the name of the process group and their number."""


@dataclass(frozen=True)
class Parting:
    """The first collective of a group in which the ranks' calls differ."""

    group: str
    """The name of the process group."""
    sequence: int
    """The number of the collective in the group, from 1."""
    kinds: Mapping[str, tuple[int, ...]]
    """The ranks of each different call."""

    @property
    def ranks(self) -> set[int]:
        """The ranks that have made the call."""
        return {rank for ranks in self.kinds.values() for rank in ranks}

    def __str__(self) -> str:
        said = "; ".join(
            f"rank {format_ranks(ranks)} called {kind}"
            for kind, ranks in self.kinds.items()
        )
        return f"the ranks parted at collective #{self.sequence} of the group: {said}"


class PartedNccl:
    """Watches the ranks of one call."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._has_looked = False

    def look(self, quiet_s: float) -> Parting | None:
        """Where the ranks parted, if they wait because of it. Call it repeatedly.

        Args:
            quiet_s: Seconds in which no rank of the call has made progress.
        """
        if quiet_s < STEADY_S:
            self._has_looked = False
            return None
        if self._has_looked or not own_gpus(self._registry):
            return None
        self._has_looked = True
        return _find_parting(self._registry.ask(endpoints.NCCL_TRACE))


def _find_parting(traces: Mapping[int, Trace | None]) -> Parting | None:
    groups = {group for trace in traces.values() for group in trace or {}}
    for group in sorted(groups):
        calls = {
            rank: trace[group]
            for rank, trace in sorted(traces.items())
            if trace is not None and group in trace
        }
        for sequence in sorted(set().union(*calls.values())):
            made = {
                rank: each[sequence] for rank, each in calls.items() if sequence in each
            }
            kinds: dict[str, tuple[int, ...]] = {}
            for rank, call in made.items():
                kinds[call.kind] = (*kinds.get(call.kind, ()), rank)
            if len(kinds) > 1 and not all(call.is_done for call in made.values()):
                return Parting(group, sequence, kinds)
    return None
