"""One call of a collective on this rank, and the texts that describe calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

from nbdist.collectives.call_site import CallSite, find_call_site, where
from nbdist.collectives.signature import Signature
from nbdist.ipc.thread_frames import frames_of
from nbdist.wire import CollectiveCall

__all__ = ["Call", "describe_mismatch", "describe_timeout"]


_HEADINGS: tuple[str, ...] = (
    "rank", "call", "operation", "op", "root", "shape", "dtype", "device", "at",
)  # fmt: skip


class Call:
    """A call that this rank is in. Its call site is looked up on demand."""

    __slots__ = (
        "call_site",
        "has_met",
        "kind",
        "sequence",
        "thread",
        "ticket",
        "timeout",
    )

    def __init__(
        self,
        kind: Signature,
        timeout: float | timedelta | None = None,
        call_site: CallSite | None = None,
    ) -> None:
        self.kind = kind
        self.timeout = timeout
        self.call_site = call_site
        self.thread = threading.get_ident()
        self.sequence = 0
        self.ticket = 0
        """The call's ticket in the group's log; 0 before it is recorded."""
        self.has_met = False
        """Whether this rank has passed a barrier in the call: all ranks are in it."""

    @property
    def label(self) -> str:
        """The call's name in errors, such as "all_reduce #12"."""
        return f"{self.kind.operation} #{self.sequence}"

    @property
    def where(self) -> str:
        """The operation and the line that called it."""
        return where(self.kind.operation, self.call_site)

    def record(self, rank: int) -> CollectiveCall:
        """The call as a record of `rank`. Any thread may call."""
        kind = self.kind
        site = self.call_site
        if site is None:
            frames = frames_of(self.thread)
            site = find_call_site(frames[0] if frames else None)
        return CollectiveCall(
            rank=rank,
            sequence=self.sequence,
            operation=kind.operation,
            reduce_op=kind.reduce_op,
            root=kind.root,
            dtype=kind.dtype,
            shape=kind.shape,
            device=kind.device,
            cell=site.cell,
            line=site.line,
        )


def describe_mismatch(calls: Sequence[CollectiveCall]) -> str:
    """The text of a mismatch: a table of each rank's call."""
    rows = [_HEADINGS, *map(_row, calls)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(
        [
            "the ranks called different collectives; no data was touched.",
            *(line.rstrip() for line in lines),
            "Make every rank call the same operation with the same shape and dtype.",
        ]
    )


def _row(call: CollectiveCall) -> tuple[str, ...]:
    return (
        str(call.rank),
        f"#{call.sequence}",
        call.operation,
        call.reduce_op or "-",
        "-" if call.root is None else str(call.root),
        str(call.shape),
        call.dtype,
        call.device,
        call.location or "unknown",
    )


def describe_timeout(
    call: CollectiveCall,
    ranks: Sequence[int],
    missing: Sequence[int],
    notes: Mapping[int, str],
) -> str:
    """The text of a time-out: which ranks had arrived, and where the others were.

    Args:
        call: this rank's call.
        ranks: the members' world ranks.
        missing: the members that had not arrived.
        notes: for each rank, the call in which it waits; "" if it waits in no call.
    """
    arrived = [rank for rank in ranks if rank not in missing]
    where = call.location or "unknown"
    lines = [
        f"{call.operation} #{call.sequence} ({where}) ran out of time.",
        f"Arrived: {_names(arrived)}. Missing: {_names(missing)}.",
    ]
    lines += [f"{notes[rank]} (it waits there)" for rank in missing if notes.get(rank)]
    silent = [rank for rank in missing if not notes.get(rank)]
    if silent and notes:
        lines.append(f"Not in any collective: {_names(silent)}.")
    return "\n".join(lines)


def _names(ranks: Sequence[int]) -> str:
    return ("ranks " if len(ranks) > 1 else "rank ") + (
        ", ".join(map(str, ranks)) or "none"
    )
