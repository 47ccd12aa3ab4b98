"""Which process of a cluster this is, and the files by which it says how it fares."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from nbdist.ipc.device_assignment import launched_rank

__all__ = ["CAPTURED", "JOINING", "Process", "process_name"]

ENDING_BYTES = 16
JOINING = "joining MPI"
"""The stage in which a process waits for the ranks that it joins."""
CAPTURED = ("stdout", "stderr")
"""What goes to files of this suffix: the descriptors 1 and 2."""


@dataclass(frozen=True)
class Process:
    """Which process this is, in the eyes of those who started it."""

    run_dir: Path
    rank: int
    generation: int
    """Of the world it enters: 0, or a later one that runs already."""

    @classmethod
    def of_arguments(cls, arguments: list[str]) -> Process:
        """From `--join RANK GENERATION`, or from the MPI launcher."""
        run_dir = Path(os.environ["NBDIST_RUN_DIR"])
        if arguments[:1] == ["--join"]:
            return cls(run_dir, int(arguments[1]), int(arguments[2]))
        return cls(run_dir, launched_rank(), 0)

    @property
    def name(self) -> str:
        """Of its files in the cluster's folder."""
        return process_name(self.rank, self.generation)

    @property
    def captured(self) -> dict[str, Path]:
        """Where what C code and child processes print goes, by `CAPTURED`."""
        return {name: self.run_dir / f"{self.name}.{name}" for name in CAPTURED}

    def progress(self, stage: str) -> None:
        """Tell the notebook how far this is, by a file that is never half written."""
        record = {"pid": os.getpid(), "stage": stage, "time": time.time()}
        with contextlib.suppress(OSError):  # a full disk is no reason to end
            _write(self.run_dir / f"{self.name}.stage", json.dumps(record))

    @property
    def is_refused(self) -> bool:
        """Whether the ranks that this one was to join have given it up."""
        return self.path("refused").exists()

    def path(self, suffix: str) -> Path:
        """One of its files in the cluster's folder."""
        return self.run_dir / f"{self.name}.{suffix}"

    def report_failure(self, error: BaseException) -> None:
        """Tell the notebook why this has ended."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        with contextlib.suppress(OSError):  # `error` is what must be seen
            _write(self.run_dir / f"{self.name}.failed", "".join(lines))

    def reserve_ending(self) -> None:
        """Take the room for `report_ending`: the disk may be full by then."""
        self._write_ending("")

    def report_ending(self, code: int) -> None:
        """Tell the notebook the exit code, negative for a signal."""
        self._write_ending(str(code))

    def _write_ending(self, text: str) -> None:
        path = self.run_dir / f"{self.name}.ending"
        with contextlib.suppress(OSError):  # no room, or the cluster is gone already
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # In place: the blocks that are taken already suffice.
                os.pwrite(descriptor, text.ljust(ENDING_BYTES).encode(), 0)
            finally:
                os.close(descriptor)


def process_name(rank: int, generation: int) -> str:
    """What the files of a rank's process are called."""
    return f"rank{rank}-{generation}" if generation else f"rank{rank}"


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)
