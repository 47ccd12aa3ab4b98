"""The files through which a rank's process reports to the notebook.

They are in the cluster's run folder. Each name begins with the process's name, such as
`rank2`:

    rank2.stage            the stage of the start, as JSON
    rank2.failed           the traceback of a start that has failed
    rank2.exit             the exit code, written by the rank's parent process
    rank2.reason           why the rank has ended itself
    rank2.refused          exists if the ranks no longer wait for this newcomer
    rank2.stdout, .stderr  the output to descriptors 1 and 2
    rank2.begun            where the output to descriptor 2 of the last cell begins
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.fork_messages import RANK_PARENT
from nbdist.ipc.launch_environment import launched_rank

TYPE_CHECKING = False  # the parent of each rank does not import `typing`
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CAPTURED",
    "JOINING",
    "REGISTERING",
    "Process",
    "describe_exit",
    "process_name",
    "read_exit_report",
    "read_reason",
    "remove_all_cuda_files",
    "remove_cuda_files",
    "report_reason",
    "stderr_of_cell",
]

EXIT_REPORT_BYTES = 16
JOINING = "joining MPI"
"""The stage in which a newcomer waits for the ranks of the world."""
REGISTERING = "registering"
"""The last stage of a start."""
CAPTURED = ("stdout", "stderr")
"""Suffixes of the files that receive the output to descriptors 1 and 2."""
SHARED_MEMORY = Path("/dev/shm")
"""Where torch and CUDA make their files."""


class Process:
    """One process of a rank.

    Args:
        run_dir: The cluster's run folder.
        rank: The rank.
        generation: The generation of the world that the process enters.
    """

    def __init__(self, run_dir: Path, rank: int, generation: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.generation = generation
        self.notes: tuple[str, ...] = ()
        """What the user should know of its start, one sentence each."""

    @classmethod
    def of_arguments(
        cls, arguments: list[str], environment: Mapping[str, str] = os.environ
    ) -> Process:
        """The process of `--join RANK GENERATION`, or of the launcher's variables."""
        run_dir = Path(environment["NBDIST_RUN_DIR"])
        if arguments[:1] == ["--join"]:
            return cls(run_dir, int(arguments[1]), int(arguments[2]))
        return cls(run_dir, launched_rank(environment), 0)

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
        """Whether the ranks no longer wait for this newcomer."""
        return self.path("refused").exists()

    def path(self, suffix: str) -> Path:
        """One of its files in the cluster's folder."""
        return self.run_dir / f"{self.name}.{suffix}"

    def report_stage(self, stage: str) -> None:
        """Report the stage of the start, and the pids of the process and its parent.

        The rank's parent reports the first stage, with its own pid for both.
        """
        pid = os.getpid()
        record = {
            "pid": pid,
            "parent_pid": int(os.environ.get(RANK_PARENT, pid)),
            "stage": stage,
            "time": time.time(),
        }
        self._write("stage", json.dumps(record))

    def read_stage(self) -> dict[str, Any] | None:
        """What `report_stage` has reported last; None before the first report."""
        path = self.path("stage")
        return json.loads(path.read_text()) if path.exists() else None

    def report_failure(self, error: BaseException) -> None:
        """Report the error that has ended the start."""
        import traceback  # slow to import, and a rank's parent does not need it

        lines = traceback.format_exception(type(error), error, error.__traceback__)
        self.report_text("failed", "".join(lines))

    def report_text(self, suffix: str, text: str) -> None:
        """Write one of the files of text."""
        self._write(suffix, text)

    def reserve_exit_report(self) -> None:
        """Reserve disk space for `report_exit`, because the disk may be full later."""
        self._write_exit_report("")

    def report_exit(self, code: int) -> None:
        """Report the exit code, which is -N for signal N."""
        self._write_exit_report(str(code))

    def read_exit_code(self) -> int | None:
        """What `report_exit` has reported; None if there is no exit report."""
        return _exit_code(self.path("exit"))

    def _write(self, suffix: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the process
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
                # In place, because the reserved blocks suffice.
                os.pwrite(descriptor, text.ljust(EXIT_REPORT_BYTES).encode(), 0)
            finally:
                os.close(descriptor)


def process_name(rank: int, generation: int) -> str:
    """The beginning of the names of a process's files."""
    return f"rank{rank}-{generation}" if generation else f"rank{rank}"


def read_exit_report(run_dir: Path, name: str) -> str | None:
    """The end of a rank's process, in words; None if there is no exit report.

    Args:
        run_dir: The cluster's run folder.
        name: The name of the process, from `process_name`.
    """
    code = _exit_code(run_dir / f"{name}.exit")
    return None if code is None else describe_exit(code)


def _exit_code(path: Path) -> int | None:
    """The exit code in an exit report; None if there is none."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text else None


def describe_exit(code: int) -> str:
    """An exit code of subprocess in words: "exit code 1", or "SIGKILL" for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def report_reason(run_dir: Path, name: str, reason: str) -> None:
    """Report why a rank is about to end itself. Arguments as for `read_exit_report`."""
    with contextlib.suppress(OSError):  # no room, or the folder has been removed
        write_atomically(
            run_dir / f"{name}.reason",
            lambda file: file.write(reason.encode("utf-8", "backslashreplace")),
            mode=0o600,
            durable=False,
        )


def stderr_of_cell(run_dir: Path, name: str) -> str:
    """What a process has written to descriptor 2 since its last cell began or ended."""
    begin = 0
    with contextlib.suppress(OSError, ValueError):  # none has begun
        begin = int((run_dir / f"{name}.begun").read_bytes())
    try:
        octets = (run_dir / f"{name}.stderr").read_bytes()
    except OSError:  # the folder has been removed
        return ""
    return octets[begin:].decode("utf-8", "replace")


def read_reason(run_dir: Path, name: str) -> str | None:
    """Why a rank has ended itself; None if it did not report it."""
    try:
        return (run_dir / f"{name}.reason").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def remove_cuda_files(pid: int) -> None:
    """Remove the files in shared memory of a process that has ended.

    torch counts the readers of CUDA memory in files, and CUDA's driver has a file for
    each process that shares memory. Both remove them in destructors, which run neither
    in a killed rank nor in one that is told to end. When a reader releases the memory,
    torch skips a file that is gone.
    """
    for pattern in (f"torch_{pid}_*", f"cuda.shm.*.{pid:x}.*"):
        for path in SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):  # another process has removed it
                path.unlink()


def remove_all_cuda_files(run_dir: Path) -> None:
    """Call `remove_cuda_files` for each rank that has begun in a cluster's folder."""
    for path in run_dir.glob("rank*.stage"):
        with contextlib.suppress(OSError):  # the folder is being removed
            remove_cuda_files(json.loads(path.read_text())["pid"])
