"""The answers of the tools, whose schemas have the docstrings of the fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Call",
    "Cluster",
    "Collectives",
    "Comparison",
    "Failure",
    "Leaf",
    "Output",
    "Parting",
    "RankState",
    "Result",
    "Stack",
    "State",
    "Value",
    "Values",
]


class Answer(BaseModel):
    """An answer, or a part of one."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Cluster(Answer):
    """A kept cluster."""

    name: str
    host: str
    folder: str
    """The working folder of the ranks."""
    ranks: int
    """0 until all have started."""
    died: list[int]
    """The ranks whose processes have ended."""
    doing: str
    """The calls that run or wait, such as "In[5]"; "" if none."""
    notebook: int | None
    """The pid of the notebook's kernel that is attached."""


class RankState(Answer):
    """What one rank does."""

    rank: int
    state: str
    """"idle", "busy", "dead", or "silent" if it does not answer: the process is
    stopped, or a thread holds the GIL."""
    doing: str = ""
    """The cell that it runs, such as "In[5]"."""
    at: str = ""
    """The line and the collective where it is, or was when it last answered."""
    seconds: float | None = None
    """Since the cell began."""
    ending: str = ""
    """Of a dead rank: its signal, such as "SIGKILL", or its exit code."""
    died: str = ""
    """Of a dead rank: how it died, with its last lines."""
    device: str
    memory_bytes: int | None = None
    """On its GPU by torch's allocator, or the process's memory on a CPU."""
    host: str
    pid: int


class State(Answer):
    """What all ranks do."""

    cluster: str
    doing: str
    """The calls that run or wait, such as "In[5]"; "" if none."""
    ranks: list[RankState]


class Stack(Answer):
    """The Python stack of ranks, from the user's code on. Equal stacks are one."""

    ranks: list[int]
    stack: str
    """"" on ranks that do not answer."""


class Value(Answer):
    """A value that some ranks have."""

    ranks: list[int]
    value: str
    """A tensor has its statistics, and a module its parameters and gradients."""
    uncompared: str
    """Why the value cannot be compared between ranks; "" if it was."""


class Values(Answer):
    """The values of an expression."""

    expression: str
    is_equal: bool
    """Whether it is equal on all ranks that answered, bit for bit."""
    values: list[Value]
    silent: list[int]
    """The ranks that do not answer."""


class Leaf(Answer):
    """A parameter or another part of a value."""

    name: str
    form: str
    """dtype, shape and kind of device, or type."""
    groups: list[list[int]]
    """The ranks with equal values, the largest group first."""
    difference: str
    """In words: how many elements differ, where first, and by how much."""
    uncompared: str
    """Why it cannot be compared; "" if it was."""


class Comparison(Answer):
    """A value compared on all ranks, leaf by leaf."""

    expression: str
    is_equal: bool
    leaves: int
    """The number of all leaves."""
    different: list[Leaf]
    """Those that differ or cannot be compared."""
    errors: dict[int, str]
    """Why a rank has no value."""
    were_busy: bool
    """Whether a cell ran: the values may then be of different moments."""


class Call(Answer):
    """A collective that some ranks have called alike."""

    ranks: list[int]
    operation: str
    reduce_op: str
    root: int | None
    dtype: str
    shape: str
    device: str
    at: str
    """The line that called it, if it is known."""


class Parting(Answer):
    """The first collective in which the ranks parted."""

    name: str
    """Such as "all_reduce #12"."""
    calls: list[Call]
    """More than one if the ranks have called different collectives."""
    missing: list[int]
    """The ranks that have not called it."""
    died: list[int]
    """The ranks that died in it."""
    waiting: list[int]
    """The ranks that wait in it."""
    failed: list[int]
    """The ranks that were released from it with an error."""


class Collectives(Answer):
    """The last collectives of all ranks, also of ranks that are blocked or dead."""

    summary: str
    """One sentence: where the ranks parted, and who waits for whom."""
    parted: Parting | None
    table: str
    """The last calls, a column for each rank."""


class Failure(Answer):
    """An error of one rank."""

    rank: int
    error: str
    """The class, such as "ValueError", or "RankDied"."""
    message: str
    at: str
    """The user's innermost line. In[0] is the code of this call."""
    is_effect: bool
    """Whether it is the effect of another rank's failure or of the time limit."""
    ending: str
    """Of a rank that died: its signal, such as "SIGKILL", or its exit code."""
    traceback: str


class Output(Answer):
    """What one rank has printed and displayed."""

    rank: int
    stdout: str
    stderr: str
    displays: list[str]
    """The texts of displays, and of the last expression."""
    seconds: float
    cut: int
    """The number of characters that were left out of the text."""


class Result(Answer):
    """The end of code that was run."""

    outcome: str
    """"finished", "failed", "timed out" or "interrupted"."""
    ranks: list[Output]
    failures: list[Failure]
    message: str
    """The error as a notebook shows it; "" if it has finished."""
    note: str
    """What followed, such as the replacement of a dead rank."""
