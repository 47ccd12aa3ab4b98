"""Names the rank for which the others wait, and what it does meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from nbdist.widgets.source import Snapshot
from nbdist.wire import TimeSplit

__all__ = ["slow_rank", "splits_of"]

LEAST_FACTOR = 1.3
"""Below this, differences between ranks may be those of a machine with other work."""
MOST_FACTOR = 10.0
LEAST_BUSY = 0.01


def splits_of(snapshot: Snapshot) -> dict[int, TimeSplit]:
    """The latest split of each rank with a new sample."""
    latest = {rank: samples[-1].split for rank, samples in snapshot.devices.items()}
    return {rank: split for rank, split in latest.items() if split is not None}


def slow_rank(splits: Mapping[int, TimeSplit]) -> str:
    """A sentence on the slowest rank; "" if no rank is much slower than the others.

    All ranks take a step together, and the fast ones wait in its collectives. The time
    outside of communication is therefore what a rank needs for its own work.
    """
    if len(splits) < 2:
        return ""
    slow = min(splits, key=lambda rank: splits[rank].communication)
    others = [split for rank, split in splits.items() if rank != slow]
    own = splits[slow]
    usual = median(1 - split.communication for split in others)
    factor = (1 - own.communication) / max(usual, LEAST_BUSY)
    if factor < LEAST_FACTOR:
        return ""
    times = f"{factor:.1f}" if factor < MOST_FACTOR else f"over {MOST_FACTOR:g}"
    more_data = own.data - median(split.data for split in others)
    more_compute = own.compute - median(split.compute for split in others)
    if more_data > more_compute:
        why = f"it waits for data {own.data:.0%} of the time"
        if own.place:
            why += f", at {own.place}"
    elif own.place:
        why = f"it is at {own.place} for {own.place_share:.0%} of the time"
    else:
        why = f"it computes {own.compute:.0%} of the time"
    return f"rank {slow} takes {times} times as long as the others: {why}"
