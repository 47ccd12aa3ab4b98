"""Moves a long device tensor through host memory in pieces.

While one piece is moved between the ranks, the next piece is copied from the GPU and
the previous piece is copied to the GPU. On other devices the host waits for each copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbdist.collectives.sync.cuda_events import await_device
from nbdist.collectives.sync.wait import Check
from nbdist.ipc.gpu_threads import own_stream

__all__ = [
    "BlockingCopier",
    "Copier",
    "CudaCopier",
    "Move",
    "Piece",
    "Pipeline",
    "WaitForCopy",
]

_BUFFERS = 3
"""Pieces in host memory at a time: one is fetched, one is moved, one is stored."""
Move = Callable[[list[Tensor], list[Tensor]], None]
WaitForCopy = Callable[[], None]
"""Waits for a copy: returns when the copy is done."""


@dataclass(frozen=True)
class Piece:
    """The work of one call of the host transport."""

    to_host: Sequence[Tensor]
    """Device tensors that are copied to the host."""
    from_host: Sequence[Tensor]
    """Device tensors that are copied from the host."""
    move: Move
    """Called with the host memory of `to_host` and that of `from_host`."""
    in_place: bool = False
    """Whether `move` changes the memory of `to_host` in place. Its two arguments are
    then the same tensors."""


class Pipeline:
    """Sends pieces through host memory that is allocated once."""

    def __init__(self, copier: Copier, size: int) -> None:
        """Make a pipeline.

        Args:
            copier: copies between device and host.
            size: bytes of host memory for a piece's `to_host`, and as many for its
                `from_host`. The memory grows for a larger piece.
        """
        self._copier = copier
        self._size = size
        self._buffers = [_Buffers(copier, size) for _ in range(_BUFFERS)]

    def run(self, pieces: Sequence[Piece]) -> None:
        """Move the pieces in order, until the end or an error of `move`.

        The device tensors do not change before the first `move` has returned.
        """
        self._copier.begin(overlap=len(pieces) > 1)
        try:
            self._run(pieces)
        finally:
            self._copier.end()

    def _run(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            self._buffers[0].fetch(pieces[0])
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                self._buffers[(number + 1) % _BUFFERS].fetch(pieces[number + 1])
            buffers = self._buffers[number % _BUFFERS]
            piece.move(*buffers.fetched())
            buffers.store()

    def close(self) -> None:
        """Free the host memory after pending copies. Safe to call twice."""
        self._buffers = [_Buffers(self._copier, self._size) for _ in range(_BUFFERS)]


class _Buffers:
    """The host memory of one piece at a time."""

    def __init__(self, copier: Copier, size: int) -> None:
        self._copier = copier
        self._to_host_memory = _HostMemory(copier, size)
        self._from_host_memory = _HostMemory(copier, size)
        self._piece: Piece | None = None
        self._to_host: list[Tensor] = []
        self._from_host: list[Tensor] = []
        self._fetching: list[WaitForCopy] = []
        self._storing: list[WaitForCopy] = []

    def fetch(self, piece: Piece) -> None:
        for stored in self._storing:
            stored()  # the copy to the GPU must not read the next piece
        self._piece = piece
        self._to_host = self._to_host_memory.views(piece.to_host)
        self._from_host = (
            self._to_host
            if piece.in_place
            else self._from_host_memory.views(piece.from_host)
        )
        self._fetching = [
            self._copier.fetch(source, target)
            for source, target in zip(piece.to_host, self._to_host, strict=True)
            if len(source)
        ]

    def fetched(self) -> tuple[list[Tensor], list[Tensor]]:
        for done in self._fetching:
            done()
        return self._to_host, self._from_host

    def store(self) -> None:
        assert self._piece is not None  # it was fetched
        self._storing = [
            self._copier.store(source, target)
            for source, target in zip(
                self._from_host, self._piece.from_host, strict=False
            )
            if len(source)
        ]


class _HostMemory:
    """Host memory, divided into views for each piece."""

    _ALIGNED = 64  # bytes; enough for every dtype

    def __init__(self, copier: Copier, size: int) -> None:
        self._copier, self._size = copier, size
        self._bytes: Tensor | None = None

    def views(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors with the lengths and dtypes of `like`."""
        starts = [0]
        for each in like:
            lines = -(-each.numel() * each.element_size() // self._ALIGNED)
            starts.append(starts[-1] + lines * self._ALIGNED)
        if self._bytes is None or len(self._bytes) < starts[-1]:
            self._bytes = self._copier.allocate(max(starts[-1], self._size))
        return [
            self._bytes[start : start + each.numel() * each.element_size()].view(
                each.dtype
            )
            for start, each in zip(starts, like, strict=False)
        ]


class Copier(ABC):
    """Copies between a device and host memory."""

    @abstractmethod
    def allocate(self, size: int) -> Tensor:
        """New host memory of `size` bytes."""

    @abstractmethod
    def begin(self, overlap: bool) -> None:
        """Begin a collective. With `overlap`, both directions are copied at once."""

    @abstractmethod
    def fetch(self, source: Tensor, target: Tensor) -> WaitForCopy:
        """Start a copy from the device to the host."""

    @abstractmethod
    def store(self, source: Tensor, target: Tensor) -> WaitForCopy:
        """Start a copy to the device.

        `source` must not change before the copy is done.
        """

    @abstractmethod
    def end(self) -> None:
        """End the collective, after success or an error."""


class BlockingCopier(Copier):
    """Copies between any device and the host. The host waits for each copy."""

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def begin(self, overlap: bool) -> None:
        pass

    def fetch(self, source: Tensor, target: Tensor) -> WaitForCopy:
        target.copy_(source)
        return _nothing

    def store(self, source: Tensor, target: Tensor) -> WaitForCopy:
        # Not the source itself: XLA may read it after the copy has returned.
        target.copy_(source.clone())
        return _nothing

    def end(self) -> None:
        pass


def _nothing() -> None:
    pass


class CudaCopier(Copier):
    """Copies between a GPU and pinned host memory, with a stream for each direction.

    The copies of one direction run in order. Each `fetch` runs after the work queued
    before `begin`, and work queued after `end` runs after each `store`. A single piece
    is copied on the current stream, which needs no ordering of streams.
    """

    def __init__(self, check: Check) -> None:
        """Make a copier. `begin` chooses the current device and stream.

        Args:
            check: called while waiting for a copy; ends the wait by raising.
        """
        self._check = check
        self._sides: tuple[torch.cuda.Stream, ...] = ()
        self._current: torch.cuda.Stream | None = None
        self._down: torch.cuda.Stream | None = None
        self._up: torch.cuda.Stream | None = None

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def begin(self, overlap: bool) -> None:
        current = self._current = torch.cuda.current_stream()
        self._down = self._up = current
        if overlap:
            device = current.device
            self._sides = self._sides or (own_stream(device), own_stream(device))
            self._down, self._up = self._sides
            for side in self._sides:
                side.wait_stream(current)

    def fetch(self, source: Tensor, target: Tensor) -> WaitForCopy:
        return self._copy(self._down, source, target)

    def store(self, source: Tensor, target: Tensor) -> WaitForCopy:
        return self._copy(self._up, source, target)

    def end(self) -> None:
        # The current stream also waits for copies that only read. The tensors belong to
        # this stream, and the allocator may reuse their memory on it.
        for side in (self._down, self._up):
            if self._current is not None and side is not None and side != self._current:
                self._current.wait_stream(side)
        self._current = self._down = self._up = None

    def _copy(
        self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor
    ) -> WaitForCopy:
        assert stream is not None  # `begin` was called
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        done = stream.record_event()
        return lambda: await_device(done.query, self._check)
