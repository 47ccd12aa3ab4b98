"""Run a function on N ranks with a deadline, and return the results of all ranks.

`launch` starts `mpiexec python ranks.py FILE FUNCTION ...`; this file is both ends. A
rank that is late prints where it stands and exits, so that nothing outlives a test.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GRACE_S = 10.0


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
) -> list[Any]:
    """Call `function(*arguments)` of a file on `n` ranks.

    Returns:
        What each returned, in rank order; None for a rank that died, with `may_die`.
    """
    with tempfile.TemporaryDirectory(prefix="nb") as place:
        folder = Path(place)
        (folder / "call").write_bytes(pickle.dumps((file, function, arguments)))
        output = _run(n, folder, deadline_s, environment or {})
        results = [_result(folder / str(rank)) for rank in range(n)]
    failures = [
        f"rank {rank}: {error}"
        for rank, (_, error) in enumerate(results)
        if error is not None and not (may_die and error == "died")
    ]
    if failures:
        raise RanksFailed("\n".join([*failures, "mpiexec said:", output[-6000:]]))
    return [value for value, _ in results]


def _run(n: int, folder: Path, deadline_s: float, extra: dict[str, str]) -> str:
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    command = [mpiexec or "mpiexec", "-n", str(n), sys.executable, __file__]
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
