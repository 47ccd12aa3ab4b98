"""Detects ranks that have queued different collectives with NCCL.

NCCL compares no calls: with different ones it waits forever, or gives a wrong result.
The last calls of each rank are recorded. These records are compared when no rank of a
call makes progress, and when the digests of all calls differ at the end of a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nbdist.clusters.rank_registry import RankRegistry
from nbdist.clusters.uneven_nccl import STEADY_S, own_gpus
from nbdist.ipc import endpoints
from nbdist.wire import NcclCall, NcclTotal, format_ranks

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
        return _find_parting(self._registry.ask(endpoints.NCCL_TRACE), are_done=False)

    def look_back(self, digests: Iterable[Mapping[str, NcclTotal]]) -> str:
        """Where the ranks parted, if the digests of their calls say so; "" if not.

        Args:
            digests: Of each rank, by the name of the process group.
        """
        if not _differ(digests):
            return ""
        traces = self._registry.ask(endpoints.NCCL_TRACE)
        parting = _find_parting(traces, are_done=True)
        return str(parting or "the ranks' records no longer have the first such call")


def _differ(digests: Iterable[Mapping[str, NcclTotal]]) -> bool:
    """Whether some ranks have made as many calls in a group, and different ones."""
    found: dict[tuple[str, int], set[int]] = {}
    for each in digests:
        for group, total in each.items():
            found.setdefault((group, total.number), set()).add(total.digest)
    return any(len(different) > 1 for different in found.values())


def _find_parting(
    traces: Mapping[int, Trace | None], *, are_done: bool
) -> Parting | None:
    """The first different call.

    Args:
        traces: The records of the ranks.
        are_done: Whether it may be one that all ranks have completed.
    """
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
            waits = not all(call.is_done for call in made.values())
            if len(kinds) > 1 and (waits or are_done):
                return Parting(group, sequence, kinds)
    return None
