"""Where the ranks of an elastic run begin, or begin again, with equal values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.errors import UsageError
from nbdist.training.elastic.commit import Commit
from nbdist.training.elastic.ranks import broadcast_tree, ranks
from nbdist.training.elastic.state import State

__all__ = ["meet"]


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    function: str
    names: tuple[str, ...]
    committed: int
    staged: int
    joins: bool
    begins: bool


def meet(state: State, function: str, *, joins: bool, begins: bool) -> None:
    """Agree on one commit, give it to those who lack it, and restore it everywhere.

    Every rank must call. When all ranks begin, the values of rank 0 are everybody's,
    and become a commit. Later, the values are those of the last commit that any rank
    has completed: where one has, all others have at least staged it. Ranks that join
    get it from the oldest survivor, the lowest rank that has it.

    Args:
        joins: whether this rank has come while the others were at work.
        begins: whether this rank has made no commit in the run yet.

    Raises:
        UsageError: the ranks have called different functions, or with different states.
    """
    world = ranks()
    world.meet("elastic_meeting")
    numbers = state._committed.number, state._staged.number
    mine = Card(function, tuple(state._objects), *numbers, joins, begins)
    cards: list[Card] = world.gather(mine)
    _compare(cards)
    old = [rank for rank, card in enumerate(cards) if not card.joins]
    if all(cards[rank].begins for rank in old):
        _begin(state, old[0])
        return
    last = max(cards[rank].committed for rank in old)
    if not joins and state._committed.number < last == state._staged.number:
        state._swap()  # another rank has completed it
    state._forget_staged()
    lacks = [card.joins or last not in (card.committed, card.staged) for card in cards]
    if any(lacks):
        _receive(state, lacks)
    state._unwrap()
    state.restore()
    state._call_back(state._committed.size, world.size)


def _begin(state: State, source: int) -> None:
    size, before, loaded = ranks().size, state._committed.size, state._loaded
    state._loaded = False
    state.sync(source)
    if loaded and before != size:  # a file of a world of another size
        state._call_back(before, size)


def _receive(state: State, lacks: Sequence[bool]) -> None:
    """Give the commit of the lowest rank that has it to those that do not."""
    world, commit = ranks(), state._committed
    source = lacks.index(False)
    number, size = world.send((commit.number, commit.size), source)
    values = broadcast_tree(commit.values, source)
    if lacks[world.rank]:
        state._committed = Commit(number, size, values)


def _compare(cards: Sequence[Card]) -> None:
    """All must have called the same."""
    for rank, card in enumerate(cards):
        if (card.function, card.names) != (cards[0].function, cards[0].names):
            raise UsageError(
                f"rank 0 called {_told(cards[0])}, and rank {rank} {_told(card)}: all "
                "ranks must call the same elastic function, with the same values"
            )


def _told(card: Card) -> str:
    return f"{card.function} with a State of {', '.join(card.names) or 'nothing'}"
