"""Metrics that nbdist itself records, such as waiting times.

Training code calls `record`. The engine sets the recorder when a rank starts, so that
training code does not import the engine.
"""

from __future__ import annotations

from nbdist.telemetry.recorder import Recorder

__all__ = ["record", "set_recorder"]

_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Set the recorder of later scalars. With None, they are dropped."""
    global _recorder
    _recorder = recorder


def record(**scalars: object) -> None:
    """Record scalars of this rank for the monitor. Takes microseconds.

    Outside of a cluster this does nothing.
    """
    if _recorder is not None:
        _recorder.record_internal(**scalars)
