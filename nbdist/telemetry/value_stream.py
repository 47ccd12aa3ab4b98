"""Passes the values that a collector has, and each later one, to another program."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from nbdist.telemetry.collector import Collector
from nbdist.telemetry.export import rows
from nbdist.wire import Batch, Sample

__all__ = ["Value", "ValueStream"]

logger = logging.getLogger(__name__)


class Value(NamedTuple):
    metric: str
    rank: int
    step: int
    time: float
    """Seconds since the epoch."""
    value: float


class ValueStream(ABC):
    """Writes what a collector has, and then each value that it receives, on a thread.

    A subclass calls this constructor when it is ready to write.
    """

    description: str
    """Where the values go, in messages."""

    def __init__(self, collector: Collector) -> None:
        self._queue: queue.SimpleQueue[list[Value] | None] = queue.SimpleQueue()
        earlier, self._unsubscribe = collector.follow(self._receive)
        self._queue.put([Value(*row[:5]) for row in rows(earlier)])
        self._thread = threading.Thread(
            target=self._run, name="nbdist-values", daemon=True
        )
        self._thread.start()

    @abstractmethod
    def write(self, values: Sequence[Value]) -> None:
        """Write some values. Only the stream's thread calls."""

    @abstractmethod
    def finish(self) -> None:
        """Release what was opened, after the last value or an error of `write`."""

    def close(self, timeout: float = 5.0) -> bool:
        """Write the values so far, and end. Safe to call twice.

        Args:
            timeout: The most seconds to wait for a slow disk or server.

        Returns:
            Whether all was written.
        """
        self._unsubscribe()
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _receive(self, batch: Batch) -> None:
        self._queue.put(
            [
                Value(metric, record.rank, record.step, record.time, value)
                for record in batch.records
                if isinstance(record, Sample)
                for metric, value in record.scalars.items()
            ]
        )

    def _run(self) -> None:
        try:
            while (values := self._queue.get()) is not None:
                self.write(values)
        except Exception as error:  # noqa: BLE001 - a client may raise anything
            self._unsubscribe()
            logger.warning(
                "No more values are written to %s: %s", self.description, error
            )
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("%s was not closed: %s", self.description, error)
