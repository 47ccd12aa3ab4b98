"""One worker process, as the notebook sees it."""

from __future__ import annotations

from dataclasses import dataclass

from nbdist.cluster.supervisor_client import Keeper, how

__all__ = ["Report", "Worker"]

LAST_LINES = 12


@dataclass(frozen=True)
class Report:
    """How a worker fared, as of one moment."""

    id: int
    rank: int
    role: str
    status: str
    """As `Worker.status`."""
    exit_code: int | None
    """Negative for a signal; None where it has not ended, or nobody knows."""
    reason: str
    """Why it is not a success: "exit code 3", "SIGKILL"; "" where it is one."""
    last_lines: tuple[str, ...]
    """Of what it has printed."""

    def __str__(self) -> str:
        reason = f" ({self.reason})" if self.reason else ""
        head = f"worker {self.id}: {self.status}{reason}"
        lines = self.last_lines if self.status in ("failed", "lost") else ()
        return "\n".join([head, *(f"    {line}" for line in lines)])


class Worker:
    """A handle on a process that `nbdist.launch_workers` has started."""

    def __init__(self, number: int, rank: int, role: str, keeper: Keeper) -> None:
        self.id = number
        """Its number among all that this notebook has launched."""
        self.rank = rank
        """Its number among those that were launched with it."""
        self.role = role
        """"worker" or "ps"."""
        self.name = f"worker{number}"
        self.keeper = keeper
        self.stopped = False
        """Whether `stop_workers` was asked to end it."""
        self.told = False
        """Whether somebody has waited for its end, and learnt of it."""
        self._read = 0

    @property
    def pid(self) -> int | None:
        """Its process; None until it has begun."""
        return self.keeper.pid(self.name)

    @property
    def exit_code(self) -> int | None:
        """What it ended with, negative for a signal; None while it runs."""
        return self.keeper.exit_code(self.name)

    @property
    def ended(self) -> bool:
        return self.exit_code is not None or not self.keeper.alive

    @property
    def status(self) -> str:
        """ "starting", "running", "succeeded", "failed", "stopped" or "lost".

        It is lost when the process that guards the workers was killed, and all of them
        with it.
        """
        code = self.exit_code
        if code is None:
            if not self.keeper.alive:
                return "lost"
            return "starting" if self.pid is None else "running"
        if code == 0:
            return "succeeded"
        return "stopped" if self.stopped else "failed"

    @property
    def output(self) -> str:
        """All that it has printed so far, on standard output and error."""
        path = self.keeper.log(self.name)
        return (
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        )

    def new_lines(self) -> list[str]:
        """The lines that it has printed since the last call.

        One that it has not finished comes with its rest, or with its own end.
        """
        ended = self.ended  # asked first: nothing comes after what is read then
        path = self.keeper.log(self.name)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        if not ended:
            data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        return data.decode("utf-8", "replace").splitlines()

    def report(self) -> Report:
        """How it fares now."""
        status, code = self.status, self.exit_code
        reason = "" if code in (None, 0) else how(code)
        if status == "lost":
            reason = "the guard process was killed"
        lines = tuple(self.output.splitlines()[-LAST_LINES:])
        return Report(self.id, self.rank, self.role, status, code, reason, lines)

    def __repr__(self) -> str:
        return f"<{self.role} {self.id}, rank {self.rank}: {self.status}>"
