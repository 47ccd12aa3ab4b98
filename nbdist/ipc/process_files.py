"""The files by which a rank's process reports to the notebook.

All lie in the cluster's run folder and begin with the process's name, such as `rank2`:

    rank2.stage            how far the start is, as JSON
    rank2.failed           the traceback of a start that has failed
    rank2.exit             the exit code, written by the rank's parent process
    rank2.refused          the ranks that this one was to join have given it up
    rank2.stdout, .stderr  what goes to descriptors 1 and 2
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.fork_messages import RANK_PARENT
from nbdist.ipc.launch_environment import launched_rank

__all__ = [
    "CAPTURED",
    "JOINING",
    "Process",
    "describe_exit",
    "process_name",
    "read_exit_report",
]

EXIT_REPORT_BYTES = 16
JOINING = "joining MPI"
"""The stage in which a process waits for the ranks that it joins."""
CAPTURED = ("stdout", "stderr")
"""Suffixes of the files that take what is written to descriptors 1 and 2."""


@dataclass(frozen=True)
class Process:
    """One process of a rank: where its files lie, and its number."""

    run_dir: Path
    rank: int
    generation: int
    """The generation of the world that the process enters."""

    @classmethod
    def of_arguments(cls, arguments: list[str]) -> Process:
        """From `--join RANK GENERATION`, or from the MPI launcher's environment."""
        run_dir = Path(os.environ["NBDIST_RUN_DIR"])
        if arguments[:1] == ["--join"]:
            return cls(run_dir, int(arguments[1]), int(arguments[2]))
        return cls(run_dir, launched_rank(), 0)

    @property
    def name(self) -> str:
        """The beginning of its files' names."""
        return process_name(self.rank, self.generation)

    @property
    def captured(self) -> dict[str, Path]:
        """The files of descriptors 1 and 2, by `CAPTURED`."""
        return {name: self.path(name) for name in CAPTURED}

    @property
    def is_refused(self) -> bool:
        """Whether the ranks that this one was to join have given it up."""
        return self.path("refused").exists()

    def path(self, suffix: str) -> Path:
        """One of its files in the cluster's folder."""
        return self.run_dir / f"{self.name}.{suffix}"

    def report_stage(self, stage: str) -> None:
        """Tell the notebook how far the start is, and which processes these are.

        The first stage is told by the rank's parent process, which is then both.
        """
        pid = os.getpid()
        record = {
            "pid": pid,
            "parent_pid": int(os.environ.get(RANK_PARENT, pid)),
            "stage": stage,
            "time": time.time(),
        }
        self._write("stage", json.dumps(record))

    def report_failure(self, error: BaseException) -> None:
        """Tell the notebook which error has ended the start."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        self._write("failed", "".join(lines))

    def reserve_exit_report(self) -> None:
        """Take the disk space of `report_exit`: the disk may be full by then."""
        self._write_exit_report("")

    def report_exit(self, code: int) -> None:
        """Tell the notebook the exit code, negative for a signal."""
        self._write_exit_report(str(code))

    def _write(self, suffix: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            write_atomically(
                self.path(suffix),
                lambda file: file.write(text.encode("utf-8", "backslashreplace")),
                mode=0o600,
                durable=False,
            )

    def _write_exit_report(self, text: str) -> None:
        with contextlib.suppress(OSError):  # no room, or the folder has been removed
            descriptor = os.open(self.path("exit"), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # In place: the blocks that are reserved suffice.
                os.pwrite(descriptor, text.ljust(EXIT_REPORT_BYTES).encode(), 0)
            finally:
                os.close(descriptor)


def process_name(rank: int, generation: int) -> str:
    """The beginning of the names of a process's files."""
    return f"rank{rank}-{generation}" if generation else f"rank{rank}"


def read_exit_report(run_dir: Path, name: str) -> str | None:
    """The end of a rank's process, in words; None if none is written.

    Args:
        name: The process's, as of `process_name`.
    """
    try:
        text = (run_dir / f"{name}.exit").read_text().strip()
    except FileNotFoundError:
        return None
    return describe_exit(int(text)) if text else None


def describe_exit(code: int) -> str:
    """An exit code in words: "exit code 1"; "SIGKILL" for -9, as subprocess has it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
