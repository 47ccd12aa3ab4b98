"""What outlives a cell, and begins again after one that was not completed.

An error or an interrupt can end a cell at any line, on some of the ranks only. What a
rank notes from step to step, such as the gradients that have arrived, is then half
done, and differs between ranks. The ranks therefore begin again together. Weights,
gradients and an optimizer's state are the user's, and stay as they are.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["Agreeing", "Lasting", "are_alive", "begin_again", "register"]


class Lasting(Protocol):
    """Something that notes more than one line of a cell completes."""

    def _begin_again(self) -> None:
        """Forget what is half done. It calls no collective, and raises nothing."""


@runtime_checkable
class Agreeing(Lasting, Protocol):
    """Something that has made progress, on which the ranks agree again."""

    def _progress(self) -> tuple[Hashable, Any]:
        """A key that is equal on all ranks, and this rank's progress; both plain."""

    def _agree(self, everyones: Sequence[Any]) -> None:
        """Take the progress on which all ranks agree.

        Args:
            everyones: each rank's progress; None for a rank that has no such thing.
        """


_all: weakref.WeakValueDictionary[int, Lasting] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(thing: Lasting) -> None:
    """Have a thing begin again with all others, as long as it lives."""
    _all[next(_numbers)] = thing


def are_alive() -> bool:
    """Whether this process has any such thing."""
    return bool(_all)


def begin_again(all_gather: Callable[[Any], list[Any]]) -> None:
    """Have all things begin again. Every rank of the world must call.

    Args:
        all_gather: Returns the value that each rank has passed, in rank order.
    """
    # A thread may register another one meanwhile.
    found = [thing for each in _all.valuerefs() if (thing := each()) is not None]
    for thing in found:
        thing._begin_again()
    mine: dict[Hashable, tuple[Agreeing, Any]] = {}
    # From the newest on: a cell that ran again has left older ones on some ranks.
    for thing in reversed(found):
        if isinstance(thing, Agreeing):
            key, progress = thing._progress()
            places = ((type(thing).__name__, key, n) for n in itertools.count())
            mine[next(each for each in places if each not in mine)] = thing, progress
    every = all_gather({place: progress for place, (_, progress) in mine.items()})
    for place, (thing, _) in mine.items():
        thing._agree([others.get(place) for others in every])
