"""Which gradients travel together: pure arithmetic over sizes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["BUCKET_BYTES", "Item", "plan_buckets"]

BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: large enough for the bandwidth, small enough to begin
while backward runs."""
_FIRST_BYTES = 2**20
"""The first bucket is small, so that there is soon something to send."""


@dataclass(frozen=True)
class Item:
    """One gradient."""

    kind: Hashable
    """Those of one kind can share a buffer."""
    nbytes: int


def plan_buckets(
    items: Sequence[Item],
    order: Sequence[int],
    limit: int = BUCKET_BYTES,
    groups: Sequence[Sequence[int]] = (),
) -> list[list[int]]:
    """Divide gradients among buckets.

    Args:
        items: The gradients.
        order: Those to divide, in the order in which they are expected.
        limit: Bytes after which a bucket is closed; 0 for one gradient in each.
        groups: Gradients that travel together, however many bytes they have.

    Returns:
        The buckets, in the order in which they are expected to be full. Each holds
        gradients of one kind; together they hold those in `order`, each once.
    """
    wanted = set(order)
    buckets = []
    for group in groups:
        buckets += _by_kind(items, [index for index in group if index in wanted])
        wanted.difference_update(group)
    open_buckets: dict[Hashable, list[int]] = {}
    for index in order:
        if index not in wanted:
            continue
        bucket = open_buckets.setdefault(items[index].kind, [])
        bucket.append(index)
        small = _FIRST_BYTES if not buckets else limit
        if sum(items[each].nbytes for each in bucket) >= min(small, limit):
            buckets.append(open_buckets.pop(items[index].kind))
    buckets += open_buckets.values()
    position = {index: at for at, index in enumerate(order)}
    return sorted(buckets, key=lambda bucket: max(position[each] for each in bucket))


def _by_kind(items: Sequence[Item], group: Sequence[int]) -> list[list[int]]:
    kinds: dict[Hashable, list[int]] = {}
    for index in group:
        kinds.setdefault(items[index].kind, []).append(index)
    return list(kinds.values())
