"""The records that the notebook's kernel and the ranks send each other.

They are frozen dataclasses of built-in types. Both sides can import and pickle them
without torch, MPI or widgets. Times are seconds since the epoch, sizes are bytes,
and a value that is unavailable is None.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

__all__ = [
    "ACTIVITIES",
    "CLOCK_MARK",
    "COMMS",
    "ELASTIC",
    "INPUT",
    "REFUSED",
    "REPLY",
    "REQUEST",
    "SHARES",
    "TELEMETRY",
    "Batch",
    "Begun",
    "Change",
    "CollectiveCall",
    "CommBatch",
    "CommMessage",
    "Comparison",
    "DeviceSample",
    "ElasticCall",
    "Failure",
    "HeldTensor",
    "InputReply",
    "InputRequest",
    "Join",
    "LeafComparison",
    "LeafDigest",
    "Mark",
    "MarkKind",
    "MemoryReport",
    "NcclCall",
    "NcclTotal",
    "Notice",
    "Outcome",
    "ProfiledOperation",
    "ProgressSnapshot",
    "RankInfo",
    "RankProfile",
    "Resume",
    "Sample",
    "Shown",
    "StepProgress",
    "Tally",
    "Variable",
    "Verdict",
    "are_unequal",
    "differ_in_nccl",
    "format_ranks",
    "ranks_in",
]


REQUEST = "nbdist_request"
REPLY = "nbdist_reply"
TELEMETRY = "nbdist_telemetry"
ELASTIC = "nbdist_elastic"
INPUT = "nbdist_input"
COMMS = "nbdist_comms"
REFUSED = "nbdist_refused"
"""Message types, in Jupyter's sense."""


class Outcome(NamedTuple):
    """What a reply says beside its value. The content of a `REPLY` has these fields."""

    ok: bool
    """False if the function has raised. The value then describes the error."""
    broken: bool
    """Whether a collective of the rank was interrupted, so that its group is broken."""
    groups: int
    """The number of process groups that torch has made on the rank."""
    published: bool
    """Whether the request has output. A message marks its end."""
    nccl: Mapping[str, NcclTotal]
    """The collectives that the rank has queued with NCCL, by the process group's
    name, of the groups that have used NCCL."""
    tallies: Mapping[str, Tally] = {}
    """What the rank has begun so far, of the groups on which that has changed."""


class Tally(NamedTuple):
    """What a rank has begun on one group of ranks since it was made or renewed.

    If nothing is left over, all members have an equal `calls`, and what one has sent to
    another is what that one receives. Each number has a count in its lowest 32 bits,
    and above them a sum over what was counted, such as the messages' tags.
    """

    ranks: Sequence[int]
    """The world ranks of the members, in the group's order."""
    calls: int
    """The collectives."""
    sent: Sequence[tuple[int, int]] = ()
    """For some world ranks, the messages that were sent to them."""
    received: Sequence[tuple[int, int]] = ()
    """The messages that were received from them, or are to be received."""
    from_any: int = 0
    """The messages that are to be received from any rank."""


class Begun(NamedTuple):
    """A call that a rank has begun."""

    group: str
    """The name of its group, as in a table of tallies."""
    number: int
    """As `RecordedCall.sequence`."""
    text: str
    """Such as "all_reduce (In[3] line 2)"."""
    peer: int | None
    """The other rank of a message; None for a collective."""


CLOCK_MARK = "nbdist: clock"
"""The name of an event in a rank's trace, whose time the rank has measured."""


@dataclass(frozen=True)
class RankInfo:
    """The identity of a rank. Its number is `rank`; ipyparallel's engine id differs."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    engine_uuid: str
    host: str
    pid: int
    device: str
    """torch's name of the device, such as "cpu" or "cuda:0"."""
    device_name: str
    device_uuid: str | None
    """UUID of the GPU or MIG device; None for a CPU rank."""
    memory_limit: int | None
    """Bytes of device memory that this rank may use; None if there is no cap."""
    threads: int
    transport: str
    generation: int = 0
    """The world's generation, which counts its rebuilds since the start."""
    name: str = ""
    """The beginning of the names of its process's files. It is unique."""
    parent_pid: int = 0
    """The process on the notebook's host that reports the rank's exit."""
    interface: str = ""
    """The interface by which ranks on other hosts reach it; "" if there are none."""
    watched_pid: int = 0
    """The process on the notebook's host that ends with the rank: the rank's own, or
    that of its parent if the rank is on another host."""
    started: str = ""
    """"forked", or the reason why the fork server has not started the rank."""
    mpi: str = ""
    """The MPI library in use, with its version."""
    notes: tuple[str, ...] = ()
    """Notes about this rank for the user, one sentence each."""


@dataclass(frozen=True)
class Sample:
    """Scalars that one rank logged at one step."""

    rank: int
    step: int
    time: float
    scalars: dict[str, float]
    is_internal: bool = False
    """Whether nbdist has recorded them, rather than the user."""


ACTIVITIES = ("compute", "communication", "data", "other")
SHARES = "time/"
"""Before an activity, the metric with the share of the time that a rank spends in it,
such as "time/compute"."""


@dataclass(frozen=True)
class TimeSplit:
    """What a rank's main thread did in the last seconds in which it ran code.

    The shares are those of a number of looks at the thread, and add up to 1.
    """

    compute: float
    """In code that is none of the next three, which includes the waits for a GPU."""
    communication: float
    """In collectives and messages, which includes the waits for other ranks."""
    data: float
    """In data loaders and datasets, which includes the waits for their workers."""
    other: float
    """In files, sleep, programs, connections, or the debugger."""
    reason: str
    """The most frequent kind of the last, as a clause: "it reads or writes files"; ""
    if there is none."""
    place: str
    """The user's line outside of communication that was seen most often, such as
    "In[4] line 7"; "" if there is none."""
    place_share: float
    """The share of that line."""
    call_place: str = ""
    """The user's line in communication that was seen most often."""

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The shares of compute, communication, data and other."""
        return self.compute, self.communication, self.data, self.other


@dataclass(frozen=True)
class DeviceSample:
    """The use of one rank's device and process at one moment."""

    rank: int
    time: float
    device: str
    utilisation: float | None
    """Percent over the last sampling period: of the GPU, or of one CPU core."""
    memory_used: int | None
    """Bytes in use on the GPU by all processes; resident bytes on the CPU."""
    memory_total: int | None
    cpu: float
    """Percent of one core that this process used; 200 is two cores."""
    resident: int
    """Bytes of host memory of this process."""
    allocated: int | None = None
    """Bytes of this rank's tensors in torch's allocator on the GPU."""
    reserved: int | None = None
    """Bytes that torch's allocator has reserved on the GPU, which include the last."""
    temperature: float | None = None
    """Of the GPU, in degrees Celsius. A MIG device has that of its card."""
    power: float | None = None
    """Of the GPU, in watts. A MIG device has that of its card."""
    disk: float | None = None
    """Bytes per second that this process reads from disks and writes to them."""
    network: float | None = None
    """Bytes per second that this host receives and sends, except to itself."""
    bus_bandwidth: float | None = None
    """Of the fastest large collective since the last sample, in bytes per second, as
    NCCL's tests define it: what each link carries. None if there was none."""
    split: TimeSplit | None = None
    """None if the rank has not run enough code yet."""


MarkKind = Literal[
    "commit", "interrupted", "lost", "nan", "replaced", "resized", "restarted"
]
"""What a `Mark` is about: a commit of an elastic state, a cell that was interrupted or
timed out, dead ranks, a value that is not finite, or new members of the world."""


@dataclass(frozen=True)
class Mark:
    """An event that the monitor marks in its charts."""

    time: float
    kind: MarkKind
    text: str
    """What has happened, as a sentence without its full stop."""
    ranks: tuple[int, ...] = ()
    """The ranks that it concerns; empty if it concerns the world."""

    def __str__(self) -> str:
        """The text, after the ranks where it does not begin with them."""
        if not self.ranks or self.text.startswith("rank "):
            return self.text
        return f"rank {format_ranks(self.ranks)}: {self.text}"


@dataclass(frozen=True)
class StepProgress:
    """How far a rank is in a loop whose number of steps is known."""

    time: float
    """When it had done the last step."""
    done: int
    total: int
    unit: str
    """What is counted: "steps" of `nbdist.log`, or a loader's "batches" of an epoch."""


@dataclass(frozen=True)
class Batch:
    """Records that a rank's recorder publishes in one message."""

    rank: int
    source: str
    """The recorder's unique name. A replaced rank has a new recorder."""
    sequence: int
    """The number of the batch, from 0. A gap shows that a batch was lost."""
    dropped: int
    """Number of records that the recorder has dropped because its buffer was full."""
    records: tuple[Sample | DeviceSample | Mark, ...]
    progress: StepProgress | None = None
    """The rank's progress now; None if it is in no loop of known length."""
    step: int | None = None
    """The training step of the rank: what it logged last, or the number of steps of its
    optimizer in this cell. None before the first."""


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call of a collective, with its call site."""

    rank: int
    sequence: int
    """Counts the group's collectives from 1; 0 for a message between two ranks."""
    operation: str
    reduce_op: str | None
    root: int | None
    dtype: str
    shape: tuple[int, ...]
    device: str
    cell: int | None = None
    """The notebook's In[] number, if the call came from a cell."""
    line: int | None = None
    members: tuple[int, ...] = ()
    """The world ranks that take part."""
    has_met: bool = False
    """Whether all ranks have arrived. This rank then waits for no other, unless one
    leaves in the middle."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.description}"

    @property
    def description(self) -> str:
        """The call and where it was made, without the rank."""
        peer = {"send": "to", "recv": "from"}.get(self.operation, "root")
        data = (str(self.shape), self.dtype) if self.dtype != "object" else ()
        details = [
            *data,
            *((self.device,) if self.device != "none" else ()),
            *((f"op={self.reduce_op}",) if self.reduce_op is not None else ()),
            *((f"{peer}={self.root}",) if self.root is not None else ()),
        ]
        where = self.location and f" {'at' if self.cell is None else 'in'} "
        number = f"#{self.sequence} " if self.sequence else ""
        return f"{number}{self.operation}({', '.join(details)}){where}{self.location}"

    @property
    def location(self) -> str:
        """The line that made the call: "In[7] line 4", or "line 4"; "" if unknown."""
        cell = "" if self.cell is None else f"In[{self.cell}] "
        return "" if self.line is None else f"{cell}line {self.line}"


@dataclass(frozen=True)
class ProgressSnapshot:
    """The position of a rank's main thread. Equal snapshots mean no progress."""

    location: str
    """The collective that the thread is in, else the line of its cell."""
    call: CollectiveCall | None
    """The collective in which the thread waits for other ranks."""
    mark: int
    """A hash of the thread's position. It changes when the thread makes progress."""


@dataclass(frozen=True)
class ProfiledOperation:
    """An operation in the profile of a rank."""

    name: str
    calls: int
    cpu_s: float
    """Seconds on the CPU, without the operations that it calls."""
    device_s: float
    """Seconds on the GPU, likewise."""


@dataclass(frozen=True)
class RankProfile:
    """What torch.profiler has measured on one rank."""

    path: str
    """A file in Chrome's trace format, on the rank's host."""
    pid: int
    steps: int
    """Number of steps of optimizers."""
    begun_ns: int
    """The begin, by the host's monotonic clock."""
    ended_ns: int
    clock_offset_ns: int
    """The epoch's time minus the monotonic clock's."""
    marked_ns: int
    """The middle of the event `CLOCK_MARK`, in the epoch's time."""
    operations: tuple[ProfiledOperation, ...]
    """Those that took most time."""

    def covers(self, time_ns: int) -> bool:
        """Whether a time of the monotonic clock lies within the profile."""
        return self.begun_ns <= time_ns <= self.ended_ns

    def copied(self, path: str, offset_ns: int) -> RankProfile:
        """The profile of another host's rank, with its file here and this host's times.

        Args:
            path: The copy of the file.
            offset_ns: The epoch's time minus this host's monotonic clock's.
        """
        by = self.clock_offset_ns - offset_ns
        return replace(
            self,
            path=path,
            begun_ns=self.begun_ns + by,
            ended_ns=self.ended_ns + by,
            clock_offset_ns=offset_ns,
        )


class NcclTotal(NamedTuple):
    """The collectives that a rank has queued with NCCL in one process group."""

    number: int
    digest: int
    """Of the calls, with their reduce-ops and roots. Ranks with equal numbers and
    different digests have called different collectives."""
    late_s: float = 0.0
    """The group's time-out in seconds, if it has passed in one of the calls."""
    sent: Sequence[tuple[int, int]] = ()
    """For some world ranks, the number of messages to them."""
    received: Sequence[tuple[int, int]] = ()
    """For some world ranks, the number of messages from them, also those to come."""

    def exceeds(self, rank: int, theirs: NcclTotal, other: int) -> bool:
        """Whether a rank waits for another one, which has this group's total `theirs`.

        Args:
            rank: The rank of this total.
            theirs: The total of the other rank.
            other: That rank.
        """
        return (
            self.number > theirs.number
            or dict(self.sent).get(other, 0) > dict(theirs.received).get(rank, 0)
            or dict(self.received).get(other, 0) > dict(theirs.sent).get(rank, 0)
        )


@dataclass(frozen=True)
class NcclCall:
    """A collective that a rank has queued with NCCL."""

    kind: str
    """What must be equal on all ranks, such as "all_reduce(Float, 3 elements)"."""
    is_done: bool
    """Whether the rank's GPU has completed it."""


@dataclass(frozen=True)
class Join:
    """A process that joins the world."""

    rank: int
    """Its rank, which is also the index of its device in assignments.json."""


@dataclass(frozen=True)
class Change:
    """A change of the world's members, from one generation to the next."""

    generation: int
    base: int
    """The generation of the last change that every rank completed. The ranks start with
    its communicator, whatever failed changes have done."""
    numbers: dict[str, int]
    """The new rank of each process that stays, by the uuid of its engine."""
    joins: tuple[Join, ...] = ()
    command: tuple[str, ...] = ()
    """The command line that starts the parent of a rank that joins. MPI runs it on the
    notebook's host."""
    addresses: tuple[str, ...] = ()
    """The addresses of the hosts of the ranks; () if all are on one host."""
    lost: tuple[str, ...] = ()
    """The addresses of hosts that were lost since the last change."""


@dataclass(frozen=True)
class ElasticCall:
    """A call of a function decorated with `nbdist.elastic.run`, and its limits."""

    name: str
    max_restarts: int
    min_ranks: int
    max_ranks: int | None
    timeout_s: float
    """Seconds to wait while there are fewer than `min_ranks` ranks."""
    index: int = 0
    """The number of earlier elastic runs in the same cell."""


@dataclass(frozen=True)
class Notice:
    """A message from a rank in an elastic run, while its cell runs."""

    kind: str
    """"entered", "paused", "answered" (a notebook's order) or "left"."""
    call: ElasticCall
    pause: int = 0
    """The number of this rank's pause. Each order is for one pause."""
    reason: str = ""
    """The reason of the pause: "failure", "resize" or "finished"."""
    commit: int = 0
    """The number of the rank's last commit; 0 for none."""
    text: str = ""
    """The error that has released the rank."""
    token: int = 0
    """The token of the answered order."""
    ok: bool = True
    value: object = None
    """The order's result, or (class, message, traceback lines) if it raised."""


@dataclass(frozen=True)
class InputRequest:
    """A rank's request for a line from the user, while its cell runs."""

    token: int
    """Identifies the request in its reply."""
    kind: str
    """"input", "getpass", "debugger", or "quit" where the debugger was quit."""
    prompt: str = ""
    text: str = ""
    """What the debugger has printed since its last request."""
    location: str = ""
    """Where the rank has stopped, such as "In[7] line 4"."""


@dataclass(frozen=True)
class InputReply:
    """The notebook's reply to a request for a line."""

    text: str = ""
    """The line, without its end."""
    at_end: bool = False
    """Whether the user has ended the input, as Ctrl-D does."""
    refusal: str = ""
    """Why nobody can answer; "" for an answer."""
    is_interrupted: bool = False
    """Whether nobody answers because the call is being interrupted."""


@dataclass(frozen=True)
class CommMessage:
    """A message of a comm, between a widget on a rank and its model in a front end."""

    kind: str
    """"comm_open", "comm_msg" or "comm_close"."""
    comm: str
    """The unique id of the comm, which is also the id of the widget's model."""
    data: dict[str, Any]
    """Values that JSON has."""
    metadata: dict[str, Any] = field(default_factory=dict)
    buffers: tuple[bytes, ...] = ()
    target: str = ""
    """Who takes a "comm_open" in the front end: "jupyter.widget" for a widget."""


@dataclass(frozen=True)
class CommBatch:
    """Messages of a rank's comms, in their order."""

    rank: int
    messages: tuple[CommMessage, ...]


@dataclass(frozen=True)
class Verdict:
    """The notebook's decision that ends a pause."""

    action: str
    """"continue" with the current ranks, "finish", "give up" or "interrupt"."""
    why: str = ""
    """The reason for the error's message; "" if the original error suffices."""
    completed_resize: int = 0
    """The number of the last resize request that was completed."""


@dataclass(frozen=True)
class Resume:
    """A file with the values that every new `State` begins with."""

    path: str
    trusted: bool = False
    """Whether this cluster has written the file. Only then may it hold pickles."""


@dataclass(frozen=True)
class Failure:
    """An exception on one rank."""

    rank: int
    host: str
    ename: str
    evalue: str
    location: str = ""
    """The innermost line of the user's code, such as "In[7] line 4"."""
    traceback: tuple[str, ...] = field(default=(), repr=False)
    """Formatted lines, with ANSI colours, as IPython made them on the rank."""
    ending: str = ""
    """Of a rank that died: its signal or exit code, as of `RankDied`."""


@dataclass(frozen=True)
class Variable:
    """One name of a rank's namespace."""

    name: str
    kind: str
    """The name of its class."""
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    value: str
    """A short text, or the Euclidean norm of a tensor or array."""
    digest: str
    """Two values that are compared are equal, bit for bit, if their digests are."""
    uncompared: str = ""
    """Why the value cannot be compared; "" if it is compared."""


@dataclass(frozen=True)
class Shown:
    """The value of an expression on one rank."""

    text: str
    digest: str
    """As for `Variable`."""
    uncompared: str = ""
    """As for `Variable`."""
    rows: tuple[str, ...] = ()
    """If the last lines of the text are the rows of a table, the digest of each row; ""
    for a row that cannot be compared."""
    image: str = ""
    """A PNG in base64, of a value that has one, such as a figure."""


@dataclass(frozen=True)
class HeldTensor:
    """The memory that one tensor holds, or several that share it."""

    name: str
    """Where it is, such as "model.fc.weight"; "" if no name leads to it."""
    kind: str
    """The name of the tensor's class."""
    shape: tuple[int, ...]
    dtype: str
    device: str
    size: int
    """Bytes of its storage, of which a view may use a part."""


@dataclass(frozen=True)
class MemoryReport:
    """The memory that one rank holds."""

    sizes: dict[str, int | None]
    """Bytes by name, as `nbdist.engine.control_handlers.memory` returns them."""
    totals: dict[str, int]
    """Bytes of all tensors that Python holds, by device."""
    counts: dict[str, int]
    """The number of these tensors by device. Tensors that share memory count once."""
    largest: tuple[HeldTensor, ...]
    """The largest tensors, the largest first."""
    note: str = ""
    """Why some tensors may have no name."""


@dataclass(frozen=True)
class LeafDigest:
    """One leaf of one rank's value."""

    name: str
    """Such as "model.layers.3.weight"; different for each leaf of the value."""
    form: str
    """dtype, shape and kind of device, or type."""
    digest: bytes | str
    """Equal for equal contents. A text says why the leaf cannot be compared."""
    text: str = ""
    """A short text of a plain value."""


@dataclass(frozen=True)
class LeafComparison:
    """One leaf of the ranks' values: a tensor, an array or a plain value."""

    name: str
    """Such as "model.layers.3.weight"."""
    form: str
    """dtype, shape and kind of device, or type; all forms if the ranks' differ."""
    groups: tuple[tuple[int, ...], ...]
    """The ranks with equal values, the largest group first."""
    uncompared: str = ""
    """Why the leaf cannot be compared; "" if it is compared."""
    count: int | None = None
    """The most elements of one rank that differ from those of the first group."""
    size: int = 0
    """Number of elements."""
    index: tuple[int, ...] = ()
    """The first index at which a rank differs from the first group."""
    largest: float | None = None
    """The largest difference from the first group."""
    values: tuple[str, ...] = ()
    """The value of each group, if it is not made of numbers."""

    @property
    def is_equal(self) -> bool:
        """Whether it is known to be equal on all ranks."""
        return len(self.groups) == 1 and not self.uncompared

    @property
    def difference(self) -> str:
        """The difference in words; "" if there is none or it was not measured."""
        if self.count is None:
            pairs = zip(self.groups, self.values, strict=False)
            texts = [f"{v} on rank {format_ranks(g)}" for g, v in pairs if v]
            if " | " in self.form:
                texts.append(self.form)
            return ", ".join(texts)
        at = f", first at [{', '.join(map(str, self.index))}]" if self.index else ""
        return (
            f"{self.count:,} of {self.size:,} elements{at}, by at most "
            f"{self.largest:.3g}"
        )

    def __str__(self) -> str:
        most, *others = map(format_ranks, self.groups)
        text = f"{self.name} differs on rank {' and '.join(others)} from rank {most}"
        return f"{text} ({self.difference})" if self.difference else text


@dataclass(frozen=True)
class Comparison:
    """The ranks' values of one expression, leaf by leaf."""

    ranks: tuple[int, ...]
    leaves: tuple[LeafComparison, ...]
    errors: dict[int, str]
    """Why a rank has no value."""
    were_busy: bool = False
    """Whether a rank was busy. The differences of tensors are then not measured."""

    @classmethod
    def of(
        cls,
        values: Mapping[int, Sequence[LeafDigest]],
        errors: Mapping[int, str],
        *,
        were_busy: bool = False,
    ) -> Comparison:
        """Compare the leaves of all ranks by their digests.

        Args:
            values: The leaves of each rank that has a value.
            errors: As the attribute.
        """
        tables = {
            rank: {leaf.name: leaf for leaf in leaves}
            for rank, leaves in values.items()
        }
        names = dict.fromkeys(name for table in tables.values() for name in table)
        leaves = tuple(_compared(name, tables) for name in names)
        return cls(tuple(sorted({*values, *errors})), leaves, dict(errors), were_busy)

    @property
    def differing(self) -> list[LeafComparison]:
        """The leaves that differ, in the value's order."""
        return [leaf for leaf in self.leaves if len(leaf.groups) > 1]

    @property
    def uncompared(self) -> list[LeafComparison]:
        """The leaves that cannot be compared."""
        return [leaf for leaf in self.leaves if leaf.uncompared]


def _compared(
    name: str, tables: Mapping[int, Mapping[str, LeafDigest]]
) -> LeafComparison:
    groups: dict[object, list[int]] = {}
    forms: dict[str, None] = {}
    texts: dict[int, str] = {}
    uncompared = ""
    for rank, table in tables.items():
        leaf = table.get(name)
        if leaf is not None and isinstance(leaf.digest, str):
            uncompared = uncompared or leaf.digest
        groups.setdefault(leaf and (leaf.form, leaf.digest), []).append(rank)
        forms["missing" if leaf is None else leaf.form] = None
        texts[rank] = "" if leaf is None else leaf.text
    # Those that most ranks agree with are first.
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    values = tuple(texts[ranks[0]] for ranks in ordered)
    return LeafComparison(
        name,
        " | ".join(forms),
        tuple(map(tuple, ordered)),
        uncompared,
        values=values if len(ordered) > 1 and any(values) else (),
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a short list, such as "0-2,5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(
        str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts
    )


def ranks_in(text: str) -> list[int]:
    """Parse ranks such as "0,2-3".

    Raises:
        ValueError: The text has another form.
    """
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(f"{text!r}: expected ranks such as 0 or 0,2-3")
        ranks.update(range(int(first), int(last) + 1))
    return sorted(ranks)


def differ_in_nccl(calls: Mapping[int, Mapping[str, NcclTotal]]) -> bool:
    """Whether two ranks have queued different work of NCCL.

    Args:
        calls: The totals of each rank, by the name of the group.
    """
    totals = [
        {name: total[:3] for name, total in each.items()} for each in calls.values()
    ]
    return are_unequal(totals) or any(
        mine[name].exceeds(rank, theirs[name], other)
        for (rank, mine), (other, theirs) in itertools.permutations(calls.items(), 2)
        for name in mine.keys() & theirs.keys()
    )


def are_unequal(counts: Iterable[Mapping[str, object]]) -> bool:
    """Whether two ranks have different counts for the same name.

    Args:
        counts: The counts of each rank, by name.
    """
    found: dict[str, set[object]] = {}
    for each in counts:
        for name, count in each.items():
            found.setdefault(name, set()).add(count)
    return any(len(different) > 1 for different in found.values())
