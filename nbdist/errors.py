"""The errors that nbdist raises.

NbdistError
├── UsageError (ValueError)      a bad argument or option; nothing was started
│   ├── UnsupportedCollective (RuntimeError)  not defined for this dtype or op
│   └── ReductionPending (AssertionError)  gradients are being reduced
├── WrongProcess                 a rank's function called in the notebook
├── NoInput (EOFError)           a rank asks for a line, and nobody can answer
├── ClusterError
│   ├── NotRunning               there is no cluster to talk to
│   ├── AlreadyRunning           a cluster is running and was left untouched
│   ├── StartError               the cluster did not come up; all is cleaned up
│   ├── ChangeFailed             the ranks could not make a new world
│   ├── ScaleFailed              the world keeps its size, and its ranks continue
│   └── RankDied                 a rank's process ended while it was needed
├── CellError                    a cell failed on one or more ranks
│   ├── CellTimeout              the cell's --timeout ran out
│   ├── CellInterrupted          the cell was interrupted
│   ├── PortInUse                ranks have each started a world on one port
│   └── NcclMismatch             ranks called different collectives of NCCL
├── RestartsSpent                an elastic run gave up; its last commit is intact
├── CheckpointError              a file of saved state is damaged, or is another file
├── ReplicasDiffer               models are not equal on all ranks
├── NotFinite (FloatingPointError)  a value of a training is NaN or infinite
├── TransferError                a value could not travel to or from the ranks
├── SaveError                    a file was not written; the old one is untouched
└── CollectiveError              raised on the ranks
    ├── CollectiveMismatch       ranks called different collectives
    ├── CollectiveTimeout        some ranks never arrived
    └── CollectiveAborted        released because another rank left it

A message gives the value that was wrong and the next thing to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyRunning",
    "CellError",
    "CellInterrupted",
    "CellTimeout",
    "ChangeFailed",
    "CheckpointError",
    "ClusterError",
    "CollectiveAborted",
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "NbdistError",
    "NcclMismatch",
    "NoInput",
    "NotFinite",
    "NotRunning",
    "PortInUse",
    "RankDied",
    "ReductionPending",
    "ReplicasDiffer",
    "RestartsSpent",
    "SaveError",
    "ScaleFailed",
    "StartError",
    "TransferError",
    "UnsupportedCollective",
    "UsageError",
    "WrongProcess",
    "encodable",
    "message_of",
    "text_of",
]


def encodable(text: str) -> str:
    """The text with lone surrogates escaped, which UTF-8 cannot encode.

    It is of class `str`: an object of a subclass may not be picklable.
    """
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")


def text_of(error: BaseException) -> str:
    """The class and the message of an error, even where its `__str__` raises."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def message_of(error: BaseException) -> str:
    """`str(error)` as `encodable` text; where `__str__` raises, a text that says so."""
    try:
        return encodable(str(error))
    except BaseException as second:  # noqa: BLE001
        # A user's `__str__` may raise anything, and the reply must still be sent.
        return f"<its __str__ raised {type(second).__name__}>"


class NbdistError(Exception):
    """Base of all errors that nbdist raises."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without nbdist's own frames."""
        return [f"\x1b[31m{type(self).__name__}\x1b[39m: {self}"]


class UsageError(NbdistError, ValueError):
    """A bad argument or option. Nothing was started or sent."""


class UnsupportedCollective(UsageError, RuntimeError):
    """The collective is not defined for this dtype, reduce-op or device."""


class ReductionPending(UsageError, AssertionError):
    """The gradients must not be changed now, because they are being reduced."""


class WrongProcess(NbdistError, RuntimeError):
    """A rank's function was called in the notebook kernel, or the reverse."""


class NoInput(NbdistError, EOFError):
    """A program on a rank asks for a line of input, and nobody can answer."""


class ClusterError(NbdistError, RuntimeError):
    """The cluster is not in the state that the call needs."""


class NotRunning(ClusterError):
    """There is no cluster to talk to."""


class AlreadyRunning(ClusterError):
    """A cluster is already running. It was left untouched."""


class StartError(ClusterError):
    """The cluster did not come up. Everything that was started is cleaned up.

    `died` is true where a process ended while it was starting.
    """

    def __init__(self, message: str, *, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


class StartInterrupted(StartError, KeyboardInterrupt):
    """The user has interrupted the start. Everything that was started is cleaned up."""


class ChangeFailed(ClusterError):
    """A change of the world's members failed. Every rank that lives keeps its state.

    `newcomer` is true where only a rank that was to join has failed. `stuck` is true
    where a rank that lives does not answer.
    """

    def __init__(
        self, message: str, *, newcomer: bool = False, stuck: bool = False
    ) -> None:
        super().__init__(message)
        self.newcomer = newcomer
        self.stuck = stuck


class ScaleFailed(ClusterError):
    """The world could not change its size. Its ranks continue with their variables."""


class RankDied(ClusterError):
    """A rank's process ended while it was needed.

    `summary` is one line with the exit code or signal. `details` are the lines that
    explain it, such as the rank's last Python stack; "" for none. `ending` is the
    signal, such as "SIGKILL", or "exit code 3"; "" if it is not known.
    """

    def __init__(self, summary: str, details: str = "", ending: str = "") -> None:
        super().__init__(summary)
        self.summary = summary
        self.details = details
        self.ending = ending

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.summary, self.details)))


class CellError(NbdistError):
    """A cell failed on one or more ranks.

    `rendered` holds the lines that a notebook shows: one traceback for each distinct
    error. `result` is the cell's `CellResult`: the output and outcome of each rank.
    """

    def __init__(self, message: str, rendered: list[str] | None = None) -> None:
        super().__init__(message)
        self.rendered = rendered or []
        self.result: Any = None
        self.note = ""
        """What nbdist did after the failure, such as the replacement of a rank."""

    def __str__(self) -> str:
        return "\n".join(text for text in (super().__str__(), self.note) if text)

    def _render_traceback_(self) -> list[str]:
        return [*self.rendered, *super()._render_traceback_()]


class CellTimeout(CellError):
    """The cell's --timeout ran out before every rank had finished."""


class CellInterrupted(CellError, KeyboardInterrupt):
    """The cell was interrupted. Every rank has stopped and keeps its variables."""


class PortInUse(CellError):
    """Ranks have each started a world of their own on the same port."""


class NcclMismatch(CellError):
    """The cell's ranks called different collectives of NCCL, which compares none."""


class RestartsSpent(NbdistError, RuntimeError):
    """An elastic run ended because its ranks could not continue. The commit is kept."""


class CheckpointError(NbdistError, ValueError):
    """A file of saved state is damaged or incomplete, or is not a file of nbdist's."""


class ReplicasDiffer(NbdistError, RuntimeError):
    """Models or optimizers are not equal on all ranks.

    `comparison` has every leaf, as a `wire.Comparison`.
    """

    def __init__(self, message: str, comparison: Any = None) -> None:
        super().__init__(message)
        self.comparison = comparison


class NotFinite(NbdistError, FloatingPointError):
    """A parameter, an output or a gradient of a watched model is NaN or infinite."""


class TransferError(NbdistError):
    """A value could not travel between the notebook and the ranks."""


class SaveError(NbdistError, OSError):
    """A file could not be written. The old file is untouched."""


class CollectiveError(NbdistError, RuntimeError):
    """A collective did not complete."""


class CollectiveMismatch(CollectiveError):
    """The ranks called different collectives. No data was touched."""


class CollectiveTimeout(CollectiveError):
    """Some ranks did not arrive before the timeout."""


class CollectiveAborted(CollectiveError):
    """This rank was released from a collective because another rank left it."""
