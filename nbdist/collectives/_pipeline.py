"""A long transfer in pieces: one is moved while its neighbours are copied.

Nothing here knows of CUDA: a `Copier` does, and a host transport moves the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from nbdist.collectives._copier import Copier, Ticket

__all__ = ["Move", "Piece", "Pipeline"]

_PLACES = 3
"""One piece is fetched, one is moved, one is stored."""
Move = Callable[[list[Tensor], list[Tensor]], None]


@dataclass(frozen=True)
class Piece:
    """What one call of the host transport deals with."""

    takes: Sequence[Tensor]
    """On the device; the host needs them."""
    gives: Sequence[Tensor]
    """On the device; the host writes to them."""
    move: Move
    """Called with all of `takes`, then all of `gives`, in host memory."""
    in_place: bool = False
    """Whether `gives` are `takes`, changed: both arguments are then the same."""


class Pipeline:
    """Sends pieces through host memory that is made once and used again."""

    def __init__(self, copier: Copier, size: int) -> None:
        """Make one.

        Args:
            copier: of the device.
            size: bytes of host memory for what a piece takes, and as many for what it
                gives. It may need more: the memory grows with the first that does.
        """
        self._copier = copier
        self._size = size
        self._places = [_Place(copier, size) for _ in range(_PLACES)]

    def run(self, pieces: Sequence[Piece]) -> None:
        """Move the pieces, in their order. Fails with what `move` raises.

        Nothing is written to the device before the first `move` has come back.
        """
        self._copier.begin(overlap=len(pieces) > 1)
        try:
            self._run(pieces)
        finally:
            self._copier.end()

    def _run(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            self._places[0].fetch(pieces[0])
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                self._places[(number + 1) % _PLACES].fetch(pieces[number + 1])
            place = self._places[number % _PLACES]
            piece.move(*place.fetched())
            place.store()

    def close(self) -> None:
        """Give the memory back, once it is not read any more. Safe to call twice."""
        self._places = [_Place(self._copier, self._size) for _ in range(_PLACES)]


class _Place:
    """Host memory for one piece at a time."""

    def __init__(self, copier: Copier, size: int) -> None:
        self._copier = copier
        self._taken, self._given = _Room(copier, size), _Room(copier, size)
        self._piece: Piece | None = None
        self._takes: list[Tensor] = []
        self._gives: list[Tensor] = []
        self._fetching: list[Ticket] = []
        self._storing: list[Ticket] = []

    def fetch(self, piece: Piece) -> None:
        for stored in self._storing:
            stored()  # or the memory would change while it is read
        self._piece = piece
        self._takes = self._taken.views(piece.takes)
        self._gives = self._takes if piece.in_place else self._given.views(piece.gives)
        self._fetching = [
            self._copier.fetch(source, target)
            for source, target in zip(piece.takes, self._takes, strict=True)
            if len(source)
        ]

    def fetched(self) -> tuple[list[Tensor], list[Tensor]]:
        for done in self._fetching:
            done()
        return self._takes, self._gives

    def store(self) -> None:
        assert self._piece is not None  # it was fetched
        self._storing = [
            self._copier.store(source, target)
            for source, target in zip(self._gives, self._piece.gives, strict=False)
            if len(source)
        ]


class _Room:
    """Bytes of host memory, divided anew for each piece."""

    _ALIGNED = 64  # more than any dtype asks for

    def __init__(self, copier: Copier, size: int) -> None:
        self._copier, self._size = copier, size
        self._bytes: Tensor | None = None

    def views(self, like: Sequence[Tensor]) -> list[Tensor]:
        """One tensor as long and of the dtype as each of `like`."""
        starts = [0]
        for each in like:
            lines = -(-each.numel() * each.element_size() // self._ALIGNED)
            starts.append(starts[-1] + lines * self._ALIGNED)
        if self._bytes is None or len(self._bytes) < starts[-1]:
            self._bytes = self._copier.room(max(starts[-1], self._size))
        return [
            self._bytes[start : start + each.numel() * each.element_size()].view(
                each.dtype
            )
            for start, each in zip(starts, like, strict=False)
        ]
