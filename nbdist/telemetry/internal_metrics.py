"""Metrics and marks that nbdist itself records, such as waiting times.

Training code calls the functions. The engine sets the recorder when a rank starts, so
that training code does not import the engine.
"""

from __future__ import annotations

from nbdist.telemetry.recorder import Recorder
from nbdist.wire import MarkKind

__all__ = ["count_batches", "mark", "record", "set_recorder"]

_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Set the recorder of later scalars and marks. With None, they are dropped."""
    global _recorder
    _recorder = recorder


def record(**scalars: object) -> None:
    """Record scalars of this rank for the monitor. Takes microseconds.

    Outside of a cluster this does nothing.
    """
    if _recorder is not None:
        _recorder.record_internal(**scalars)


def count_batches(done: int, total: int) -> None:
    """Set this rank's progress in an epoch, as `Recorder.count_batches` does."""
    if _recorder is not None:
        _recorder.count_batches(done, total)


def mark(kind: MarkKind, text: str, *, of_world: bool = False) -> None:
    """Mark an event in the monitor's charts, as `Recorder.mark` does.

    Takes microseconds. Outside of a cluster this does nothing.
    """
    if _recorder is not None:
        _recorder.mark(kind, text, of_world=of_world)
