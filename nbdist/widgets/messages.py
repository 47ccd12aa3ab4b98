"""A collector's snapshot as a widget message: JSON, and one buffer of numbers.

The buffer holds little-endian float64. For each entry of `series`, in order: step,
time and value of the latest sample, then `count` steps, times, means, lows and highs.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

from nbdist.widgets.source import Piece, Snapshot
from nbdist.wire import DeviceSample, RankInfo

__all__ = ["encode"]


def encode(snapshot: Snapshot, sequence: int) -> tuple[dict[str, Any], bytes]:
    """The message's content and its buffer."""
    content = {
        "kind": "update",
        "sequence": sequence,
        "full": snapshot.full,
        "series": [_header(piece) for piece in snapshot.pieces],
        "ranks": [_rank(info) for info in snapshot.ranks],
        "devices": [_device(samples) for samples in snapshot.devices.values()],
        "lost": [list(item) for item in snapshot.lost.items()],
    }
    numbers = array("d")
    for piece in snapshot.pieces:
        _append(numbers, piece)
    if sys.byteorder == "big":
        numbers.byteswap()
    return content, numbers.tobytes()


def _header(piece: Piece) -> list[str | int]:
    return [piece.metric, piece.rank, piece.width, piece.start, len(piece.steps)]


def _append(numbers: array[float], piece: Piece) -> None:
    numbers.extend(piece.latest)
    for column in (piece.steps, piece.times, piece.means, piece.lows, piece.highs):
        numbers.extend(column)


def _rank(info: RankInfo) -> list[str | int]:
    return [info.rank, info.host, info.device, info.device_name]


def _device(samples: list[DeviceSample]) -> dict[str, Any]:
    last = samples[-1]
    return {
        "rank": last.rank,
        "device": last.device,
        "utilisation": [sample.utilisation for sample in samples],
        "used": last.memory_used,
        "total": last.memory_total,
        "own": last.memory_own,
        "cpu": last.cpu,
    }
