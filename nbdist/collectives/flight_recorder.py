"""Records this process's last collectives and messages, for `%dist_collectives`.

The record is a file, so that it outlives the process (`ipc/flight_record.py`). Each
group has a log, which writes to the process's one recorder. Both are compiled. Without
the compiled module, the classes of this module do the same.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nbdist.collectives.transports.native import find_compiled
from nbdist.ipc import flight_record
from nbdist.ipc.flight_record import (
    ENTRY,
    HEAD_BYTES,
    LAST_AT,
    RECORD_BYTES,
    TEXT_BYTES,
    RecordedCall,
)

__all__ = [
    "CallLog",
    "PythonCallLog",
    "PythonRecorder",
    "open_log",
    "recent_calls",
    "record_in",
]

_NUMBER = struct.Struct("<Q")
_PAIR = struct.Struct("<ii")
_TIME = struct.Struct("<q")
_STATE = struct.Struct("<I")
# Positions in an entry.
_SEQUENCE_AT = 8
_STARTED_AT = 32
_ENDED_AT = 40
_STATE_AT = 48
_SITE_AT = 64
_UNDER_WAY = (flight_record.SCHEDULED, flight_record.RUNNING)


class CallLog(Protocol):
    """The calls of one group on this rank. A call is named by its ticket."""

    sequence: int
    """The number of collectives that were started."""

    def begin(self, text: bytes, fingerprint: int) -> int:
        """Record a collective that starts, and return its ticket.

        Args:
            text: The call, as `Signature.text`.
            fingerprint: The fingerprint of its signature; 0 if it is not compared.
        """

    def schedule(self, text: bytes, fingerprint: int) -> int:
        """Record a collective that starts later, and return its ticket."""

    def message(self, text: bytes, fingerprint: int, sequence: int) -> int:
        """Record a message that starts, with its number, and return its ticket."""

    def start(self, ticket: int) -> None:
        """Start a scheduled collective."""

    def locate(self, ticket: int, cell: int, line: int) -> None:
        """Record the call site. 0 stands for an unknown cell or line."""

    def end(self, ticket: int, ok: bool) -> None:
        """Record the end of a call."""


class PythonRecorder:
    """The record's file, and the ticket of the next call."""

    def __init__(self, descriptor: int, count: int) -> None:
        self.memory = mmap.mmap(descriptor, HEAD_BYTES + count * ENTRY.size)
        self._count = count
        self._lock = threading.Lock()

    def write(self, values: Sequence[Any]) -> int:
        """Write an entry, and return its ticket.

        Args:
            values: Those of `flight_record.ENTRY` without the first, the ticket.
        """
        with self._lock:
            ticket = self._next_ticket()
            _set(self.memory, LAST_AT, _NUMBER.pack(ticket))
            at = self._address(ticket)
            _set(self.memory, at, _NUMBER.pack(0))
            ENTRY.pack_into(self.memory, at, 0, *values)
            _set(self.memory, at, _NUMBER.pack(ticket))
        return ticket

    def _next_ticket(self) -> int:
        """Calls under way keep their entries, except if many follow each other."""
        (ticket,) = _NUMBER.unpack_from(self.memory, LAST_AT)
        for _ in range(flight_record.MOST_PASSED + 1):
            ticket += 1
            at = self._address(ticket) + _STATE_AT
            if _STATE.unpack_from(self.memory, at)[0] not in _UNDER_WAY:
                break
        return int(ticket)

    def _address(self, ticket: int) -> int:
        return HEAD_BYTES + ticket % self._count * ENTRY.size

    def find(self, ticket: int) -> int | None:
        """The position of a call's entry; None if a later call has overwritten it."""
        at = self._address(ticket)
        (committed,) = _NUMBER.unpack_from(self.memory, at)
        return at if ticket and committed == ticket else None


class PythonCallLog:
    """A `CallLog` in Python.

    Args:
        recorder: The process's recorder.
        group, generation, rank: As of `flight_record.RecordedCall`.
        members: The beginning of each text, as `flight_record.members_text`.
    """

    def __init__(
        self,
        recorder: PythonRecorder,
        group: int,
        generation: int,
        rank: int,
        members: bytes,
    ) -> None:
        self._recorder = recorder
        self._identity = group, generation, rank
        self._members = members
        self.sequence = 0

    def begin(self, text: bytes, fingerprint: int) -> int:
        self.sequence += 1
        return self._write(text, fingerprint, flight_record.RUNNING, self.sequence)

    def schedule(self, text: bytes, fingerprint: int) -> int:
        return self._write(text, fingerprint, flight_record.SCHEDULED, 0)

    def message(self, text: bytes, fingerprint: int, sequence: int) -> int:
        return self._write(text, fingerprint, flight_record.RUNNING, sequence)

    def _write(self, text: bytes, fingerprint: int, state: int, sequence: int) -> int:
        now, whole = time.monotonic_ns(), self._members + text
        times = now, now, 0
        length = min(len(whole), 2**16 - 1)
        place = *self._identity, 0, 0
        return self._recorder.write(
            (sequence, fingerprint, *times, state, *place, length, whole[:TEXT_BYTES])
        )

    def start(self, ticket: int) -> None:
        self.sequence += 1
        memory, at = self._recorder.memory, self._recorder.find(ticket)
        if at is not None:
            _set(memory, at + _SEQUENCE_AT, _NUMBER.pack(self.sequence))
            _set(memory, at + _STARTED_AT, _TIME.pack(time.monotonic_ns()))
            _set(memory, at + _STATE_AT, _STATE.pack(flight_record.RUNNING))

    def locate(self, ticket: int, cell: int, line: int) -> None:
        at = self._recorder.find(ticket)
        if at is not None:
            _set(self._recorder.memory, at + _SITE_AT, _PAIR.pack(cell, line))

    def end(self, ticket: int, ok: bool) -> None:
        memory, at = self._recorder.memory, self._recorder.find(ticket)
        if at is not None:
            state = flight_record.DONE if ok else flight_record.FAILED
            _set(memory, at + _ENDED_AT, _TIME.pack(time.monotonic_ns()))
            _set(memory, at + _STATE_AT, _STATE.pack(state))


def _set(memory: Any, at: int, value: bytes) -> None:
    """Change a value of an entry that others may read.

    `Struct.pack_into` sets its bytes to 0 first, and a reader could find the 0.
    """
    memory[at : at + len(value)] = value


_MOST_RECENT = 50

_recorder: Any = None
_memory: mmap.mmap | None = None
"""The record, to be read."""
_owner = 0
"""The process that made the recorder. A forked child must not write to it."""


def record_in(folder: Path, name: str) -> None:
    """Record this process's calls in a file, from its first group on.

    If there is no room for the file, the record ends with the process.

    Args:
        folder, name: As for `flight_record.create`.
    """
    try:
        _use(flight_record.create(folder, name))
    except OSError:
        _use(flight_record.open_unnamed())


def _use(descriptor: int) -> None:
    global _recorder, _owner, _memory
    native = find_compiled()
    make = PythonRecorder if native is None else native.Recorder
    try:
        _memory = mmap.mmap(descriptor, RECORD_BYTES, access=mmap.ACCESS_READ)
        _recorder, _owner = make(descriptor, flight_record.CALLS), os.getpid()
    finally:
        os.close(descriptor)


def open_log(group: int, generation: int, rank: int, members: Sequence[int]) -> CallLog:
    """The log of a group that this process enters.

    Args:
        group, generation, rank, members: As of `flight_record.RecordedCall`.
    """
    if _owner != os.getpid():
        _use(flight_record.open_unnamed())
    native = find_compiled()
    make = PythonCallLog if native is None else native.CallLog
    text = flight_record.members_text(members)
    log: CallLog = make(_recorder, group, generation, rank, text)
    return log


def recent_calls(after: int) -> list[RecordedCall]:
    """The last calls of this process, oldest first. Any thread may call.

    Args:
        after: A ticket. Only later calls are included, and at most 50.
    """
    if _memory is None or _owner != os.getpid():
        return []
    return flight_record.recent_calls(_memory, after, _MOST_RECENT)
