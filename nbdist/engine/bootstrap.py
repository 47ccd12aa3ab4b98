"""The start of a rank: its device, MPI, torch.distributed, and then its engine."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing.util
import os
import select
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nbdist.errors import text_of
from nbdist.ipc import folders, ports
from nbdist.ipc.device_assignment import DeviceAssignment
from nbdist.ipc.fork_messages import FORKED, GATE, STARTED
from nbdist.ipc.prctl import name_process
from nbdist.ipc.private_files import memory_folder, rendezvous_folder
from nbdist.ipc.process_files import JOINING, REGISTERING, Process

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

STDERR = 2
OTHERS_TIMEOUT_S = 5.0
"""Seconds after which a rank joins MPI although others are not forked."""
OPENBLAS_SETTERS = (
    "openblas_set_num_threads", "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads", "scipy_openblas_set_num_threads64_",
)  # fmt: skip
"""The names of one function in different builds of OpenBLAS."""
MAX_SOCKET_PATH_BYTES = 107
SOCKET_NAME_BYTES = len("/pymp-abcd1234/listener-abcd1234")


def main() -> None:
    """Be one rank of the cluster in $NBDIST_RUN_DIR; return when the rank ends."""
    # MPI keeps handlers that are installed before it. Its own handlers write the C
    # stack with functions that may hang in a crashed process.
    faulthandler.enable(STDERR)
    process = Process.of_arguments(sys.argv[1:])
    name_process(f"nbdist rank {process.rank}")
    sys.path[:] = os.environ["NBDIST_PATH"].split(os.pathsep)
    note = folders.enter(os.environ["NBDIST_WORK_DIR"], *folders.read(process.run_dir))
    process.notes = (f"rank {process.rank} {note}",) if note else ()
    try:
        assignments = DeviceAssignment.read_all(process.run_dir)
        assignment = assignments[process.rank]
        assignment.apply()
        ports.set_addresses_of_hosts({each.address for each in assignments} - {""})
        _keep_sockets_in(process.run_dir)
        _become_engine(process, assignment)
    except SystemExit as error:  # what calls it has said why on standard error
        sys.stderr.flush()
        _end(f"its event loop has failed ({text_of(error)})")
    except BaseException as error:  # noqa: BLE001 - the process ends
        process.report_failure(error)
        traceback.print_exc()
        sys.stderr.flush()
        _end(f"its event loop has failed ({text_of(error)})")


def _end(why: str) -> NoReturn:
    """End this process without Python's end, in which MPI waits for the other ranks."""
    from nbdist.engine.rank import is_rank, this_rank

    if is_rank():  # it has started
        this_rank().end(why)
    os._exit(1)


def _keep_sockets_in(run_dir: Path) -> None:
    """Put multiprocessing's sockets, such as a DataLoader's, into the run folder.

    A killed process leaves its sockets behind. The run folder is removed at the end.
    The folder of other temporary files does not change.
    """
    if len(str(run_dir)) + SOCKET_NAME_BYTES > MAX_SOCKET_PATH_BYTES:
        return
    before = tempfile.tempdir
    tempfile.tempdir = str(run_dir)
    try:
        multiprocessing.util.get_temp_dir()  # makes and remembers the folder
    finally:
        tempfile.tempdir = before


def _become_engine(process: Process, assignment: DeviceAssignment) -> None:
    # torch reads the variables that `apply` has set when it is imported.
    process.report_stage("loading torch")
    import torch

    torch.set_num_threads(assignment.threads)
    # The main thread runs the backward of all devices, so that an interrupt reaches
    # its hooks. A thread for each device would only be faster with several devices.
    torch.autograd.set_multithreading_enabled(False)
    if os.environ.get(STARTED) == FORKED:
        _bound_openblas(assignment.threads)
    process.report_stage(JOINING)
    from nbdist.collectives import flight_recorder
    from nbdist.engine import torch_group, world

    flight_recorder.record_in(memory_folder(process.run_dir), process.name)
    if process.generation:
        here = world.join_running(process.rank, process.generation)
    else:
        _await_others()
        here = world.join()
    ports.confine(os.getpid(), ports.addresses_of_hosts())
    _allocate_segments(process.run_dir)
    here.publish_environment()
    device = _select_device(assignment)
    process.report_stage("starting torch.distributed")
    owns_gpu = device.type == "cuda" and not assignment.shares_gpu
    torch_group.start(process.run_dir, owns_gpu, process.generation)
    process.report_stage(REGISTERING)
    from nbdist.engine import ipykernel_debugger

    ipykernel_debugger.leave_out()
    from nbdist.engine.kernel import run_engine

    run_engine(process, here, assignment, device)


def _await_others() -> None:
    """Wait until the other ranks of the start are forked, for a short time at most."""
    gate = os.environ.pop(GATE, None)
    if gate is not None:
        select.select([int(gate)], [], [], OTHERS_TIMEOUT_S)
        os.close(int(gate))


def _bound_openblas(threads: int) -> None:
    """Set the threads of OpenBLAS, which a forked rank's fork server has loaded.

    OpenBLAS reads the environment only when it is loaded. Other libraries read it
    later, or use torch's number of threads.
    """
    wanted = os.environ.get("OPENBLAS_NUM_THREADS") or str(threads)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    for path in paths:
        if "openblas" in os.path.basename(path):
            library = ctypes.CDLL(path)
            for name in OPENBLAS_SETTERS:
                if hasattr(library, name):
                    getattr(library, name)(int(wanted))


def _allocate_segments(run_dir: Path) -> None:
    """Allocate the memory that the ranks share through Open MPI.

    Otherwise the first write to a page allocates it, and raises SIGBUS if the file
    system is full.
    """
    folder = rendezvous_folder(run_dir)
    for name in os.listdir(folder):
        if not name.startswith("sm_segment."):
            continue
        with contextlib.suppress(OSError):  # no room, or the rank has ended
            descriptor = os.open(folder / name, os.O_RDWR)
            try:
                os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)


def _select_device(assignment: DeviceAssignment) -> torch.device:
    """Select this rank's torch device, and cap its memory where it is shared."""
    import torch

    if assignment.gpu_index is None:
        return torch.device("cpu")
    if torch.cuda.device_count() != len(assignment.visible_gpus):
        raise RuntimeError(
            f"torch sees {torch.cuda.device_count()} GPUs instead of "
            f"{len(assignment.visible_gpus)} ({', '.join(assignment.visible_gpus)}): "
            f"is torch {torch.__version__} built for them?"
        )
    device = torch.device("cuda", assignment.gpu_index)
    torch.cuda.set_device(device)
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = assignment.memory_fraction(total)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
    return device
