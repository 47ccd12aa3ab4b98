"""Names the rank for which the others wait, and what it does meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from nbdist.widgets.source import Snapshot
from nbdist.wire import TimeSplit

__all__ = ["slow_rank", "splits_of"]

LEAST_FACTOR = 1.3
"""Below this, differences between ranks may be those of a machine with other work."""
MOST_FACTOR = 10.0
LEAST_BUSY = 0.01
MUCH_COMMUNICATION = 0.5


def splits_of(snapshot: Snapshot) -> dict[int, TimeSplit]:
    """The latest split of each rank with a new sample."""
    latest = {rank: samples[-1].split for rank, samples in snapshot.devices.items()}
    return {rank: split for rank, split in latest.items() if split is not None}


def slow_rank(splits: Mapping[int, TimeSplit]) -> str:
    """A sentence on the slowest rank, or on what slows all of them; "" for neither.

    All ranks take a step together, and the fast ones wait in its collectives. The time
    outside of communication is therefore what a rank needs for its own work.
    """
    if len(splits) < 2:
        return ""
    slow = min(splits, key=lambda rank: splits[rank].communication)
    others = [split for rank, split in splits.items() if rank != slow]
    usual = median(1 - split.communication for split in others)
    factor = (1 - splits[slow].communication) / max(usual, LEAST_BUSY)
    if factor < LEAST_FACTOR:
        return _common_wait(list(splits.values()))
    why = _why(splits[slow], others)
    if factor > MOST_FACTOR:
        return f"the others wait for rank {slow}: {why}"
    return f"rank {slow} takes {factor:.1f} times as long as the others: {why}"


def _why(own: TimeSplit, others: Sequence[TimeSplit]) -> str:
    """In what the rank spends more time than the others."""
    activities = (
        (own.compute, [split.compute for split in others], "it computes"),
        (own.data, [split.data for split in others], "it waits for data"),
        (own.other, [split.other for split in others], own.reason),
    )
    share, _, clause = max(activities, key=lambda each: each[0] - median(each[1]))
    where = f", at {own.place}" if own.place else ""
    return f"{clause} {share:.0%} of the time{where}"


def _common_wait(splits: Sequence[TimeSplit]) -> str:
    """A sentence if all ranks spend most of the time in communication."""
    share = median(split.communication for split in splits)
    if share < MUCH_COMMUNICATION:
        return ""
    places = Counter(split.call_place for split in splits if split.call_place)
    where = next((f", at {place}" for place, _ in places.most_common(1)), "")
    return f"the ranks communicate {share:.0%} of the time{where}"
