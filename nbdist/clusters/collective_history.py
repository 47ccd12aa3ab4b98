"""The ranks' last collectives, call by call, and the call in which they parted."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nbdist.errors import UsageError
from nbdist.ipc.flight_record import FlightRecord, RecordedCall, group_number
from nbdist.widgets.table import Table, seconds_text
from nbdist.wire import format_ranks

__all__ = ["CollectiveHistory", "HistoryRow"]

Place = tuple[int, int]
"""A generation of the world, and a group of it."""


@dataclass
class HistoryRow:
    """One collective of a group, or one message between two ranks."""

    generation: int
    group: int
    sequence: int
    members: tuple[int, ...]
    """The world ranks that take part."""
    calls: dict[int, RecordedCall] = field(default_factory=dict)
    """Each rank's call, by world rank."""
    missing: tuple[int, ...] = ()
    """The members that have not made the call, although others are in it."""
    ended: tuple[int, ...] = ()
    """The ranks whose process has ended in the call."""

    @property
    def first_ns(self) -> int:
        """The time of the first rank's call, by the monotonic clock."""
        return min(call.scheduled_ns for call in self.calls.values())

    @property
    def last_rank(self) -> int:
        """The rank whose call was the last to start."""
        return max(self.calls, key=lambda rank: self.calls[rank].started_ns)

    @property
    def kinds(self) -> dict[str, list[int]]:
        """The ranks of each different call, most ranks first."""
        found: dict[str, list[int]] = defaultdict(list)
        for rank, call in sorted(self.calls.items()):
            found[call.description].append(rank)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two ranks."""
        return any(call.is_message for call in self.calls.values())

    @property
    def is_done(self) -> bool:
        """Whether a rank has completed the call, so that all ranks have made it."""
        return any(call.state == "done" for call in self.calls.values())

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks have made the same call."""
        return self.is_done and not self.is_message and len(self.kinds) == 1

    @property
    def is_in_progress(self) -> bool:
        """Whether a rank is in the call, or will be."""
        return any(
            call.state in ("scheduled", "running") and rank not in self.ended
            for rank, call in self.calls.items()
        )

    @property
    def has_parted(self) -> bool:
        """Whether the ranks called differently, or one did not call or has failed."""
        if self.is_message:
            return False
        failed = any(call.state == "failed" for call in self.calls.values())
        return len(self.kinds) > 1 or bool(self.missing or self.ended) or failed

    @property
    def location(self) -> str:
        """Where a rank has made the call; "" if no rank knows."""
        places = (call.location for call in self.calls.values())
        return next(filter(None, places), "")

    @property
    def name(self) -> str:
        """Such as "all_reduce #12"."""
        operations = dict.fromkeys(call.operation for call in self.calls.values())
        return f"{' or '.join(operations)} #{self.sequence}"


class CollectiveHistory:
    """The ranks' last collectives and messages. It is shown as a table.

    Args:
        records: The flight records of all processes.
        ended: The names of the processes that have ended.
        now_ns: The time at which the records were read, by the monotonic clock.
        count: The number of calls to show.
        ranks: The ranks to show; None for all.
    """

    def __init__(
        self,
        records: Sequence[FlightRecord],
        ended: Collection[str],
        now_ns: int,
        *,
        count: int = 20,
        ranks: Collection[int] | None = None,
    ) -> None:
        self.records = tuple(records)
        self._ended = frozenset(ended)
        self._now_ns = now_ns
        self._count = count
        self._ranks = ranks
        self.rows = _aligned(self.records, self._ended)
        """Every recorded call, in the order of time."""
        self.parted = _first_parted(self.rows)
        """The first call in which the ranks parted; None if they have not, or if they
        have agreed again since."""

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the collectives for torch's analyzer, a file for each rank.

        `python -m torch.distributed.flight_recorder.fr_trace FOLDER` reads them. The
        files have the generation of the world in which the ranks have parted, or the
        last one, and no messages.

        Args:
            folder: A folder that does not exist or is empty.

        Returns:
            The files.

        Raises:
            UsageError: The folder is not empty, or no collective was recorded.
            OSError: A file cannot be written.
        """
        from nbdist.clusters.torch_trace import checked_folder, write_traces

        path = checked_folder(folder)
        rows = [row for row in self.rows if not row.is_message]
        if not rows:
            raise UsageError("no rank has made a collective: there is nothing to save")
        last = max(row.generation for row in rows)
        generation = last if self.parted is None else self.parted.generation
        chosen = [row for row in rows if row.generation == generation]
        return write_traces(path, chosen, self.records[0].clock_offset_ns)

    @property
    def summary(self) -> str:
        """One sentence: where the ranks parted, and who waits for whom."""
        row = self.parted
        if not self.rows:
            return "no rank has made a collective or sent a message"
        if row is None:
            waiting = next(filter(self._is_waiting, self.rows), None)
            if waiting is None:
                return self._agreement
            ((rank, call),) = waiting.calls.items()
            return f"rank {rank} is in {call.description} for {self._duration(call)}"
        where = f" ({row.location})" if row.location else ""
        kinds = row.kinds
        if len(kinds) > 1:
            said = [
                f"{_subject(ranks)} called {kind}{self._at(row.calls[ranks[0]])}"
                for kind, ranks in kinds.items()
            ]
            return f"the ranks parted at call #{row.sequence}: {'; '.join(said)}"
        parts = [self._missing_text(rank, row) for rank in row.missing]
        if row.ended:
            parts.append(f"{_subject(row.ended)} died in it")
        parts += self._rest_text(row)
        begin = "the ranks parted at " if row.missing else ""
        end = ":" if row.missing else " was not completed:"
        return f"{begin}{row.name}{where}{end} {'; '.join(parts)}"

    @property
    def _agreement(self) -> str:
        last = next((row for row in reversed(self.rows) if row.has_parted), None)
        if last is None:
            return "the ranks agree in all recorded calls"
        at = f" ({last.location})" if last.location else ""
        return f"the ranks have agreed again since they parted at {last.name}{at}"

    def _at(self, call: RecordedCall) -> str:
        return f" at {call.location}" if call.location else ""

    def _missing_text(self, rank: int, row: HistoryRow) -> str:
        process = _process(self.records, rank, row.generation)
        has_ended = process is not None and process.name in self._ended
        text = f"rank {rank} {'died and had' if has_ended else 'has'} not come"
        calls = [] if process is None else process.calls
        own = [call for call in calls if call.rank == rank and call.sequence]
        if not own:
            return f"{text} and has made no call"
        last = own[-1]
        group = "" if last.members == row.members else (
            f" of group {format_ranks(last.members)}"
        )  # fmt: skip
        name = f"{last.operation} #{last.sequence}{group}{self._at(last)}"
        state = self._state(last, has_ended)
        if last.ended_ns:
            ago = _duration((self._now_ns - last.ended_ns) / 1e9)
            state = f"{last.state} {ago} ago"
        return f"{text} (its last call is {name}, {state})"

    def _rest_text(self, row: HistoryRow) -> list[str]:
        texts = []
        for state, verbs in (
            ("running", ("waits", "wait")),
            ("failed", ("failed after", "failed after")),
        ):
            ranks = [
                rank
                for rank, call in sorted(row.calls.items())
                if call.state == state and rank not in row.ended
            ]
            if ranks:
                verb = verbs[len(ranks) > 1]
                longest = max(self._seconds(row.calls[rank]) for rank in ranks)
                texts.append(f"{_subject(ranks)} {verb} {_duration(longest)}")
        return texts

    def _is_waiting(self, row: HistoryRow) -> bool:
        """Whether one side of a message waits for the other."""
        (state, *others) = (call.state for call in row.calls.values())
        return row.is_message and state == "running" and not (others or row.ended)

    def _duration(self, call: RecordedCall) -> str:
        return _duration(self._seconds(call))

    def _seconds(self, call: RecordedCall) -> float:
        return ((call.ended_ns or self._now_ns) - call.started_ns) / 1e9

    def _state(self, call: RecordedCall, has_ended: bool) -> str:
        if call.state == "scheduled":
            return "died before it began" if has_ended else "scheduled"
        if call.state == "running" and has_ended:
            return "died in it"
        return f"{call.state} {self._duration(call)}"

    # -- the table -------------------------------------------------------------------

    @property
    def notes(self) -> str:
        """What the records lack, a line each; "" if nothing."""
        notes = [
            f"{each.name} ended while it wrote the record of "
            f"{each.torn} more call{'s' * (each.torn > 1)}"
            for each in self.records
            if each.torn and each.name in self._ended
        ]
        known = {call.rank for each in self.records for call in each.calls}
        members = {rank for row in self.rows for rank in row.members}
        silent = sorted(members - known)
        if silent:
            notes.append(f"rank {format_ranks(silent)} has no recorded call")
        hidden = len(self.rows) - len(self._shown())
        if hidden:
            notes.append(f"{hidden:,} more recorded calls: -n {len(self.rows)}")
        return "\n".join(notes)

    def _shown(self) -> list[HistoryRow]:
        chosen = self.rows[-self._count :]
        if self.parted is not None and self.parted not in chosen:
            chosen = [self.parted, *chosen[1:]]
        return chosen

    @property
    def table(self) -> Table:
        """A row for each call, and a column for each rank."""
        rows = self._shown()
        columns = sorted({rank for row in rows for rank in row.members})
        if self._ranks is not None:
            columns = [rank for rank in columns if rank in self._ranks]
        places = {(row.generation, row.members, row.group) for row in rows}
        cells = []
        for row in rows:
            kind = next(iter(row.kinds))
            own = [self._cell(row, rank, kind) for rank in columns]
            head = [_group_name(row, places)] if len(places) > 1 else []
            cells.append([*head, f"#{row.sequence}", kind, row.location, *own])
        header = ["group"] if len(places) > 1 else []
        header += ["call", "operation", "at", *(f"rank {rank}" for rank in columns)]
        return Table(header, cells, self.notes)

    def _cell(self, row: HistoryRow, rank: int, kind: str) -> str:
        if rank not in row.members:
            return "-"
        call = row.calls.get(rank)
        if call is None:
            return "not come" if rank in row.missing else ""
        state = self._state(call, rank in row.ended)
        if row.is_message or call.description == kind:
            return state
        return f"{call.description} {state}"

    def __repr__(self) -> str:
        return f"{self.summary}\n{self.table!r}" if self.rows else self.summary

    def _repr_html_(self) -> str:
        import html

        return f"<div>{html.escape(self.summary)}</div>{self.table._repr_html_()}"


def _aligned(
    records: Sequence[FlightRecord], ended: Collection[str]
) -> list[HistoryRow]:
    """The rows of all calls, in the order of time."""
    rows: dict[tuple[object, ...], HistoryRow] = {}
    for record in records:
        for number, call in _numbered(record.calls):
            ends = _ends(call) if call.is_message else ()
            key = call.generation, call.group, number, *ends
            members = tuple(sorted(set(ends) or call.members))
            row = rows.setdefault(
                key, HistoryRow(call.generation, call.group, number, members)
            )
            row.calls[call.rank] = call
            if record.name in ended and call.state in ("scheduled", "running"):
                row.ended += (call.rank,)
    for row in rows.values():
        row.missing = tuple(_missing(row, records))
    return sorted(rows.values(), key=lambda row: row.first_ns)


def _ends(call: RecordedCall) -> tuple[int, ...]:
    """The sender and the receiver of a message. A receiver may not know the sender."""
    if call.root is None:
        return (call.rank,)
    return (
        (call.rank, call.root) if call.operation == "send" else (call.root, call.rank)
    )


def _numbered(calls: Sequence[RecordedCall]) -> Iterator[tuple[int, RecordedCall]]:
    """Calls with their numbers. Scheduled calls begin after those that have begun."""
    last: dict[Place, int] = defaultdict(int)
    for call in calls:
        if not call.is_message:
            place = call.generation, call.group
            last[place] = max(last[place], call.sequence)
    for call in calls:
        if call.state == "scheduled":
            last[call.generation, call.group] += 1
            yield last[call.generation, call.group], call
        else:
            yield call.sequence, call


def _missing(row: HistoryRow, records: Sequence[FlightRecord]) -> Iterator[int]:
    """The members that have not made a call that nobody has completed."""
    if row.is_done or row.is_message:
        return
    for rank in row.members:
        process = _process(records, rank, row.generation)
        if rank in row.calls or process is None:
            continue
        # Its record of the call is not among those that were overwritten.
        first_ns = process.calls[0].scheduled_ns if process.calls else row.first_ns + 1
        if not process.has_wrapped or first_ns <= row.first_ns:
            yield rank


def _process(
    records: Sequence[FlightRecord], rank: int, generation: int
) -> FlightRecord | None:
    """The process that was this rank in a generation; None if it is not known."""
    for record in records:
        if any((c.rank, c.generation) == (rank, generation) for c in record.calls):
            return record
    joined = {record.joined: record for record in records}
    own = [each for each in joined if each[0] == rank and each[1] <= generation]
    return joined[max(own)] if own else None


def _first_parted(rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """The first row in which ranks parted, and after which they have not agreed again,
    in the newest generation that has one."""
    agreed = [row for row in rows if row.is_agreed]
    parted = [
        row
        for row in rows
        if row.has_parted and not any(_is_over(row, later) for later in agreed)
    ]
    newest = max((row.generation for row in parted), default=0)
    return next((row for row in parted if row.generation == newest), None)


def _is_over(row: HistoryRow, later: HistoryRow) -> bool:
    """Whether the ranks that have parted in a row have agreed in another, later one."""
    if later.first_ns <= row.first_ns:
        return False
    if later.generation == row.generation and later.group == row.group:
        return True
    # They may go on as another world, in which nothing of the former one proceeds, or
    # in another group.
    is_newer = later.generation > row.generation
    return is_newer or (
        not row.is_in_progress and set(later.members) >= set(row.members)
    )


def _group_name(row: HistoryRow, places: Collection[tuple[object, ...]]) -> str:
    name = format_ranks(row.members)
    if sum(each[:2] == (row.generation, row.members) for each in places) > 1:
        name += f" (group {group_number(row.group)})"
    if len({generation for generation, _, _ in places}) > 1:
        name += f", generation {row.generation}"
    return name


def _subject(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return seconds_text(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
