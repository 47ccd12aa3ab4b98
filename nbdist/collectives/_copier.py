"""Copies between a device and host memory, beside each other and beside the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from nbdist.collectives.sync.cuda_events import await_device
from nbdist.collectives.sync.wait import Check

__all__ = ["Copier", "CudaCopier", "Ticket"]

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
