"""Compares what ranks have begun on their groups, and finds what is left over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nbdist.wire import Begun, Tally, format_ranks

__all__ = ["LeftOver", "describe", "left_over"]

_COUNT = 2**32 - 1
Tables = Mapping[int, Mapping[str, Tally]]


class LeftOver(NamedTuple):
    """What some ranks have begun and others have not. It meets their later calls."""

    group: str
    """The name of the group."""
    ahead: tuple[int, ...]
    """The ranks that have begun it."""
    behind: tuple[int, ...]
    """The ranks that have not."""
    calls: int
    """How many calls; 0 if the numbers are equal and the calls differ."""
    kind: str
    """"call" for collectives, "send", or "recv"."""
    numbers: tuple[int, ...]
    """The numbers that differ, by which two comparisons can be told apart."""


def left_over(tables: Tables) -> list[LeftOver]:
    """What is left over between these ranks.

    Args:
        tables: The tallies of each rank, by the name of the group. A group on which a
            rank has begun nothing may be missing in its table.
    """
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    return [each for key in keys for each in _of_group(key, tables)]


def _of_group(key: str, tables: Tables) -> Iterator[LeftOver]:
    members = next(table[key].ranks for table in tables.values() if key in table)
    found = {rank: tables[rank].get(key) for rank in members if rank in tables}
    calls = {rank: tally.calls if tally else 0 for rank, tally in found.items()}
    if len(set(calls.values())) > 1:
        counts = {rank: number & _COUNT for rank, number in calls.items()}
        most = max(calls, key=lambda rank: (counts[rank], calls[rank]))
        ahead = tuple(rank for rank in calls if calls[rank] == calls[most])
        behind = tuple(rank for rank in calls if rank not in ahead)
        count = counts[most] - min(counts[rank] for rank in behind)
        numbers = tuple(calls.values())
        yield LeftOver(key, ahead, behind, count, "call", numbers)
    if any(
        tally and (tally.sent or tally.received or tally.from_any)
        for tally in found.values()
    ):
        for receiver in found:
            yield from _to(receiver, key, found)


def _to(
    receiver: int, key: str, found: Mapping[int, Tally | None]
) -> Iterator[LeftOver]:
    """The messages to one rank that were not received, and those that were not sent."""
    own = found[receiver]
    received = dict(own.received) if own else {}
    from_any = own.from_any if own else 0
    sent = {
        rank: dict(tally.sent).get(receiver, 0) if tally else 0
        for rank, tally in found.items()
    }
    open_ = {
        rank: number - received.get(rank, 0)
        for rank, number in sent.items()
        if number != received.get(rank, 0)
    }
    if sum(open_.values()) == from_any and all(each >= 0 for each in open_.values()):
        return
    for rank in open_:
        count = (sent[rank] & _COUNT) - (received.get(rank, 0) & _COUNT)
        numbers = sent[rank], received.get(rank, 0)
        if count < 0:
            yield LeftOver(key, (receiver,), (rank,), -count, "recv", numbers)
        else:
            yield LeftOver(key, (rank,), (receiver,), count, "send", numbers)
    if from_any and not open_:
        others = tuple(rank for rank in found if rank != receiver)
        count = from_any & _COUNT
        yield LeftOver(key, (receiver,), others, count, "recv", (from_any,))


def describe(left: LeftOver, begun: Mapping[int, Sequence[Begun]]) -> str:
    """What is left over, in words.

    Args:
        left: It.
        begun: The last calls of each rank, the oldest first.
    """
    ahead, behind = format_ranks(left.ahead), format_ranks(left.behind)
    peer = None if left.kind == "call" else left.behind[0]
    calls = [
        each.text
        for each in begun.get(left.ahead[0], ())
        if each.group == left.group
        and (each.peer is None) == (peer is None)
        and (peer is None or each.text.startswith(left.kind))
        and (peer is None or each.peer in (None, peer))
    ]
    names = ", ".join(calls[-left.calls :][:2]) if left.calls else ""
    verb = {"call": "called", "send": "received", "recv": "sent"}[left.kind]
    if not left.calls:
        return f"different calls of rank {ahead} and rank {behind}"
    if not names:
        names = {"call": "a collective", "send": "a send", "recv": "a recv"}[left.kind]
    to = "" if peer is None else f" {'to' if left.kind == 'send' else 'from'} {behind}"
    times = f" ({left.calls} times)" if left.calls > 2 else ""
    group = " on a group of gloo" if left.group.startswith("gloo") else ""
    return (
        f"rank {ahead}'s {names}{to}{times}{group}, which rank {behind} has not {verb}"
    )
