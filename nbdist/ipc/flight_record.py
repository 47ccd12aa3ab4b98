"""The flight record of a rank: a file with its last collectives and messages.

The rank writes the file in the cluster's folder in shared memory
(`collectives/flight_recorder.py`). The notebook maps it, also while the rank is blocked
and after it was killed. The file has a head and a ring of entries, one for each call.
`_native.c` has the same layout.

An entry begins with its *commit word*: the call's ticket, or 0 while the entry is
written. A process that is killed meanwhile leaves the 0, and the entry is not read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from nbdist.ipc.private_files import open_file

__all__ = [
    "CALLS",
    "DONE",
    "ENTRY",
    "FAILED",
    "HEAD_BYTES",
    "LAST_AT",
    "MOST_PASSED",
    "RECORD_BYTES",
    "RUNNING",
    "SCHEDULED",
    "SUFFIX",
    "TEXT_BYTES",
    "FlightRecord",
    "RecordedCall",
    "call_text",
    "create",
    "group_identity",
    "group_number",
    "known_calls",
    "members_text",
    "open_unnamed",
    "read_folder",
    "read_known",
    "recent_calls",
    "remove_others",
]

SUFFIX = ".flight"
"""The file of the process `rank2` is `rank2.flight`."""
CALLS = 1000
"""Number of entries in the ring."""
MOST_PASSED = 16
"""Number of calls under way that are not overwritten."""
MAGIC = b"nbdist\0\1"
HEAD = struct.Struct("<8sQqII")
"""The magic, the ticket given last, the offset of the clocks, the number of entries,
and the pid. The entry of a ticket is at the ticket modulo `CALLS`."""
LAST_AT = 8
"""The position of the last ticket in the head."""
HEAD_BYTES = 64
RANK_BITS = 12
"""The bits of a group's identity, of 32, that tell its first rank."""
TEXT_BYTES = 180
MEMBERS_BYTES = 100
"""The most bytes of the text for the members of a group. The call needs the others."""
ENTRY = struct.Struct(f"<QQqqqqIIIiiiHxx{TEXT_BYTES}s")
COMMIT = struct.Struct("<Q")
RECORD_BYTES = HEAD_BYTES + CALLS * ENTRY.size
SCHEDULED, RUNNING, DONE, FAILED = range(1, 5)
STATES = {
    SCHEDULED: "scheduled",
    RUNNING: "running",
    DONE: "done",
    FAILED: "failed",
}


@dataclass(frozen=True)
class RecordedCall:
    """One call of one rank. Times are nanoseconds of the host's monotonic clock."""

    ticket: int
    """Counts the calls of the process, with gaps."""
    group: int
    """The `group_identity`, equal on all members."""
    generation: int
    """The generation of the world in which the group was made or renewed."""
    rank: int
    """The world rank that the process had."""
    members: tuple[int, ...]
    """The world ranks of the group's members, in the group's order. If the entry has no
    room for all, some are left out at the end."""
    sequence: int
    """Counts the collectives of the group, or the messages of this rank to or from one
    peer, from 1. It is 0 until a scheduled call has started."""
    operation: str
    reduce_op: str
    root: int | None
    """The world rank of the root, or of a message's other rank; None without one."""
    dtype: str
    device: str
    shape: str
    """Such as "(1024, 3)". It ends in "..." if the entry has no room for all of it."""
    fingerprint: int
    """The fingerprint of the signature; 0 if calls are not compared."""
    state: str
    """"scheduled", "running", "done" or "failed"."""
    scheduled_ns: int
    started_ns: int
    ended_ns: int
    """0 until the call has ended."""
    cell: int | None
    line: int | None

    def shifted(self, by_ns: int) -> RecordedCall:
        """The call with later times."""
        return replace(
            self,
            scheduled_ns=self.scheduled_ns + by_ns,
            started_ns=self.started_ns and self.started_ns + by_ns,
            ended_ns=self.ended_ns and self.ended_ns + by_ns,
        )

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two ranks."""
        return self.operation in ("send", "recv")

    @property
    def description(self) -> str:
        """The call in words, such as "all_reduce(sum, float32, (4,))"."""
        peer = {"send": "to", "recv": "from"}.get(self.operation, "root")
        root = "" if self.root is None else f"{peer}={self.root}"
        data = (self.dtype, self.shape) if self.dtype != "object" else ()
        device = self.device if self.device not in ("cpu", "none") else ""
        details = filter(None, (self.reduce_op, root, *data, device))
        return f"{self.operation}({', '.join(details)})"

    @property
    def location(self) -> str:
        """The line that made the call: "In[7] line 4", or "line 4"; "" if unknown."""
        cell = "" if self.cell is None else f"In[{self.cell}] "
        return "" if self.line is None else f"{cell}line {self.line}"


@dataclass(frozen=True)
class FlightRecord:
    """What one process has recorded."""

    def shifted(self, offset_ns: int) -> FlightRecord:
        """The record with the times of a monotonic clock with another offset."""
        by = self.clock_offset_ns - offset_ns
        return replace(
            self,
            clock_offset_ns=offset_ns,
            calls=tuple(call.shifted(by) for call in self.calls),
        )

    name: str
    """The process's name, such as "rank2"."""
    joined: tuple[int, int]
    """The rank with which it joined the world, and the generation of the world."""
    pid: int
    clock_offset_ns: int
    """The epoch's time minus the monotonic clock's."""
    calls: tuple[RecordedCall, ...]
    """In the order of their tickets."""
    torn: int
    """Number of entries that were being written when the file was read. If the process
    has ended, nobody completes them."""
    has_wrapped: bool
    """Whether earlier calls were overwritten."""


# -- writing ---------------------------------------------------------------------------


def create(folder: Path, name: str) -> int:
    """Make the record of this process.

    Args:
        folder: The cluster's folder in shared memory.
        name: The process's name, such as "rank2".

    Returns:
        A descriptor of the file.

    Raises:
        OSError: There is no room for it.
    """
    path = folder / f"{name}{SUFFIX}"
    path.unlink(missing_ok=True)  # of a process that could not join
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, RECORD_BYTES)
        _write_head(descriptor)
    except BaseException:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def open_unnamed() -> int:
    """Make a record that ends with this process, and return its descriptor."""
    descriptor = os.memfd_create("nbdist flight record")
    os.ftruncate(descriptor, RECORD_BYTES)
    _write_head(descriptor)
    return descriptor


def _write_head(descriptor: int) -> None:
    offset_ns = time.time_ns() - time.monotonic_ns()
    os.pwrite(descriptor, HEAD.pack(MAGIC, 0, offset_ns, CALLS, os.getpid()), 0)


def group_identity(number: int, first: int) -> int:
    """What a group is known by: no other group of its generation has it.

    Args:
        number: Equal on all members. A process has no two groups with one number.
        first: The world rank of the first member. Groups without a common member may
            have equal numbers, but have other first ranks.
    """
    return number << RANK_BITS | first % (1 << RANK_BITS)


def group_number(identity: int) -> int:
    """The number in a `group_identity`."""
    return identity >> RANK_BITS


def members_text(ranks: Sequence[int]) -> bytes:
    """The members of a group in their order, as an entry's text begins: "0-2,5".

    "0-30:10" are every tenth of these ranks. Members for which there is no room are
    left out at the end, where "+7" counts them.
    """
    runs: list[list[int]] = []
    for rank in ranks:
        run = runs[-1] if runs else []
        step = run[1] - run[0] if run[1:] else max(1, rank - run[0]) if run else 0
        if run and rank - run[-1] == step:
            run.append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in _run_texts(run)]
    text, left = ",".join(parts), len(ranks)
    if len(text) > MEMBERS_BYTES:
        kept = text[: MEMBERS_BYTES - len(f",+{left}")].rpartition(",")[0]
        text = f"{kept},+{left - len(_members(kept))}"
    return text.encode()


def _run_texts(run: list[int]) -> list[str]:
    """The text of ranks with equal differences; two distant ranks are no range."""
    step = run[1] - run[0] if run[1:] else 1
    if step == 1:
        return [f"{run[0]}-{run[-1]}" if run[1:] else str(run[0])]
    return [f"{run[0]}-{run[-1]}:{step}"] if run[2:] else [str(each) for each in run]


def call_text(
    operation: str,
    reduce_op: str | None,
    root: int | None,
    dtype: str,
    device: str,
    shape: Iterable[int],
) -> bytes:
    """The rest of an entry's text. The shape is last, because it may be cut."""
    fields = (
        operation,
        reduce_op or "",
        "" if root is None else root,
        dtype,
        device,
        str(tuple(shape)),
    )
    return "".join(f"\t{each}" for each in fields).encode()


# -- reading ---------------------------------------------------------------------------


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove the records of all processes but these."""
    for path in folder.glob(f"*{SUFFIX}"):
        if path.name.removesuffix(SUFFIX) not in names:
            path.unlink(missing_ok=True)


def read_folder(folder: Path) -> list[FlightRecord]:
    """The records of all processes of a cluster, also of those that have ended.

    Each file is copied twice, the second time when all have been copied once. A call is
    included if its group's call of this number was in some file at the first time. So
    if a rank lacks a call that another rank is in, it had not made the call.
    """
    first, second = _copies(folder), _copies(folder)
    return _records(second, _known(first))


Key = tuple[int, int, int, str]
"""Identifies a call on all members of its group."""


def known_calls(folder: Path) -> set[Key]:
    """The calls in all files of a folder."""
    return _known(_copies(folder))


def read_known(folder: Path, known: set[Key]) -> list[FlightRecord]:
    """The records in a folder, of the calls only those that are known."""
    return _records(_copies(folder), known)


def recent_calls(memory: mmap.mmap, after: int, most: int) -> list[RecordedCall]:
    """The last calls in a record that its own process has mapped, oldest first.

    Args:
        memory: The record.
        after: A ticket. Only later calls are included.
        most: The most calls.
    """
    (last,) = COMMIT.unpack_from(memory, LAST_AT)
    found = []
    for ticket in range(last, max(after, last - most), -1):
        at = HEAD_BYTES + ticket % CALLS * ENTRY.size
        values = ENTRY.unpack_from(memory, at)
        if values[0] == ticket and COMMIT.unpack_from(memory, at) == (ticket,):
            found.append(_call(values))
    return found[::-1]


class _Copy(NamedTuple):
    """What a file held, read three times in a row. It is decoded later, because a
    rank may make more calls than a file holds while one file is decoded."""

    path: Path
    before: bytes
    entries: bytes
    after: bytes


def _copies(folder: Path) -> list[_Copy]:
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError, ValueError):  # it was removed meanwhile
            found.append(_copy(path))
    return found


def _copy(path: Path) -> _Copy:
    """Copy one file.

    Raises:
        OSError: The file cannot be opened, or another user may have written it.
        ValueError: The file has another layout.
    """
    descriptor = open_file(path)
    try:
        if os.fstat(descriptor).st_size < RECORD_BYTES:
            raise ValueError(f"{path}: expected {RECORD_BYTES} bytes")
        with mmap.mmap(descriptor, RECORD_BYTES, access=mmap.ACCESS_READ) as memory:
            copy = _Copy(path, memory[:], memory[:], memory[:])
    finally:
        os.close(descriptor)
    if HEAD.unpack_from(copy.before)[0] != MAGIC:
        raise ValueError(f"{path}: not a flight record of this version")
    return copy


def _known(copies: Iterable[_Copy]) -> set[Key]:
    return {_key(call) for copy in copies for call in _calls(copy)}


def _key(call: RecordedCall) -> Key:
    direction = f"{call.rank} {call.root}" if call.is_message else ""
    return call.group, call.generation, call.sequence, direction


def _records(copies: Iterable[_Copy], known: set[Key]) -> list[FlightRecord]:
    return [_record(copy, known) for copy in copies]


def _record(copy: _Copy, known: set[Key]) -> FlightRecord:
    _, last, offset_ns, _, pid = HEAD.unpack_from(copy.before)
    name = copy.path.name.removesuffix(SUFFIX)
    rank, _, generation = name.removeprefix("rank").partition("-")
    calls = sorted(_calls(copy), key=lambda call: call.ticket)
    used = sum(slot <= last for slot in range(1, CALLS)) + (last >= CALLS)
    return FlightRecord(
        name,
        (int(rank), int(generation or 0)),
        pid,
        offset_ns,
        tuple(each for each in calls if _key(each) in known),
        used - len(calls),
        last > CALLS,
    )


def _calls(copy: _Copy) -> Iterator[RecordedCall]:
    """The whole entries of a copy: their commit words were equal before and after."""
    for at in range(HEAD_BYTES, RECORD_BYTES, ENTRY.size):
        (ticket,) = COMMIT.unpack_from(copy.before, at)
        if ticket and COMMIT.unpack_from(copy.after, at) == (ticket,):
            yield _call(ENTRY.unpack_from(copy.entries, at))


def _call(values: tuple[Any, ...]) -> RecordedCall:
    (ticket, sequence, fingerprint, scheduled_ns, started_ns, ended_ns, state, group,
     generation, rank, cell, line, length, text) = values  # fmt: skip
    fields = text[:length].decode(errors="replace").split("\t")
    fields += [""] * (7 - len(fields))
    members = _members(fields[0])
    operation, reduce_op, root, dtype, device, shape = fields[1:7]
    peer = int(root) if root else None
    if operation in ("send", "recv") and peer is not None:
        peer = members[peer] if peer < len(members) else None
    return RecordedCall(
        ticket=ticket,
        group=group,
        generation=generation,
        rank=rank,
        members=members,
        sequence=sequence,
        operation=operation,
        reduce_op=reduce_op,
        root=peer,
        dtype=dtype,
        device=device,
        shape=shape + ("..." if length > TEXT_BYTES else ""),
        fingerprint=fingerprint,
        state=STATES[state],
        scheduled_ns=scheduled_ns,
        started_ns=started_ns,
        ended_ns=ended_ns,
        cell=cell or None,
        line=line or None,
    )


def _members(text: str) -> tuple[int, ...]:
    members: list[int] = []
    for part in text.split(","):
        if part.startswith("+"):  # the number of those that are left out
            break
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        members.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(members)
