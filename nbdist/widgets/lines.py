"""Merges the output of several ranks into one text.

The order of each rank's lines is kept. A line that several ranks print within the same
update becomes one item with the numbers of those ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, takewhile
from typing import NamedTuple

__all__ = ["Item", "LineSplitter", "merge"]


class Item(NamedTuple):
    """Some lines that follow each other, or one displayed object."""

    kind: str
    """"stdout", "stderr", "display", "grid", or "board" for widgets."""
    keys: Sequence[Hashable]
    """The lines; or one value, which is equal for displays that look the same."""
    payload: object = None


class Part(NamedTuple):
    """A part of an item that is shown as a whole."""

    name: Hashable
    """The kind and the key, if several ranks have the key; otherwise None."""
    item: Item


def merge(queues: dict[int, deque[Item]]) -> Iterator[tuple[list[int], Item]]:
    """Empty the queues, and yield items with the ranks that have them.

    A key waits while another rank has an equal key later in its queue, so that both can
    be yielded as one. If all keys wait, the first one is yielded. Keys that follow each
    other in the same queues may be yielded together.
    """
    together, start = _common_start(queues)
    if start is not None:
        yield together, start
    shared = _shared(queues)
    parts = {rank: deque(_parts(queue, shared)) for rank, queue in queues.items()}
    for queue in queues.values():
        queue.clear()
    left_of = {
        rank: Counter(part.name for part in queue if part.name is not None)
        for rank, queue in parts.items()
    }
    holders = Counter(chain.from_iterable(left_of.values()))
    """For each name, the number of ranks that still have it in their queue."""
    while left := sorted(rank for rank, queue in parts.items() if queue):
        heads: dict[Hashable, list[int]] = {}
        for rank in left:
            own = parts[rank]
            while own and (own[0].name is None or holders[own[0].name] == 1):
                yield [rank], own.popleft().item
            if own:
                heads.setdefault(own[0].name, []).append(rank)
        if heads:
            name, ranks = next(
                (head for head in heads.items() if holders[head[0]] == len(head[1])),
                next(iter(heads.items())),
            )
            items = [parts[rank].popleft().item for rank in ranks]
            for rank in ranks:
                left_of[rank][name] -= 1
                holders[name] -= not left_of[rank][name]
            yield ranks, items[0]


def _common_start(queues: dict[int, deque[Item]]) -> tuple[list[int], Item | None]:
    """Take the lines with which the queues of several ranks begin, if all do.

    Returns:
        The ranks whose queues are not empty, and these lines; None if there are none.
    """
    ranks = sorted(rank for rank, queue in queues.items() if queue)
    kinds = {queues[rank][0].kind for rank in ranks}
    if len(ranks) < 2 or len(kinds) > 1 or not kinds & {"stdout", "stderr"}:
        return ranks, None
    kind = kinds.pop()
    first_lines = {queues[rank][0].keys[0] for rank in ranks}
    if len(first_lines) > 1:
        return ranks, None
    starts = []
    for rank in ranks:
        same_kind = takewhile(lambda item: item.kind == kind, queues[rank])
        starts.append([key for item in same_kind for key in item.keys])
    common = min(starts, key=len)
    for lines in starts:
        equal = [one == other for one, other in zip(common, lines, strict=False)]
        if False in equal:
            common = common[: equal.index(False)]
    for rank in ranks:
        _drop(queues[rank], len(common))
    return ranks, Item(kind, common)


def _drop(queue: deque[Item], number: int) -> None:
    """Remove the first keys of a queue."""
    while number:
        item = queue.popleft()
        if len(item.keys) > number:
            queue.appendleft(item._replace(keys=item.keys[number:]))
        number -= min(number, len(item.keys))


def _shared(queues: dict[int, deque[Item]]) -> dict[str, set[Hashable]]:
    """The keys that several ranks have, by their kind."""
    seen: dict[str, set[Hashable]] = {}
    shared: dict[str, set[Hashable]] = {}
    for queue in queues.values():
        own: dict[str, set[Hashable]] = {}
        for item in queue:
            own.setdefault(item.kind, set()).update(item.keys)
        for kind, keys in own.items():
            earlier = seen.setdefault(kind, set())
            shared.setdefault(kind, set()).update(earlier & keys)
            earlier |= keys
    return shared


def _parts(queue: deque[Item], shared: dict[str, set[Hashable]]) -> Iterator[Part]:
    """Cut a queue into the keys that several ranks have, and what is between them."""
    for item in queue:
        kind, keys, payload = item
        if shared[kind].isdisjoint(keys):
            yield Part(None, item)
            continue
        end = 0
        for index, key in enumerate(keys):
            if key in shared[kind]:
                if end < index:
                    yield Part(None, Item(kind, keys[end:index]))
                yield Part((kind, key), Item(kind, [key], payload))
                end = index + 1
        if end < len(keys):
            yield Part(None, Item(kind, keys[end:]))


class LineSplitter:
    """Cuts one rank's stream into whole lines, and keeps the unfinished line.

    Text after a carriage return replaces the line, as in a terminal.
    """

    def __init__(self) -> None:
        self.unfinished = ""

    def feed(self, text: str) -> list[str]:
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
