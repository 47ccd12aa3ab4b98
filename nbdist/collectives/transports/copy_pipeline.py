"""A long transfer in pieces: one is moved while its neighbours are copied.

Nothing here knows of CUDA: a `Copier` does, and a host transport moves the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbdist.collectives.sync.cuda_events import await_device
from nbdist.collectives.sync.wait import Check

__all__ = [
    "Copier",
    "CudaCopier",
    "Move",
    "Piece",
    "Pipeline",
    "Ticket",
]

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


Ticket = Callable[[], None]
"""Returns once the copy it was given for is done."""


class Copier(ABC):
    """Starts copies; each way, they are done in the order in which they were begun.

    Between `begin` and `end`. What `fetch` reads is what work before `begin` leaves,
    and work after `end` sees what `store` writes.
    """

    @abstractmethod
    def room(self, size: int) -> Tensor:
        """New host memory that copies go through: `size` bytes."""

    @abstractmethod
    def begin(self, overlap: bool) -> None:
        """A collective starts; with `overlap`, copies go on beside each other."""

    @abstractmethod
    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        """From the device to the host."""

    @abstractmethod
    def store(self, source: Tensor, target: Tensor) -> Ticket:
        """From the host to the device; `source` may change once it is done."""

    @abstractmethod
    def end(self) -> None:
        """The collective is over, well or not."""


class CudaCopier(Copier):
    """Pinned memory, and a stream for each way.

    One piece alone stays on the current stream: that saves ordering three of them.
    """

    def __init__(self, check: Check) -> None:
        """Make one for the device that is current in `begin`.

        Args:
            check: called while waiting for a copy; ends the wait by raising.
        """
        self._check = check
        self._sides: tuple[torch.cuda.Stream, ...] = ()
        self._current: torch.cuda.Stream | None = None
        self._down: torch.cuda.Stream | None = None
        self._up: torch.cuda.Stream | None = None

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def begin(self, overlap: bool) -> None:
        current = self._current = torch.cuda.current_stream()
        self._down = self._up = current
        if overlap:
            self._sides = self._sides or (torch.cuda.Stream(), torch.cuda.Stream())
            self._down, self._up = self._sides
            for side in self._sides:
                side.wait_stream(current)

    def fetch(self, source: Tensor, target: Tensor) -> Ticket:
        return self._copy(self._down, source, target)

    def store(self, source: Tensor, target: Tensor) -> Ticket:
        return self._copy(self._up, source, target)

    def end(self) -> None:
        # Also for what is only read: the tensors belong to the current stream, which
        # may use their memory for others.
        for side in (self._down, self._up):
            if self._current is not None and side is not None and side != self._current:
                self._current.wait_stream(side)
        self._current = self._down = self._up = None

    def _copy(
        self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor
    ) -> Ticket:
        assert stream is not None  # for it has begun
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        done = stream.record_event()
        return lambda: await_device(done.query, self._check)
