"""Scalars that nbdist itself records beside those of the user, such as waiting times.

The parts that train know nothing of the engine: a rank's start says where they go.
"""

from __future__ import annotations

from nbdist.telemetry.recorder import Recorder

__all__ = ["note", "set_recorder"]

_recorder: Recorder | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Send every later `note` to this recorder; None drops them, as in a script."""
    global _recorder
    _recorder = recorder


def note(**scalars: object) -> None:
    """Record scalars of this rank, for the monitor. Costs microseconds, or nothing."""
    if _recorder is not None:
        _recorder.note(**scalars)
