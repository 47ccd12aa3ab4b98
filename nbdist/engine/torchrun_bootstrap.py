"""Joining MPI from a process that torchrun has started.

MPI knows only processes that its own launcher starts. So rank 0 starts that launcher
too: `mpiexec` runs one placeholder for each rank, which does nothing but tell what MPI
would have known it by. torchrun's process of the same number takes this identity on,
and starts MPI in the placeholder's stead; the placeholder ends with it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nbdist.errors import StartError, WrongProcess
from nbdist.ipc.prctl import die_with_parent
from nbdist.ipc.private_files import check_folder

__all__ = ["is_borrowed", "join_mpi"]

LAUNCHER = "nbdist.cluster.launchers.places"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
POLL_S = 0.02
_line: int | None = None
"""A pipe to this rank's placeholder, which ends when it closes, however it does."""


def is_borrowed() -> bool:
    """Whether this process stands in another's place."""
    return _line is not None


def join_mpi() -> Path:
    """Start MPI as the rank that torchrun says. Every rank must call.

    Returns:
        A folder that all ranks know, which is removed at the end.

    Raises:
        WrongProcess: The ranks are on several hosts, or MPI has started already.
        StartError: The placeholders did not come up.
        PermissionError: Another user has named a folder of his.
    """
    from mpi4py import MPI

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", size)) != size:
        raise WrongProcess(
            "under torchrun, nbdist.init() joins the ranks of one host: for several, "
            f"start the script with mpiexec -n {size} python train.py"
        )
    if MPI.Is_initialized():
        raise WrongProcess(
            "MPI was started before nbdist.init(): under torchrun, import nbdist "
            "before mpi4py"
        )
    die_with_parent()  # a torchrun that is killed would leave its workers behind
    folder = _agree_on_folder(rank)
    launcher = _Launcher(folder, size) if rank == 0 else None
    os.environ.update(_take_place(folder / str(rank), launcher))
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.register(_leave, launcher)
    return folder


def _agree_on_folder(rank: int) -> Path:
    """A folder of rank 0's, known to all by way of torchrun's store."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))
    shared = PrefixStore("nbdist", store)
    # A worker that torchrun starts again finds the store as the former ones left it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0:
        shared.set(f"folder-{attempt}", tempfile.mkdtemp(prefix="nbdist-"))
    # What it holds becomes this process's environment, and the store is open to all.
    return check_folder(Path(shared.get(f"folder-{attempt}").decode()))


class _Launcher:
    """The `mpiexec` of the placeholders, and what it says."""

    def __init__(self, folder: Path, size: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives with this
        self._process = subprocess.Popen(
            [sys.executable, "-m", LAUNCHER, str(folder), str(size)],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def said(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Wait for it, as long as it takes to end in good order."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _take_place(identity: Path, launcher: _Launcher | None) -> dict[str, str]:
    """What this rank's placeholder was started with.

    Raises:
        StartError: It did not come up.
    """
    global _line
    end = time.monotonic() + START_TIMEOUT_S
    while not identity.exists():
        ended = launcher is not None and launcher.ended
        if ended or time.monotonic() > end:
            said = "see the error of rank 0" if launcher is None else launcher.said()
            raise StartError(f"mpiexec has given this process no place: {said}")
        time.sleep(POLL_S)  # a file that appears raises no event
    _line = os.open(f"{identity}.line", os.O_WRONLY | os.O_CLOEXEC)
    found: dict[str, str] = json.loads(identity.read_text())
    return found


def _leave(launcher: _Launcher | None) -> None:
    """End MPI, which waits for all ranks, then what was started for it."""
    from mpi4py import MPI

    MPI.Finalize()
    if _line is not None:
        os.close(_line)
    if launcher is not None:
        launcher.end()
