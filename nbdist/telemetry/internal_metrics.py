"""Scalars that nbdist records itself, beside those of the user, such as waiting times.

Training code calls `record` and needs to know nothing of the engine, which sets the
recorder when a rank starts.
"""

from __future__ import annotations

from nbdist.telemetry.recorder import Recorder

__all__ = ["record", "set_recorder"]

_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Send what is recorded from now on to this recorder; None drops it."""
    global _recorder
    _recorder = recorder


def record(**scalars: object) -> None:
    """Record scalars of this rank for the monitor; outside of a cluster, do nothing.

    Costs microseconds.
    """
    if _recorder is not None:
        _recorder.record_internal(**scalars)
