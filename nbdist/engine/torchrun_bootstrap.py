"""Joins MPI from a process that torchrun has started.

MPI accepts only processes that its own launcher has started. Therefore rank 0 also runs
`mpiexec`, which starts one *placeholder* process for each rank (`main` of this module).
The placeholder writes the environment variables that identify it to MPI into a file,
and waits. torchrun's process of the same rank reads the file, sets the variables and
initialises MPI in the placeholder's place. The placeholder ends with that process.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nbdist.errors import StartError, WrongProcess
from nbdist.ipc.atomic_files import write_atomically
from nbdist.ipc.launch_environment import launched_rank
from nbdist.ipc.prctl import die_with_parent
from nbdist.ipc.private_files import check_folder

__all__ = ["has_joined", "join_mpi", "main"]

LAUNCHER = "nbdist.clusters.launchers.placeholders"
MPI_PREFIXES = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPI4PY_")
START_TIMEOUT_S = 60
END_TIMEOUT_S = 10.0
POLL_S = 0.02

_pipe: int | None = None
"""The write end of a pipe to this rank's placeholder, which ends with the pipe."""


# -- in torchrun's process -------------------------------------------------------------


def has_joined() -> bool:
    """Whether this process has joined MPI by `join_mpi`."""
    return _pipe is not None


def join_mpi() -> Path:
    """Initialise MPI with torchrun's rank numbers. Every rank must call.

    Returns:
        A folder, the same on all ranks. It is removed at the end.

    Raises:
        WrongProcess: The ranks are on several hosts, or MPI is initialised already.
        StartError: The placeholders did not come up.
        PermissionError: The folder that the ranks agreed on is another user's.
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
    die_with_parent()  # a killed torchrun leaves its workers behind
    # Rank 0 serves the store itself if torchrun does not. It must not end before the
    # others have read it. MPI's initialisation waits for them.
    store = _torchruns_store()
    folder = _agree_on_folder(store, rank)
    launcher = _Launcher(folder, size) if rank == 0 else None
    os.environ.update(_take_identity(folder / str(rank), launcher))
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    del store
    atexit.register(_leave, launcher)
    return folder


def _torchruns_store() -> Any:
    """A store of torch that all ranks share."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://"))
    return PrefixStore("nbdist", store)


def _agree_on_folder(shared: Any, rank: int) -> Path:
    """Make a folder on rank 0, and share its path through the store."""
    # After a restart by torchrun, the store still has the former workers' entries.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0:
        shared.set(f"folder-{attempt}", tempfile.mkdtemp(prefix="nbdist-"))
    # Anyone can write to the store, and the folder's files become this process's
    # environment: the folder must be this user's.
    return check_folder(Path(shared.get(f"folder-{attempt}").decode()))


class _Launcher:
    """The process of the placeholders' `mpiexec`, and its output."""

    def __init__(self, folder: Path, size: int) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - kept open
        self._process = subprocess.Popen(
            [sys.executable, "-m", LAUNCHER, str(folder), str(size)],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def printed(self) -> str:
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Wait for the process to end; kill it after `END_TIMEOUT_S`."""
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _take_identity(identity: Path, launcher: _Launcher | None) -> dict[str, str]:
    """The environment variables that identify this rank's placeholder to MPI.

    Raises:
        StartError: The placeholder did not come up.
    """
    global _pipe
    end = time.monotonic() + START_TIMEOUT_S
    while not identity.exists():
        ended = launcher is not None and launcher.ended
        if ended or time.monotonic() > end:
            why = "see the error of rank 0" if launcher is None else launcher.printed()
            raise StartError(f"mpiexec did not start a process for this rank: {why}")
        time.sleep(POLL_S)  # a file that appears raises no event
    _pipe = os.open(f"{identity}.pipe", os.O_WRONLY | os.O_CLOEXEC)
    found: dict[str, str] = json.loads(identity.read_text())
    return found


def _leave(launcher: _Launcher | None) -> None:
    """Finalise MPI, which waits for all ranks. Then end placeholder and launcher."""
    from mpi4py import MPI

    MPI.Finalize()
    if _pipe is not None:
        os.close(_pipe)
    if launcher is not None:
        launcher.end()


# -- in a placeholder ------------------------------------------------------------------


def main() -> None:
    """Run a placeholder: `python -m nbdist.engine.torchrun_bootstrap FOLDER`."""
    folder, rank = Path(sys.argv[1]), launched_rank()
    os.mkfifo(folder / f"{rank}.pipe")
    identity = json.dumps(_identity()).encode()
    write_atomically(folder / str(rank), lambda file: file.write(identity), mode=0o600)
    signal.alarm(START_TIMEOUT_S)  # ends this process
    with (folder / f"{rank}.pipe").open("rb") as pipe:
        signal.alarm(0)
        pipe.read()  # returns when torchrun's process closes the pipe or ends


def _identity() -> dict[str, str]:
    """The environment variables that identify this process to MPI."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(MPI_PREFIXES) or name == "LD_LIBRARY_PATH"
    }


if __name__ == "__main__":
    main()
