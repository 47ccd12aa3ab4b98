"""Merges the output of several ranks into one text.

The order of each rank's lines is kept. A line that several ranks print within the same
update becomes one item with the numbers of those ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

__all__ = ["Item", "LineSplitter", "merge"]


class Item(NamedTuple):
    """One line, or one displayed object."""

    kind: str
    """"stdout", "stderr" or "display"."""
    key: Hashable
    """Equal for items that look the same. For text, it is the line."""
    payload: object = None


def merge(queues: dict[int, deque[Item]]) -> Iterator[tuple[list[int], Item]]:
    """Empty the queues, and yield each item with the ranks that have it.

    An item waits while another rank has an equal item later in its queue, so that both
    can be yielded as one. If all items wait, the first one is yielded.
    """
    left_of = {rank: Counter(map(_name, queue)) for rank, queue in queues.items()}
    holders = Counter(chain.from_iterable(left_of.values()))
    """For each item, the number of ranks that still have it in their queue."""
    left = sorted(rank for rank, queue in queues.items() if queue)
    while left := [rank for rank in left if queues[rank]]:
        # A fast way for items that only the first rank has, as most items.
        first, alone = queues[left[0]], [left[0]]
        while first and holders[_name(first[0])] == 1:
            yield alone, first.popleft()
        if not first:
            continue
        heads: dict[Hashable, list[int]] = {}
        for rank in left:
            heads.setdefault(_name(queues[rank][0]), []).append(rank)
        name, ranks = next(
            (head for head in heads.items() if holders[head[0]] == len(head[1])),
            next(iter(heads.items())),
        )
        items = [queues[rank].popleft() for rank in ranks]
        for rank in ranks:
            left_of[rank][name] -= 1
            holders[name] -= not left_of[rank][name]
        yield ranks, items[0]


_name = itemgetter(0, 1)
"""An item's kind and key."""


class LineSplitter:
    """Cuts one rank's stream into whole lines, and keeps the unfinished line.

    Text after a carriage return replaces the line, as in a terminal.
    """

    def __init__(self) -> None:
        self.unfinished = ""

    def feed(self, text: str) -> Iterable[str]:
        """The lines that this text completes, without their ends."""
        text = self.unfinished + text
        if "\r" not in text:
            *lines, self.unfinished = text.split("\n")
            return lines
        *lines, last = text.replace("\r\n", "\n").split("\n")
        self.unfinished = _last_return(last, keep_trailing=True)
        return [_last_return(line) for line in lines]


def _last_return(line: str, *, keep_trailing: bool = False) -> str:
    """The text that a terminal shows for a line with carriage returns."""
    shown = line.rstrip("\r")
    trailing = "\r" if keep_trailing and len(shown) < len(line) else ""
    return shown.rsplit("\r", 1)[-1] + trailing
