"""Joins the ranks' traces into one, in Chrome's Trace Event Format.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nbdist.clusters.collective_history import HistoryRow
from nbdist.ipc.atomic_files import write_atomically
from nbdist.wire import CLOCK_MARK, RankProfile

__all__ = ["write_trace"]

Event = dict[str, Any]

COLLECTIVES = "collectives"
"""The name of a rank's row of collectives."""
PROCESSES = 1000
"""The processes of rank 2 in the trace are numbered from 2000."""
NAMES = ("process_name", "process_sort_index")


def write_trace(
    path: Path, profiles: Mapping[int, RankProfile], rows: Sequence[HistoryRow]
) -> None:
    """Write one trace of all ranks.

    Args:
        path: A .json or .json.gz file.
        profiles: By rank.
        rows: The collectives to include.

    Raises:
        OSError: A file cannot be read or written.
    """
    epoch_us = (
        min(each.begun_ns + each.clock_offset_ns for each in profiles.values()) / 1e3
    )
    events: list[Event] = []
    for rank, profile in profiles.items():
        events += _events_of(rank, profile, epoch_us)
    for row in rows:
        events += _joined(row, profiles, epoch_us)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode()
    if path.name.endswith(".gz"):
        text = gzip.compress(text)

    def write(file: BinaryIO) -> None:
        file.write(text)

    write_atomically(path, write, durable=False)


def _events_of(rank: int, profile: RankProfile, epoch_us: float) -> Iterator[Event]:
    """A rank's events, with the processes and the times of the joined trace."""
    trace = json.loads(Path(profile.path).read_bytes())
    own: list[Event] = trace["traceEvents"]
    base_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    shift_us = base_us + _error_us(own, base_us, profile) - epoch_us
    numbers = {profile.pid: rank * PROCESSES}
    yield _named(rank * PROCESSES, f"rank {rank}")
    yield {
        **_metadata(rank * PROCESSES, "process_sort_index"),
        "args": {"sort_index": rank * PROCESSES},
    }
    for event in own:
        if event["name"] == CLOCK_MARK or event["pid"] == "Traces":
            continue
        if event["ph"] == "M" and event["name"] in NAMES:
            continue
        known = event["pid"] in numbers
        number = numbers.setdefault(event["pid"], rank * PROCESSES + len(numbers))
        if not known:
            yield _named(number, f"rank {rank}: {_process_of(event)}")
        joined = {**event, "pid": number}
        if "ts" in event:
            joined["ts"] = event["ts"] + shift_us
        if event["ph"] in "stf":
            joined["id"] = f"rank {rank}: {event['id']}"
        yield joined


def _error_us(events: Sequence[Event], base_us: float, profile: RankProfile) -> float:
    """How much later the clock mark is by the rank's clock than in its trace."""
    for event in events:
        if event["name"] == CLOCK_MARK and event["ph"] == "X":
            seen_us = base_us + event["ts"] + event["dur"] / 2
            return float(profile.marked_ns / 1e3 - seen_us)
    return 0.0


def _process_of(event: Event) -> str:
    """The name of a row of torch's trace that is no process, such as a GPU."""
    number = event["pid"]
    return f"GPU {number}" if isinstance(number, int) else str(number) or "torch"


def _joined(
    row: HistoryRow, profiles: Mapping[int, RankProfile], epoch_us: float
) -> Iterator[Event]:
    """A collective on each of its ranks, and arrows from its last call."""
    last = row.last_rank
    identity = f"group {row.group} generation {row.generation} {row.name}"
    arrow = {"name": "last", "cat": COLLECTIVES, "id": identity, "tid": COLLECTIVES}
    for rank, call in row.calls.items():
        number = rank * PROCESSES

        def at(ns: int, rank: int = rank) -> float:
            return (ns + profiles[rank].clock_offset_ns) / 1e3 - epoch_us

        yield {
            "ph": "X",
            "name": call.description,
            "cat": COLLECTIVES,
            "pid": number,
            "tid": COLLECTIVES,
            "ts": at(call.started_ns),
            "dur": (max(call.ended_ns, call.started_ns) - call.started_ns) / 1e3,
            "args": {"number": row.sequence, "at": call.location, "group": row.group},
        }
        if rank == last:
            yield {**arrow, "ph": "s", "pid": number, "ts": at(call.started_ns)}
    for rank in row.calls.keys() - {last}:
        profile = profiles[rank]
        met_ns = row.calls[last].started_ns + profile.clock_offset_ns
        end = {"ph": "f", "bp": "e", "pid": rank * PROCESSES}
        yield {**arrow, **end, "ts": met_ns / 1e3 - epoch_us}


def _metadata(process: int, name: str) -> Event:
    return {"ph": "M", "name": name, "pid": process, "tid": 0, "ts": 0}


def _named(process: int, name: str) -> Event:
    return {**_metadata(process, "process_name"), "args": {"name": name}}
