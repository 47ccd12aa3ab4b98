"""Writes the logged values to TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbdist.errors import UsageError
from nbdist.telemetry.collector import Collector
from nbdist.telemetry.value_stream import Value, ValueStream

__all__ = ["EventFiles"]


class EventFiles(ValueStream):
    """Writes values to a folder for each rank.

    TensorBoard shows a metric of all ranks in one chart. Its own writer writes the
    files.

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
        self._folder = folder
        self.description = str(folder)
        self._writers: dict[int, Any] = {}
        super().__init__(collector)

    def write(self, values: Sequence[Value]) -> None:
        """
        Raises:
            OSError: The disk is full, or the folder was removed.
        """
        written = set()
        for metric, rank, step, time, value in values:
            if rank not in self._writers:
                self._writers[rank] = self._open(str(self._folder / f"rank{rank}"))
            scalar = {"tag": metric, "simple_value": value}
            event = self._event(step=step, wall_time=time, summary={"value": [scalar]})
            self._writers[rank].add_event(event)
            written.add(rank)
        for rank in written:
            self._writers[rank].flush()

    def finish(self) -> None:
        for writer in self._writers.values():
            writer.close()


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
