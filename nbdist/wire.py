"""The records that cross between the notebook kernel and the ranks.

Plain frozen dataclasses of built-in types: both sides can import them without torch,
MPI or widgets, and pickle carries them. Times are seconds since the epoch, sizes are
bytes, and what is not available is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = [
    "ELASTIC",
    "REFUSED",
    "REPLY",
    "REQUEST",
    "TELEMETRY",
    "Batch",
    "Change",
    "CollectiveCall",
    "DeviceSample",
    "ElasticCall",
    "Failure",
    "Join",
    "Notice",
    "ProgressSnapshot",
    "RankInfo",
    "Resume",
    "Sample",
    "Verdict",
    "format_ranks",
]


REQUEST = "nbdist_request"
REPLY = "nbdist_reply"
TELEMETRY = "nbdist_telemetry"
ELASTIC = "nbdist_elastic"
REFUSED = "nbdist_refused"
"""The types of our messages, in Jupyter's sense."""


@dataclass(frozen=True)
class RankInfo:
    """Who a rank is. `rank` is the one numbering; an engine's id is not."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    engine_uuid: str
    host: str
    pid: int
    device: str
    """torch's name for it: "cpu" or "cuda:0"."""
    device_name: str
    device_uuid: str | None
    """NVML's UUID of the GPU or MIG device; None for a CPU rank."""
    memory_limit: int | None
    """Bytes of device memory this rank may take; None when it is not capped."""
    threads: int
    transport: str
    generation: int = 0
    """Counts the changes of membership since the start."""
    name: str = ""
    """Of its process's files in the cluster's folder; no later process has it."""
    parent_pid: int = 0
    """Of the process that started the rank and reports how it ends."""
    mpi: str = ""
    """The MPI library in use, with its version."""
    notes: tuple[str, ...] = ()
    """What a user should know about this rank, one sentence each."""


@dataclass(frozen=True)
class Sample:
    """Scalars that one rank logged at one step."""

    rank: int
    step: int
    time: float
    scalars: dict[str, float]


@dataclass(frozen=True)
class DeviceSample:
    """What one rank's device and process were doing at one moment."""

    rank: int
    time: float
    device: str
    utilisation: float | None
    """Percent of the last sampling period: of the GPU, or of one CPU core."""
    memory_used: int | None
    """Bytes in use on the GPU by everyone; a CPU rank's own resident bytes."""
    memory_total: int | None
    memory_own: int | None
    """Bytes in this rank's torch allocator on the GPU; resident bytes on the CPU."""
    cpu: float
    """Percent of one core this process used; 200 is two cores."""


@dataclass(frozen=True)
class Batch:
    """What a rank's recorder publishes at once."""

    rank: int
    source: str
    """Names the recorder: another one, in a replaced rank, counts from 0 again."""
    sequence: int
    """Counts the recorder's batches from 0, so that a lost one is noticed."""
    dropped: int
    """Records that found no room in the recorder's buffer, since its start."""
    records: tuple[Sample | DeviceSample, ...]


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's view of a collective: what it called, and where."""

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
    """The notebook's In[] number, where the call came from a cell."""
    line: int | None = None
    members: tuple[int, ...] = ()
    """The world ranks that take part."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.description}"

    @property
    def description(self) -> str:
        """The call and its place, without its rank."""
        peer = {"send": "to", "recv": "from"}.get(self.operation, "root")
        data = (str(self.shape), self.dtype) if self.dtype != "object" else ()
        details = [
            *data,
            *((self.device,) if self.device != "none" else ()),
            *((f"op={self.reduce_op}",) if self.reduce_op is not None else ()),
            *((f"{peer}={self.root}",) if self.root is not None else ()),
        ]
        place = "" if self.line is None else f" at line {self.line}"
        if self.cell is not None:
            place = f" in In[{self.cell}] line {self.line}"
        number = f"#{self.sequence} " if self.sequence else ""
        return f"{number}{self.operation}({', '.join(details)}){place}"


@dataclass(frozen=True)
class ProgressSnapshot:
    """Where the main thread of a rank is. Two are equal if it has not moved between."""

    place: str
    """The collective that the thread is in, else the line of its cell."""
    call: CollectiveCall | None
    """The collective in which the thread waits for other ranks."""
    mark: int
    """A hash of the thread's position, which differs once the thread has moved."""


@dataclass(frozen=True)
class Join:
    """A process that is to join the world."""

    rank: int
    """The number that it takes; its device is that entry of assignments.json."""


@dataclass(frozen=True)
class Change:
    """How one generation of the world becomes the next."""

    generation: int
    base: int
    """Generation of the last change that every rank completed. The ranks start from
    its communicator, so that an attempt which failed leaves nothing behind."""
    numbers: dict[str, int]
    """The new rank of each process that stays, by its engine's uuid."""
    joins: tuple[Join, ...] = ()


@dataclass(frozen=True)
class ElasticCall:
    """A call of a function that `nbdist.elastic.run` decorates, and its limits."""

    name: str
    max_restarts: int
    min_ranks: int
    max_ranks: int | None
    timeout_s: float
    """Seconds to wait for ranks, while there are fewer than `min_ranks`."""
    index: int = 0
    """How many elastic runs its cell has begun before it."""


@dataclass(frozen=True)
class Notice:
    """What a rank in an elastic run says out of turn, while its cell runs."""

    kind: str
    """"entered", "paused", "answered" (an order of the notebook's) or "left"."""
    call: ElasticCall
    pause: int = 0
    """Counts this rank's pauses: an order is for one of them."""
    reason: str = ""
    """Of a pause: "failure", "resize" or "finished"."""
    commit: int = 0
    """The number of the rank's last commit; 0 for none."""
    text: str = ""
    """What has released it."""
    token: int = 0
    """Of the order that is answered."""
    ok: bool = True
    value: object = None
    """What the order gave; (class, message, traceback lines) where it raised."""


@dataclass(frozen=True)
class Verdict:
    """What ends a pause."""

    action: str
    """"go on" with the ranks that there are now, "finish", "give up" or "interrupt"."""
    why: str = ""
    """In words, for the error; "" where the error that led to it says all."""
    completed_resize: int = 0
    """Number of the last resize request that was completed."""


@dataclass(frozen=True)
class Resume:
    """A file that every new `State` begins from."""

    path: str
    trusted: bool = False
    """Whether this cluster has written it, so that it may hold any object."""


@dataclass(frozen=True)
class Failure:
    """An exception on one rank."""

    rank: int
    host: str
    ename: str
    evalue: str
    place: str = ""
    """The last line of the user's own that was reached: "In[7] line 4"."""
    traceback: tuple[str, ...] = field(default=(), repr=False)
    """Formatted lines, with ANSI colours, as IPython made them on the rank."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as a short list: "0-2,5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(
        str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts
    )
