"""What ranks with different calls tell each other, and what they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nbdist.collectives import Signature
from nbdist.errors import CollectiveMismatch, UnsupportedCollective

from ._request import StandIn

__all__ = ["JOIN", "Offer", "Offers", "in_common", "needs_all", "nothing_in_common"]

JOIN = "join"


@dataclass(frozen=True)
class Offer:
    """A call that a rank has made and that is not done."""

    kind: Signature
    meets: bool
    stand_in: StandIn | None


@dataclass(frozen=True)
class Offers:
    """What one rank tells the others."""

    calls: dict[str, Offer]
    """By name, in the order in which they were made."""
    waits: bool
    """Whether it makes no further call before one of these is done."""
    unnamed: Counter[str]
    """How many calls without a name it has made so far."""

    @property
    def joined(self) -> bool:
        return JOIN in self.calls


def in_common(table: Sequence[Offers]) -> dict[str, Offer]:
    """The calls that all of these ranks have made, in the order of the first one."""
    first = table[0].calls
    return {
        name: offer
        for name, offer in first.items()
        if all(name in each.calls for each in table)
    }


def needs_all(kind: Signature) -> UnsupportedCollective:
    """Why a call ends that a rank which has joined cannot stand in for."""
    return UnsupportedCollective(
        f"{kind.operation}: a rank has joined, and only Sum, Average, Min, Max and "
        "Product can go on without it; make this call before any rank joins"
    )


def nothing_in_common(
    table: list[Offers],
    ranks: tuple[int, ...],
    mismatch: CollectiveMismatch | None,
) -> CollectiveMismatch:
    """Why all calls end when no rank can go on.

    Args:
        table: Every rank's offers.
        ranks: Their numbers in the world.
        mismatch: What the gate has found, if it has.
    """
    lines = ["every rank waits, and no call was made by all of them:"]
    for rank, offers in zip(ranks, table, strict=True):
        lines.append(f"rank {rank} waits for {', '.join(offers.calls)}")
    if mismatch is not None:
        lines.append(str(mismatch))
    return CollectiveMismatch("\n".join(lines))
