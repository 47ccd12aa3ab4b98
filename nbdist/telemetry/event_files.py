"""Writes the logged values to TensorBoard's event files."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.errors import UsageError
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.export import rows
from nbdist.wire import Batch, Sample

__all__ = ["EventFiles"]

logger = logging.getLogger(__name__)


class _Value(NamedTuple):
    metric: str
    rank: int
    step: int
    time: float
    value: float


class EventFiles:
    """Writes what a collector has, and then each value that it receives.

    The folder has a folder for each rank, so that TensorBoard shows a metric of all
    ranks in one chart. TensorBoard's own writer writes the files, on a thread.

    Args:
        folder: Is made if it does not exist.

    Raises:
        UsageError: The folder cannot be made, or TensorBoard is not installed.
    """

    def __init__(self, collector: Collector, folder: Path) -> None:
        self._open, self._event = _tensorboard()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--logdir {folder}: the folder cannot be made: {error.strerror}"
            ) from error
        self.folder = folder
        self._writers: dict[int, Any] = {}
        self._queue: queue.SimpleQueue[list[_Value] | None] = queue.SimpleQueue()
        earlier, self._unsubscribe = collector.follow(self._receive)
        self._queue.put([_Value(*row[:5]) for row in rows(earlier)])
        self._thread = threading.Thread(
            target=self._run, name="nbdist-event-files", daemon=True
        )
        self._thread.start()

    def close(self, timeout: float = 5.0) -> bool:
        """Write the values so far, and close the files. Safe to call twice.

        Args:
            timeout: The most seconds to wait for a slow disk.

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
                _Value(metric, record.rank, record.step, record.time, value)
                for record in batch.records
                if isinstance(record, Sample)
                for metric, value in record.scalars.items()
            ]
        )

    def _run(self) -> None:
        try:
            while (values := self._queue.get()) is not None:
                self._write(values)
        except OSError as error:
            self._unsubscribe()
            logger.warning("No more values are written to %s: %s", self.folder, error)
        for writer in self._writers.values():
            with contextlib.suppress(OSError):  # as above
                writer.close()

    def _write(self, values: Iterable[_Value]) -> None:
        """
        Raises:
            OSError: The disk is full, or the folder was removed.
        """
        written = set()
        for metric, rank, step, time, value in values:
            if rank not in self._writers:
                self._writers[rank] = self._open(str(self.folder / f"rank{rank}"))
            scalar = {"tag": metric, "simple_value": value}
            event = self._event(step=step, wall_time=time, summary={"value": [scalar]})
            self._writers[rank].add_event(event)
            written.add(rank)
        for rank in written:
            self._writers[rank].flush()


def _tensorboard() -> tuple[Callable[[str], Any], Callable[..., Any]]:
    """TensorBoard's writer of a folder, and its class of events.

    Raises:
        UsageError: TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UsageError(
            "--logdir needs TensorBoard, which is not installed: pip install "
            "tensorboard, or save the values with --save FILE.csv"
        ) from error
    return EventFileWriter, Event
