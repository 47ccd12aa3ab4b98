"""Runs a function on N ranks with a deadline, and returns the results of all ranks.

`launch` starts `mpiexec python ranks.py FOLDER DEADLINE`: this file runs in the test
and on the ranks. A rank that is late prints its stack and exits, so that no process
outlives a test. The fork server of nbdist forks the ranks, because an import of torch
takes seconds. With NBDIST_FORK_LAUNCHES=0, or `forked=False`, they start.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0
FORK_TIMEOUT_S = 60.0
"""Seconds that the fork server may take, with its imports."""
IS_FORKING = os.environ.get("NBDIST_FORK_LAUNCHES", "1") == "1" and (
    sys.platform == "linux"
)
FORKED_RANK = Path(__file__).with_name("forked_rank.py")
MODULE = "tests.collectives.ranks"


class RanksFailed(AssertionError):
    """A rank raised, died or was late."""


def launch(
    n: int,
    file: str,
    function: str,
    *arguments: Any,
    deadline_s: float = 60.0,
    environment: dict[str, str] | None = None,
    may_die: bool = False,
    forked: bool = True,
) -> list[Any]:
    """Call `function(*arguments)`, which a file defines, on `n` ranks.

    Args:
        environment: Variables of the ranks. An import does not see them in forked ones.
        may_die: Whether a rank may end without a result.
        forked: Whether the ranks may be forked.

    Returns:
        The results in rank order; None for a rank that died, with `may_die`.
    """
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="nb")
        folder = Path(stack.enter_context(made))
        # Open MPI removes the files that ranks map only if every rank finalizes.
        mapped = tempfile.TemporaryDirectory(prefix="nb", dir=_memory())
        own = {"OMPI_MCA_btl_sm_backing_directory": stack.enter_context(mapped)}
        (folder / "call").write_bytes(pickle.dumps((file, function, arguments)))
        program = [sys.executable, __file__]
        if IS_FORKING and forked:
            rank_host = stack.enter_context(forking(folder))
            program = [sys.executable, "-S", str(FORKED_RANK), str(rank_host), MODULE]
        extra = {**own, **(environment or {})}
        output = _run(n, program, folder, deadline_s, extra)
        results = [_result(folder / str(rank)) for rank in range(n)]
    failed = [
        f"rank {rank}: {error}"
        for rank, (_, error) in enumerate(results)
        if error is not None and not (may_die and error == "died")
    ]
    if failed:
        raise RanksFailed("\n".join([*failed, "mpiexec said:", output[-6000:]]))
    return [value for value, _ in results]


def once(function: Callable[_P, _Result]) -> Callable[_P, _Result]:
    """Call a function once for each list of arguments, also if it raises.

    Tests of one launch would otherwise launch it again after each failure.
    """
    outcomes: dict[tuple[object, ...], Future[_Result]] = {}

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        key = (*args, *sorted(kwargs.items()))
        if key not in outcomes:
            outcomes[key] = future = Future()
            try:
                future.set_result(function(*args, **kwargs))
            except RanksFailed as error:
                future.set_exception(error)
        return outcomes[key].result()

    return called


def failures(outcomes: Sequence[Mapping[str, str | None]], case: str) -> str:
    """The ranks that failed in a case, with their errors; "" if none has.

    Args:
        outcomes: For each rank, its error or None, by case.
    """
    found = enumerate(each[case] for each in outcomes)
    return "\n".join(f"rank {rank}: {error}" for rank, error in found if error)


def assert_clean(errors: Mapping[str, Sequence[str | None]], what: str) -> None:
    """Fail if there is no case, or if a case failed on a rank.

    Args:
        errors: The error or None of each rank, by case.
        what: The subject of the cases, for the message.
    """
    failed = [
        f"{what}, {case}, rank {rank}:\n{error}"
        for case, per_rank in errors.items()
        for rank, error in enumerate(per_rank)
        if error is not None
    ]
    assert errors
    assert not failed, "\n".join(failed)


@contextmanager
def forking(folder: Path) -> Iterator[Path]:
    """The socket of a process that has imported torch, and forks processes on request.

    They end with this block.

    Args:
        folder: An empty folder for the socket.
    """
    from nbdist.clusters import fork_server_client
    from nbdist.config import ForkConfig
    from nbdist.ipc.fork_messages import SOCKET, receive, socket_address

    fork_server_client.serve(folder, dict(os.environ), ForkConfig())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(FORK_TIMEOUT_S)
        with socket_address(folder / SOCKET) as address:
            connection.connect(address)
        assert receive(connection) is not None
        yield folder / SOCKET


def _run(
    n: int,
    program: Sequence[str],
    folder: Path,
    deadline_s: float,
    extra: dict[str, str],
) -> str:
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    command = [mpiexec or "mpiexec", "-n", str(n), *program]
    process = subprocess.Popen(
        [*command, str(folder), str(deadline_s)],
        env={**os.environ, **_environment(folder), **extra},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=deadline_s + GRACE_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # mpiexec ends its ranks
        try:
            return process.communicate(timeout=GRACE_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0]


def _memory() -> Path | None:
    """The folder of shared memory; None, for the temporary folder, if there is none."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else None


def _environment(folder: Path) -> dict[str, str]:
    return {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
    }


def _result(path: Path) -> tuple[Any, str | None]:
    if not path.exists():
        return None, "died"
    value, error = pickle.loads(path.read_bytes())
    return value, error


def _main(folder: Path, deadline_s: float) -> None:
    faulthandler.dump_traceback_later(deadline_s, exit=True)
    from mpi4py import MPI

    if not MPI.Is_initialized():  # in a forked process
        _begin_forked()
    file, function, arguments = pickle.loads((folder / "call").read_bytes())
    value, error = None, None
    try:
        value = getattr(_load(file), function)(*arguments)
    except BaseException:  # noqa: BLE001 - it is reported, and the test fails
        error = traceback.format_exc()
    rank = MPI.COMM_WORLD.rank
    (folder / f"{rank}.part").write_bytes(pickle.dumps((value, error)))
    (folder / f"{rank}.part").rename(folder / str(rank))
    if error is not None:
        MPI.COMM_WORLD.Abort(1)  # the others may be waiting for this rank


def _begin_forked() -> None:
    """Do in a forked rank what a rank that was started has done before `_main`."""
    import torch
    from mpi4py import MPI

    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)  # as $OMP_NUM_THREADS says
    MPI.Init_thread(MPI.THREAD_MULTIPLE)


def _load(file: str) -> Any:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("body", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["body"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
